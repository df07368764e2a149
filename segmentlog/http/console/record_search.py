"""Searches records forward or backward within a budget of time and bytes; a later search can continue."""

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
"""Offsets that a backward search reads at a time, at first and at most. Matches are often near the end."""
_VALUES_MAX: Final = 32 << 20
"""Maximum bytes of matching records held in memory."""


class SkippedRange(NamedTuple):
    """Offsets that a search skipped because of damage."""

    partition: int
    base_offset: int
    end_offset: int
    why: str


class SearchResult(msgspec.Struct):
    """Records found, and where to continue."""

    records: list[Record]
    cursors: dict[int, int]
    """By partition: the offset to continue at. A backward search continues with the record before that offset."""
    is_complete: bool
    """Whether all matches were found."""
    record_count: int
    """Number of records examined."""
    size_bytes: int
    seconds: float
    limit: str
    """The limit that ended the search early: "records", "time" or "bytes"; else ""."""
    damage: list[SkippedRange]


class _Budget:
    """Time and bytes for one search, shared evenly among the remaining partitions."""

    def __init__(self, seconds: float, size_bytes: int) -> None:
        self._began_s = time.monotonic()
        self._seconds, self._size_bytes = seconds, size_bytes
        self.read_bytes = self.record_count = self.held_bytes = 0
        self.damage: list[SkippedRange] = []
        self._deadline_s, self._limit_bytes = 0.0, 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def share(self, among: int) -> None:
        """Set the limits for the next partition to its share of what is left of the budget.

        ``among`` is the number of partitions left to search.
        """
        now_s = time.monotonic()
        self._deadline_s = now_s + max(self._began_s + self._seconds - now_s, 0.0) / among
        self._limit_bytes = self.read_bytes + max(self._size_bytes - self.read_bytes, 0) // among

    def count_batch(self, batch: RecordBatch) -> None:
        """Count a batch as examined."""
        self.read_bytes += batch.raw_size_bytes
        self.record_count += len(batch)

    @property
    def is_spent(self) -> bool:
        return bool(self.exhausted_reason)

    @property
    def exhausted_reason(self) -> str:
        if self.held_bytes > _VALUES_MAX:
            return "bytes"
        if time.monotonic() >= self._deadline_s:
            return "time"
        return "bytes" if self.read_bytes >= self._limit_bytes else ""


def search(
    logs: Sequence[Partition], begins: dict[int, int], record_filter: RecordFilter, *, limit: int, backwards: bool =
    False, isolation: Isolation = "read_uncommitted", seconds: float = SECONDS, size_bytes: int = BYTES,
) -> SearchResult:  # fmt: skip
    """Search each partition from its offset in ``begins``, forward or backward, for up to ``limit`` matching records.

    The records are ordered by time. Each search examines some batches of each partition even if the budget is small, so
    that repeated searches always advance.
    """
    budget = _Budget(seconds, size_bytes)
    walk = _search_backward if backwards else _search_forward
    cursors = dict(begins)
    found: list[list[Record]] = []
    done: set[int] = set()
    limited = ""
    for at, log in enumerate(logs):
        budget.share(len(logs) - at)
        records, cursors[log.number], is_done = walk(log, begins[log.number], record_filter, limit, isolation, budget)
        found.append(records)
        if is_done:
            done.add(log.number)
        elif len(records) < limit:
            limited = limited or budget.exhausted_reason
    selected: list[Record] = []
    overflowed: set[int] = set()
    for record in heapq.merge(*found, key=_by_time, reverse=backwards):
        if len(selected) < limit:
            selected.append(record)
        elif record.partition not in overflowed:  # the first record beyond the limit: continue with it
            overflowed.add(record.partition)
            cursors[record.partition] = record.offset + backwards
    is_complete = len(done) == len(logs) and not overflowed
    if not is_complete and not limited:
        limited = "records"
    return SearchResult(selected, cursors, is_complete, budget.record_count, budget.read_bytes, budget.elapsed_s,
                 "" if is_complete else limited, budget.damage)  # fmt: skip


def _by_time(record: Record) -> tuple[int, int, int]:
    return record.timestamp, record.partition, record.offset


def _search_forward(
    log: Partition, start_offset: int, record_filter: RecordFilter, limit: int, isolation: Isolation, budget: _Budget
) -> tuple[list[Record], int, bool]:
    """Return (records, offset to continue at, whether the end was reached)."""
    records: list[Record] = []
    end = log.end_offset(isolation=isolation)
    at = start_offset
    for batch in _batches(log, start_offset, isolation, budget):
        budget.count_batch(batch)
        for record in record_filter.records(batch):
            records.append(record)
            budget.held_bytes += _size(record)
            if len(records) >= limit:
                break
        at = records[-1].offset + 1 if len(records) >= limit else batch.next_offset
        if len(records) >= limit or budget.is_spent:
            return records, at, at >= end
    return records, max(at, end), True


def _search_backward(
    log: Partition, start_offset: int, record_filter: RecordFilter, limit: int, isolation: Isolation, budget: _Budget
) -> tuple[list[Record], int, bool]:
    """Return (records, newest first; offset to continue at; whether the log's start was reached)."""
    records: list[Record] = []
    high = min(start_offset, log.end_offset(isolation=isolation))
    width = max(limit, _FIRST_WIDTH)
    while high > log.log_start_offset and len(records) < limit:
        low = max(high - width, log.log_start_offset)
        newest: deque[Record] = deque(maxlen=limit - len(records))
        fitting_count = 0
        for batch in _batches(log, low, isolation, budget):
            if batch.base_offset >= high:
                break
            budget.count_batch(batch)
            for record in record_filter.records(batch):
                if record.offset < high:
                    newest.append(record)
                    fitting_count += 1
            if batch.next_offset >= high:
                break
        records.extend(reversed(newest))
        budget.held_bytes += sum(map(_size, newest))
        high = newest[0].offset if fitting_count > len(newest) else low  # continue with the records that did not fit
        if budget.is_spent:
            break
        width = min(2 * width, _WIDTH_MAX)
    return records, high, high <= log.log_start_offset


def _batches(log: Partition, start_offset: int, isolation: Isolation, budget: _Budget) -> Iterable[RecordBatch]:
    """Yield batches from an offset, or from the next readable one. Damaged batches are recorded and skipped."""
    return log.read(readable_from(log, start_offset), isolation=isolation, on_skip=_damage_recorder(log, budget))


def _damage_recorder(log: Partition, budget: _Budget) -> Callable[[int, int, CorruptBatch], None]:
    def record_damage(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        budget.damage.append(SkippedRange(log.number, base_offset, end_offset, str(damage)))

    return record_damage


def readable_from(log: Partition, offset: int) -> int:
    """Return the first readable offset at or after ``offset``: after the log start and outside lost ranges."""
    for _ in range(10):  # retention may move the start meanwhile
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
    """Return the record at an offset; None if there is none. Raises `CorruptBatch`."""
    if not log.log_start_offset <= offset < log.log_end_offset or readable_from(log, offset) != offset:
        return None
    for batch in log.read(offset, 1):
        for record in batch.slice(0, 1).records():
            return record if record.offset == offset else None
    return None
