"""Kafka Connect, distributed: two workers, which are killed in the middle, and the server's workers under them.

Lines of a file come into a topic exactly once and in their order, and from there into another file, each at least once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from ecosystem.connect.cluster import PATIENCE_S, Cluster
from ecosystem.reading import by_client, by_library, open_transactions, undecided_and_aborted
from server.clients.fetching import Missing
from server.clients.java_driver import class_path
from server.clients.served import Served
from server.clients.teller import Start
from waiting import wait_until

from segmentlog.demo.flights import load_flights
from segmentlog.store import LogStore

_PORTION = 30_000
"""Lines that a worker has room for at once."""


@pytest.fixture
def java() -> None:
    """Skipped where Java's programs cannot be had."""
    try:
        class_path()
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


class Copying:
    """Lines, from a file through a topic to a file.

    No batch is ever full: a source that has one full keeps the rest of what it read until its file grows (Kafka 4.3).
    """

    def __init__(self, store: LogStore, served: Served, start: Start, folder: Path, lines: Sequence[str]) -> None:
        self._store, self._served, self._folder, self._lines = store, served, folder, lines
        self._written = 0
        store.create_topic("lines", partitions=1)
        self.write(100)
        self.cluster = Cluster(served, start, folder)
        self.cluster.configure("source", {
            "connector.class": "FileStreamSource", "file": folder / "in", "topic": "lines", "batch.size": len(lines),
            "exactly.once.support": "required", "transaction.boundary": "interval",
            "transaction.boundary.interval.ms": 500,
        })  # fmt: skip
        sink = {"connector.class": "FileStreamSink", "file": folder / "out", "topics": "lines"}
        self.cluster.configure("sink", {**sink, "consumer.override.isolation.level": "read_committed"})
        self.cluster.wait_for_tasks("source", "sink")

    def write(self, count: int) -> None:
        """Write up to ``count`` more lines."""
        part = self._lines[self._written : self._written + count]
        self._written += len(part)
        with open(self._folder / "in", "a") as file:
            file.writelines(f"{line}\n" for line in part)

    def is_in_the_middle(self) -> bool:
        """Write a line, and return whether a transaction is open."""
        self.write(1)
        return open_transactions(self._store, "lines")

    def kill_worker_of_server(self, number: int) -> None:
        """Kill a worker during a transaction."""
        wait_until(self.is_in_the_middle, "there is no transaction", PATIENCE_S)
        victim = self._served.workers()[number]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: victim not in (now := self._served.workers()) and len(now) == 3, "it stays dead", PATIENCE_S)

    def finish(self) -> None:
        """Write the remaining lines: each must be in the topic exactly once, and in the file at least once."""
        out, count = self._folder / "out", len(self._lines)

        def is_done() -> bool:
            self.cluster.wait_for_tasks("source", "sink")
            return len(by_library(self._store, "lines")) >= count and set(out.read_text().splitlines()) >= everything

        def is_in_the_topic() -> bool:
            self.cluster.wait_for_tasks("source")
            return len(by_library(self._store, "lines")) >= self._written

        def what_is_missing() -> str:
            topic, missing = len(by_library(self._store, "lines")), everything - set(out.read_text().splitlines())
            (log,) = self._store.topic("lines").partitions()
            return (
                f"of {self._written} lines {topic} are in the topic, and {len(missing)} are not in the file "
                f"({sorted(missing)[:2]}); stable to {log.last_stable_offset} of {log.log_end_offset}, "
                f"committed {self._store.group_offsets.committed('connect-sink')}"
            )

        everything = set(self._lines)
        while self._written < count:
            self.write(_PORTION)
            wait_until(is_in_the_topic, what_is_missing, 2 * PATIENCE_S, 1)
        wait_until(is_done, what_is_missing, 2 * PATIENCE_S, 1)
        rows = by_client(self._served.address, "lines", 1)
        assert rows == by_library(self._store, "lines")
        assert [row.value.decode() for row in rows if row.value is not None] == self._lines
        wait_until(lambda: not open_transactions(self._store, "lines"), "a transaction stays open", PATIENCE_S)
        assert undecided_and_aborted(self._store, "lines") > 0, "no worker was killed in the middle"
        assert set(out.read_text().splitlines()) == everything
        (position,) = self._store.group_offsets.committed("connect-sink").values()
        assert position.offset > rows[-1].offset

    def check_its_topics(self) -> None:
        """Check that Connect keeps its state in compacted topics."""
        for what, partitions in (("config", 1), ("offset", 4), ("status", 2)):
            topic = self._store.topic(f"connect-{what}")
            assert topic.partition_count == partitions
            assert topic.config.cleanup_policy == "compact"
            assert sum(log.log_end_offset for log in topic.partitions()) > 0


def lines_of(limit: int | None = None) -> list[str]:
    """Flights, each with its number, since a line is to be found again."""
    return [f"{number} {value.decode()}" for number, value in enumerate(load_flights(limit).values)]


@pytest.mark.usefixtures("java")
def test_exactly_once(store: LogStore, served: Served, start: Start, tmp_path: Path) -> None:
    """The worker that has the source is killed, and one of the server's."""
    work = Copying(store, served, start, tmp_path, lines_of(3_000))
    work.cluster.kill_holder("source", work.is_in_the_middle)
    work.kill_worker_of_server(1)
    work.finish()
    work.check_its_topics()


@pytest.mark.ecosystem
@pytest.mark.usefixtures("java")
def test_a_year(store: LogStore, served: Served, start: Start, tmp_path: Path) -> None:
    """All flights of 2013: the worker with a task is killed again and again, and so is each worker of the server."""
    work = Copying(store, served, start, tmp_path, lines_of())
    for turn in range(6):
        work.write(_PORTION)
        work.cluster.kill_holder("sink" if turn % 3 == 2 else "source", work.is_in_the_middle)
        work.kill_worker_of_server(turn % 3)
    work.finish()
    work.check_its_topics()
