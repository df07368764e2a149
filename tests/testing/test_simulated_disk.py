"""The simulated machine forgets what it may forget, and the checker finds what it is there for."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
from logs import FakeClock
from trial import Trial

from segmentlog.store import LogStore
from segmentlog.testing import History, SimulatedDisk
from segmentlog.testing.simulated_disk import PAGE
from segmentlog.topics.descriptor_budget import DescriptorBudget


def _survivors(disk: SimulatedDisk, path: str, states: int = 200) -> Counter[bytes | None]:
    """Return the contents that a file may have after a power cut now (None: it does not exist), with their counts."""
    found: Counter[bytes | None] = Counter()
    for survivor in disk.point().crashes(random.Random(1), states):
        try:
            found[survivor.find(path).content()] += 1
        except FileNotFoundError:
            found[None] += 1
    return found


def _written(disk: SimulatedDisk, path: str, data: bytes, *, sync: bool) -> None:
    process = disk.process()
    fd = process.open(path, os.O_RDWR | os.O_CREAT)
    process.pwritev(fd, [data], 0)
    if sync:
        process.fsync(fd)
    process.close(fd)


def test_a_name_is_lost_until_its_folder_is_synced() -> None:
    """A file that was fsynced may be gone all the same; after the folder's fsync it is there, whole."""
    disk = SimulatedDisk()
    disk.make_folders("/a")
    _written(disk, "/a/f", b"data", sync=True)
    assert set(_survivors(disk, "/a/f")) == {None, b"data"}
    disk.process().sync_folder("/a")
    assert set(_survivors(disk, "/a/f")) == {b"data"}


def test_unsynced_data_survives_in_any_part() -> None:
    """All, nothing, single pages, sectors, or the size without the data may survive; old data below stays."""
    disk = SimulatedDisk()
    disk.make_folders("/a")
    _written(disk, "/a/f", b"o" * PAGE, sync=True)
    disk.process().sync_folder("/a")
    _written(disk, "/a/f", b"n" * (3 * PAGE), sync=False)
    found = [content for content in _survivors(disk, "/a/f") if content is not None]
    assert b"o" * PAGE in found
    assert b"n" * (3 * PAGE) in found
    assert (b"o" * PAGE).ljust(3 * PAGE, b"\0") in found
    assert any(content.startswith(b"o") and b"n" in content for content in found), "a later page alone"
    assert any(len(set(content[:PAGE])) == 2 for content in found), "a torn page"
    disk.process().sync_folder("/a")
    process = disk.process()
    process.fsync(process.open("/a/f", os.O_RDONLY))
    assert set(_survivors(disk, "/a/f")) == {b"n" * (3 * PAGE)}


def test_a_rename_survives_whole_or_not_at_all() -> None:
    """After replacing a file there is the old one or the new one, under this name."""
    disk = SimulatedDisk()
    disk.make_folders("/a")
    for name, data in (("/a/f", b"old"), ("/a/f.tmp", b"new")):
        _written(disk, name, data, sync=True)
    process = disk.process()
    process.sync_folder("/a")
    process.replace("/a/f.tmp", "/a/f")
    assert set(_survivors(disk, "/a/f")) == {b"old", b"new"}
    assert set(_survivors(disk, "/a/f.tmp")) == {b"new", None}


def test_stores_through_a_map_are_lost_like_writes() -> None:
    """Data stored through a writable map may survive or be lost."""
    disk = SimulatedDisk()
    disk.make_folders("/a")
    _written(disk, "/a/f", b"old ", sync=True)
    process = disk.process()
    process.sync_folder("/a")
    process.map_file(process.open("/a/f", os.O_RDWR), 4, writable=True)[:] = b"new "
    assert set(_survivors(disk, "/a/f")) == {b"old ", b"new "}


def test_a_process_death_loses_nothing_and_syncs_nothing() -> None:
    """The machine keeps its page cache after the death of a process; a power cut may still come later."""
    disk = SimulatedDisk()
    disk.make_folders("/a")
    _written(disk, "/a/f", b"data", sync=False)
    after = disk.point().process_death()
    assert after.find("/a/f").content() == b"data"
    assert None in _survivors(after, "/a/f")


# ---------------------------------------------------------------- the checker itself


def test_the_history_finds_what_it_is_there_for() -> None:
    """Each broken rule is reported, and losses that the log reports are not."""
    history = History()
    history.acknowledged(0, [b"alpha"], durable=True)
    history.acknowledged(1, [b"beta", b"gamma"], durable=False)
    assert not history.check({0: b"alpha", 1: b"beta", 2: b"gamma"})
    assert not history.check({0: b"alpha"}, [(1, 10)])
    gone, loud = history.check({}, [(1, 2)])
    assert (gone.rule, gone.offset) == ("a durable record is gone", 0)
    assert (loud.rule, loud.offset) == ("a record is gone outside every lost range", 2)
    history.handed("somebody", 1, b"delta")
    assert history.conflicts[-1].rule == "one offset, two records"


def test_a_short_life_with_all_its_crashes() -> None:
    """A trial of one round: some hundred states, none of which breaks a promise."""
    assert Trial(seed=7, policy="6records", writers=2).run(rounds=1, operations=15, variants=6) > 100


def test_a_simulated_process_closes_nothing_for_the_descriptors_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would close descriptors of another process, and a seed would not always repeat its failure."""
    monkeypatch.setattr(DescriptorBudget, "limit", staticmethod(lambda: 2))
    disk = SimulatedDisk()
    disk.make_folders("/store")
    processes: list[Any] = [disk.process(), disk.process()]
    stores = [LogStore("/store", fs=process, clock=FakeClock(), background=False) for process in processes]
    stores[0].create_topic("t", 4)
    for partition in stores[0].topic("t").partitions():
        partition.append([b"x"])
    calls = processes[0].calls
    processes[0].fail_at = (calls + 1, "die")
    for partition in stores[1].topic("t").partitions():
        partition.append([b"y"])
    assert processes[0].calls == calls
    processes[0].fail_at = None
    for store in stores:
        store.close()
