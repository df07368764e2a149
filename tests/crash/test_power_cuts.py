"""The power is cut at every call that the engine makes, recovery included, and every promise is held against it.

SEGMENTLOG_CRASH_STATES  how many different crash states (CI: 100,000; `make test-crash`: 1,000,000)
SEGMENTLOG_SEED          the first seed; a failure names the one that shows it again
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import count

import pytest
from logs import FakeClock
from trial import FOLDER, POLICIES, Trial, run_trial

from segmentlog.config import TopicConfig
from segmentlog.partition.partition import Partition
from segmentlog.testing import History
from segmentlog.testing.disk import PAGE, SimulatedDisk

STATES = int(os.environ.get("SEGMENTLOG_CRASH_STATES", "20000"))
SEED = int(os.environ.get("SEGMENTLOG_SEED", "1"))

# ---------------------------------------------------------------- the simulated machine itself


def _survivors(disk: SimulatedDisk, path: str, states: int = 200) -> Counter[bytes | None]:
    """What a file may hold after a power cut now (None: it is not there), and how often."""
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
    """All, nothing, single pages, sectors, the size without the data: each is seen, and old data stays below it."""
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
    """What was stored through a writable map may survive, or not."""
    disk = SimulatedDisk()
    disk.make_folders("/a")
    _written(disk, "/a/f", b"old ", sync=True)
    process = disk.process()
    process.sync_folder("/a")
    process.map_file(process.open("/a/f", os.O_RDWR), 4, writable=True)[:] = b"new "
    assert set(_survivors(disk, "/a/f")) == {b"old ", b"new "}


def test_a_process_death_loses_nothing_and_syncs_nothing() -> None:
    """The machine goes on with its page cache; the power may still be cut afterwards."""
    disk = SimulatedDisk()
    disk.make_folders("/a")
    _written(disk, "/a/f", b"data", sync=False)
    after = disk.point().process_death()
    assert after.find("/a/f").content() == b"data"
    assert None in _survivors(after, "/a/f")


# ---------------------------------------------------------------- the checker itself


def test_the_history_finds_what_it_is_there_for() -> None:
    """Each rule that is broken shows, and what the log itself calls lost does not."""
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


def test_an_engine_without_a_ceiling_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is no formality: a log that resumes where its bytes end gives offsets out twice, and is found out."""
    from segmentlog.partition import recovery
    from segmentlog.policy.recovery import RecoveryVerdict

    def resume_at_the_end(checkpoint: object, *, end_offset: int, last_epoch: int, **_: object) -> RecoveryVerdict:
        return RecoveryVerdict(end_offset, last_epoch + 1, "wherever the bytes end")

    monkeypatch.setattr(recovery, "decide", resume_at_the_end)
    with pytest.raises(AssertionError, match=r"one offset, two records|goes on unaware|gone outside"):
        Trial(SEED, "never", 1).run(1, 25, 8)


# ---------------------------------------------------------------- the engine


def test_no_promise_is_broken_at_any_crash_state() -> None:
    """Every policy, one and three writers: durable is durable, no offset twice, what is gone is told, order is kept."""
    jobs = ((seed, policy, writers) for seed in count(SEED) for policy in POLICIES for writers in (1, 3))
    states = 0
    failures = []
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_trial, *next(jobs)) for _ in range(workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                if error := one.exception():
                    failures.append(str(error))
                else:
                    states += one.result()
                if states < STATES and not failures:
                    running.add(pool.submit(run_trial, *next(jobs)))
    assert not failures, "\n".join(failures)
    assert states >= STATES
    print(f"{states:,} crash states")


def test_indexes_rebuilt_from_nothing_equal_the_live_ones() -> None:
    """After a power cut, too: what a reader finds with the recovered indexes it finds without any."""
    disk = SimulatedDisk()
    disk.make_folders(FOLDER)
    config = TopicConfig.from_mapping({"fsync": "never", "segment_records": 20, "index_interval_bytes": 100})

    def opened(disk: SimulatedDisk) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: config, fs=disk.process(), clock=FakeClock())

    log = opened(disk)
    for number in range(60):
        log.append([b"%d" % number], timestamps=[1000 + number])
        if number % 25 == 0:
            log.flush()
    compared = 0
    for survivor in disk.point().crashes(random.Random(SEED), 50):
        log = opened(survivor)
        live = {base: _entries(log, base) for base in _bases(log)}
        process = survivor.process()
        for name in process.listdir(FOLDER):
            if name.endswith("index"):
                process.unlink(f"{FOLDER}/{name}")
        fresh = opened(survivor)
        assert {base: _entries(fresh, base) for base in _bases(fresh)} == live
        compared += len(live)
    assert compared > 20


def _bases(log: Partition) -> list[int]:
    return [segment.base_offset for segment in log.segments()]


def _entries(log: Partition, base: int) -> list[object]:
    """The entries of one segment's index as a reader has it after reading all."""
    state = log.handle.page.log.read()
    bases = log.handle.segments(state)
    segment = log._reader._segment(bases, bases.index(base), state)
    return [entries.tolist() for entries in segment.index.entries()]
