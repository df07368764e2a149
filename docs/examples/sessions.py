"""Clicks to sessions, with Spark's transformWithState: state for each user, and a timer that ends a session.

    python docs/examples/sessions.py STORE --checkpoint DIR [--gap 30m] [--follow]

Reads the topic `clicks`: values such as {"user": "ann", "page": "/"}; when it was is the record's timestamp.
A user's session is over when the user has been silent for the gap. It becomes one record of the topic `sessions`:

    key        ann
    value      {"user": "ann", "started": "...", "ended": "...", "clicks": 2, "pages": ["/", "/shop"]}
    timestamp  when it ended

A run goes on where the last one with the same checkpoint ended, open sessions included: they are part of it. The
sink writes each micro-batch once, whenever it is killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from segmentlog.errors import SegmentlogError
from segmentlog.quantities import parse_duration_ms
from segmentlog.spark.pipelines.pipeline_queries import Incremental, ensure_topic, run_incremental
from segmentlog.spark.session import session

LATE = "10 minutes"
"""How long after the latest click an earlier one may still come; what comes later than that is left out."""

Click = tuple[int, str]
"""When, in milliseconds since 1970, and which page."""


class Sessions(StatefulProcessor):
    """Keeps the clicks of each user that are in no finished session yet.

    Spark calls it with the state of one user at a time. "Now" is the watermark: the latest click of all users, less
    the time that others may be late. Clicks before it do not come any more, so what it has passed is final.
    """

    def __init__(self, gap_ms: int) -> None:
        self._gap_ms = gap_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Before anything else, in each task."""
        self._handle = handle
        self._clicks = handle.getListState("clicks", "at_ms LONG, page STRING")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """Add new clicks of a user, read in any order. They may begin, extend or join sessions."""
        self._clicks.appendList([(row.at_ms, row.page) for row in rows])
        self._wake_at_the_end_of(self._open_sessions()[0])
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """Return the sessions that ended before the watermark; a later click may have extended one."""
        now_ms = timerValues.getCurrentWatermarkInMs()
        sessions = self._open_sessions()
        over = [one for one in sessions if one[-1][0] + self._gap_ms <= now_ms]
        still_open = sessions[len(over) :]  # they are in order
        self._clicks.clear()
        if still_open:
            self._clicks.appendList([click for one in still_open for click in one])
            self._wake_at_the_end_of(still_open[0])
        for one in over:
            pages = [page for _, page in one]
            yield Row(user=key[0], started_ms=one[0][0], ended_ms=one[-1][0], clicks=len(one), pages=pages)

    def _open_sessions(self) -> list[list[Click]]:
        """Return the user's clicks by time, split at each pause of at least the gap."""
        sessions: list[list[Click]] = []
        for at_ms, page in sorted(self._clicks.get()):
            if not sessions or at_ms - sessions[-1][-1][0] >= self._gap_ms:
                sessions.append([])
            sessions[-1].append((at_ms, page))
        return sessions

    def _wake_at_the_end_of(self, one: list[Click]) -> None:
        # Earlier timers of the user stay: they go off, and may find that nothing is over.
        self._handle.registerTimer(one[-1][0] + self._gap_ms)


def run(
    spark: SparkSession,
    path: str,
    checkpoint: str,
    gap_minutes: float,
    follow: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Turn clicks into sessions: those that are there now, or with `follow` until `is_stopped()`.

    Returns how many records it has read. Sessions that may go on stay in the checkpoint, for the next run.
    """
    path = os.path.abspath(path)
    ensure_topic(path, "sessions", create=2)
    records = spark.readStream.format("segmentlog").option("subscribe", "clicks").option("startingOffsets", "earliest")
    clicks = (
        records.load(path)
        .select(F.from_json(F.col("value").cast("string"), "user STRING, page STRING").alias("click"), "timestamp")
        .select("click.*", "timestamp", F.unix_millis("timestamp").alias("at_ms"))
        .where("user IS NOT NULL AND page IS NOT NULL")  # what is no click
        .withWatermark("timestamp", LATE)
    )
    sessions = clicks.groupBy("user").transformWithState(
        Sessions(round(gap_minutes * 60_000)),
        outputStructType="user STRING, started_ms LONG, ended_ms LONG, clicks INT, pages ARRAY<STRING>",
        outputMode="Append",
        timeMode="EventTime",
    )
    started, ended = F.timestamp_millis("started_ms"), F.timestamp_millis("ended_ms")
    value = F.to_json(F.struct("user", started.alias("started"), ended.alias("ended"), "clicks", "pages"))
    rows = sessions.select(F.col("user").alias("key"), value.alias("value"), ended.alias("timestamp"))
    writer = rows.writeStream.format("segmentlog").option("path", path).option("topic", "sessions")
    # Starts the query, by the checkpoint, and waits for its end.
    return run_incremental(spark, writer, Incremental(checkpoint, follow, is_stopped=is_stopped)).rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Clicks to sessions.")
    parser.add_argument("store", help="the folder of a store that has a topic 'clicks'")
    parser.add_argument("--checkpoint", required=True, help="a folder for how far it came, and the open sessions")
    parser.add_argument("--gap", default="30m", help="the silence that ends a session (default: 30m)")
    parser.add_argument("--follow", action="store_true", help="wait for more clicks, until Ctrl-C")
    given = parser.parse_args()
    spark = session("sessions")
    spark.sparkContext.setLogLevel("OFF")  # what fails is raised
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        gap_minutes = parse_duration_ms(given.gap) / 60_000
        count = run(spark, given.store, given.checkpoint, gap_minutes, given.follow, interrupted.is_set)
        sys.stderr.write(f"{count:,} records read\n")
    except (SegmentlogError, ValueError) as error:
        sys.exit(str(error))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
