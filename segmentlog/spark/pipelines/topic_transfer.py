"""Import rows from any source of Spark into a topic, and export records to any sink of Spark."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from pyspark.sql import functions as F

from segmentlog.errors import InvalidConfig
from segmentlog.spark.pipelines.json_columns import (
    JSON_OPTIONS,
    METADATA,
    find_column,
    parse_json_columns,
    require_schema,
    to_blob,
    to_timestamp,
)
from segmentlog.spark.pipelines.pipeline_queries import (
    RECORD_COLUMNS,
    Incremental,
    QueryReport,
    ensure_topic,
    read_topic,
    run_batch,
    run_incremental,
    write_topic,
)
from segmentlog.spark.spark_errors import explain_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FILES: Final = ("parquet", "json", "csv", "orc", "avro", "text", "xml")
"""Sources that are folders of files, for which a stream needs an explicit schema."""
_READ_OPTIONS: Final[dict[str, dict[str, str]]] = {"csv": {"header": "true", "inferSchema": "true"}}
_WRITE_OPTIONS: Final[dict[str, dict[str, str]]] = {"csv": {"header": "true"}}
_DATE: Final = "date"

Mode = Literal["errorifexists", "append", "overwrite"]


class SparkEndpoint(msgspec.Struct, frozen=True):
    """Source or sink of Spark: the arguments of `spark.read` or `df.write`."""

    format: str
    path: str | None = None
    """None for formats without a path, such as ``jdbc``."""
    options: Mapping[str, str] = {}


Place = SparkEndpoint
"""Former name of `SparkEndpoint`."""


class RecordShape(msgspec.Struct, frozen=True):
    """Mapping of a row to a record."""

    key: tuple[str, ...] = ()
    """Columns of the key: one column is used unchanged; several become a JSON object."""
    value: str | None = None
    """Column of the value; None: the whole row as a JSON object, with null fields."""
    timestamp: str | None = None
    """Column of the timestamp: times, milliseconds since 1970 or ISO 8601; None: the current time."""
    tombstones: bool = False
    """Whether values may be null, which makes the record a tombstone."""


class RowShape(msgspec.Struct, frozen=True):
    """Mapping of a record to a row: the record's own columns, or with ``json_values`` the fields of its value."""

    text: bool = False
    """Whether key and value are text instead of bytes."""
    json_values: bool = False
    """Whether the row has the fields of the value instead of the record's own columns."""
    schema: str | None = None
    """The fields as DDL; None: the fields of the first and last records."""
    metadata: bool = False
    """With ``json_values``: add the record's own columns as _key, _partition, _offset, _timestamp."""
    strict: bool = False
    """With ``json_values``: fail at a value that is not a JSON object, instead of a row of nulls."""


# ---------------------------------------------------------------- import


@explain_spark_errors()
def import_rows(
    spark: SparkSession,
    path: str,
    topic: str,
    source: SparkEndpoint,
    shape: RecordShape = RecordShape(),  # noqa: B008 - frozen
    *,
    schema: str | None = None,
    create: int | None = None,
    incremental: Incremental | None = None,
) -> QueryReport:
    """Append the rows of a source to a topic.

    By default one job appends all rows, which become visible at once. With ``incremental`` a query appends only the
    rows that are new since the last run with the same checkpoint, each exactly once. CSV files have a header, unless an
    option of the source disables it.

    Args:
        schema: the schema of the source, as DDL; None: Spark infers it.
        create: create the topic with this number of partitions, if it does not exist.

    Raises:
        UnknownTopic: the topic does not exist.
        InvalidConfig: with ``incremental``, if the source is a single file.
        SparkFailed: Spark cannot read the source, or not as a stream; a column does not exist.
    """
    if incremental is not None and source.format in _FILES and os.path.isfile(source.path or ""):
        raise InvalidConfig("path", source.path, "a folder: an incremental import reads each new file of it once")
    rows = _read(spark, source, schema, streaming=incremental is not None)
    records = _build_records(rows, shape)
    ensure_topic(path, topic, create)
    return write_topic(records, path, topic, incremental=incremental, allow_null_values=shape.tombstones)


def _read(spark: SparkSession, source: SparkEndpoint, ddl: str | None, *, streaming: bool) -> DataFrame:
    options = {**_READ_OPTIONS.get(source.format, {}), **source.options}
    if streaming:
        stream = spark.readStream.format(source.format).options(**options)
        if ddl is not None:
            stream = stream.schema(ddl)
        elif source.format in _FILES:
            stream = stream.schema(_read(spark, source, None, streaming=False).schema)
        return stream.load(source.path)
    reader = spark.read.format(source.format).options(**options)
    if ddl is not None:
        reader = reader.schema(ddl)
    return reader.load(source.path)


def _build_records(rows: DataFrame, shape: RecordShape) -> DataFrame:
    value = F.to_json(F.struct("*"), JSON_OPTIONS) if shape.value is None else to_blob(rows, shape.value)
    columns = [value.alias("value")]
    if len(shape.key) == 1:
        columns.append(to_blob(rows, shape.key[0]).alias("key"))
    elif shape.key:
        parts = F.struct(*(find_column(rows, name).alias(name) for name in shape.key))
        columns.append(F.to_json(parts, JSON_OPTIONS).alias("key"))
    if shape.timestamp is not None:
        columns.append(to_timestamp(rows, shape.timestamp).alias("timestamp"))
    return rows.select(*columns)


# ---------------------------------------------------------------- export


@explain_spark_errors()
def export_records(
    spark: SparkSession,
    path: str,
    topic: str,
    sink: SparkEndpoint,
    shape: RowShape = RowShape(),  # noqa: B008 - frozen
    *,
    start: str = "earliest",
    partition_by: tuple[str, ...] = (),
    mode: Mode = "errorifexists",
    incremental: Incremental | None = None,
) -> QueryReport:
    """Write the records of a topic to a sink.

    With ``incremental``, append only the records that are new since the last run with the same checkpoint. The sink
    must support streams; files get each record exactly once.

    Args:
        start: "earliest", "latest" or JSON as in ``startingOffsets``; an existing checkpoint overrides it.
        partition_by: columns that become folders; ``date`` is the date of the record's timestamp, in the session's
            time zone, unless the rows have a column of that name.
        mode: treatment of existing data in the sink; ``incremental`` always appends.

    Raises:
        UnknownTopic: the topic does not exist.
        NotJson: with ``json_values`` and no schema, if the sample has no JSON object.
        InvalidConfig: the format is CSV, and keys and values are bytes.
        SparkFailed: the sink does not accept the rows; a value is not text.
    """
    ensure_topic(path, topic)
    if sink.format == "csv" and not (shape.text or shape.json_values):
        accepted = "combined with text or json_values (--text or --json-values): CSV cannot hold bytes"
        raise InvalidConfig("format", "csv", accepted)
    rows = _build_rows(spark, path, topic, sink, shape, start, _DATE in partition_by, incremental is not None)
    options = {**_WRITE_OPTIONS.get(sink.format, {}), **sink.options}
    if incremental is None:
        return run_batch(
            rows,
            lambda counted: counted.write.format(sink.format).mode(mode).options(**options).partitionBy(*partition_by),
            sink.path,
        )
    writer = rows.writeStream.format(sink.format).outputMode("append").options(**options).partitionBy(*partition_by)
    if sink.path is not None:
        writer = writer.option("path", sink.path)
    return run_incremental(spark, writer, incremental)


def _build_rows(
    spark: SparkSession,
    path: str,
    topic: str,
    sink: SparkEndpoint,
    shape: RowShape,
    start: str,
    with_date: bool,
    streaming: bool,
) -> DataFrame:
    if not shape.json_values:
        rows = read_topic(spark, path, topic, RECORD_COLUMNS, start=start, streaming=streaming, text=shape.text)
        if shape.text:
            texts = F.transform(
                "headers", lambda header: F.struct(header["key"], header["value"].cast("string").alias("value"))
            )
            rows = rows.withColumn("headers", F.to_json(texts) if sink.format == "csv" else texts)
        return rows.withColumn(_DATE, F.to_date("timestamp")) if with_date else rows
    schema = require_schema(spark, path, topic, shape.schema)
    kept = ["_key", "_partition", "_offset", "_timestamp"] if shape.metadata else []
    with_date = with_date and _DATE not in schema.fieldNames()
    needed = dict.fromkeys([*kept, *(["_timestamp"] if with_date else [])])
    columns = ["value", *(METADATA[name] for name in needed)]
    # Read values as binary: text that is not UTF-8 then becomes a row of nulls, like other invalid JSON.
    records = read_topic(spark, path, topic, columns, start=start, streaming=streaming)
    rows = parse_json_columns(records, schema, needed, strict=shape.strict)
    if with_date:
        rows = rows.withColumn(_DATE, F.to_date("_timestamp"))
        rows = rows if shape.metadata else rows.drop("_timestamp")
    as_text = shape.metadata and (shape.text or sink.format == "csv")
    return rows.withColumn("_key", F.col("_key").cast("string")) if as_text else rows
