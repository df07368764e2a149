"""What pipelines share: reading and writing a topic, once or on from where the last run ended."""

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
from segmentlog.spark.spark_errors import SparkFailed, explained, reason_of
from segmentlog.spark.store_opener import folder_of, open_on_driver, place_of

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
"""Called with how many input rows a micro-batch had, once it is done."""
_LOOK_EVERY_S = 0.2

RECORD_COLUMNS: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "headers": "array<struct<key: string, value: binary>>",
}
"""Of a topic, with their types."""


class QueryReport(msgspec.Struct, frozen=True):
    """What a job or a query did."""

    rows: int
    """That it read."""
    batches: int = 1
    """Micro-batches that had any."""
    stopped: bool = False
    """Whether it was asked to stop before it came to an end."""


class Incremental(msgspec.Struct, frozen=True):
    """That a run is to go on where the last one with the same checkpoint ended, and how."""

    checkpoint: str
    """A folder of Spark's, which says how far the runs came."""
    follow: bool = False
    """Whether to wait for more, until ``is_stopped()``."""
    every: str = "1s"
    """How often a run that follows looks for more; see `interval`."""
    on_rows: OnRows | None = None
    is_stopped: Callable[[], bool] = lambda: False


def interval(text: str) -> str:
    """A length of time as Spark has it, of ``1h``, ``1h30m`` or what Spark takes itself: ``1 hour``.

    Raises `InvalidConfig`.
    """
    try:
        milliseconds = parse_duration_ms(text)
    except ValueError:
        return text  # whose error Spark tells
    if milliseconds <= 0:
        raise InvalidConfig("time", text, "a length of time, such as 1h, 10m or '1 hour'")
    return f"{milliseconds} milliseconds"


# ---------------------------------------------------------------- topics


def ensure_topic(path: str, topic: str, create: int | None = None) -> None:
    """Make sure that a topic is there; ``create`` makes it with so many partitions if it is not.

    Raises `UnknownTopic`, `InvalidTopicName`, `StoreVersionError`, and `InvalidConfig` for one to be made in an object
    store.
    """
    if create is None:
        with open_on_driver(path, (topic,)) as store:
            store.topic(topic)
        return
    with segmentlog.open(folder_of(path), background=False) as store:
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
    """These columns of a topic's records, with ``text`` the key and the value as text.

    Only what is named is decoded: Spark does not tell a Python source which columns a query needs.
    """
    types = RECORD_COLUMNS | ({"key": "string", "value": "string"} if text else {})
    reader = spark.readStream if streaming else spark.read
    return (
        reader.format("segmentlog")
        .option("path", place_of(path))
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
    """Append records to a topic: all at once, or by micro-batches each of which is written exactly once.

    With ``mode`` "update" a query writes what has changed, in place of what is final. Raises `SparkFailed`.
    """
    options = {
        "path": folder_of(path),
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


@explained()
def run_batch(
    rows: DataFrame, writer_of: Callable[[DataFrame], DataFrameWriter], path: str | None = None
) -> QueryReport:
    """Write rows in one job, and count them on the way. Raises `SparkFailed`."""
    written = Observation()
    writer_of(rows.observe(written, F.count(F.lit(1)).alias("rows"))).save(path)
    return QueryReport(observed_rows(written))


def observed_rows(observation: Observation) -> int:
    """How many rows passed it, once the job is done."""
    try:
        return int(observation.get.get("rows") or 0)
    except Py4JError:  # a plan that turned out to be empty was cut off before it got there
        return 0


def run_incremental(spark: SparkSession, writer: DataStreamWriter, how: Incremental) -> QueryReport:
    """Run a query on from its checkpoint. Raises `SparkFailed`."""
    checkpoint = how.checkpoint if "://" in how.checkpoint else os.path.abspath(how.checkpoint)
    return run_query(
        spark,
        writer.option("checkpointLocation", checkpoint),
        follow=how.follow,
        every=interval(how.every),
        on_rows=how.on_rows,
        is_stopped=how.is_stopped,
    )


class _Listener(StreamingQueryListener):
    """Counts what queries read, by the id of their run: one may have read before it is known which it is."""

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
        """All of a run's progress is told before its end; an end that is lost is not waited for."""
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
    """Start a query and wait: until it has read what is there now, or with ``follow`` until ``is_stopped()``.

    ``every`` is how often a following query looks for more. Raises `SparkFailed`.
    """
    listener = _Listener()
    spark.streams.addListener(listener)
    try:
        with explained():
            trigger = writer.trigger(processingTime=every) if follow else writer.trigger(availableNow=True)
            query = trigger.start()
            run_id, told, stopped = str(query.runId), 0, False
            try:
                while not query.awaitTermination(_LOOK_EVERY_S):  # type: ignore[arg-type]
                    if on_rows is not None and listener.rows[run_id] > told:
                        on_rows(listener.rows[run_id] - told)
                        told = listener.rows[run_id]
                    if is_stopped():
                        stopped = True
                        query.stop()
            except Exception:
                # A signal to a whole terminal or service reaches Spark's processes, too, and the query fails first.
                stopped = is_stopped()
                if not stopped:
                    raise
            finally:
                with contextlib.suppress(OSError, Py4JError):  # Java is gone
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
