"""A copy in transactions by each client that has them, killed with its server's workers: each record once, in order."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from server.clients.fetching import Missing
from server.clients.java_driver import java_command
from server.clients.kafkajs_driver import node_command
from server.clients.served import Served
from server.clients.teller import Start, Teller
from waiting import wait_until

from segmentlog.store import LogStore

_HERE = Path(__file__).parent
_PARTITIONS: Final = 3
_PROGRESS_WITHIN_S: Final = 60.0
"""Longest wait for another committed record.

A long copy takes 1,500 transactions. Their total time depends on the machine: two copies missed 120 s at a load of 12.
A client that restarts waits for the session of its predecessor, 3 s, and up to 30 s for each answer.
"""


def _python(name: str) -> list[str]:
    return [sys.executable, str(_HERE / name)]


_COMMANDS: dict[str, Callable[[], Sequence[str]]] = {
    "confluent-kafka": lambda: _python("confluent_copy.py"),
    "aiokafka": lambda: _python("aiokafka_copy.py"),
    "kafka-python": lambda: _python("kafka_python_copy.py"),
    "kafkajs": lambda: node_command(_HERE / "copy.js"),
    "java": lambda: java_command("Copy", project=_HERE / "java"),
}


def command_of(client: str) -> Sequence[str]:
    """Return the command that starts the client's program."""
    try:
        return _COMMANDS[client]()
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


def values_of(store: LogStore, topic: str) -> list[list[bytes | None]]:
    """Return the values that a reader of the library gets from each partition."""
    return [
        [value for batch in log.read(0, isolation="read_committed") for value in batch.values]
        for log in store.topic(topic).partitions()
    ]


class CommittedCount:
    """Counts the records of a topic that are committed. A call reads only the records since the previous call."""

    def __init__(self, store: LogStore, topic: str) -> None:
        self._logs = store.topic(topic).partitions()
        self._next_offsets = [0] * len(self._logs)
        self.count = 0

    def update(self) -> int:
        """Return the count."""
        for log in self._logs:
            for batch in log.read(self._next_offsets[log.number], isolation="read_committed"):
                self.count += len(batch.values)
                self._next_offsets[log.number] = int(batch.offsets[-1]) + 1
        return self.count


def has_come_on(running: Teller, seen: int) -> bool:
    """Return whether the program has committed three more transactions, or has ended."""
    return running.has_ended or sum(line.startswith("committed") for line in running.told[seen:]) >= 3


def difference(found: list[bytes | None], wanted: list[bytes | None]) -> str:
    """Return repeated values, missing values, and the first difference, in a few words that no report cuts."""
    twice = [value for value, times in Counter(found).items() if times > 1]
    missing = sorted(set(wanted) - set(found), key=wanted.index)
    at = next((at for at, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), len(wanted))
    return f"{len(twice)} twice: {twice[:3]}, {len(missing)} missing: {missing[:3]}, at {at}: {found[at : at + 3]}"


def copy(store: LogStore, served: Served, start: Start, client: str, count: int, kills: int) -> None:
    """Copy ``count`` records a partition while program and workers are killed in turn, and check the copy."""
    command = command_of(client)
    store.create_topic("from", partitions=_PARTITIONS)
    store.create_topic("to", partitions=_PARTITIONS)
    for log in store.topic("from").partitions():
        for first in range(0, count, 100):
            log.append([b"%d/%d" % (log.number, number) for number in range(first, first + 100)])
    expected = values_of(store, "from")

    def begin() -> Teller:
        return start([*command, served.address, "from", "to"])

    copied = CommittedCount(store, "to")
    running = begin()
    for kill in range(kills):
        wait_until(partial(has_come_on, running, len(running.told)))
        assert copied.update() < _PARTITIONS * count, "too little to be killed at"
        if kill % 2:
            os.kill(served.workers()[kill // 2 % 3], signal.SIGKILL)
        else:
            running.kill()
        if running.has_ended:
            running = begin()
    ends_s = time.monotonic() + _PROGRESS_WITHIN_S
    while (before := copied.count) < _PARTITIONS * count:
        if copied.update() > before:
            ends_s = time.monotonic() + _PROGRESS_WITHIN_S
        assert time.monotonic() < ends_s, f"{before} records of {_PARTITIONS * count}, and no more come"
        if running.has_ended:
            running = begin()
        time.sleep(0.1)
    running.kill()
    for number, (found, wanted) in enumerate(zip(values_of(store, "to"), expected, strict=True)):
        assert found == wanted, f"partition {number}: {difference(found, wanted)}; told: {running.told[-20:]}"
    positions = store.group_offsets.committed("copy").values()
    assert sorted(one.offset for one in positions) == [count] * _PARTITIONS


@pytest.mark.parametrize("client", _COMMANDS)
def test_a_copy_is_exactly_once(store: LogStore, served: Served, start: Start, client: str) -> None:
    """The copy has each record once, although the client and then a worker are killed in the middle."""
    copy(store, served, start, client, 1000, 2)


@pytest.mark.ecosystem
@pytest.mark.parametrize("client", _COMMANDS)
def test_a_long_copy_is_exactly_once(store: LogStore, served: Served, start: Start, client: str) -> None:
    """The copy is also exactly once when it takes longer."""
    copy(store, served, start, client, 20_000, 21)
