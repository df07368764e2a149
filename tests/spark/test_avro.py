"""`from_avro`: values of Kafka's serializers as columns, each by the schema that it names."""

from __future__ import annotations

import datetime
import decimal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

import segmentlog
from segmentlog import schemas
from segmentlog.errors import InvalidConfig
from segmentlog.schemas.registry_errors import InvalidSchema
from segmentlog.spark import from_avro
from segmentlog.spark.avro_types import AvroTypes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLACE = {"type": "record", "name": "Place", "fields": [{"name": "city", "type": "string"}]}
ALL: list[tuple[str, Any, Any, Any]] = [
    # name, type in Avro, a value, the value in Spark
    ("i", "int", 7, 7),
    ("d", "double", 0.5, 0.5),
    ("b", "bytes", b"\0\1", bytearray(b"\0\1")),
    ("e", {"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
    ("f", {"type": "fixed", "name": "F", "size": 2}, b"ab", bytearray(b"ab")),
    ("n", ["null", "string"], None, None),
    ("w", ["int", "long"], 1 << 40, 1 << 40),
    ("u", ["string", "int"], 3, "3"),
    ("p", PLACE, {"city": "Ulm"}, ("Ulm",)),
    ("l", {"type": "array", "items": "Place"}, [{"city": "Bonn"}], [("Bonn",)]),
    ("m", {"type": "map", "values": "long"}, {"a": 1}, {"a": 1}),
    ("z", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, decimal.Decimal("1.25"),
     decimal.Decimal("1.25")),
    ("day", {"type": "int", "logicalType": "date"}, datetime.date(2026, 7, 31), datetime.date(2026, 7, 31)),
    ("clock", {"type": "int", "logicalType": "time-millis"}, datetime.time(0, 0, 1, 5000), 1005),
    ("id", {"type": "string", "logicalType": "uuid"}, uuid.UUID(int=5), str(uuid.UUID(int=5))),
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a store with values of two versions of a schema in a topic, and one value that is not of the schema."""
    first = {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind, _, _ in ALL]}
    place = str(tmp_path / "store")
    with segmentlog.open(place, background=False) as store:
        store.create_topic("things")
        with store.producer(serializer=schemas.AvroSerializer(store.schemas, first)) as producer:
            producer.send("things", {name: value for name, _, value, _ in ALL})
        second = {**first, "fields": [*first["fields"], {"name": "since", "type": "string", "default": "new"}]}
        with store.producer(serializer=schemas.AvroSerializer(store.schemas, second)) as producer:
            producer.send("things", {name: value for name, _, value, _ in ALL} | {"since": "2"})
        store.create_topic("bad")
        store.topic("bad").partition(0).append([b"no value", None])
    return place


def test_values_are_read_by_the_schemas_that_they_name(spark: SparkSession, path: str) -> None:
    """Every type of Avro has its column; an older value gets the defaults of the newest schema."""
    rows = spark.read.format("segmentlog").option("path", path).option("subscribe", "things").load()
    found = rows.select(from_avro("value", path, subject="things-value").alias("v")).select("v.*").collect()
    for row, since in zip(found, ("new", "2"), strict=True):
        assert row["since"] == since
        assert {name: row[name] for name, _, _, _ in ALL} == {name: shown for name, _, _, shown in ALL}


UUID_BYTES = uuid.UUID(int=5).bytes


@pytest.mark.parametrize(
    ("base", "logical", "value", "kind", "shown"),
    [
        ({"type": "fixed", "name": "U", "size": 16}, "uuid", UUID_BYTES, "string", str(uuid.UUID(int=5))),
        ({"type": "fixed", "name": "U", "size": 3}, "uuid", b"abc", "binary", b"abc"),
        ({"type": "bytes"}, "uuid", b"\0\1", "binary", b"\0\1"),
        ({"type": "string"}, "date", "x", "string", "x"),
        ({"type": "int"}, "timestamp-millis", 5, "int", 5),
        ({"type": "long"}, "time-millis", 5, "bigint", 5),
        ({"type": "string"}, "decimal", "1.5", "string", "1.5"),
    ],
)
def test_a_logical_type_of_another_type(base: dict[str, Any], logical: str, value: Any, kind: str, shown: Any) -> None:
    """Counts for nothing, as Avro says; a UUID may be text, or sixteen bytes."""
    types = AvroTypes({**base, "logicalType": logical}, {})
    convert = types.converter()
    assert types.spark_type().simpleString() == kind
    assert (value if convert is None else convert(value)) == shown


@pytest.mark.parametrize(("precision", "scale"), [(None, 0), (0, 0), (39, 2), (5, 6)])
def test_a_decimal_that_spark_has_not(precision: int | None, scale: int) -> None:
    """The error comes when the column is created, before any value is read."""
    schema = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
    with pytest.raises(InvalidSchema, match=f"a decimal of precision {precision} and scale {scale}: Spark's"):
        AvroTypes({key: value for key, value in schema.items() if value is not None}, {}).spark_type()


def test_what_is_no_value_fails_or_is_null(spark: SparkSession, path: str) -> None:
    """The mode decides; a null value is null in both modes."""
    rows = spark.read.format("segmentlog").option("path", path).option("subscribe", "bad").load()
    kept = rows.select(from_avro("value", path, subject="things-value", mode="permissive").alias("v")).collect()
    assert [row.v for row in kept] == [None, None]
    with pytest.raises(PySparkException, match="the value does not start with a schema id"):
        rows.select(from_avro("value", path, subject="things-value").alias("v")).collect()
    with pytest.raises(InvalidConfig):
        from_avro("value", path)
