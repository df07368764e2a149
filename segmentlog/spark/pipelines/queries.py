"""Running a streaming query to its end, or for as long as one follows: progress, and stopping."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from segmentlog.spark.failures import SparkFailed, explained, reason_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

OnRows = Callable[[int], None]
"""Called with how many input rows a micro-batch had, once it is done."""
_LOOK_EVERY_S = 0.2


class QueryReport(msgspec.Struct, frozen=True):
    """What a query did."""

    rows: int
    """That it read."""
    batches: int
    """Micro-batches that had any."""
    stopped: bool
    """Whether it was asked to stop before it came to an end."""


class _Listener(StreamingQueryListener):
    """Counts what one query reads."""

    def __init__(self, on_rows: OnRows | None) -> None:
        self._on_rows = on_rows
        self.run_id = ""
        self.rows = self.batches = 0
        self.ended = threading.Event()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        if str(progress.runId) == self.run_id and progress.numInputRows:
            self.rows += progress.numInputRows
            self.batches += 1
            if self._on_rows is not None:
                self._on_rows(progress.numInputRows)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        if str(event.runId) == self.run_id:
            self.ended.set()


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
    listener = _Listener(on_rows)
    spark.streams.addListener(listener)
    try:
        with explained():
            trigger = writer.trigger(processingTime=every) if follow else writer.trigger(availableNow=True)
            query = trigger.start()
            listener.run_id = str(query.runId)
            stopped = False
            while not query.awaitTermination(_LOOK_EVERY_S):  # type: ignore[arg-type]
                if is_stopped():
                    query.stop()
                    stopped = True
            listener.ended.wait(5)
    finally:
        spark.streams.removeListener(listener)
    error = query.exception()
    if error is not None and not stopped:
        raise SparkFailed(reason_of(error)) from error
    return QueryReport(listener.rows, listener.batches, stopped)
