"""Aggregate the values of a topic in windows of event time, in one job or continuously.

Each window becomes a record of the target topic:

    key        the window's keys and start, as JSON: a compacted topic keeps the last state of each window
    value      the same with the window's end and the aggregates
    timestamp  the window's start, so that windows of hours can be aggregated to windows of days
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from pyspark.sql import Observation
from pyspark.sql import functions as F

from segmentlog.errors import SegmentlogError
from segmentlog.spark.pipelines.json_columns import (
    JSON_OPTIONS,
    METADATA,
    find_column,
    may_mention,
    narrow_schema,
    parse_json_columns,
    quote_name,
    require_schema,
    to_timestamp,
)
from segmentlog.spark.pipelines.pipeline_queries import (
    RECORD_COLUMNS,
    Incremental,
    QueryReport,
    count_observed_rows,
    ensure_topic,
    parse_interval,
    read_topic,
    write_topic,
)
from segmentlog.spark.spark_errors import explain_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_JSON: Final = {**JSON_OPTIONS, "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSXXX"}
# The starts and ends of windows are whole milliseconds.
_START: Final = "window_start"
_END: Final = "window_end"
_TIME: Final = "_time"
_WINDOW: Final = "_window"

_FUNCTIONS: Final[dict[str, Callable[[Column], Column]]] = {
    "count": F.count,
    "sum": F.sum,
    "avg": F.avg,
    "mean": F.avg,
    "min": F.min,
    "max": F.max,
}
_PERCENTILE: Final = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
_AGGREGATE: Final = re.compile(r"\s*([\w.]+)\s*(?:\((.*)\))?\s*(?:\s+as\s+(\w+)\s*)?", re.IGNORECASE | re.DOTALL)


class InvalidAggregation(SegmentlogError, ValueError):
    """The aggregates or windows are not valid."""


class Aggregate(msgspec.Struct, frozen=True):
    """One aggregate of each window."""

    function: str
    of: str
    """A column or an SQL expression; ``*`` for count."""
    name: str

    def column(self) -> Column:
        """Return the aggregate as a column of Spark."""
        percentile = _PERCENTILE.fullmatch(self.function)
        if percentile is not None:
            return F.percentile_approx(F.expr(self.of), float(percentile[1]) / 100).alias(self.name)
        of = F.lit(1) if self.of == "*" else F.expr(self.of)
        return _FUNCTIONS[self.function](of).alias(self.name)


class Windows(msgspec.Struct, frozen=True):
    """Definition of the windows and their aggregates."""

    aggregates: tuple[Aggregate, ...]
    length: str
    """Length of a window, such as ``1h``, ``10m`` or Spark's ``1 hour``."""
    slide: str | None = None
    """Time between the starts of two windows; None: the length of a window."""
    keys: tuple[str, ...] = ()
    time: str | None = None
    """Column of the event time; None: the record's timestamp. Rows without a time are left out."""
    where: str | None = None
    """SQL condition for the rows to aggregate."""
    watermark: str = "10m"
    """How late a record may arrive to be counted, in an incremental query."""


def parse_aggregate(text: str) -> Aggregate:
    """Parse ``count``, ``avg(dep_delay)`` or ``p99(dep_delay) AS slow``. Raises `InvalidAggregation`."""
    found = _AGGREGATE.fullmatch(text)
    if found is None:
        raise InvalidAggregation(f"{text!r} is not an aggregate; write FUNCTION(COLUMN) or FUNCTION(COLUMN) AS NAME")
    function, of = found[1].lower(), (found[2] or "").strip()
    if function not in _FUNCTIONS and not _PERCENTILE.fullmatch(function):
        there = ", ".join(_FUNCTIONS)
        raise InvalidAggregation(
            f"{text!r}: there is no aggregate {found[1]!r}; there are {there}, and p50, p99.9, ..."
        )
    if function == "count":
        of = of or "*"
    elif not of or of == "*":
        raise InvalidAggregation(f"{text!r} names no column; write {function}(COLUMN)")
    name = re.sub(r"[\W_]+", "_", function if of == "*" else f"{function}_{of}").strip("_")
    return Aggregate(function, of, found[3] or name)


# ---------------------------------------------------------------- the pipeline


@explain_spark_errors()
def aggregate(
    spark: SparkSession,
    path: str,
    topic: str,
    windows: Windows,
    *,
    schema: str | None = None,
    start: str = "earliest",
    strict: bool = False,
) -> DataFrame:
    """Return one row for each window of the existing records, in order of time.

    Its columns are the keys, window_start, window_end and the aggregates.

    Args:
        schema: the fields of the values as DDL; None: the fields of the first and last records.
        start: "earliest", "latest" or JSON as in ``startingOffsets``.
        strict: fail at a value that is not a JSON object, instead of a row of nulls.

    Raises:
        UnknownTopic: the topic does not exist.
        NotJson: no value in the sample is a JSON object.
        InvalidAggregation: the windows or aggregates are not valid.
        SparkFailed: a column does not exist, or an expression is not valid.
    """
    found = _aggregate_rows(_read_source(spark, path, topic, windows, schema, start, strict, streaming=False), windows)
    return found.orderBy(_START, *(quote_name(name) for name in windows.keys))


@explain_spark_errors()
def aggregate_to(
    spark: SparkSession,
    path: str,
    topic: str,
    windows: Windows,
    to: str,
    *,
    schema: str | None = None,
    start: str = "earliest",
    strict: bool = False,
    create: int | None = None,
    mode: Literal["append", "update"] = "append",
    incremental: Incremental | None = None,
) -> QueryReport:
    """Write each window as a record to a topic; see the top of this module.

    By default one job aggregates the existing records, and all of its windows become visible at once. With
    ``incremental`` a query continues from its checkpoint. In mode "append" it writes a window once, when the watermark
    has passed the window's end; in mode "update" it writes a window whenever it has changed. Set ``schema`` for a query
    that runs repeatedly: a sample may find other fields the next time, and Spark refuses to continue with them.

    Raises:
        UnknownTopic, NotJson, InvalidAggregation, SparkFailed: as `aggregate`.
    """
    ensure_topic(path, topic)
    if to == topic:
        raise InvalidAggregation(f"the windows of {topic!r} cannot be written to {topic!r} itself; name another topic")
    rows = _read_source(spark, path, topic, windows, schema, start, strict, streaming=incremental is not None)
    if incremental is None:
        read = Observation()
        rows = rows.observe(read, F.count(F.lit(1)).alias("rows"))
    records = _encode_windows(_aggregate_rows(rows, windows), windows)
    ensure_topic(path, to, create)
    report = write_topic(records, path, to, incremental=incremental, mode=mode)
    if incremental is None:
        return msgspec.structs.replace(report, rows=count_observed_rows(read))
    return report


def _read_source(
    spark: SparkSession,
    path: str,
    topic: str,
    windows: Windows,
    ddl: str | None,
    start: str,
    strict: bool,
    *,
    streaming: bool,
) -> DataFrame:
    """Return the rows to aggregate, with their time."""
    if not windows.aggregates:
        raise InvalidAggregation("there is no aggregate; name at least one, such as count or avg(COLUMN)")
    names = [_START, _END, *windows.keys, *(figure.name for figure in windows.aggregates)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidAggregation(f"two columns of the result are called {min(twice)!r}; name one with AS")
    ensure_topic(path, topic)
    schema = require_schema(spark, path, topic, ddl)
    # Check the expressions against all columns first, so that an error is raised before any record is read.
    _aggregate_rows(_add_time(parse_json_columns(_create_empty(spark), schema, METADATA), windows, strict), windows)
    texts = [*windows.keys, *(figure.of for figure in windows.aggregates), windows.where or "", windows.time or ""]
    schema = schema if strict else narrow_schema(schema, *texts)  # a strict read must check whole values
    metadata = [name for name in METADATA if name == "_timestamp" or may_mention(name, *texts)]
    columns = [METADATA[name] for name in metadata] + (["value"] if schema.fields else [])
    records = read_topic(spark, path, topic, columns, start=start, streaming=streaming)
    return _add_time(parse_json_columns(records, schema, metadata, strict=strict), windows, strict)


def _create_empty(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([], ", ".join(f"{name} {kind}" for name, kind in RECORD_COLUMNS.items()))


def _add_time(rows: DataFrame, windows: Windows, strict: bool) -> DataFrame:
    """Return the rows that match ``windows.where``, with their time."""
    if windows.where is not None:
        rows = rows.where(F.expr(windows.where))
    rows = rows.withColumn(_TIME, to_timestamp(rows, windows.time or "_timestamp", strict=strict))
    return rows.withWatermark(_TIME, parse_interval(windows.watermark))


def _aggregate_rows(rows: DataFrame, windows: Windows) -> DataFrame:
    slide = None if windows.slide is None else parse_interval(windows.slide)
    window = F.window(F.col(_TIME), parse_interval(windows.length), slide).alias(_WINDOW)
    keys = [find_column(rows, name).alias(name) for name in windows.keys]
    counted = rows.groupBy(*keys, window).agg(*(figure.column() for figure in windows.aggregates))
    return counted.select(
        *(quote_name(name) for name in windows.keys),
        F.col(f"{_WINDOW}.start").alias(_START),
        F.col(f"{_WINDOW}.end").alias(_END),
        *(figure.name for figure in windows.aggregates),
    )


def _encode_windows(rows: DataFrame, windows: Windows) -> DataFrame:
    def as_json(names: Sequence[str]) -> Any:
        return F.to_json(F.struct(*map(quote_name, names)), _JSON)

    return rows.select(
        as_json([*windows.keys, _START]).alias("key"),
        as_json(rows.columns).alias("value"),
        F.col(_START).alias("timestamp"),
    )
