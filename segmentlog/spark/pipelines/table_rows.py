"""Which row of a key counts: from records to the rows of a table, in Spark's terms. See `table`.

Rows are worked on in one shape, whatever their columns are called in the table: key, partition, offset, timestamp,
value (bytes, or a struct of JSON columns), whether the record ``deleted`` the row, whether it ``was`` in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType, TimestampType

from segmentlog.spark.pipelines.json_columns import METADATA
from segmentlog.spark.pipelines.output_folders import spark_uris

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

RECORD: Final = ("key", "value", "partition", "offset", "timestamp")
"""What is read of a topic."""
_OWN: Final = {"key": BinaryType(), "partition": IntegerType(), "offset": LongType(), "timestamp": TimestampType()}
_VALUE: Final = StructField("value", BinaryType())
_META: Final = ("key", "partition", "offset", "timestamp", "deleted", "was")


class Changes(msgspec.Struct, frozen=True):
    """What becomes of the keys that have changed."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0


class TableRows:
    """Makes rows of a table whose values are bytes, or ``payload``: JSON objects with these fields."""

    def __init__(self, spark: SparkSession, payload: StructType | None) -> None:
        self._spark = spark
        self._payload = payload
        taken = set() if payload is None else {name.lower() for name in payload.fieldNames()}
        self.names = {own: (hidden if own in taken else own) for hidden, own in METADATA.items()}
        """What a record's own columns are called beside those of its value."""

    def latest(self, records: DataFrame | None) -> DataFrame:
        """The last record of each key in each partition, with how many ``records`` there were, and the ``first``."""
        if records is None:
            fields = [*(StructField(name, kind) for name, kind in _OWN.items()), _VALUE]
            records = self._spark.createDataFrame([], StructType(fields))
        last = records.groupBy("key", "partition").agg(
            F.max_by(F.struct("value", "timestamp"), "offset").alias("last"),
            F.max("offset").alias("offset"),
            F.count("*").alias("records"),
            F.min("offset").alias("first"),
        )
        value: Column = F.col("last.value")
        return last.select(
            "key",
            "partition",
            "offset",
            F.col("last.timestamp").alias("timestamp"),
            (value if self._payload is None else F.from_json(value.cast("string"), self._payload)).alias("value"),
            value.isNull().alias("deleted"),
            F.lit(False).alias("was"),
            "records",
            "first",
        )

    def existing(self, paths: Sequence[str]) -> DataFrame:
        """The rows in some files of the table."""
        own = [StructField(self.names[name], kind) for name, kind in _OWN.items()]
        schema = StructType([*own, *([_VALUE] if self._payload is None else self._payload.fields)])
        if paths:
            rows = self._spark.read.schema(schema).parquet(*spark_uris(paths))
        else:
            rows = self._spark.createDataFrame([], schema)
        packed = F.col("value")
        if self._payload is not None:
            # With the payload's own type: in a file every column may be null.
            packed = F.struct(*[F.col(f"`{field.name}`") for field in self._payload.fields]).cast(self._payload)
        return rows.select(
            *[F.col(self.names[name]).alias(name) for name in _OWN],
            packed.alias("value"),
            F.lit(False).alias("deleted"),
            F.lit(True).alias("was"),
        )

    def shaped(self, rows: DataFrame, *others: str) -> DataFrame:
        """With the columns of the table, and others."""
        if self._payload is None:
            value = [F.col("value")]
        else:
            value = [F.col(f"value.`{field.name}`") for field in self._payload.fields]
        key, *rest = [F.col(name).alias(self.names[name]) for name in _OWN]
        return rows.select(key, *value, *rest, *others)


def winners(rows: DataFrame) -> DataFrame:
    """The row that counts of each key, and whether there ``was`` one before.

    In a partition it is the one with the highest offset; among those of several partitions the latest.
    """
    was = F.max("was").alias("was")
    content = [F.col(name) for name in rows.columns if name not in ("key", "partition", "was")]
    # One shuffle for both: what is grouped by key lies together for key and partition, too.
    together = rows.repartition("key")
    inner = together.groupBy("key", "partition").agg(F.max_by(F.struct(*content), "offset").alias("last"), was)
    order = F.struct("last.timestamp", "last.offset", "partition")
    outer = inner.groupBy("key").agg(F.max_by(F.struct("last", "partition"), order).alias("best"), was)
    return outer.select("key", "best.partition", "best.last.*", "was")


def merged(existing: DataFrame, changes: DataFrame) -> DataFrame:
    """The rows that there are after the changes."""
    return winners(existing.unionByName(changes.select(existing.columns))).where("NOT deleted")


def count_changes(existing: DataFrame, changes: DataFrame) -> Changes:
    """How many rows come, change and go; without reading any value of those that exist."""
    affected = existing.select(*_META).join(changes.select("key"), "key", "left_semi")
    # A key may stay as it is: its change is older than its row, which is from another partition.
    both = affected.withColumn("stays", F.lit(True)).unionByName(
        changes.select(*_META).withColumn("stays", F.lit(False))
    )
    counts = winners(both).agg(
        F.expr("count_if(NOT was AND NOT deleted)").alias("inserted"),
        F.expr("count_if(was AND NOT deleted AND NOT stays)").alias("updated"),
        F.expr("count_if(was AND deleted)").alias("deleted"),
    )
    row = counts.collect()[0]
    return Changes(row["inserted"], row["updated"], row["deleted"])
