"""Looking for records, forwards or backwards, as long as it may take; then it says how far it came, and can go on."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from segmentlog.consuming.record_filter import RecordFilter
from segmentlog.errors import CorruptBatch, LogTruncated, OffsetOutOfRange

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Isolation, Partition
    from segmentlog.records import Record

SECONDS: Final = 1.0
BYTES: Final = 128 << 20
_FIRST_WIDTH: Final = 64
_WIDTH_MAX: Final = 1 << 16
"""Offsets that a backward search reads at a time: few at first, for what is wanted is often near the end."""
_VALUES_MAX: Final = 32 << 20
"""Bytes of records that are found and held."""


class Damage(NamedTuple):
    """Offsets that were stepped over, and why."""

    partition: int
    base_offset: int
    end_offset: int
    why: str


class Found(msgspec.Struct):
    """What a search came to."""

    records: list[Record]
    cursors: dict[int, int]
    """For each partition where to go on: the next offset, or backwards the one behind the next."""
    is_complete: bool
    """Whether there is nothing more to find."""
    record_count: int
    """How many records were looked at."""
    size_bytes: int
    seconds: float
    limit: str
    """What ended it before the end: "records", "time", "bytes"; or nothing did."""
    damage: list[Damage]


class _Budget:
    """Time and bytes for all of a search, shared fairly by the partitions to come."""

    def __init__(self, seconds: float, size_bytes: int) -> None:
        self._began_s = time.monotonic()
        self._seconds, self._size_bytes = seconds, size_bytes
        self.taken_bytes = self.record_count = self.held_bytes = 0
        self.damage: list[Damage] = []
        self._until_s, self._until_bytes = 0.0, 0

    @property
    def taken_s(self) -> float:
        return time.monotonic() - self._began_s

    def share(self, among: int) -> None:
        """What is left, for the next of so many."""
        now_s = time.monotonic()
        self._until_s = now_s + max(self._began_s + self._seconds - now_s, 0.0) / among
        self._until_bytes = self.taken_bytes + max(self._size_bytes - self.taken_bytes, 0) // among

    def take(self, batch: RecordBatch) -> None:
        """A batch is looked at."""
        self.taken_bytes += batch.raw_size_bytes
        self.record_count += len(batch)

    @property
    def is_spent(self) -> bool:
        return bool(self.why)

    @property
    def why(self) -> str:
        if self.held_bytes > _VALUES_MAX:
            return "bytes"
        if time.monotonic() >= self._until_s:
            return "time"
        return "bytes" if self.taken_bytes >= self._until_bytes else ""


def search(
    logs: Sequence[Partition], begins: dict[int, int], wanted: RecordFilter, *, limit: int, backwards: bool = False,
    isolation: Isolation = "read_uncommitted", seconds: float = SECONDS, size_bytes: int = BYTES,
) -> Found:  # fmt: skip
    """Up to ``limit`` records that fit, by time: from ``begins`` on, or before it, backwards; by partition.

    Of each partition some batches are looked at, however little time there is, so that going on gets on.
    """
    budget = _Budget(seconds, size_bytes)
    walk = _walk_back if backwards else _walk_on
    cursors = dict(begins)
    found: list[list[Record]] = []
    done: set[int] = set()
    limited = ""
    for at, log in enumerate(logs):
        budget.share(len(logs) - at)
        records, cursors[log.number], is_done = walk(log, begins[log.number], wanted, limit, isolation, budget)
        found.append(records)
        if is_done:
            done.add(log.number)
        elif len(records) < limit:
            limited = limited or budget.why
    taken: list[Record] = []
    left: set[int] = set()
    for record in heapq.merge(*found, key=_by_time, reverse=backwards):
        if len(taken) < limit:
            taken.append(record)
        elif record.partition not in left:  # the first that had no place: it is the next one then
            left.add(record.partition)
            cursors[record.partition] = record.offset + backwards
    is_complete = len(done) == len(logs) and not left
    if not is_complete and not limited:
        limited = "records"
    return Found(taken, cursors, is_complete, budget.record_count, budget.taken_bytes, budget.taken_s,
                 "" if is_complete else limited, budget.damage)  # fmt: skip


def _by_time(record: Record) -> tuple[int, int, int]:
    return record.timestamp, record.partition, record.offset


def _walk_on(
    log: Partition, begin: int, wanted: RecordFilter, limit: int, isolation: Isolation, budget: _Budget
) -> tuple[list[Record], int, bool]:
    """(records, where to go on, whether the end was reached)."""
    records: list[Record] = []
    end = log.end_offset(isolation=isolation)
    at = begin
    for batch in _batches(log, begin, isolation, budget):
        budget.take(batch)
        for record in wanted.records(batch):
            records.append(record)
            budget.held_bytes += _size(record)
            if len(records) >= limit:
                break
        at = records[-1].offset + 1 if len(records) >= limit else batch.next_offset
        if len(records) >= limit or budget.is_spent:
            return records, at, at >= end
    return records, max(at, end), True


def _walk_back(
    log: Partition, begin: int, wanted: RecordFilter, limit: int, isolation: Isolation, budget: _Budget
) -> tuple[list[Record], int, bool]:
    """(records, newest first; where to go on; whether the log's start was reached)."""
    records: list[Record] = []
    high = min(begin, log.end_offset(isolation=isolation))
    width = max(limit, _FIRST_WIDTH)
    while high > log.log_start_offset and len(records) < limit:
        low = max(high - width, log.log_start_offset)
        kept: deque[Record] = deque(maxlen=limit - len(records))
        fitting_count = 0
        for batch in _batches(log, low, isolation, budget):
            if batch.base_offset >= high:
                break
            budget.take(batch)
            for record in wanted.records(batch):
                if record.offset < high:
                    kept.append(record)
                    fitting_count += 1
            if batch.next_offset >= high:
                break
        records.extend(reversed(kept))
        budget.held_bytes += sum(map(_size, kept))
        high = kept[0].offset if fitting_count > len(kept) else low  # what had no place is still to come
        if budget.is_spent:
            break
        width = min(2 * width, _WIDTH_MAX)
    return records, high, high <= log.log_start_offset


def _batches(log: Partition, begin: int, isolation: Isolation, budget: _Budget) -> Iterable[RecordBatch]:
    """From there on, or from where the log goes on behind what is gone. Damage is stepped over, and noted."""
    return log.read(readable_from(log, begin), isolation=isolation, on_skip=_noting(log, budget))


def _noting(log: Partition, budget: _Budget) -> Callable[[int, int, CorruptBatch], None]:
    def note(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        budget.damage.append(Damage(log.number, base_offset, end_offset, str(damage)))

    return note


def readable_from(log: Partition, offset: int) -> int:
    """The nearest offset at or after it that may be read from: not before the log's start, nor in a lost range."""
    for _ in range(10):  # the start may move meanwhile
        try:
            return log.check_position(min(max(offset, log.log_start_offset), log.log_end_offset))
        except LogTruncated as truncated:
            offset = truncated.lost.end_offset
        except OffsetOutOfRange:
            continue
    return log.log_end_offset


def _size(record: Record) -> int:
    return len(record.value or b"") + len(record.key or b"")


def find_record(log: Partition, offset: int) -> Record | None:
    """The record of that offset; None where there is none. Raises `CorruptBatch`."""
    if not log.log_start_offset <= offset < log.log_end_offset or readable_from(log, offset) != offset:
        return None
    for batch in log.read(offset, 1):
        for record in batch.slice(0, 1).records():
            return record if record.offset == offset else None
    return None
