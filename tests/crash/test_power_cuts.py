"""The power is cut at every call that the engine makes, recovery included, and every promise is held against it.

SEGMENTLOG_CRASH_STATES  how many different crash states (CI: 100,000; `make test-crash`: 1,000,000)
SEGMENTLOG_SEED          the first seed; a failure names the one that shows it again
"""

from __future__ import annotations

import os
import random
from itertools import count

import pytest
from logs import FakeClock
from trial import FOLDER, POLICIES, Trial, run_trial, run_until

from segmentlog.config import TopicConfig
from segmentlog.partition.partition import Partition
from segmentlog.testing import SimulatedDisk

STATES = int(os.environ.get("SEGMENTLOG_CRASH_STATES", "20000"))
SEED = int(os.environ.get("SEGMENTLOG_SEED", "1"))


def test_an_engine_without_a_ceiling_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is no formality: a log that resumes where its bytes end gives offsets out twice, and is found out."""
    from segmentlog.partition import recovery
    from segmentlog.policy.recovery import RecoveryVerdict

    def resume_at_the_end(checkpoint: object, *, end_offset: int, last_epoch: int, **_: object) -> RecoveryVerdict:
        return RecoveryVerdict(end_offset, last_epoch + 1, "wherever the bytes end")

    monkeypatch.setattr(recovery, "decide", resume_at_the_end)
    # A durable append would notice by itself that its offset is a lost one's.
    monkeypatch.setattr("segmentlog.partition.syncer.Syncer.lost_among", lambda *_: None)
    with pytest.raises(AssertionError, match=r"one offset, two records|goes on unaware|gone outside"):
        Trial(SEED, "never", 1).run(1, 25, 8)


# ---------------------------------------------------------------- the engine


def test_no_promise_is_broken_at_any_crash_state() -> None:
    """Every policy, one and three writers: durable is durable, no offset twice, what is gone is told, order is kept."""
    jobs = ((seed, policy, writers) for seed in count(SEED) for policy in POLICIES for writers in (1, 3))
    states = run_until(STATES, run_trial, jobs)
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
