"""Kafka Streams, exactly once: instances and workers of the server are killed during transactions.

The results are compared with plain Python: each flight counts once, and each change of a sum appears once.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from ecosystem.reading import Row, by_client, by_library, open_transactions, undecided_and_aborted
from ecosystem.streams.flights import Flight, Flown, delays_of, flights_of_2013, flown_of, planes_of_2013
from server.clients.fetching import Missing
from server.clients.java_driver import class_path, java_command
from server.clients.served import Served
from server.clients.teller import Start, Teller
from waiting import wait_until

from segmentlog.store import LogStore

_HERE = Path(__file__).parent
_NAME = "flight-delays"
_PARTITIONS = 4
_SETTINGS = {
    "application.id": _NAME,
    "processing.guarantee": "exactly_once_v2",
    "commit.interval.ms": 400,
    # After a kill, others wait for the end of the transaction and of the session.
    "producer.transaction.timeout.ms": 4000,
    "main.consumer.session.timeout.ms": 4000,
    "main.consumer.heartbeat.interval.ms": 500,
    "consumer.auto.offset.reset": "earliest",
    # A record for each change, so that each can be counted.
    "statestore.cache.max.bytes": 0,
    # The flights are from 2013: a shorter retention would delete their windows at once.
    "windowstore.changelog.additional.retention.ms": 50 * 365 * 24 * 3_600_000,
    "reconnect.backoff.max.ms": 200,
}
_IN_MEMORY = "org.apache.kafka.streams.state.BuiltInDslStoreSuppliers$InMemoryDslStoreSuppliers"


class Work:
    """The topics, and instances of the application, each with a folder of its own."""

    def __init__(
        self, store: LogStore, served: Served, start: Start, folder: Path, flights: Sequence[Flight],
        *, on_disk: bool, standbys: int = 0,
    ) -> None:  # fmt: skip
        self._store, self._served, self._start, self._folder = store, served, start, folder
        self._flights, self._on_disk, self._standbys = flights, on_disk, standbys
        self._planes = planes_of_2013()
        self._fed = 0
        self._heirs: list[Teller] = []
        self.apps: dict[str, Teller] = {}
        self.torn = 0
        # Streams would create these topics with a retention of a week, and the flights are older.
        for topic in ("flights", "delays", "flown"):
            store.create_topic(topic, partitions=_PARTITIONS, retention_ms=-1)
        store.create_topic("planes", partitions=_PARTITIONS, cleanup_policy="compact")
        # Timestamps before all flights, because a join reads the older records first.
        stamps = [flights[0].timestamp - 1] * len(self._planes)
        with store.producer() as producer:
            tails = [tail.encode() for tail in self._planes]
            producer.send_many("planes", list(self._planes.values()), tails, timestamps=stamps)

    def feed(self, count: int) -> None:
        """Send up to ``count`` more flights."""
        part = self._flights[self._fed : self._fed + count]
        self._fed += len(part)
        if part:
            stamps, tails, values = zip(*part, strict=True)
            keys = [None if tail is None else tail.encode() for tail in tails]
            with self._store.producer() as producer:
                producer.send_many("flights", list(values), keys, timestamps=list(stamps))

    def start(self, name: str, more: dict[str, str] | None = None, *, dies_at: int | None = None) -> Teller:
        """Start an instance in the folder of that name. With ``dies_at``, it dies at the commit after that many."""
        settings = {
            **_SETTINGS, "bootstrap.servers": self._served.address, "state.dir": self._folder / name,
            "num.standby.replicas": self._standbys, **(more or {}),
        }  # fmt: skip
        main, words = ("FlightDelays", []) if dies_at is None else ("DyingFlightDelays", [dies_at])
        properties = self._folder / f"{name}.properties"
        more = [_HERE / "rocksdb"] if self._on_disk else []
        command = java_command(main, properties, *words, memory="256m", project=_HERE, more=more)
        if not self._on_disk:
            settings["dsl.store.suppliers.class"] = _IN_MEMORY
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        properties.write_text(text)
        self.apps[name] = self._start(command)
        if self.torn:
            self._heirs.append(self.apps[name])
        return self.apps[name]

    def come_into_the_middle(self) -> None:
        """Wait until an instance has committed, works, and has an open transaction while flights come."""

        def is_there() -> bool:
            self.feed(5)
            self.look()
            return open_transactions(self._store, "delays") and open_transactions(self._store, "flown")

        wait_until(lambda: self._runs() and self._has_committed(), f"it does not work: {self._told()}")
        wait_until(is_there, f"it has no transaction: {self._told()}")

    def kill(self, name: str) -> None:
        """Kill an instance like `kill -9`, during a transaction: it is stopped first, so the moment is certain."""
        app, ends_s = self.apps[name], time.monotonic() + 120
        while True:
            assert time.monotonic() < ends_s, "it is never in the middle"
            self.come_into_the_middle()
            app.stop()
            time.sleep(0.2)  # lets the server answer the requests that it has sent
            if open_transactions(self._store, "flown"):
                app.kill()
                self.torn += 1
                del self.apps[name]
                return
            app.go_on()

    def wait_for_death(self, name: str) -> None:
        """Wait for an instance that dies by itself, between the offsets and the end of a transaction."""
        app = self.apps.pop(name)

        def has_ended() -> bool:
            if "state RUNNING" in app.told:
                self.feed(5)
            return app.has_ended

        wait_until(has_ended, f"it does not come to its end: {app.told}")
        assert open_transactions(self._store, "flown")
        self.torn += 1

    def kill_worker(self, number: int) -> None:
        """Kill a worker of the server during a transaction."""
        self.come_into_the_middle()
        self._kill_worker(number)

    def kill_worker_under_restoring(self, name: str, number: int) -> None:
        """Kill a worker of the server while an instance reads changelogs."""
        app = self.apps[name]
        wait_until(lambda: any(line.startswith("restoring") for line in app.told), "it restores nothing")
        self._kill_worker(number)

    def _kill_worker(self, number: int) -> None:
        victim = self._served.workers()[number]
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: victim not in (now := self._served.workers()) and len(now) == 3, "it is not started again", 60
        )

    def finish(self, within_s: float) -> None:
        """Send the remaining flights, and wait until all of them are processed."""
        self.feed(len(self._flights))
        expected = delays_of(self._flights)
        count = sum(map(len, expected.values()))

        def is_read(topic: str) -> bool:
            self.look()
            return self._positions(topic) == self._ends(topic)

        wait_until(lambda: is_read("flights") and is_read("planes"), f"it does not end: {self._told()}", within_s)
        wait_until(lambda: len(by_library(self._store, "delays")) >= count, "it does not add up all of them", every_s=1)
        for topic in ("delays", "flown"):
            wait_until(lambda topic=topic: not open_transactions(self._store, topic), "a transaction stays open")

    def check(self) -> None:
        """Check that all results are those of plain Python, and that none is there twice."""
        delays, flown = (self._seen(topic) for topic in ("delays", "flown"))
        assert Counter(_flown(row) for row in flown) == flown_of(self._flights, self._planes)
        told: dict[str, list[str]] = defaultdict(list)
        for row in delays:
            key, value = _words(row)
            told[key].append(value)
        expected = delays_of(self._flights)
        assert told.keys() == expected.keys()
        for name, minutes in expected.items():
            sums = told[name]
            assert [int(one.split()[0]) for one in sums] == list(range(1, len(minutes) + 1)), name
            assert sums[-1] == f"{len(minutes)} {sum(minutes)} {max(minutes)}", name
        hidden = [undecided_and_aborted(self._store, topic) for topic in ("delays", "flown")]
        assert hidden[1] > 0, "it was never killed in the middle"
        lines = [line.split() for app in self._heirs for line in app.told]
        restored = sum(int(words[-1]) for words in lines if words[0] == "restored")
        assert restored > 0, "who came after one that was killed has read no changelog"
        print(f"{self.torn} torn, {hidden} records hidden, {restored} restored")

    def look(self) -> None:
        """Check that no instance has ended, or reports that it must."""
        for app in self.apps.values():
            assert not app.has_ended, app.told
            assert not [line for line in app.told if line[0] == "!"], app.told

    def _seen(self, topic: str) -> list[Row]:
        rows = by_client(self._served.address, topic, _PARTITIONS)
        assert rows == by_library(self._store, topic)
        return rows

    def _has_committed(self) -> bool:
        return any(log.last_stable_offset > 0 for log in self._store.topic("delays").partitions())

    def _positions(self, topic: str) -> list[int]:
        found = {where: one.offset for where, one in self._store.group_offsets.committed(_NAME).items()}
        return [offset for where, offset in sorted(found.items()) if where.topic == topic]

    def _ends(self, topic: str) -> list[int]:
        return [log.log_end_offset for log in self._store.topic(topic).partitions()]

    def _runs(self) -> bool:
        self.look()
        return all("state RUNNING" in app.told for app in self.apps.values())

    def _told(self) -> list[str]:
        return [line for app in self.apps.values() for line in app.told[-20:]]


@pytest.fixture
def java() -> None:
    """Skipped where Java's programs cannot be had."""
    try:
        class_path(_HERE)
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


@pytest.mark.usefixtures("java")
def test_exactly_once(store: LogStore, served: Served, start: Start, tmp_path: Path) -> None:
    """The first days of 2013, state in memory: the application dies, and a worker under the one that follows."""
    work = Work(store, served, start, tmp_path, flights_of_2013(6_000), on_disk=False)
    work.feed(2_000)
    work.start("a", dies_at=3)
    work.wait_for_death("a")
    work.start("b")
    work.kill_worker(0)
    work.finish(90)
    work.check()


@pytest.mark.ecosystem
@pytest.mark.usefixtures("java")
def test_a_year(store: LogStore, served: Served, start: Start, tmp_path: Path) -> None:
    """Two instances with state on disk and standbys process all flights of 2013; each of them is killed in turn."""
    work = Work(store, served, start, tmp_path, flights_of_2013(), on_disk=True, standbys=1)
    for name in "ab":
        work.start(name)
    for turn in range(6):
        name = "ab"[turn % 2]
        work.feed(40_000)
        work.kill(name)
        work.start(name)
        if turn % 2:
            work.kill_worker_under_restoring(name, turn % 3)
        else:
            work.kill_worker(turn % 3)
    work.finish(600)
    work.check()


@pytest.mark.ecosystem
@pytest.mark.usefixtures("java")
def test_groups_of_the_streams_protocol(store: LogStore, served: Served, start: Start, tmp_path: Path) -> None:
    """The server does not support it: an application that asks for it reports that and ends, and does not hang."""
    work = Work(store, served, start, tmp_path, flights_of_2013(100), on_disk=False)
    work.feed(100)
    app = work.start("a", {"group.protocol": "streams"})
    wait_until(lambda: any(line[0] == "!" for line in app.told), "it does not say why")
    (why,) = (line for line in app.told if line[0] == "!")
    assert "does not support the STREAMS group protocol" in why


def _words(row: Row) -> tuple[str, str]:
    assert row.key is not None
    assert row.value is not None
    return row.key.decode(), row.value.decode()


def _flown(row: Row) -> Flown:
    return Flown(*_words(row), row.timestamp)
