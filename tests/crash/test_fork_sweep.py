"""Forks: a thread is stopped at each point of its work in turn, another one forks, and both processes continue."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_trial import OPERATIONS, prepare, try_busy, try_point, watched_locks

import segmentlog
from segmentlog.inspection.store_inspection import inspect_store

POINTS = int(os.environ.get("SEGMENTLOG_FORK_POINTS", "4"))
"""How many points of each operation, of either kind; 0 for every call, and `_MOST` of the instructions."""
_MOST = 1000
"""Points that are tried, of some 200,000 instructions, at five trials a second."""
SEED = int(os.environ.get("SEGMENTLOG_SEED", str(random.randrange(1 << 30))))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder in memory if possible: an fsync takes longer than the rest of a trial, and is not the subject."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
        yield Path(path)


@pytest.mark.parametrize("kind", ["calls", "instructions"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_child_uses_the_store_whatever_another_was_at(operation: str, kind: str, folder: Path) -> None:
    """Wherever another thread of the parent was, a child does every kind of work with the store that it inherited.

    The parent continues, no record is doubled or lost, and after the parent's close no process holds a lock.
    """
    path = folder / "store"
    prepare(path)
    with watched_locks():
        for _ in range(2):  # the first run opens files that later runs find open
            counted, _ = try_point(path, operation, kind, 0)
        points = range(1, counted.points + 1)
        count = min(POINTS or (_MOST if kind == "instructions" else len(points)), len(points))
        chosen = sorted(random.Random(f"{SEED} {operation}").sample(points, count))
        acked: Counter[bytes] = Counter()
        waited, slowest_s, tried, began_s = 0, 0.0, 0, time.monotonic()
        for number, point in enumerate(chosen):
            trial, scene = try_point(path, operation, kind, point, by_multiprocessing=bool(number % 2))
            where = f"{operation}, {kind}, point {point} of {counted.points} ({trial.where}), seed {SEED}"
            assert not trial.problem, f"{where}: {trial.problem}"
            tried += trial.reached
            waited += trial.waited
            slowest_s = max(slowest_s, trial.child_s)
            acked.update(scene.acked)
    took_s = time.monotonic() - began_s
    print(
        f"{operation}, {kind}: forked at {tried} of {counted.points} points in {took_s:.0f} s, {waited} times the fork"
        f" had to wait; the slowest child took {slowest_s:.2f} s; seed {SEED}"
    )
    with segmentlog.open(path, background=False) as store:
        log = store.topic("t").partition(0)
        found = Counter(value for batch in log.read(log.log_start_offset) for value in batch.values)
        for value, count in acked.items():
            assert found[value] == count, (value, found[value], count)
        assert not any(value.startswith(b"not mine") for value in found)
    assert [one for one in inspect_store(str(path)) if one.severity == "damage"] == []


def test_children_of_a_busy_parent_work(folder: Path) -> None:
    """No thread is stopped: threads append, read and search, background work runs, and every child does its work."""
    path = folder / "store"
    prepare(path)
    problem = try_busy(path, 4 * (POINTS or 100))
    assert not problem, problem
