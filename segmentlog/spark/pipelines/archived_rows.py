"""Convert records to rows of an archive's Parquet files and back, for restoring and for verifying.

In the files, ``timestamp`` is a Parquet timestamp. A record without a timestamp has -1 ms, 1969-12-31 23:59:59.999, as
in Spark's Kafka source. A timestamp that does not fit Spark's 64 bits of microseconds is stored in ``timestampMillis``,
and ``timestamp`` is null. All other rows in this module have ``timestamp`` in milliseconds, which can hold any value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType, TimestampType

from segmentlog.config import TopicConfig
from segmentlog.format.batch import MAX_RAW_SIZE, decode_header
from segmentlog.format.decoded_batch import record_batch
from segmentlog.quantities import LATEST_MS
from segmentlog.spark.arrow_batches import ArrowRows
from segmentlog.spark.arrow_records import convert_rows
from segmentlog.spark.pipelines.output_folders import spark_uris
from segmentlog.spark.schema import HEADERS
from segmentlog.staging.offset_restore import OffsetEncoder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from segmentlog.format.columns import Int64Array
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.append.batch_encoding import CheckedColumns

COLUMNS: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS),
        StructField("timestampMillis", LongType()),
    ]
)
"""Columns of an archive, except ``date``, which is part of the folder names. Older archives lack the last column."""

READ: Final = ("partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
"""Columns that an archive reads from a log, with the timestamp in milliseconds."""

RESTORED: Final = StructType(
    [
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", LongType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("headers", HEADERS),
    ]
)
"""Columns of a row that are restored, with the timestamp in milliseconds."""

_DAY_MS: Final = 86_400_000
_FITS: Final = f"timestamp BETWEEN {-LATEST_MS} AND {LATEST_MS}"
_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999
_DATE: Final = (
    f"CASE WHEN timestamp BETWEEN {_FIRST_MS} AND {_LAST_MS} THEN"
    f" date_add(DATE'1970-01-01', int((timestamp - pmod(timestamp, {_DAY_MS})) div {_DAY_MS})) END AS date"
)
# The date in UTC, independent of the session's time zone. Null outside the years 1 to 9999: Spark would read the name
# of such a folder as text, and then the dates of all folders.


def to_archive_columns(rows: DataFrame) -> DataFrame:
    """Return rows with the columns of an archive: `COLUMNS` and ``date``.

    ``rows`` have the columns `READ`, with the timestamp in milliseconds.
    """
    columns = {name: name for name in READ} | {
        "timestamp": f"CASE WHEN {_FITS} THEN timestamp_millis(timestamp) END AS timestamp",
        "timestampMillis": f"CASE WHEN NOT ({_FITS}) THEN timestamp END AS timestampMillis",
    }
    return rows.selectExpr(*(columns[name] for name in COLUMNS.fieldNames()), _DATE)


def read_files(spark: SparkSession, paths: Sequence[str]) -> DataFrame:
    """Read the records in files of an archive, with the timestamp in milliseconds."""
    found = spark.read.schema(COLUMNS).parquet(*spark_uris(paths)) if paths else spark.createDataFrame([], COLUMNS)
    timestamp = F.coalesce("timestampMillis", F.unix_millis("timestamp"))
    return found.withColumn("timestamp", timestamp).drop("timestampMillis")


_SIZE: Final = (
    "coalesce(octet_length(key), 0) + coalesce(octet_length(value), 0) + coalesce(aggregate(headers, 0, (size, one) ->"
    " size + octet_length(one.key) + coalesce(octet_length(one.value), 0) + 10), 0)"
)
_BATCH_OF_ONE_BYTES: Final = 1024
# Upper bound of the overhead of a batch with one record.


def largest_batch_column() -> Column:
    """Return an aggregate column: the smallest `max.message.bytes` with which a topic accepts all rows.

    The column is null if the input has no rows.
    """
    return (F.max(F.expr(_SIZE)) + _BATCH_OF_ONE_BYTES).alias("largest_batch_bytes")


OnRecords = Callable[[int, "Int64Array", "CheckedColumns", int], None]
"""Called with a partition, offsets, columns and the approximate size in bytes."""


def pass_rows(batch: pa.RecordBatch, take: OnRecords) -> None:
    """Pass the records of rows to ``take``, one partition at a time.

    The rows have the columns `RESTORED`, and are sorted by partition and offset. Raises `InvalidRecord`.
    """
    offsets = batch.column(batch.schema.get_field_index("offset")).to_numpy()
    for _, records, size_bytes, partitions in convert_rows(batch, ""):
        assert partitions is not None
        columns = records.columns()
        edges = [0, *(np.flatnonzero(np.diff(partitions)) + 1).tolist(), len(offsets)]
        for start, stop in pairwise(edges):
            part_bytes = size_bytes * (stop - start) // len(offsets)
            take(int(partitions[start]), offsets[start:stop], columns.part(start, stop), part_bytes)


def simulate_restore(rows: DataFrame, config: TopicConfig) -> DataFrame:
    """Return what a consumer would read after ``rows`` of `read_files` were restored into a topic with ``config``.

    The code that restores an archive encodes each record in a batch, and a reader decodes the batch again. Nothing is
    staged or appended.
    """
    # `restore` creates a topic that accepts the largest record.
    config = TopicConfig.from_mapping({**config.to_mapping(), "max.message.bytes": MAX_RAW_SIZE})
    ordered = rows.select(RESTORED.fieldNames()).sortWithinPartitions("partition", "offset")
    return ordered.mapInArrow(partial(_simulate_task, config), RESTORED)


def _simulate_task(config: TopicConfig, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Convert the rows of one task. Runs on an executor."""
    encoder, to_rows = OffsetEncoder(config), ArrowRows(RESTORED)
    for batch in batches:
        made: list[RecordBatch] = []

        def take(partition: int, offsets: Int64Array, columns: CheckedColumns, size_bytes: int) -> None:
            for base_offset, encoded in encoder.batches(offsets, columns, size_bytes):
                data = memoryview(b"".join((encoded.placed_at(base_offset, 0), encoded.payload)))
                header = decode_header(data, 0)
                made.append(record_batch(header, data[len(data) - header.payload_size :], "", partition))  # noqa: B023

        pass_rows(batch, take)
        yield from to_rows.convert(made)
