"""Convert values that are JSON objects to columns, and columns to JSON."""

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
from segmentlog.spark.spark_errors import explain_spark_errors
from segmentlog.spark.store_opener import open_on_driver

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from segmentlog.log.partition import Partition

SAMPLE: Final = 1000
"""Number of records sampled at each end of a topic to infer its columns."""
_SAMPLE_BYTES: Final = 16 << 20
_PARTITION_SAMPLE_MIN: Final = 10

METADATA: Final = {
    "_key": "key",
    "_value": "value",
    "_partition": "partition",
    "_offset": "offset",
    "_timestamp": "timestamp",
    "_headers": "headers",
}
"""Names of the record's own columns next to the fields of its value, and their names in the data source."""

JSON_OPTIONS: Final = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options of to_json: no field is dropped, and the text is the same in every time zone."""


class NotJson(SegmentlogError):
    """The sampled values contain no JSON object, so the columns cannot be inferred."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return (
            f"the columns of topic {self.topic!r} are unknown: no value at either end of it is a JSON object;"
            " name the columns with --schema, such as --schema 'id long, name string'"
        )


# ---------------------------------------------------------------- schema


@explain_spark_errors()
def resolve_schema(
    spark: SparkSession, path: str, topic: str, ddl: str | None = None, *, sample: int = SAMPLE
) -> StructType:
    """Return the columns of a topic's values: those in ``ddl``, or the fields of the first and last records.

    Fields that only records in between have are left out. The result is empty if no value in the sample is a JSON
    object.
    Raises `UnknownTopic`, and `SparkFailed` or `InvalidConfig` if ``ddl`` is not valid.
    """
    if ddl is not None:
        schema = StructType.fromDDL(ddl)
        if not isinstance(schema, StructType):
            raise InvalidConfig("schema", ddl, "columns with their types, such as 'id long, name string'")
        return schema
    texts = [value.decode("utf-8", "replace") for value in _sample_values(path, topic, sample) if _is_object(value)]
    if not texts:
        return StructType()
    found = spark.read.json(spark.createDataFrame([(text,) for text in texts], "value string"), mode="DROPMALFORMED")
    return StructType([field for field in found.schema.fields if field.name not in METADATA])


def require_schema(
    spark: SparkSession, path: str, topic: str, ddl: str | None = None, *, sample: int = SAMPLE
) -> StructType:
    """Return the columns like `resolve_schema`, but raise `NotJson` if there are none."""
    schema = resolve_schema(spark, path, topic, ddl, sample=sample)
    if not schema.fields:
        raise NotJson(topic)
    return schema


def _sample_values(path: str, topic: str, count: int) -> Iterator[bytes]:
    """Yield about ``count`` values from each end of the topic.

    Each end of a partition gives at least `_PARTITION_SAMPLE_MIN` values, or all values if it has fewer.
    """
    with open_on_driver(path, (topic,)) as store:
        partitions = [store.topic(topic).partition(number) for number in range(store.topic(topic).partition_count)]
        each = max(_PARTITION_SAMPLE_MIN, count // len(partitions))
        for log in partitions:
            start, end = log.log_start_offset, log.end_offset(isolation="read_committed")
            yield from _read_values(log, start, min(start + each, end))
            # Count records, not offsets: a crash may leave a million offsets without records at the end.
            yield from _read_values(log, max(start + each, offset_of_last(log, each, end)), end)


def _read_values(log: Partition, start: int, end: int) -> Iterator[bytes]:
    if start >= end:
        return
    try:
        found = log.read(start, max_bytes=_SAMPLE_BYTES, isolation="read_committed")
    except LogTruncated as truncated:  # continue after the lost range
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


# ---------------------------------------------------------------- conversion


def parse_json_columns(
    records: DataFrame, schema: StructType, metadata: Iterable[str] = (), *, strict: bool = False
) -> DataFrame:
    """Return the fields of the values as columns, then the columns of `METADATA` named in ``metadata``.

    A value that is not a JSON object becomes a row of nulls; a field of the wrong type becomes null. With ``strict``
    the job fails instead.
    """
    own = [F.col(METADATA[name]).alias(name) for name in metadata]
    if not schema.fields:
        return records.select(*own)
    mode = {"mode": "FAILFAST" if strict else "PERMISSIVE"}
    parsed = F.from_json(F.col("value").cast("string"), schema, mode).alias("row")
    return records.select(parsed, *own).select("row.*", *(name for name in metadata))


def narrow_schema(schema: StructType, *texts: str) -> StructType:
    """Return a schema with only the fields that one of the texts may mention, so that the job parses no others."""
    return StructType([field for field in schema.fields if may_mention(field.name, *texts)])


def may_mention(name: str, *texts: str) -> bool:
    """Return whether one of the texts may mention a column. A false positive only costs time."""
    return any(name.lower() in text.lower() for text in texts)


def find_column(rows: DataFrame, name: str) -> Column:
    """Return a column by its name, which may have any characters, or by the path of a nested field (``a.b``)."""
    return rows[quote_name(name) if name in rows.columns else name]


def quote_name(name: str) -> str:
    """Return a name as an SQL identifier, in backticks if needed."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) else "`" + name.replace("`", "``") + "`"


def to_blob(rows: DataFrame, name: str) -> Column:
    """Return a column as bytes or text for a record.

    Structs, arrays, maps and variants become JSON. Other types become text as Spark casts them.
    """
    found = find_column(rows, name)
    kind = rows.select(found).schema[0].dataType
    if isinstance(kind, BinaryType | StringType):
        return found
    if isinstance(kind, StructType | ArrayType | MapType | VariantType):
        return F.to_json(found, JSON_OPTIONS)
    return found.cast("string")


def to_timestamp(rows: DataFrame, name: str, *, strict: bool = True) -> Column:
    """Return a column of milliseconds since 1970, or of ISO 8601 text, as timestamps.

    With ``strict``, other text fails the job; otherwise it becomes null.
    """
    found = find_column(rows, name)
    kind = rows.select(found).schema[0].dataType
    if isinstance(kind, NumericType):
        return F.timestamp_millis(found.cast("bigint"))
    return found.cast("timestamp") if strict else found.try_cast("timestamp")
