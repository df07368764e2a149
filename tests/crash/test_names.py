"""A process dies while it makes something, another one finds and uses it, and then the power is cut.

What the second one was told is on disk is there afterwards, and so are the names that lead to it, which nobody else is
about to put there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from logs import FakeClock

from segmentlog.errors import UnknownTopic
from segmentlog.store import LogStore
from segmentlog.testing import SimulatedDisk
from segmentlog.testing.faults import Died

PATH = "/simulated/store"
VARIANTS = 25
Work = Callable[[LogStore], object]


def _process(disk: SimulatedDisk) -> LogStore:
    """The store, as a process has it that leaves things as they are when it ends."""
    store = LogStore(PATH, fs=disk.process(), clock=FakeClock(), background=False)
    store.close = lambda: None  # type: ignore[method-assign]
    return store


def _append(store: LogStore, partition: int = 0) -> int:
    return store.topic("t").partition(partition).append([b"durable"], ack="durable")


def _values(store: LogStore, partition: int = 0) -> list[bytes | None]:
    return [value for batch in store.topic("t").partition(partition).read(0) for value in batch.values]


def _make(store: LogStore) -> None:
    store.create_topic("t", fsync="never")


def _add(store: LogStore) -> None:
    store.alter_topic("t", partitions=2)


def _rename(store: LogStore) -> None:
    store.rename_topic("old", "t")


@pytest.mark.parametrize(
    ("before", "change", "partition"),
    [("other", _make, 0), ("t", _add, 1), ("old", _rename, 0)],
    ids=["made", "given another partition", "renamed"],
)
@pytest.mark.parametrize(
    "between",
    [lambda _: None, lambda one: one.alter_topic("another", segment_records=7), lambda one: one.create_topic("x")],
    ids=["at once", "once another topic is altered", "once another is made"],
)
def test_what_is_durable_in_a_topic_has_a_name(before: str, change: Work, partition: int, between: Work) -> None:
    """The topic was made, or given a partition or a name, by a process that died at any of its calls."""
    used, calls = 0, 0
    while True:
        calls += 1
        disk = SimulatedDisk()
        disk.make_folders(PATH)
        dying, living = _process(disk), _process(disk)
        living.create_topic("another")
        living.create_topic(before, fsync="never")
        process: Any = dying.fs
        process.fail_at = (process.calls + calls, "die")
        is_over = False
        with suppress(Died):
            change(dying)
            is_over = True
        between(living)
        try:
            _append(living, partition)
        except UnknownTopic:
            assert not is_over
            continue
        used += 1
        for survivor in disk.point().crashes(random.Random(calls), VARIANTS):
            assert _values(_process(survivor), partition) == [b"durable"], calls
        if is_over:
            break
    assert calls > 10
    assert used > 1


def test_what_is_durable_in_a_store_has_a_name() -> None:
    """The store itself was made by a process that died at any of its calls, in folders that were not there either."""
    calls = 0
    while True:
        calls += 1
        disk = SimulatedDisk()
        process: Any = disk.process()
        process.fail_at = (calls, "die")
        is_over = False
        with suppress(Died):
            LogStore(PATH, fs=process, clock=FakeClock(), background=False)
            is_over = True
        living = _process(disk)
        _make(living)
        _append(living)
        for survivor in disk.point().crashes(random.Random(calls), VARIANTS):
            assert _values(_process(survivor)) == [b"durable"], calls
        if is_over:
            break
    assert calls > 5
