"""Values that are JSON objects, as columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    MapType,
    NumericType,
    StringType,
    StructType,
    VariantType,
)

from segmentlog.consuming.cursor import offset_of_last
from segmentlog.errors import InvalidConfig, LogTruncated, SegmentlogError
from segmentlog.spark.spark_errors import explained
from segmentlog.spark.store_opener import open_on_driver

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from segmentlog.log.partition import Partition

SAMPLE: Final = 1000
"""Records that are looked at, at each end of a topic, to see which columns there are."""
_SAMPLE_BYTES: Final = 16 << 20
_AT_LEAST: Final = 10

METADATA: Final = {
    "_key": "key",
    "_value": "value",
    "_partition": "partition",
    "_offset": "offset",
    "_timestamp": "timestamp",
    "_headers": "headers",
}
"""The names that a record's own columns have beside those of its value, and theirs in a record."""

JSON_OPTIONS: Final = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""How rows become JSON: nothing of them is lost, and it is the same text in every time zone."""


class NotJson(SegmentlogError):
    """There are no JSON objects to tell the columns by."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r} has no value at either end that is a JSON object, to tell the columns by:"
            " say which there are with --schema, such as --schema 'id long, name string'"
        )


# ---------------------------------------------------------------- which columns there are


@explained()
def schema_of(
    spark: SparkSession, path: str, topic: str, ddl: str | None = None, *, sample: int = SAMPLE
) -> StructType:
    """The columns of a topic's values: those that ``ddl`` says, or that the first and last records have.

    A field that only records between them have is left out. No columns if none of them is a JSON object.
    Raises `SparkFailed` or `InvalidConfig` when ``ddl`` is none, `UnknownTopic`.
    """
    if ddl is not None:
        schema = StructType.fromDDL(ddl)
        if not isinstance(schema, StructType):
            raise InvalidConfig("schema", ddl, "columns with their types, such as 'id long, name string'")
        return schema
    texts = [value.decode("utf-8", "replace") for value in _sample(path, topic, sample) if _is_object(value)]
    if not texts:
        return StructType()
    found = spark.read.json(spark.createDataFrame([(text,) for text in texts], "value string"), mode="DROPMALFORMED")
    return StructType([field for field in found.schema.fields if field.name not in METADATA])


def require_schema(
    spark: SparkSession, path: str, topic: str, ddl: str | None = None, *, sample: int = SAMPLE
) -> StructType:
    """Like `schema_of`. Raises `NotJson` when there are no columns."""
    schema = schema_of(spark, path, topic, ddl, sample=sample)
    if not schema.fields:
        raise NotJson(topic)
    return schema


def _sample(path: str, topic: str, count: int) -> Iterator[bytes]:
    """Values from the ends of each partition, so many in all, but some of each."""
    with open_on_driver(path, (topic,)) as store:
        partitions = [store.topic(topic).partition(number) for number in range(store.topic(topic).partition_count)]
        each = max(_AT_LEAST, count // len(partitions))
        for log in partitions:
            start, end = log.log_start_offset, log.end_offset(isolation="read_committed")
            yield from _values(log, start, min(start + each, end))
            # By records: a crash may have left a million offsets without one at the end.
            yield from _values(log, max(start + each, offset_of_last(log, each, end)), end)


def _values(log: Partition, start: int, end: int) -> Iterator[bytes]:
    if start >= end:
        return
    try:
        found = log.read(start, max_bytes=_SAMPLE_BYTES, isolation="read_committed")
    except LogTruncated as truncated:  # what is there begins behind it
        start = truncated.lost.end_offset
        if start >= end:
            return
        found = log.read(start, max_bytes=_SAMPLE_BYTES, isolation="read_committed")
    for batch in found:
        count = int((batch.offsets < end).sum())
        yield from (value for value in batch.values[:count] if value is not None)
        if batch.next_offset >= end:
            return


def _is_object(value: bytes) -> bool:
    return value[:256].lstrip()[:1] == b"{"


# ---------------------------------------------------------------- from JSON and to it


def json_columns(
    records: DataFrame, schema: StructType, metadata: Iterable[str] = (), *, strict: bool = False
) -> DataFrame:
    """The fields of the values as columns, then those of `METADATA` that are asked for.

    A value that is no such object is a row of nulls, one that fits a column badly a null there; with
    ``strict`` the job fails.
    """
    own = [F.col(METADATA[name]).alias(name) for name in metadata]
    if not schema.fields:
        return records.select(*own)
    mode = {"mode": "FAILFAST" if strict else "PERMISSIVE"}
    parsed = F.from_json(F.col("value").cast("string"), schema, mode).alias("row")
    return records.select(parsed, *own).select("row.*", *(name for name in metadata))


def narrowed(schema: StructType, *texts: str) -> StructType:
    """Without the fields that no text mentions: they need not be parsed."""
    return StructType([field for field in schema.fields if mentions(field.name, *texts)])


def mentions(name: str, *texts: str) -> bool:
    """Whether a column may be meant; rather once too often."""
    return any(name.lower() in text.lower() for text in texts)


def column(rows: DataFrame, name: str) -> Column:
    """A column by its name, whatever characters are in it, or by the path of a nested one (``a.b``)."""
    return rows[quoted(name) if name in rows.columns else name]


def quoted(name: str) -> str:
    """A name as SQL has it."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else "`" + name.replace("`", "``") + "`"


def as_blob(rows: DataFrame, name: str) -> Column:
    """A column as the bytes or the text of a record: what has parts as JSON, everything else as Spark prints it."""
    found = column(rows, name)
    kind = rows.select(found).schema[0].dataType
    if isinstance(kind, BinaryType | StringType):
        return found
    if isinstance(kind, StructType | ArrayType | MapType | VariantType):
        return F.to_json(found, JSON_OPTIONS)
    return found.cast("string")


def as_timestamp(rows: DataFrame, name: str, *, strict: bool = True) -> Column:
    """A column as time: milliseconds since 1970, or ISO 8601; without ``strict`` other text is null."""
    found = column(rows, name)
    kind = rows.select(found).schema[0].dataType
    if isinstance(kind, NumericType):
        return F.timestamp_millis(found.cast("bigint"))
    return found.cast("timestamp") if strict else found.try_cast("timestamp")
