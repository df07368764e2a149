"""Reduce records to the latest row of each key, with Spark's operations. See `latest_rows`.

Inside this module all rows have the same columns, whatever their names in the table. These are key, partition, offset,
timestamp, value (bytes, or a struct of JSON columns), ``deleted`` (whether the record deletes the row) and ``was``
(whether the table had the row before).
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
"""Columns that are read from a topic."""
_OWN: Final = {"key": BinaryType(), "partition": IntegerType(), "offset": LongType(), "timestamp": TimestampType()}
_VALUE: Final = StructField("value", BinaryType())
_META: Final = ("key", "partition", "offset", "timestamp", "deleted", "was")


class Changes(msgspec.Struct, frozen=True):
    """Number of rows that an update inserts, updates and deletes."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0


class TableRows:
    """Converter between records and rows of a table. Values are bytes, or JSON objects with the fields ``payload``."""

    def __init__(self, spark: SparkSession, payload: StructType | None) -> None:
        self._spark = spark
        self._payload = payload
        taken = set() if payload is None else {name.lower() for name in payload.fieldNames()}
        self.names = {own: (hidden if own in taken else own) for hidden, own in METADATA.items()}
        """Column names in the table for the record's own columns."""

    def latest(self, records: DataFrame | None) -> DataFrame:
        """Return the last record of each key and partition.

        Column ``records`` is the number of its records, and ``first`` is their first offset.
        """
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
        """Read the rows in files of the table."""
        own = [StructField(self.names[name], kind) for name, kind in _OWN.items()]
        schema = StructType([*own, *([_VALUE] if self._payload is None else self._payload.fields)])
        if paths:
            rows = self._spark.read.schema(schema).parquet(*spark_uris(paths))
        else:
            rows = self._spark.createDataFrame([], schema)
        packed = F.col("value")
        if self._payload is not None:
            # Cast to the payload's type: columns read from a file are nullable.
            packed = F.struct(*[F.col(f"`{field.name}`") for field in self._payload.fields]).cast(self._payload)
        return rows.select(
            *[F.col(self.names[name]).alias(name) for name in _OWN],
            packed.alias("value"),
            F.lit(False).alias("deleted"),
            F.lit(True).alias("was"),
        )

    def to_table_columns(self, rows: DataFrame, *others: str) -> DataFrame:
        """Return rows with the columns that the table has, followed by the columns ``others``."""
        if self._payload is None:
            value = [F.col("value")]
        else:
            value = [F.col(f"value.`{field.name}`") for field in self._payload.fields]
        key, *rest = [F.col(name).alias(self.names[name]) for name in _OWN]
        return rows.select(key, *value, *rest, *others)


def select_latest(rows: DataFrame) -> DataFrame:
    """Return the latest row of each key. Its column ``was`` is true if the table had a row of the key before.

    In a partition the row with the highest offset is the latest; among partitions, the row with the latest timestamp.
    """
    was = F.max("was").alias("was")
    content = [F.col(name) for name in rows.columns if name not in ("key", "partition", "was")]
    # One shuffle serves both groupings: rows partitioned by key are also grouped by key and partition.
    together = rows.repartition("key")
    inner = together.groupBy("key", "partition").agg(F.max_by(F.struct(*content), "offset").alias("last"), was)
    order = F.struct("last.timestamp", "last.offset", "partition")
    outer = inner.groupBy("key").agg(F.max_by(F.struct("last", "partition"), order).alias("best"), was)
    return outer.select("key", "best.partition", "best.last.*", "was")


def apply_changes(existing: DataFrame, changes: DataFrame) -> DataFrame:
    """Return the rows of a table after the changes."""
    return select_latest(existing.unionByName(changes.select(existing.columns))).where("NOT deleted")


def count_changes(existing: DataFrame, changes: DataFrame) -> Changes:
    """Count inserted, updated and deleted rows, without reading the values of existing rows."""
    affected = existing.select(*_META).join(changes.select("key"), "key", "left_semi")
    # A row may stay unchanged: it may come from another partition and be later than the change.
    both = affected.withColumn("stays", F.lit(True)).unionByName(
        changes.select(*_META).withColumn("stays", F.lit(False))
    )
    counts = select_latest(both).agg(
        F.expr("count_if(NOT was AND NOT deleted)").alias("inserted"),
        F.expr("count_if(was AND NOT deleted AND NOT stays)").alias("updated"),
        F.expr("count_if(was AND deleted)").alias("deleted"),
    )
    row = counts.collect()[0]
    return Changes(row["inserted"], row["updated"], row["deleted"])
