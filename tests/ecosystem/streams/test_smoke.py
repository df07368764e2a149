"""Kafka Streams' own SmokeTest, exactly once, while processors and server are killed.

Two processors count, add up, join, window and suppress what the driver writes, in 15 topics of 5 partitions, with their
state on disk. In the end Kafka's own verifier compares each result with what it has to be.

SEGMENTLOG_SMOKE_KILLS    how often something is killed: a processor, the server, the other processor, the server...
SEGMENTLOG_SMOKE_RECORDS  records for each of 20 keys; Kafka has 1000
SEGMENTLOG_SMOKE_SECONDS  in which the driver writes them, 2 ms or more a record; Kafka has 90
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ecosystem.reading import by_library, open_transactions
from server.clients.fetching import Missing
from server.clients.java_driver import MOVED, class_path, java_command
from server.clients.served import Served
from server.clients.teller import Start, Teller
from waiting import wait_until

from segmentlog.store import LogStore
from segmentlog.testing.ports import free_ports

KILLS = int(os.environ.get("SEGMENTLOG_SMOKE_KILLS", "6"))
RECORDS = int(os.environ.get("SEGMENTLOG_SMOKE_RECORDS", "1000"))
SECONDS = int(os.environ.get("SEGMENTLOG_SMOKE_SECONDS", "60"))
_HERE = Path(__file__).parent
_SMOKE = _HERE / "smoke"
_KEYS = 20
_TOPICS = (
    "data", "echo", "max", "min", "min-suppressed", "min-raw", "dif", "sum", "sws-raw", "sws-suppressed", "cnt", "avg",
    "wcnt", "tagg", "fk",
)  # fmt: skip
_PARTITIONS = 5
_WORKERS = 3
_SETTINGS = {
    "processing.guarantee": "exactly_once_v2",
    "commit.interval.ms": 400,
    # After a kill, the other processor waits for the end of the transaction and of the session.
    "producer.transaction.timeout.ms": 4000,
    "main.consumer.session.timeout.ms": 4000,
    "main.consumer.heartbeat.interval.ms": 500,
    "consumer.auto.offset.reset": "earliest",
    "reconnect.backoff.max.ms": 200,
}
_END_S = 900.0
"""For the verifier, which itself gives up after 16 minutes without progress."""


@pytest.fixture
def served(store: LogStore, tmp_path: Path) -> Iterator[Served]:
    """Yield a server with three workers on fixed ports, which they keep after a restart."""
    served = Served(Path(store.path), tmp_path / "served.log", free_ports(1 + _WORKERS))
    yield served
    served.stop()


@pytest.fixture
def java() -> None:
    """Skipped where Java's programs cannot be had."""
    try:
        for folder in (_SMOKE, MOVED):
            class_path(folder)
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


class Processors:
    """The two instances of the application, each with a folder of its own."""

    def __init__(self, store: LogStore, served: Served, start: Start, folder: Path) -> None:
        self._store, self._served, self._start, self._folder = store, served, start, folder
        self._running: dict[str, Teller] = {}

    def start(self, name: str) -> None:
        """Start one, with the state that it had."""
        settings = {
            **_SETTINGS, "bootstrap.servers": self._served.address, "state.dir": self._folder / f"state-{name}",
        }  # fmt: skip
        properties = self._folder / f"{name}.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        main = "org.apache.kafka.streams.tests.StreamsSmokeTest"
        self._running[name] = self._start(
            java_command(main, properties, "process", memory="256m", project=_SMOKE, more=[MOVED])
        )

    def wait(self) -> None:
        """Wait until both processors work."""
        wait_until(lambda: self.look() or all(map(_has_started, self._running.values())), "a processor does not start")

    def kill(self, name: str) -> None:
        """Kill a processor like `kill -9`, during open transactions."""
        one, ends_s = self._running[name], time.monotonic() + 60
        while True:
            one.stop()
            time.sleep(0.1)  # lets the server answer the requests that it has sent
            if open_transactions(self._store, "echo") or time.monotonic() > ends_s:
                one.kill()
                return
            one.go_on()
            time.sleep(0.05)

    def look(self) -> None:
        """Check that no processor has given up."""
        for name, one in self._running.items():
            told = list(one.told)
            # "...: Didn't start in one minute" is no failure: on a slow machine it starts later.
            trouble = [at for at, line in enumerate(told) if line.endswith("SMOKE-TEST-CLIENT-EXCEPTION")]
            assert not trouble, "\n".join([name, *told[trouble[0] : trouble[0] + 60]])
            assert not one.has_ended, "\n".join([name, *told[-20:]])


def _has_started(one: Teller) -> bool:
    return any("SMOKE-TEST-CLIENT-STARTED" in line for line in one.told)


def _written(driver: Teller) -> int:
    """Return the number of records that the driver reports as written."""
    found = [re.search(r" (\d+) records produced", line) for line in driver.told]
    return max((int(one[1]) for one in found if one), default=0)


@pytest.mark.long(minutes=1.7)
@pytest.mark.usefixtures("java")
def test_smoke(store: LogStore, served: Served, start: Start, tmp_path: Path) -> None:
    """Processors and workers are killed, and each record counts once: Kafka's verifier finds all results right."""
    for topic in _TOPICS:
        store.create_topic(topic, partitions=_PARTITIONS)
    processors = Processors(store, served, start, tmp_path)
    for name in "ab":
        processors.start(name)
    processors.wait()
    driver = start(
        java_command("Smoke", served.address, _KEYS, RECORDS, SECONDS, memory="256m", project=_SMOKE, more=[MOVED])
    )

    def has_written(count: float) -> bool:
        processors.look()
        assert not driver.has_ended, driver.told[-20:]
        return _written(driver) >= count or "ALL-RECORDS-WRITTEN" in driver.told

    for turn in range(KILLS):
        due = _KEYS * RECORDS * (turn + 0.5) / KILLS
        wait_until(lambda due=due: has_written(due), f"the driver does not write: {driver.told[-5:]}", 300)
        if turn % 2:
            served.kill_and_restart()
        else:
            name = "ab"[turn // 2 % 2]
            processors.kill(name)
            processors.start(name)
    wait_until(lambda: has_written(_KEYS * RECORDS), "the driver does not come to its end", 300)

    def has_judged() -> bool:
        processors.look()
        return bool({"PASSED", "NOT-PASSED"} & set(driver.told)) or driver.has_ended

    wait_until(has_judged, f"no verdict: {driver.told[-20:]}", _END_S, 0.5)
    assert {"PASSED", "ALL-RECORDS-DELIVERED"} <= set(driver.told), "\n".join(driver.told[-100:])
    # The library sees the same: each record of the driver once.
    echoed = [row.value for row in by_library(store, "echo")]
    assert len(echoed) == _KEYS * RECORDS


def test_the_topics_are_those_of_the_smoke_test() -> None:
    """The test uses fifteen topics, each once."""
    assert len(set(_TOPICS)) == len(_TOPICS) == 15
