"""Acknowledgements that wait for an fsync: one fsync covers many, errors reach each, and none blocks the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import open_log

from segmentlog.errors import LogTruncated, PartitionFailed
from segmentlog.log.partition import Partition
from segmentlog.records import LostRange
from segmentlog.server.ack_waiter import AckWaiter


@pytest.fixture
def durability() -> Iterator[AckWaiter]:
    """Yield a waiter with two threads."""
    made = AckWaiter(2)
    yield made
    made.close()


class Told:
    """Results that each waiter got."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Exception | None] = {}
        self._changed = threading.Condition()

    def of(self, number: int) -> Callable[[Exception | None], None]:
        def done(error: Exception | None) -> None:
            with self._changed:
                self.outcomes[number] = error
                self._changed.notify_all()

        return done

    def wait(self, count: int) -> dict[int, Exception | None]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) >= count, 10)
        return self.outcomes


def held(monkeypatch: pytest.MonkeyPatch, log: Partition, sync: Callable[..., int]) -> threading.Event:
    """Block the first fsync, so that others arrive meanwhile. Return the event that releases it."""
    gate = threading.Event()

    def slow(offset: int, base_offset: int | None = None) -> int:
        assert gate.wait(10)
        return sync(offset, base_offset)

    monkeypatch.setattr(log, "sync_upto", slow)
    return gate


def test_one_fsync_for_all_who_came_meanwhile(
    tmp_path: Path, durability: AckWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fsync covers all requests that arrived while the first one ran."""
    log, told, calls = open_log(tmp_path), Told(), []
    sync = log.sync_upto
    gate = held(monkeypatch, log, lambda end, base=None: (calls.append(end), sync(end, base))[1])
    for number in range(50):
        at = log.append([b"x"])
        durability.when_durable(log, at, at + 1, told.of(number))
    gate.set()
    assert set(told.wait(50).values()) == {None}
    assert len(calls) <= 3
    assert calls[-1] == 50


def test_a_failed_fsync_is_told_to_all(tmp_path: Path, durability: AckWaiter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters that come later get the error, too, and never a success."""
    log, told = open_log(tmp_path), Told()

    def fails(*_: Any) -> int:
        raise PartitionFailed("t", "the disk")

    gate = held(monkeypatch, log, fails)
    for number in range(10):
        at = log.append([b"x"])
        durability.when_durable(log, at, at + 1, told.of(number))
    gate.set()
    assert {type(error) for error in told.wait(10).values()} == {PartitionFailed}


def test_what_was_dropped_is_told_to_whom_it_concerns(
    tmp_path: Path, durability: AckWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter whose records still exist gets no error because records of others were lost."""
    log, told = open_log(tmp_path), Told()

    def partly(end: int, base: int | None = None) -> int:
        if base is not None and base <= 3 < end:
            raise LogTruncated("t", 3, LostRange(3, 4, 1, "a crash"))
        return end

    gate = held(monkeypatch, log, partly)
    for number in range(6):
        at = log.append([b"x"])
        durability.when_durable(log, at, at + 1, told.of(number))
    gate.set()
    outcomes = told.wait(6)
    assert [number for number, error in outcomes.items() if error is not None] == [3]


def test_one_who_fails_to_listen_keeps_nobody_waiting(
    tmp_path: Path, durability: AckWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of one callback affects neither other waiters nor the thread."""
    log, told = open_log(tmp_path), Told()
    gate = held(monkeypatch, log, log.sync_upto)

    def raises(error: Exception | None) -> None:
        raise ValueError("not to be")

    for number in range(4):
        at = log.append([b"x"])
        durability.when_durable(log, at, at + 1, raises if number == 1 else told.of(number))
    gate.set()
    assert set(told.wait(3).values()) == {None}
    at = log.append([b"x"])
    durability.when_durable(log, at, at + 1, told.of(9))
    assert told.wait(4)[9] is None
