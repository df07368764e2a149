"""The power is cut at every call that the engine makes, recovery included, and every promise is held against it.

SEGMENTLOG_CRASH_STATES  how many different crash states (20,000; `make test-crash`: 1,000,000)
SEGMENTLOG_SEED          that seed alone; a failure names the one that shows it again
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from logs import FakeClock, contents
from seeds import given_seed, jobs
from trial import FOLDER, POLICIES, Trial, run_trial, run_until

from segmentlog.config import TopicConfig
from segmentlog.errors import LogTruncated
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.log.partition import Partition
from segmentlog.testing import SimulatedDisk

STATES = int(os.environ.get("SEGMENTLOG_CRASH_STATES", "20000"))


def test_an_engine_without_a_ceiling_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial detects a log that resumes where its bytes end: it assigns offsets twice."""
    from segmentlog.log.recovery import log_recovery
    from segmentlog.policy.recovery_policy import RecoveryVerdict

    def resume_at_the_end(checkpoint: object, *, end_offset: int, last_epoch: int, **_: object) -> RecoveryVerdict:
        return RecoveryVerdict(end_offset, last_epoch + 1, "wherever the bytes end")

    monkeypatch.setattr(log_recovery, "decide", resume_at_the_end)
    # A durable append would notice by itself that its offset is a lost one's.
    monkeypatch.setattr("segmentlog.log.append.syncer.Syncer.find_lost_range", lambda *_: None)
    with pytest.raises(AssertionError, match=r"one offset, two records|goes on unaware|gone outside"):
        Trial(1, "never", 1).run(1, 25, 8)


# ---------------------------------------------------------------- the engine


@pytest.mark.long(minutes=0.9)
def test_no_promise_is_broken_at_any_crash_state() -> None:
    """One and three writers, each policy: durable records stay, offsets are unique, losses are reported,
    order is kept.
    """
    states = run_until(STATES, run_trial, *jobs("power cuts", POLICIES, (1, 3)))
    assert states >= STATES or given_seed() is not None
    print(f"{states:,} crash states")


def test_a_power_cut_while_a_partition_is_made_leaves_a_new_one() -> None:
    """At each of its calls, with any names that the folder kept: no damage, also for strict, and offsets from 0 on."""
    config = TopicConfig.from_mapping({"fsync": "never"})

    def opened(disk: SimulatedDisk, **options: Any) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: config, fs=disk.process(), clock=FakeClock(), **options)

    disk = SimulatedDisk()
    disk.make_folders(FOLDER)
    disk.find(FOLDER).sync()
    points = []
    disk.on_effect = lambda: points.append(disk.point())
    opened(disk)
    disk.on_effect = None
    tried = 0
    for point in points:
        for survivor in point.crashes(random.Random(1), 50):
            found = inspect_partition(survivor.process(), FOLDER, "t", 0, config, Tally())
            assert not [str(one) for one in found.findings if one.severity == "damage"]
            log = opened(survivor, recovery="strict")
            assert (log.log_start_offset, log.log_end_offset, log.lost_ranges()) == (0, 0, [])
            assert log.append([b"first"], ack="durable") == 0
            tried += 1
    assert tried > 50


def test_a_clean_close_syncs_what_a_roll_sealed() -> None:
    """All records were durable before the roll, and only the end of the file is left to sync: the close does so."""
    config = TopicConfig.from_mapping({"fsync": "never"})
    disk = SimulatedDisk()
    disk.make_folders(FOLDER)
    disk.find(FOLDER).sync()
    log = Partition(FOLDER, "t", 0, lambda: config, fs=disk.process(), clock=FakeClock())
    log.append([b"a", b"b"], ack="durable")
    log.roll()
    points = []
    disk.on_effect = lambda: points.append(disk.point())
    log.close()
    disk.on_effect = None
    for point in points:
        for survivor in point.crashes(random.Random(1), 20):
            found = inspect_partition(survivor.process(), FOLDER, "t", 0, config, Tally())
            assert not [str(one) for one in found.findings if one.severity == "damage"]
            log = Partition(FOLDER, "t", 0, lambda: config, fs=survivor.process(), clock=FakeClock())
            assert [one.value for one in contents(log)] == [b"a", b"b"]
            log.append([b"c"], ack="durable")
            assert [one.value for one in contents(log)] == [b"a", b"b", b"c"]


def test_indexes_rebuilt_from_nothing_equal_the_live_ones() -> None:
    """This also holds after a power cut: a reader finds the same records with and without recovered indexes."""
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
    for survivor in disk.point().crashes(random.Random(1), 50):
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


def test_a_truncation_that_a_power_cut_interrupts_is_shown_as_it_will_end() -> None:
    """A read-only open before any open for writing shows every record below the truncation, and only those."""
    config = TopicConfig.from_mapping({"fsync": "never", "segment_records": 10})

    def opened(disk: SimulatedDisk, **options: Any) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: config, fs=disk.process(), clock=FakeClock(), **options)

    disk = SimulatedDisk()
    disk.make_folders(FOLDER)
    log = opened(disk)
    for number in range(6):
        log.append([b"%d" % number] * 5)
    log.flush()
    points = []
    disk.on_effect = lambda: points.append(disk.point())
    log.truncate(13)
    disk.on_effect = None
    ends = set()
    for point in points:
        for survivor in point.crashes(random.Random(1), 20):
            found = inspect_partition(survivor.process(), FOLDER, "t", 0, config, Tally())
            assert not [str(one) for one in found.findings if one.severity == "damage"]
            looking = opened(survivor, read_only=True)
            seen = contents(looking)
            ends.add(len(seen))
            if len(seen) == 13:
                assert contents(looking, 13) == []
                with pytest.raises(LogTruncated, match=r"\[13, 31\)"):
                    next(looking.read(20))
            assert seen == contents(opened(survivor))
    assert ends == {13, 30}


def test_a_recovery_that_a_power_cut_interrupts_leaves_a_sound_log() -> None:
    """At each of its calls, `verify` finds the log sound, although the new segment was empty."""
    config = TopicConfig.from_mapping({"fsync": "never", "segment_records": 5})

    def opened(disk: SimulatedDisk) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: config, fs=disk.process(), clock=FakeClock())

    disk = SimulatedDisk()
    disk.make_folders(FOLDER)
    log = opened(disk)
    log.append([b"a"] * 5)
    log.roll()
    log.close()
    log = opened(disk)
    log.append([b"b"] * 3)
    points = []
    for survivor in disk.point().crashes(random.Random(1), 20):
        survivor.on_effect = lambda disk=survivor: points.append(disk.point())
        opened(survivor)
    for point in points:
        for survivor in point.crashes(random.Random(2), 10):
            found = inspect_partition(survivor.process(), FOLDER, "t", 0, config, Tally())
            assert not [str(one) for one in found.findings if one.severity == "damage"]
            assert opened(survivor).log_end_offset > 8


def _bases(log: Partition) -> list[int]:
    return [segment.base_offset for segment in log.segments()]


def _entries(log: Partition, base: int) -> list[object]:
    """Return the entries of one segment's index after a reader has read everything."""
    state = log.handle.page.log.read()
    bases = log.handle.segments(state)
    segment = log._open_segments.get(bases, bases.index(base), state)
    return [entries.tolist() for entries in segment.index.entries()]
