"""Seeded lives of a compacted topic on a simulated machine, with a power cut at every call.

`trial` does the same for appends. This trial also runs the cleaner, retention, trims and truncations. During a pass of
the cleaner, other processes append, roll, trim and read, at moments that the seed chooses.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from keyed import KeyedHistory, Said, compacted
from logs import FakeClock, Kept
from trial import FOLDER, Broken, Moment
from wire import append_either

from segmentlog.config import TopicConfig
from segmentlog.format.file_names import SWAP_SUFFIX, parse_copy_name
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.store_inspection import Tally
from segmentlog.log.partition import Partition
from segmentlog.testing.fault_injection import Died
from segmentlog.testing.simulated_disk import SimulatedDisk

Event = Callable[[KeyedHistory], None]

LATER_MS = 100_000
"""Longer than every delete horizon."""


class CompactionTrial:
    """A workload, and checks of the states after crashes at each of its calls. ``states`` counts the checked states."""

    def __init__(self, seed: int, writers: int, *, truncates: bool = True) -> None:
        self.seed, self.writer_count, self._truncates = seed, writers, truncates
        self.rng = random.Random(f"compaction/{seed}/{writers}")
        rng = self.rng
        self.keep_last = rng.choice((1, 1, 2, 3))
        self.config = TopicConfig.from_mapping(
            {
                "fsync": rng.choice(("always", "never", "6records")),
                "cleanup_policy": rng.choice(("compact", "compact", "delete,compact")),
                "retention_segments": 4,
                "segment_records": rng.choice((3, 8, 15)),
                "segment_bytes": rng.choice((600, 16 << 10)),
                "index_interval_bytes": rng.choice((60, 500)),
                "compression_type": rng.choice(("none", "lz4")),
                "compaction_keep_last": self.keep_last,
                "delete_retention_ms": rng.choice((0, 30)),
                "file_delete_delay_ms": rng.choice((0, 20)),
            }
        )
        self.keys = [b"%d" % number for number in range(rng.choice((2, 4)))] + [b"a key of more than 16 bytes"]
        self.clock = FakeClock()
        self.disk = SimulatedDisk()
        self.disk.make_folders(FOLDER)
        self.disk.find(FOLDER).sync()
        self.events: list[Event] = []
        self.states = 0
        self.passes = 0
        self._number = self._variants = 0
        self._busy = False
        self._writers: list[Partition] = []
        self._moments: list[Moment] = []

    def run(self, rounds: int, operations: int, variants: int) -> int:
        """Run ``rounds`` times: operations, then a crash at each of their calls; continue from one of the crashes."""
        with (
            mock.patch("segmentlog.log.append.appender.OFFSET_CEILING_STEP", 24),
            mock.patch("segmentlog.log.append.syncer.CHECKPOINT_BYTES", 1500),
        ):
            for number in range(rounds):
                self._variants = variants
                self._live(operations)
                for moment in self._moments:
                    events = self.events[: moment.event_count]
                    if self.rng.random() < 0.1:
                        self._check(moment.point.process_death(), events, f"round {number}, a process's death", moment)
                    for disk in moment.point.crashes(self.rng, variants):
                        self._check(disk, events, f"round {number}, a power cut", moment)
                moment = self.rng.choice(self._moments)
                self.events = self.events[: moment.event_count]
                self.disk = self.rng.choice(list(moment.point.crashes(self.rng, 8)))
                self._moments = []
        return self.states

    # ------------------------------------------------------------ living

    def _open(self, disk: SimulatedDisk, clock: FakeClock | None = None) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: self.config, fs=disk.process(), clock=clock or self.clock)

    def _live(self, operations: int) -> None:
        disk, rng = self.disk, self.rng
        disk.on_effect = lambda: self._happened(disk)
        self._writers = [self._open(disk) for _ in range(self.writer_count)]
        # Once a process has opened the log, records that a power cut took must not come back.
        self._note_shown(self._writers[0], lambda history, shown: history.settled(shown))
        for _ in range(operations):
            at = rng.randrange(self.writer_count)
            process: Any = self._writers[at].handle.fs
            process.fail_at = (process.calls + rng.randrange(1, 90), "die") if rng.random() < 0.06 else None
            try:
                self._operate(at)
            except Died:
                self._writers[at] = self._open(disk)
        disk.on_effect = None

    def _happened(self, disk: SimulatedDisk) -> None:
        self._moments.append(Moment(disk.point(), len(self.events)))
        if not self._busy or self.rng.random() > 0.15:
            return
        if any(name in disk.find(FOLDER).names and disk.find(f"{FOLDER}/{name}").locks for name in ("lock", "state")):
            return  # the other process would wait for the lock
        self._busy = False
        at = self.rng.randrange(len(self._writers))
        process: Any = self._writers[at].handle.fs
        if at != self._compactor and not process._dead:
            process.fail_at = None
            self._disturb(at)
        self._busy = True

    def _disturb(self, at: int) -> None:
        """Act as another process during a compaction."""
        what = self.rng.random()
        if what < 0.6:
            self._append(at)
        elif what < 0.8:
            self._writers[at].roll()
        elif what < 0.9:
            self._read(at)
        elif what < 0.95:
            self._trim(at)
        elif self._truncates:
            self._truncate(at)

    def _operate(self, at: int) -> None:
        log, rng = self._writers[at], self.rng
        what = rng.random()
        if what < 0.50:
            self._append(at)
        elif what < 0.55:
            log.flush()
        elif what < 0.63:
            self._read(at)
        elif what < 0.69:
            log.roll()
        elif what < 0.75:
            self.clock.advance(rng.choice((1, 25, 40)))
        elif what < 0.90:
            self._compact(at)
        elif what < 0.93:
            log.close()
            self._writers[at] = self._open(self.disk)
        elif what < 0.96:
            log.apply_retention()
            self._note_start(log)
        elif what < 0.98:
            self._trim(at)
        elif self._truncates:
            self._truncate(at)

    def _append(self, at: int) -> None:
        rng = self.rng
        records = []
        for _ in range(rng.choice((1, 1, 2, 5))):
            self._number += 1
            padding = b"." * rng.choice((0, 0, 30, 600))
            value = None if rng.random() < 0.2 else b"%06d:%s" % (self._number, padding)
            records.append(Said(rng.choice(self.keys), value))
        durable = rng.random() < 0.2
        columns = [one.value for one in records], [one.key for one in records]
        base_offset = append_either(self._writers[at], *columns, ack="durable" if durable else None)
        durable |= self.config.fsync.kind == "always"
        self.events.append(lambda history: history.told(base_offset, records, durable=durable))

    def _note_shown(self, log: Partition, note: Callable[[KeyedHistory, dict[int, Said]], None]) -> None:
        shown = records_of(log)
        self.events.append(lambda history: note(history, shown))

    def _note_start(self, log: Partition) -> None:
        start = log.log_start_offset
        self.events.append(lambda history: history.trimmed(start))

    def _read(self, at: int) -> None:
        log = self._writers[at]
        durable_offset = log.durable_offset
        shown = records_of(log)

        def event(history: KeyedHistory) -> None:
            for offset, record in shown.items():
                history.named(offset, record, durable=offset < durable_offset)

        self.events.append(event)

    def _trim(self, at: int) -> None:
        log = self._writers[at]
        end = log.log_start_offset + 1 + (log.log_end_offset - log.log_start_offset) // 3
        log.trim(self.rng.randint(log.log_start_offset, min(end, log.log_end_offset)))
        self._note_start(log)

    def _truncate(self, at: int) -> None:
        log = self._writers[at]
        offset = self.rng.randint(log.log_start_offset, log.log_end_offset)
        names = [parse_copy_name(name) for name in self.disk.find(FOLDER).names if name.endswith(SWAP_SUFFIX)]
        replaced = [range(*offsets) for offsets in names if offsets is not None]
        self._note_shown(log, lambda history, shown: history.withdrawn(offset, shown, replaced))
        log.truncate(offset)

    def _compact(self, at: int) -> None:
        log = self._writers[at]
        self._read(at)
        self._compactor, self._busy = at, self.writer_count > 1 and self.rng.random() < 0.6
        try:
            report = log.compact(buffer_bytes=self.rng.choice((34, 130, 10_000)))
        finally:
            self._busy = False
        if not report.busy:
            self.passes += 1
            end = report.cleaned_offset
            self._note_shown(log, lambda history, shown: history.settled(shown, end))

    # ------------------------------------------------------------ checking

    def _check(self, disk: SimulatedDisk, events: list[Event], what: str, moment: Moment) -> None:
        self.states += 1
        where = (
            f"{what} after call {moment.point.effects}, state {self.states}; again with "
            f"SEGMENTLOG_SEED={self.seed} SEGMENTLOG_COMPACTION_VARIANTS={self._variants}, "
            f"{self.writer_count} writers, keep_last {self.keep_last}"
        )
        history = KeyedHistory(self.keep_last)
        for event in events:
            event(history)
        try:
            log = self._open(disk)
            ranges = [(lost.base_offset, lost.end_offset) for lost in log.lost_ranges()]
            shown = records_of(log)
            self._expect(history.check(shown, ranges, log.log_start_offset), where)
            clean = log.handle.ledger.last_checkpoint().compacted.cleaned_offset
            counts = Counter(record.key for offset, record in shown.items() if offset < clean)
            self._expect([f"{key} twice below {clean}" for key in counts if counts[key] > self.keep_last], where)
            if self.states % 10 == 0:
                self._go_on(log, history, disk, ranges, where)
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\n  {where}") from error

    def _go_on(
        self, log: Partition, history: KeyedHistory, disk: SimulatedDisk, ranges: list[tuple[int, int]], where: str
    ) -> None:
        """Append after a recovery and run passes that drop every tombstone; no older record of a key may reappear."""
        base_offset = log.append([b"after"], [b"after"], ack="durable")
        self._expect([f"offset {base_offset} twice"] if history.is_known(base_offset) else [], where)
        history.told(base_offset, [Said(b"after", b"after")], durable=True)
        log.roll()
        before = [Kept(offset, *record, 0) for offset, record in records_of(log).items()]
        clock = FakeClock()
        clock.advance(LATER_MS)
        second = self._open(disk, clock)
        for buffer_bytes in (34 * (self.states % 3 + 1), 10_000):
            second.compact(buffer_bytes=buffer_bytes, wait_s=0)
            clock.advance(LATER_MS)
        wanted = {one.offset for one in compacted(before, log.log_end_offset, self.keep_last) if one.value is not None}
        self._expect([f"wanted {wanted}, found {found}"] if wanted != (found := set(records_of(log))) else [], where)
        second.close()
        last = self._open(disk.point().process_death())
        shown = records_of(last)
        self._expect(history.check(shown, ranges, last.log_start_offset), where + ", after two passes")
        self._expect([f"wanted {wanted}, reopened {set(shown)}"] if wanted != set(shown) else [], where)
        process = disk.process()
        left = [name for name in process.listdir(FOLDER) if name.endswith((".cleaned", ".swap"))]
        self._expect(left, where)
        findings = inspect_partition(process, FOLDER, "t", 0, self.config, Tally()).findings
        self._expect([finding for finding in findings if finding.severity == "damage"], where)

    def _expect(self, conflicts: list[Any], where: str) -> None:
        if conflicts:
            raise Broken("\n  ".join(map(str, conflicts[:5])) + f"\n  {where}")


def records_of(log: Partition) -> dict[int, Said]:
    """Return offset -> record of all records that a reader gets."""
    return {
        offset: Said(key, value)
        for batch in log.read(log.log_start_offset)
        for offset, key, value in zip(batch.offsets.tolist(), batch.keys, batch.values, strict=True)
    }


def run_compaction_trial(seed: int, writers: int, variants: int) -> int:
    """Run one trial and return the number of states that it checked. Raises `Broken`."""
    logging.disable(logging.WARNING)
    return CompactionTrial(seed, writers).run(rounds=2, operations=30, variants=variants)
