"""A long seeded life of a partition on a simulated machine, with a power cut at every call it makes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any
from unittest import mock

import msgspec
from logs import FakeClock
from wire import append_either

from segmentlog.config import TopicConfig
from segmentlog.errors import LogTruncated
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.store_inspection import Tally
from segmentlog.log.partition import Partition
from segmentlog.testing import History
from segmentlog.testing.fault_injection import Died
from segmentlog.testing.simulated_disk import CrashPoint, SimulatedDisk

FOLDER = "/t/0"
POLICIES = ("always", "20ms", "6records", "900bytes", "never")

Event = Callable[[History], None]


class Broken(AssertionError):
    """An invariant does not hold; the message says how to reproduce it."""


class Moment(msgspec.Struct):
    """A boundary between two calls: the disk as it was, and the results that were returned by then."""

    point: CrashPoint
    event_count: int


class Trial:
    """A workload, and the checks of every state after its crashes.

    ``states`` counts the different crash states that were recovered and checked.
    """

    crash_name = "a power cut"

    def __init__(self, seed: int, policy: str, writers: int) -> None:
        self.seed, self.policy, self.writer_count = seed, policy, writers
        self.rng = random.Random(f"{seed}/{policy}/{writers}")
        self.config = TopicConfig.from_mapping(
            {
                "fsync": policy,
                "segment_records": self.rng.choice((7, 20, 200)),
                "segment_bytes": 16 << 10,
                "index_interval_bytes": self.rng.choice((60, 500)),
                "compression_type": self.rng.choice(("none", "lz4")),
            }
        )
        self.disk = SimulatedDisk()
        self.disk.make_folders(FOLDER)
        self.disk.find(FOLDER).sync()
        self.events: list[Event] = []
        self.states = 0
        self._number = 0
        self._gone_before: set[int] = set()
        self._moments: list[Moment] = []
        self._opened_at = 0

    def run(self, rounds: int, operations: int, variants: int) -> int:
        """Run ``rounds`` times: operations, then a crash at each of their calls; continue from one of the crashes."""
        with (
            mock.patch("segmentlog.log.append.appender.OFFSET_CEILING_STEP", 24),
            mock.patch("segmentlog.log.append.syncer.CHECKPOINT_BYTES", 1500),
            mock.patch("segmentlog.storage.segment._WINDOW", 4000),
            mock.patch("segmentlog.storage.segment._WINDOW_SYNCS", 1),
            # An inspection reads twice, in case another process is working; in this trial, no other process is.
            mock.patch("segmentlog.inspection.segments_inspection._PAUSE_S", 0),
            mock.patch("segmentlog.inspection.partition_inspection._PAUSE_S", 0),
            mock.patch("segmentlog.inspection.small_files._READ_PAUSE_S", 0),
        ):
            for number in range(rounds):
                self._live(operations)
                said, seen = -1, set[int]()
                for moment in self._moments:
                    events = self.events[: moment.event_count]
                    if said != moment.event_count:  # the same disk is another state once more results were returned
                        said, seen = moment.event_count, set()
                    if self.rng.random() < 0.2:
                        self._check(moment.point.process_death(), events, f"round {number}, a process's death", moment)
                    for disk in self._crashes(moment.point, variants, seen):
                        self._check(disk, events, f"round {number}, {self.crash_name}", moment)
                self._go_on()
        return self.states

    def _crashes(self, point: CrashPoint, count: int, seen: set[int] | None = None) -> Iterator[SimulatedDisk]:
        return point.crashes(self.rng, count, seen)

    def _go_on(self) -> None:
        """Crash at one of the moments, and continue the next round with the disk of that crash."""
        moment = self.rng.choice(self._moments)
        self.events = self.events[: moment.event_count]
        self.disk = self.rng.choice(list(self._crashes(moment.point, 8)))
        self._moments = []

    # ------------------------------------------------------------ living

    def _open(self, disk: SimulatedDisk, **options: Any) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: self.config, fs=disk.process(), clock=FakeClock(), **options)

    def _live(self, operations: int) -> None:
        disk = self.disk
        disk.on_effect = lambda: self._moments.append(Moment(disk.point(), len(self.events)))
        writers = [self._open(disk) for _ in range(self.writer_count)]
        self._opened_at = disk.effects
        history = History()
        for event in self.events:
            event(history)
        self._gone_before = set(history.named()) - dict(_records(writers[0])).keys()
        for _ in range(operations):
            at = self.rng.randrange(len(writers))
            try:
                self._operate(writers, at)
            except Died:
                writers[at] = self._open(disk)
        disk.on_effect = None

    def _operate(self, writers: list[Partition], at: int) -> None:
        log, rng = writers[at], self.rng
        process: Any = log.handle.fs
        process.fail_at = None
        if rng.random() < 0.03:
            process.fail_at = (process.calls + rng.randrange(1, 30), "die")
        what = rng.random()
        if what < 0.62:
            self._append(log, at)
        elif what < 0.68:
            log.flush()
        elif what < 0.82:
            self._read(log, durable_only=rng.random() < 0.5)
        elif what < 0.90:
            clock: Any = log.handle.clock
            clock.advance(rng.choice((1, 25)))
            if log.sync_due():
                log.flush()
        elif what < 0.93:
            log.close()
            writers[at] = self._open(self.disk)
        elif what < 0.96:
            log.trim(rng.randint(log.log_start_offset, log.log_end_offset))
        elif what < 0.97:
            offset = rng.randint(log.log_start_offset, log.log_end_offset)
            self.events.append(lambda history: history.withdrawn(offset))
            log.truncate(offset)
        elif what < 0.98:
            log.roll()

    def _append(self, log: Partition, at: int) -> None:
        rng = self.rng
        values = []
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            self._number += 1
            padding = b"." * rng.choice((0, 0, 30, 600, 1500))
            values.append(b"%d:%06d:%s" % (at, self._number, padding))
        durable = rng.random() < 0.15
        base_offset = append_either(log, values, ack="durable" if durable else None, compressed=False)
        durable |= self.policy == "always"
        self.events.append(lambda history: history.acknowledged(base_offset, values, durable=durable))

    def _read(self, log: Partition, *, durable_only: bool) -> None:
        durable_offset = log.durable_offset
        found = list(_records(log, durable_only=durable_only))
        who = "a durable-only reader" if durable_only else "a reader"

        def event(history: History) -> None:
            for offset, value in found:
                history.handed(who, offset, value, durable_only=offset < durable_offset)

        self.events.append(event)

    # ------------------------------------------------------------ checking

    def _check(self, disk: SimulatedDisk, events: list[Event], what: str, moment: Moment) -> None:
        """Open the log as the crash left it, and compare it with all results that were returned."""
        self.states += 1
        where = (
            f"{what} after call {moment.point.effects}, state {self.states}; again with "
            f"SEGMENTLOG_SEED={self.seed}, policy {self.policy}, {self.writer_count} writers"
        )
        history = History()
        for event in events:
            event(history)
        thorough = self.states % 40 == 0
        recovery: list[CrashPoint] = []
        try:
            seen: dict[int, bytes | None] = {}
            if thorough:
                self._expect_no_damage(disk, where + ", before it was opened")
                seen = dict(_records(self._open(disk, read_only=True)))
                disk.on_effect = lambda: recovery.append(disk.point())
            log = self._open(disk)
            disk.on_effect = None
            if disk.mount == moment.point.mount and moment.point.effects >= self._opened_at:
                self._expect_all_there(log, history, where)
            if thorough and disk.mount != moment.point.mount and seen != (opened := dict(_records(log))):
                ends = f"{sorted(seen)[-5:]}, and the next who opened it {sorted(opened)[-5:]}"
                raise Broken(f"who only looked at the log saw {ends}\n  {where}")
            first = self._verify(log, history, disk, where, thorough=thorough)
            if disk.mount == moment.point.mount:
                recovery = []  # only the process died: a power cut in its recovery is another case
            for point in self.rng.sample(recovery, min(len(recovery), 3)):
                for again in point.crashes(self.rng, 3):
                    self._recover_again(again, events, first, where)
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\n  {where}") from error

    def _verify(
        self, log: Partition, history: History, disk: SimulatedDisk, where: str, *, thorough: bool
    ) -> tuple[dict[int, bytes | None], int]:
        ranges = [(lost.base_offset, lost.end_offset) for lost in log.lost_ranges()]
        contents = dict(_records(log))
        named = history.named()
        self._expect(history.check(contents, ranges, log.log_start_offset), where)
        gone = [offset for offset in named if offset not in contents and offset >= log.log_start_offset]
        for offset in gone[:3]:
            self._expect_told(log, offset, where)
        fresh = {offset: named[offset] for offset in gone if offset not in self._gone_before}
        self._expect_bound(fresh, history, where)
        self._expect_order(contents, where)
        end_offset = log.log_end_offset
        # A writer continues at an offset that no record ever had.
        values = [b"after:%06d" % self.states, b"x" * 200]
        base_offset = log.append(values, ack="durable")
        history.acknowledged(base_offset, values, durable=True)
        after = dict(_records(log)) if thorough else contents | dict(_records(log, end_offset))
        self._expect(history.check(after, ranges, log.log_start_offset), where)
        if thorough:
            self._expect_no_damage(disk, where)
        return contents, end_offset

    def _expect_no_damage(self, disk: SimulatedDisk, where: str) -> None:
        """Check that a power cut leaves torn writes, and no corruption."""
        found = inspect_partition(disk.process(), FOLDER, "t", 0, self.config, Tally())
        self._expect([finding for finding in found.findings if finding.severity == "damage"], where)

    def _recover_again(
        self, disk: SimulatedDisk, events: list[Event], first: tuple[dict[int, bytes | None], int], where: str
    ) -> None:
        """Crash in the middle of the recovery, and check that its result is the same."""
        self.states += 1
        history = History()
        for event in events:
            event(history)
        self._expect_no_damage(disk, where + ", and again in its recovery, before it was opened")
        log = self._open(disk)
        contents, end_offset = self._verify(log, history, disk, where + ", and again in its recovery", thorough=False)
        if contents != first[0] or end_offset != first[1]:
            raise Broken(
                f"two recoveries differ: ends {first[1]} and {end_offset}, records {sorted(first[0])[-5:]} and "
                f"{sorted(contents)[-5:]}\n  {where}"
            )

    def _expect_all_there(self, log: Partition, history: History, where: str) -> None:
        """Check that the death of a process loses no record that any process got."""
        contents = dict(_records(log))
        gone = [
            offset
            for offset in history.named()
            if offset >= log.log_start_offset
            and offset not in contents
            and not history.was_withdrawn(offset)
            and offset not in self._gone_before
        ]
        if gone:
            raise Broken(f"offsets {gone[:5]} went with a process\n  {where}")

    def _expect_told(self, log: Partition, offset: int, where: str) -> None:
        """Check that a reader that had read a lost record gets an error when it continues."""
        try:
            log.read(offset + 1)
        except LogTruncated as told:
            if told.lost.base_offset <= offset < told.lost.end_offset:
                return
        raise Broken(f"a reader behind lost offset {offset} goes on unaware\n  {where}")

    def _expect_bound(self, gone: dict[int, bytes | None], history: History, where: str) -> None:
        """Check that the acknowledged records that were lost are no more than the policy allows: see
        docs/durability.md.
        """
        lost = [value for offset, value in gone.items() if history.was_acknowledged(offset)]
        if self.policy == "6records" and len(lost) >= 6:
            raise Broken(f"{len(lost)} acknowledged records are gone under {self.policy}\n  {where}")
        size_bytes = sum(len(value or b"") for value in lost)
        if self.policy == "900bytes" and self.config.compression_type == "none" and size_bytes >= 900:
            raise Broken(f"{size_bytes} bytes of acknowledged records are gone under {self.policy}\n  {where}")

    def _expect_order(self, contents: dict[int, bytes | None], where: str) -> None:
        """Check that each producer's records are in the order in which it sent them."""
        last: dict[bytes, bytes] = {}
        for offset in sorted(contents):
            who, number, *_ = (contents[offset] or b"").split(b":")
            if last.get(who, b"") >= number:
                raise Broken(f"offset {offset}: {number!r} of {who!r} stands behind {last[who]!r}\n  {where}")
            last[who] = number

    def _expect(self, conflicts: list[Any], where: str) -> None:
        if conflicts:
            raise Broken("\n  ".join(map(str, conflicts[:5])) + f"\n  {where}")


def _records(log: Partition, start: int | None = None, **options: Any) -> Iterator[tuple[int, bytes | None]]:
    for batch in log.read(log.log_start_offset if start is None else start, **options):
        yield from zip(batch.offsets.tolist(), batch.values, strict=True)


def run_trial(seed: int, policy: str, writers: int) -> int:
    """Run one trial and return the number of states that it checked. Raises `Broken`."""
    logging.disable(logging.WARNING)  # there are thousands of recoveries
    return Trial(seed, policy, writers).run(rounds=2, operations=25, variants=8)


def run_until(
    states_wanted: int, run: Callable[..., int], always: Sequence[tuple[Any, ...]], more: Iterator[tuple[Any, ...]]
) -> int:
    """Run trials on all processors until ``states_wanted`` crash states were checked; return the number. Raises
    `Broken`.

    The trials of ``always`` all run. If ``more`` ends, the number may be smaller.
    """
    states = 0
    left = list(reversed(always))
    failures: list[str] = []
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[int], tuple[Any, ...]] = {}
        while True:
            while len(running) < workers and not failures and (left or states < states_wanted):
                job = left.pop() if left else next(more, None)
                if job is None:
                    break
                running[pool.submit(run, *job)] = job
            if not running:
                break
            for one in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(one)
                if error := one.exception():
                    # A failure outside of the checks does not name its seed.
                    failures.append(f"{type(error).__name__}: {error}\n  {run.__name__}{job}")
                else:
                    states += one.result()
    if failures:
        raise Broken("\n".join(failures))
    return states
