"""Long seeded lives of a follower's log, with the power cut at every call that it makes.

The leader is an ordinary partition on a disk of its own. It appends, rolls, trims, truncates, and sometimes dies and
recovers, so that the follower has records that the leader lacks. The rules of `policy.replica_fetch` connect the two.
After each power cut of the follower, a new process follows the leader until both logs are equal to the byte.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from logs import FakeClock
from wire import append_either

from segmentlog.config import TopicConfig
from segmentlog.format.scan import scan_batches
from segmentlog.log.follower_log import FollowerLog
from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.policy.lost_ranges import skip_lost_ranges
from segmentlog.policy.replica_fetch import (
    HighWatermark,
    LogHistory,
    ReplicaFetch,
    ReplicaId,
    review_answer,
    review_fetch,
    truncate_history,
)
from segmentlog.storage.segment import MappedSegment
from segmentlog.testing.fault_injection import Died
from segmentlog.testing.simulated_disk import CrashPoint, SimulatedDisk

FOLDER = "/t/0"
_REPLICA = ReplicaId("follower", "0")
_ROUNDS_MAX = 2000


class Broken(AssertionError):
    """A promise of the follower's log is broken; the message has the seed."""


class Promised(NamedTuple):
    """What a follower has told its leader."""

    confirmed: int = 0
    ceiling: int = 0


class Moment(NamedTuple):
    """A boundary between two calls of the follower: its disk, and its promises by then."""

    point: CrashPoint
    promised: Promised


def stored_batches(leader: Partition, offset: int, room: int) -> tuple[bytes, int]:
    """Return (whole batches from ``offset`` on as they are on disk, base offset of their segment).

    At most ``room`` bytes, but at least one batch.
    """
    handle = leader.handle
    log = handle.page.log.read()
    bases = handle.segments(log)
    base = bases[bisect_right(bases, offset) - 1]
    view = MappedSegment(handle.fs, handle.folder, base).view
    end = log.end_position if base == log.active_base_offset else len(view)
    begin = stop = -1
    for position, header in scan_batches(view, 0, end):
        if header.next_offset <= offset:
            continue
        begin = position if begin < 0 else begin
        if stop > begin and position + header.size_bytes - begin > room:
            break
        stop = position + header.size_bytes
    assert begin >= 0, f"the leader's segment {base} has no batch of offset {offset}"
    return bytes(view[begin:stop]), base


def history_of(log: Partition) -> LogHistory:
    """Return epochs and lost ranges of a leader's log."""
    return LogHistory(tuple(log.epochs()), tuple(log.lost_ranges()), log.log_end_offset)


def fetch_once(
    leader: Partition, follower: FollowerLog, room: int = 1 << 20, before: Callable[[int], None] = lambda offset: None
) -> bool:
    """Let a follower fetch once. Return False if it has everything.

    ``before`` is called with the offset up to which the follower's records remain, before any are removed.
    """
    term, ours, theirs = leader.epoch, follower.history, history_of(leader)
    end = follower.log_end_offset
    fetch = ReplicaFetch(_REPLICA, term, ours.last_epoch, end, follower.durable_offset, follower.offset_ceiling)
    verdict = review_fetch(term, theirs, fetch, None)
    if verdict.divergence is not None:
        answer = review_answer(_REPLICA, term, ours, HighWatermark(0, 0), 0, fetch, verdict.divergence)
        assert answer.truncate_to is not None, answer.reason
        if answer.truncate_to < follower.log_start_offset:
            raise Broken(f"truncation to {answer.truncate_to}, before the log start {follower.log_start_offset}")
        before(answer.truncate_to)
        follower.truncate(answer.truncate_to)
        return True
    follower.note_ceiling(leader.handle.page.log.read().offset_ceiling)
    first_base = leader.handle.segments(leader.handle.page.log.read())[0]
    if skip_lost_ranges(theirs.lost_ranges, end) < first_base:
        before(0)
        follower.restart_at(first_base, theirs, follower.offset_ceiling)
        return True
    gap = next((lost for lost in theirs.lost_ranges if lost.base_offset == end), None)
    if gap is not None:
        follower.add_lost_range(gap)
    elif end < leader.log_end_offset:
        follower.append(*stored_batches(leader, end, room))
    start = follower.log_start_offset
    follower.trim(leader.log_start_offset)
    return follower.log_start_offset != start or follower.log_end_offset != end


class Trial:
    """A workload, and the checks of every state that a power cut of the follower leaves."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(f"follower/{seed}")
        self.config = TopicConfig.from_mapping(
            {
                "fsync": "never",
                "segment_records": self.rng.choice((7, 20, 200)),
                "segment_bytes": 16 << 10,
                "index_interval_bytes": self.rng.choice((60, 500)),
                "compression_type": self.rng.choice(("none", "lz4")),
                "file_delete_delay_ms": 0,
            }
        )
        self.leader_disk, self.disk = self._new_disk(), self._new_disk()
        self.leader = self._open_leader()
        self.promised = Promised()
        self.assigned: dict[int, bytes | None] = {}
        self.states = 0
        self._number = 0
        self._sequences: dict[int, int] = {}
        self._moments: list[Moment] = []

    @staticmethod
    def _new_disk() -> SimulatedDisk:
        disk = SimulatedDisk()
        disk.make_folders(FOLDER)
        disk.find(FOLDER).sync()
        return disk

    def _open_leader(self) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: self.config, fs=self.leader_disk.process(), clock=FakeClock())

    def _open_follower(self, disk: SimulatedDisk) -> FollowerLog:
        log = FollowerLog(Handle(disk.process(), FOLDER, "t", 0, lambda: self.config, FakeClock()))
        report = log.open()
        if report.verdict in ("incomplete", "no checkpoint"):
            raise Broken(f"a power cut is taken for damage: {report.verdict}, {report.why}")
        return log

    def run(self, rounds: int, operations: int, variants: int) -> int:
        """Run ``rounds`` lives; return the number of states that were checked."""
        with (
            mock.patch("segmentlog.log.append.appender.OFFSET_CEILING_STEP", 24),
            mock.patch("segmentlog.log.append.syncer.CHECKPOINT_BYTES", 1500),
            mock.patch("segmentlog.storage.segment._WINDOW", 4000),
            mock.patch("segmentlog.storage.segment._WINDOW_SYNCS", 1),
        ):
            for number in range(rounds):
                self._live(operations)
                seen, before = set[int](), None
                for moment in self._moments:
                    if moment.promised != before:  # the same disk is another state once more was promised
                        seen, before = set(), moment.promised
                    where = f"round {number}, call {moment.point.effects}"
                    if self.rng.random() < 0.1:
                        self._check(moment.point.process_death(), moment.promised, where + ", a process's death")
                    for disk in moment.point.crashes(self.rng, variants, seen):
                        self._check(disk, moment.promised, where + ", a power cut")
                moment = self.rng.choice(self._moments)
                self.disk = self.rng.choice(list(moment.point.crashes(self.rng, 8)))
                self.promised = moment.promised
                self._moments = []
        return self.states

    # ------------------------------------------------------------ living

    def _live(self, operations: int) -> None:
        disk = self.disk
        disk.on_effect = lambda: self._moments.append(Moment(disk.point(), self.promised))
        follower = self._open_follower(disk)
        for _ in range(operations):
            self._operate_leader()
            process: Any = follower._handle.fs
            process.fail_at = None
            if self.rng.random() < 0.05:
                process.fail_at = (process.calls + self.rng.randrange(1, 40), "die")
            try:
                for _ in range(self.rng.randrange(6)):
                    self._operate_follower(follower)
            except Died:
                follower = self._open_follower(disk)
        disk.on_effect = None

    def _operate_follower(self, follower: FollowerLog) -> None:
        what = self.rng.random()
        if what < 0.7:
            fetch_once(self.leader, follower, self.rng.choice((1, 300, 1 << 20)), self._before_removal)
            self._promise(follower)
        elif what < 0.97:
            follower.sync()
            self._promise(follower)
        else:
            follower.close()
            follower._handle.ensure_open()

    def _before_removal(self, offset: int) -> None:
        self.promised = self.promised._replace(confirmed=min(self.promised.confirmed, offset))

    def _promise(self, follower: FollowerLog) -> None:
        self.promised = Promised(follower.durable_offset, follower.offset_ceiling)

    def _operate_leader(self) -> None:
        leader, rng = self.leader, self.rng
        what = rng.random()
        if what < 0.65:
            self._append()
        elif what < 0.75:
            leader.flush()
        elif what < 0.80:
            leader.roll()
        elif what < 0.84:
            kept = min(leader.last_stable_offset, leader.durable_offset)  # a leader deletes only replicated records
            leader.trim(rng.randint(leader.log_start_offset, max(kept, leader.log_start_offset)))
        elif what < 0.87:
            low = max(leader.log_start_offset, leader.log_end_offset - 5)
            leader.truncate(rng.randint(low, leader.log_end_offset))
            self._sequences.clear()
        elif what < 0.92:
            for entry in leader.open_transactions():
                leader.end_transaction(entry.producer_id, entry.epoch, committed=rng.random() < 0.5)
        else:
            self.leader_disk = rng.choice(list(self.leader_disk.point().crashes(rng, 5)))
            self.leader = self._open_leader()
            self._sequences.clear()

    def _append(self) -> None:
        leader, rng = self.leader, self.rng
        values: list[bytes | None] = []
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            self._number += 1
            values.append(b"%06d:%s" % (self._number, b"." * rng.choice((0, 0, 30, 600))))
        if rng.random() < 0.4:
            self._number += 1
            producer_id = 1 << 40 | self._number if not self._sequences else rng.choice(list(self._sequences))
            sequence = self._sequences.get(producer_id, 0)
            stamp = ProducerStamp(producer_id, 0, sequence, transactional=bool(producer_id % 2))
            base_offset = leader.append(values, producer=stamp)
            self._sequences[producer_id] = sequence + len(values)
            if rng.random() < 0.3:
                self._sequences.clear()
        else:
            base_offset = append_either(leader, values, compressed=False)
        for offset, value in enumerate(values, base_offset):
            assert self.assigned.setdefault(offset, value) == value, "the leader assigned an offset twice"

    # ------------------------------------------------------------ checking

    def _check(self, disk: SimulatedDisk, promised: Promised, what: str) -> None:
        self.states += 1
        where = f"{what}, state {self.states}; again with SEGMENTLOG_SEED={self.seed}"
        recovery: list[CrashPoint] = []
        if self.states % 20 == 0:
            disk.on_effect = lambda: recovery.append(disk.point())
        try:
            follower = self._open_follower(disk)
            disk.on_effect = None
            self._expect_kept(disk, follower, promised)
            self._expect_equal(disk, follower)
            for point in self.rng.sample(recovery, min(len(recovery), 3)):
                for again in point.crashes(self.rng, 3):
                    self.states += 1
                    follower = self._open_follower(again)
                    self._expect_kept(again, follower, promised)
                    self._expect_equal(again, follower)
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\n  {where}") from error

    def _expect_kept(self, disk: SimulatedDisk, follower: FollowerLog, promised: Promised) -> None:
        """Expect everything that the follower has promised, and no record that the leader has not appended."""
        if follower.log_end_offset < promised.confirmed:
            raise Broken(f"the log ends at {follower.log_end_offset}, and {promised.confirmed} was confirmed")
        if follower.offset_ceiling < promised.ceiling:
            raise Broken(f"the ceiling is {follower.offset_ceiling}, and {promised.ceiling} was reported")
        reader = self._reader(disk)
        for batch in reader.read(reader.log_start_offset):
            for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                if self.assigned.get(offset, b"") != value:
                    raise Broken(f"offset {offset} is {value!r}, and the leader appended {self.assigned.get(offset)!r}")

    def _reader(self, disk: SimulatedDisk) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: self.config, fs=disk.process(), clock=FakeClock(), read_only=True)

    def _expect_equal(self, disk: SimulatedDisk, follower: FollowerLog) -> None:
        """Follow the leader to its end, and expect the same log."""
        leader = self.leader
        for _ in range(_ROUNDS_MAX):
            if not fetch_once(leader, follower):
                break
        else:
            raise Broken(f"the follower has not reached the leader's end after {_ROUNDS_MAX} fetches")
        if follower.sync() != leader.log_end_offset:
            raise Broken(f"the follower synced {follower.durable_offset} of {leader.log_end_offset}")
        ours, theirs = _normal(follower.history), _normal(history_of(leader))
        if ours != theirs:
            raise Broken(f"the histories differ: {ours} and {theirs}")
        log, led = follower._handle.page.log.read(), leader.handle.page.log.read()
        for name in ("log_start_offset", "log_end_offset", "last_stable_offset"):
            first = skip_lost_ranges(theirs.lost_ranges, getattr(log, name))
            if first != skip_lost_ranges(theirs.lost_ranges, getattr(led, name)):
                raise Broken(f"{name} is {getattr(log, name)}, and the leader's {getattr(led, name)}")
        if log.offset_ceiling < led.offset_ceiling:
            raise Broken(f"the ceiling is {log.offset_ceiling}, below the leader's {led.offset_ceiling}")
        segments, led_segments = self._segments(follower._handle), self._segments(leader.handle)
        if segments != led_segments:
            base = next(base for base in led_segments | segments if segments.get(base) != led_segments.get(base))
            raise Broken(f"segment {base} differs; the leader has {[*led_segments]}, the follower {[*segments]}")
        if self._contents(self._reader(disk)) != self._contents(leader):
            raise Broken("a reader of the follower sees other records than a reader of the leader")

    @staticmethod
    def _segments(handle: Handle) -> dict[int, bytes]:
        """Return the bytes of each segment with a batch that ends after the log start.

        A power cut may undo the deletion of other segments, or a process may die before it.
        """
        log = handle.page.log.read()
        found = {}
        for base in handle.segments(log):
            view = MappedSegment(handle.fs, handle.folder, base).view
            found[base] = bytes(view[: log.end_position] if base == log.active_base_offset else view)
        return {
            base: content
            for base, content in found.items()
            if any(
                header.next_offset > log.log_start_offset
                for _, header in scan_batches(memoryview(content), 0, len(content))
            )
        }

    @staticmethod
    def _contents(log: Partition) -> list[tuple[int, bytes | None]]:
        return [
            record
            for batch in log.read(log.log_start_offset, isolation="read_committed")
            for record in zip(batch.offsets.tolist(), batch.values, strict=True)
        ]


def _normal(history: LogHistory) -> LogHistory:
    """Return a history without epochs that began in a lost range of a later epoch: a leader may keep them."""
    history = truncate_history(history, history.log_end_offset)
    epochs = [
        start
        for start in history.epochs
        if not any(lost.base_offset < start.start_offset < lost.end_offset for lost in history.lost_ranges)
    ]
    return history._replace(epochs=epochs)


def run_trial(seed: int) -> int:
    """Return the number of states that were checked, in a process of its own. Raise `Broken`."""
    logging.disable(logging.WARNING)  # recoveries by the thousand
    return Trial(seed).run(rounds=2, operations=25, variants=6)
