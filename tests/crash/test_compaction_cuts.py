"""The power is cut, and calls fail, while a log is compacted and retained.

SEGMENTLOG_COMPACTION_STATES    how many different crash states
SEGMENTLOG_COMPACTION_VARIANTS  and of those at each call
SEGMENTLOG_SEED                 that seed alone; a failure names the one that shows it again
"""

from __future__ import annotations

import errno
import os
import random
from typing import Any

import pytest
from compaction_trial import FOLDER, CompactionTrial, records_of, run_compaction_trial
from keyed import Said, compacted
from logs import FakeClock, Kept
from seeds import fresh_seed, given_seed, jobs
from trial import run_until

from segmentlog.config import TopicConfig
from segmentlog.errors import PartitionFailed, SegmentlogError
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.store_inspection import Tally
from segmentlog.log.partition import Partition
from segmentlog.testing.fault_injection import Died
from segmentlog.testing.simulated_disk import SimulatedDisk

STATES = int(os.environ.get("SEGMENTLOG_COMPACTION_STATES", "3000"))
VARIANTS = int(os.environ.get("SEGMENTLOG_COMPACTION_VARIANTS", "1"))


@pytest.mark.long(minutes=0.7)
def test_no_key_loses_its_last_records_at_any_crash_state() -> None:
    """One and three processes: the last records of each key exist, and records before a tombstone stay deleted."""
    states = run_until(STATES, run_compaction_trial, *jobs("compaction cuts", (1, 3), (VARIANTS,)))
    assert states >= STATES or given_seed() is not None
    print(f"{states:,} crash states")


def test_a_cleaner_that_forgets_a_record_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial detects a cleaner that leaves out one survivor in a batch of several."""
    from segmentlog.policy.offset_map import OffsetMap

    real = OffsetMap.kept

    def all_but_one(self: OffsetMap, base_offset: int, end_offset: int) -> Any:
        found = real(self, base_offset, end_offset)
        return found[1:] if len(found) > 1 else found

    monkeypatch.setattr(OffsetMap, "kept", all_but_one)
    with pytest.raises(AssertionError, match=r"tombstone at|is gone|wanted"):
        _try_lives(10)


def _try_lives(count: int) -> None:
    for seed in range(1, 1 + count):
        CompactionTrial(seed, 1, truncates=False).run(1, 40, 2)


# ---------------------------------------------------------------- a call fails

FAULTS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR, "short write": "short", "death": "die"}


class Life:
    """A log with something for every step of a pass: tombstones of all ages, segments to merge, empty ones."""

    def __init__(self) -> None:
        self.config = TopicConfig.from_mapping(
            {
                "fsync": "never", "cleanup_policy": "delete,compact", "segment_bytes": 700, "delete_retention_ms": 10,
                "retention_segments": 1, "index_interval_bytes": 60, "compression_type": "none",
            }
        )  # fmt: skip
        self.disk = SimulatedDisk()
        self.disk.make_folders(FOLDER)
        self.disk.find(FOLDER).sync()
        self.process = self.disk.process()
        self.clock = FakeClock()
        self.log = self.opened()
        rng = random.Random(4)
        for number in range(14):
            value = None if number % 4 == 2 else b"%d" % number + b"." * rng.choice((0, 150))
            self.log.append([value], [b"k%d" % rng.randrange(4)])
            if number % 4 == 3:
                self.log.roll()
            if number == 7:
                self.log.compact()
                self.clock.advance(20)
        self.log.flush()

    def opened(self, disk: SimulatedDisk | None = None) -> Partition:
        fs = self.process if disk is None else disk.process()
        return Partition(FOLDER, "t", 0, lambda: self.config, fs=fs, clock=self.clock)

    def work(self) -> None:
        self.log.compact(buffer_bytes=34 * 2)
        self.log.apply_retention()


def _kept(shown: dict[int, Said]) -> list[Kept]:
    return [Kept(offset, *record, 0) for offset, record in shown.items()]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_at_any_call_of_a_pass_leaves_the_log_whole(fault: str) -> None:
    """The log is intact in this process, in the next one, and after a power cut; the next pass does the rest.

    Every call with SEGMENTLOG_COMPACTION_STATES of 100,000 and more, else every fifth, the seed decides which.
    """
    life = Life()
    before = records_of(life.log)
    first = life.process.calls
    life.work()
    calls = life.process.calls - first
    after = records_of(life.log)
    start = life.log.log_start_offset
    assert 100 < calls < 2000
    active = life.log.segments()[-1].base_offset
    wanted = {one.offset for one in compacted(_kept(before), active, 1) if one.offset >= start}
    assert {offset for offset in wanted if before[offset].value is not None} <= after.keys() <= wanted
    met: dict[str, set[str]] = {}
    every = 1 if STATES >= 100_000 else 5
    print(f"SEGMENTLOG_SEED={fresh_seed()}")
    for call in range(1 + fresh_seed() % every, calls + 1, every):
        life = Life()
        how: Any = FAULTS[fault]
        life.process.fail_at = (life.process.calls + call, how)
        failure = ""
        try:
            life.work()
        except (SegmentlogError, OSError, Died) as error:
            failure = type(error).__name__
        life.process.fail_at = None
        note = f"call {call} ({life.process.failed}) fails with {fault}: {failure or 'no error'}"
        met.setdefault(life.process.failed, set()).add(failure)
        point = life.disk.point()
        try:
            if fault != "death":
                _go_on(life, life.log, before, wanted)
            elif call % 2:
                _go_on(life, life.opened(point.process_death()), before, wanted)
            for survivor in list(point.crashes(random.Random(call), 2))[call % 2 :][:1]:
                _go_on(life, life.opened(survivor), before, wanted)
        except Exception as error:
            raise AssertionError(note) from error
    print(fault, calls, met)
    assert {"pwritev", "open", "flock", "unlink"} <= met.keys()


def _go_on(life: Life, log: Partition, before: dict[int, Said], wanted: set[int]) -> None:
    shown = records_of(log)
    assert shown.items() <= before.items()
    values = {offset for offset in wanted if before[offset].value is not None}
    assert values <= shown.keys(), "the last record of a key is gone"
    try:
        log.append([b"on"], [b"after"])
        log.compact()
    except PartitionFailed:  # an fsync of the log itself failed, and the log is failed until it is opened again
        log.abandon()
        log = life.opened(next(life.disk.point().crashes(random.Random(1), 1)))
        log.compact()
    active = log.segments()[-1].base_offset  # the segment that was active before the power cut is sealed now
    last = {one.offset for one in compacted(_kept(shown), active, 1)}
    left = records_of(log).keys() & before.keys()
    assert {offset for offset in last if before[offset].value is not None} <= left <= last, "the next pass is not whole"
    process: Any = log.handle.fs
    assert not [name for name in process.listdir(FOLDER) if name.endswith((".cleaned", ".swap"))]
    findings = inspect_partition(process, FOLDER, "t", 0, life.config, Tally()).findings
    assert not [finding for finding in findings if finding.severity == "damage"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_fsync_of_a_copy_does_not_fail_the_partition(error: int) -> None:
    """The log itself is unchanged: appends succeed, and a later pass writes a new copy."""
    life = Life()
    copies: set[int] = set()
    process = life.process
    real_open, real_fsync = process.open, process.fsync

    def opening(path: str, *rest: Any) -> int:
        fd: int = real_open(path, *rest)
        if path.endswith(".cleaned"):
            copies.add(fd)
        return fd

    def fsync(fd: int) -> None:
        if fd in copies:
            raise OSError(error, os.strerror(error))
        real_fsync(fd)

    process.open, process.fsync = opening, fsync
    before = records_of(life.log)
    with pytest.raises((OSError, SegmentlogError)) as caught:
        life.log.compact()
    assert not isinstance(caught.value, PartitionFailed)
    assert life.log.failed is None
    assert records_of(life.log) == before
    assert not [name for name in process.listdir(FOLDER) if name.endswith((".cleaned", ".swap"))]
    assert life.log.append([b"on"], [b"after"], ack="durable") == 14
    process.fsync = real_fsync
    assert not life.log.compact().busy
    assert len(records_of(life.log)) < len(before)
