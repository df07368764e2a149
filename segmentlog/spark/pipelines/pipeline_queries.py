"""Read and write topics for pipelines, in one job or in a query that continues from its checkpoint."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec
from py4j.protocol import Py4JError
from pyspark.sql import Observation
from pyspark.sql import functions as F
from pyspark.sql.streaming.listener import StreamingQueryListener

import segmentlog
from segmentlog.errors import InvalidConfig, TopicExists
from segmentlog.quantities import parse_duration_ms
from segmentlog.spark.foreach_batch import append_batches
from segmentlog.spark.spark_errors import SparkFailed, explain_spark_errors, reason_of
from segmentlog.spark.store_opener import open_on_driver, resolve_location, resolve_writable_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )
    from pyspark.sql.streaming.readwriter import DataStreamWriter

OnRows = Callable[[int], None]
"""Called after a micro-batch with the number of its input rows."""
_POLL_INTERVAL_S = 0.2

RECORD_COLUMNS: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "headers": "array<struct<key: string, value: binary>>",
}
"""Columns of a topic, with their types."""


class QueryReport(msgspec.Struct, frozen=True):
    """Result of a job or a query."""

    rows: int
    """Input rows."""
    batches: int = 1
    """Micro-batches with input rows."""
    stopped: bool = False
    """Whether the caller stopped it before it had finished."""


class Incremental(msgspec.Struct, frozen=True):
    """Settings of a run that continues where the last run with the same checkpoint ended."""

    checkpoint: str
    """The folder in which Spark stores the progress of the runs."""
    follow: bool = False
    """Whether to wait for more records, until ``is_stopped()``."""
    every: str = "1s"
    """Time between two micro-batches with ``follow``; see `parse_interval`."""
    on_rows: OnRows | None = None
    is_stopped: Callable[[], bool] = lambda: False


def parse_interval(text: str) -> str:
    """Return a duration, such as ``1h`` or ``1h30m``, in Spark's notation.

    Spark's own notation, such as ``1 hour``, is returned unchanged. Raises `InvalidConfig`.
    """
    try:
        milliseconds = parse_duration_ms(text)
    except ValueError:
        return text  # Spark parses the text, and raises the error
    if milliseconds <= 0:
        raise InvalidConfig("time", text, "a length of time, such as 1h, 10m or '1 hour'")
    return f"{milliseconds} milliseconds"


# ---------------------------------------------------------------- topics


def ensure_topic(path: str, topic: str, create: int | None = None) -> None:
    """Check that a topic exists; with ``create``, create it with that number of partitions if needed.

    Raises `UnknownTopic`, `InvalidTopicName`, `StoreVersionError`, and `InvalidConfig` to create a topic in an object
    store.
    """
    if create is None:
        with open_on_driver(path, (topic,)) as store:
            store.topic(topic)
        return
    with segmentlog.open(resolve_writable_folder(path), background=False) as store:
        if topic not in store.topics(internal=True):
            with contextlib.suppress(TopicExists):
                store.create_topic(topic, create)


def read_topic(
    spark: SparkSession,
    path: str,
    topic: str,
    columns: Iterable[str],
    *,
    start: str = "earliest",
    streaming: bool = False,
    text: bool = False,
) -> DataFrame:
    """Return these columns of a topic's records. With ``text``, key and value are strings, not binary.

    Only the named columns are decoded: Spark does not tell a Python source which columns a query needs.
    """
    types = RECORD_COLUMNS | ({"key": "string", "value": "string"} if text else {})
    reader = spark.readStream if streaming else spark.read
    return (
        reader.format("segmentlog")
        .option("path", resolve_location(path))
        .option("subscribe", topic)
        .option("startingOffsets", start)
        .schema(", ".join(f"{name} {types[name]}" for name in RECORD_COLUMNS if name in set(columns)))
        .load()
    )


def write_topic(
    records: DataFrame,
    path: str,
    topic: str,
    *,
    incremental: Incremental | None = None,
    mode: str = "append",
    allow_null_values: bool = False,
) -> QueryReport:
    """Append records to a topic in one transaction, or in micro-batches, each exactly once.

    With ``mode`` "update" a query writes changed rows, not only final rows. Raises `SparkFailed`.
    """
    options = {
        "path": resolve_writable_folder(path),
        "topic": topic,
        "allowNullValues": str(allow_null_values).lower(),
    }
    if incremental is None:
        return run_batch(records, lambda counted: counted.write.format("segmentlog").mode("append").options(**options))
    if mode == "append":
        writer = records.writeStream.format("segmentlog").outputMode(mode).options(**options)
    else:
        writer = records.writeStream.outputMode(mode).foreachBatch(append_batches(**options))
    return run_incremental(records.sparkSession, writer, incremental)


# ---------------------------------------------------------------- running


@explain_spark_errors()
def run_batch(
    rows: DataFrame, writer_of: Callable[[DataFrame], DataFrameWriter], path: str | None = None
) -> QueryReport:
    """Write rows in one job and count them. Raises `SparkFailed`."""
    written = Observation()
    writer_of(rows.observe(written, F.count(F.lit(1)).alias("rows"))).save(path)
    return QueryReport(count_observed_rows(written))


def count_observed_rows(observation: Observation) -> int:
    """Return the number of rows that an observation counted, after its job."""
    try:
        return int(observation.get.get("rows") or 0)
    except Py4JError:  # Spark removed the observation from an empty plan
        return 0


def run_incremental(spark: SparkSession, writer: DataStreamWriter, how: Incremental) -> QueryReport:
    """Run a query that continues from its checkpoint. Raises `SparkFailed`."""
    checkpoint = how.checkpoint if "://" in how.checkpoint else os.path.abspath(how.checkpoint)
    return run_query(
        spark,
        writer.option("checkpointLocation", checkpoint),
        follow=how.follow,
        every=parse_interval(how.every),
        on_rows=how.on_rows,
        is_stopped=how.is_stopped,
    )


class _RowCounter(StreamingQueryListener):
    """Counts the rows that queries read, by run id. A query may read rows before its caller knows its run id."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self.batches: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        if progress.numInputRows:
            self.rows[str(progress.runId)] += progress.numInputRows
            self.batches[str(progress.runId)] += 1

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._changed:
            self._ended.add(str(event.runId))
            self._changed.notify_all()

    def wait_for_end(self, run_id: str) -> None:
        """Wait up to 5 s for the end of a run. Spark sends the end after all progress, but may lose the event."""
        with self._changed:
            self._changed.wait_for(lambda: run_id in self._ended, timeout=5)


def run_query(
    spark: SparkSession,
    writer: DataStreamWriter,
    *,
    follow: bool = False,
    every: str = "1 second",
    on_rows: OnRows | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> QueryReport:
    """Run a query until it has read all existing records, or with ``follow`` until ``is_stopped()``.

    ``every`` is the time between two micro-batches with ``follow``. Raises `SparkFailed`.
    """
    listener = _RowCounter()
    spark.streams.addListener(listener)
    try:
        with explain_spark_errors():
            trigger = writer.trigger(processingTime=every) if follow else writer.trigger(availableNow=True)
            query = trigger.start()
            run_id, told, stopped = str(query.runId), 0, False
            try:
                while not query.awaitTermination(_POLL_INTERVAL_S):  # type: ignore[arg-type]
                    if on_rows is not None and listener.rows[run_id] > told:
                        on_rows(listener.rows[run_id] - told)
                        told = listener.rows[run_id]
                    if is_stopped():
                        stopped = True
                        query.stop()
            except Exception:
                # A signal to the whole process group also reaches Spark's processes, and then the query fails first.
                stopped = is_stopped()
                if not stopped:
                    raise
            finally:
                with contextlib.suppress(OSError, Py4JError):  # Java has exited
                    if query.isActive:
                        query.stop()
            listener.wait_for_end(run_id)
        rows = listener.rows[run_id]
        if on_rows is not None and rows > told:
            on_rows(rows - told)
        error = None if stopped else query.exception()
        if error is not None:
            raise SparkFailed(reason_of(error)) from error
    finally:
        with contextlib.suppress(OSError, Py4JError):
            spark.streams.removeListener(listener)
    return QueryReport(rows, listener.batches[run_id], stopped)
