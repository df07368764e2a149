"""A process dies in the middle of a call, another one builds upon its unsynced writes, and then the power is cut.

The dead process may not have synced its writes, and no other process will. Records that the second process got as
durable or as committed must exist afterwards, and so must the names that lead to them.

SEGMENTLOG_FAULTS_EVERY  1: the process dies at each call of a commit; 4, the default: at each fourth call.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from logs import FakeClock
from seeds import fresh_seed

from segmentlog import ProducerStamp
from segmentlog.errors import UnknownTopic
from segmentlog.store import LogStore
from segmentlog.testing import SimulatedDisk
from segmentlog.testing.fault_injection import Died
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch, WrongState

PATH = "/simulated/store"
VARIANTS = 25
EVERY = int(os.environ.get("SEGMENTLOG_FAULTS_EVERY", "4"))
# Objects of a process that is dead are dropped without being closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
Work = Callable[[LogStore], object]


def _process(disk: SimulatedDisk) -> LogStore:
    """Open the store as a process that does nothing when it ends."""
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


def _pair(store: LogStore) -> tuple[list[bytes | None], list[bytes | None]]:
    """Return the committed values of both topics."""
    logs = [store.topic(name).partition(0) for name in "xy"]
    x, y = ([value for batch in log.read(0, isolation="read_committed") for value in batch.values] for log in logs)
    return x, y


def _commit(store: LogStore) -> Callable[[], object]:
    """Return a transaction of a producer of the library, about to be committed."""
    producer = store.producer(name="n", linger_ms=0)
    producer.begin_transaction()
    producer.send_many("x", [b"1"])
    producer.send_many("y", [b"2"])
    return producer.commit_transaction


def _commit_remotely(store: LogStore) -> Callable[[], object]:
    """Return a function that commits the transaction of a server's client."""
    remote = store.transactions.server_transactions
    numbers = remote.register("n", 60_000)
    logs = [store.topic(name).partition(0) for name in ("x", "y")]
    remote.add_partitions("n", numbers, logs)
    for value, log in zip((b"1", b"2"), logs, strict=True):
        log.append([value], producer=ProducerStamp(*numbers, 0, True))
    return lambda: remote.end_transaction("n", numbers, committed=True)


def _end_again(store: LogStore) -> None:
    """Repeat the client's request, which had no answer, at another worker of the server."""
    state = store.transactions.states()["n"]
    with suppress(WrongState):  # the client had an answer, so it would not ask again after a crash
        store.transactions.server_transactions.end_transaction(
            "n", ProducerIdAndEpoch(state.producer_id, state.epoch), committed=True
        )


@pytest.mark.parametrize(
    ("begun", "finish"),
    [
        (_commit, lambda store: store.finish_transactions()),
        (_commit, lambda store: store.producer(name="n", linger_ms=0)),
        (_commit, lambda store: store.transactions.abort_by_name("n")),
        (_commit_remotely, lambda store: store.finish_transactions()),
        (_commit_remotely, lambda store: store.transactions.server_transactions.register("n", 60_000)),
        (_commit_remotely, _end_again),
    ],
    ids=["finished", "opened", "aborted", "a client's finished", "a client's opened", "a client's ended again"],
)
def test_a_decision_that_others_go_by_stays(begun: Callable[[LogStore], Callable[[], object]], finish: Work) -> None:
    """A process died at a call of a commit: all of it is there or nothing, and what was shown stays."""
    print(f"SEGMENTLOG_SEED={fresh_seed()}")
    calls, told = 1 + fresh_seed() % EVERY - EVERY, 0
    is_over = False
    while not is_over:
        calls += EVERY
        disk = SimulatedDisk()
        disk.make_folders(PATH)
        dying, living = _process(disk), _process(disk)
        for name in ("x", "y"):
            living.create_topic(name, fsync="never")
        commit = begun(dying)
        process: Any = dying.fs
        process.fail_at = (process.calls + calls, "die")
        with suppress(Died):
            commit()
            is_over = True
        points = []
        disk.on_effect = lambda points=points, disk=disk: points.append(disk.point())
        finish(living)
        disk.on_effect = None
        shown = _pair(living)
        last = disk.point()
        for point in (random.Random(calls).choice(points or [last]), last):
            for survivor in point.crashes(random.Random(calls), 5):
                left = _process(survivor)
                if begun is _commit_remotely:
                    left.transactions.server_transactions.register("n", 60_000)
                else:
                    left.producer(name="n", linger_ms=0)
                found = _pair(left)
                assert found in (([b"1"], [b"2"]), ([], [])), (calls, found)
                assert point is not last or found == shown or shown == ([], []), (calls, shown, found)
                assert not is_over or found == ([b"1"], [b"2"]), calls
        told += shown != ([], [])
    assert calls > 30
    assert told > 5 // EVERY
