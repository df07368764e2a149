"""Arithmetic of lost ranges: ranges of offsets that have no records and never will.

The ranges of a partition ascend. They may be adjacent, but never overlap: adding a range adds only its uncovered parts
(`add_lost_ranges`), or removes the ranges that it covers (`with_lost_range`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from segmentlog.records import LostRange

Ranges = Sequence[LostRange]


def find_overlapping(ranges: Ranges, base_offset: int, end_offset: int) -> LostRange | None:
    """Return the first range that overlaps ``[base_offset, end_offset)``, or None."""
    for lost in ranges:
        if lost.base_offset < end_offset and base_offset < lost.end_offset:
            return lost
    return None


def find_containing(ranges: Ranges, offset: int) -> LostRange | None:
    """Return the range that contains an offset, or None."""
    return find_overlapping(ranges, offset, offset + 1)


def skip_lost_ranges(ranges: Ranges, offset: int) -> int:
    """Return the first offset from ``offset`` on that is not in a lost range."""
    for lost in ranges:
        if lost.base_offset <= offset < lost.end_offset:
            offset = lost.end_offset
    return offset


def is_lost(ranges: Ranges, base_offset: int, end_offset: int) -> bool:
    """Return whether lost ranges cover all of ``[base_offset, end_offset)``."""
    return skip_lost_ranges(ranges, base_offset) >= end_offset


def count_offsets(ranges: Ranges, base_offset: int, end_offset: int) -> int:
    """Count the offsets in ``[base_offset, end_offset)`` that no lost range covers; 0 for an empty interval.

    All counts and lags use this function. The result is an upper bound of the number of records: compaction, control
    batches and aborted transactions leave further offsets without a record.
    """
    lost = (min(one.end_offset, end_offset) - max(one.base_offset, base_offset) for one in ranges)
    return max(end_offset - base_offset, 0) - sum(count for count in lost if count > 0)


def advance(ranges: Ranges, offset: int, count: int) -> int:
    """Count ``count`` (1 or more) offsets from ``offset`` on, skipping lost ranges.

    Return the offset after the last.
    """
    for lost in ranges:
        if lost.end_offset > offset:
            before = max(lost.base_offset - offset, 0)
            if before >= count:
                break
            offset, count = lost.end_offset, count - before
    return offset + count


def with_lost_range(ranges: Ranges, lost: LostRange) -> tuple[LostRange, ...]:
    """Return the ranges with ``lost`` appended, and without the ranges that ``lost`` covers."""
    apart = [known for known in ranges if known.base_offset < lost.base_offset or known.end_offset > lost.end_offset]
    return (*apart, lost)


def add_lost_ranges(known: Iterable[LostRange], new: Iterable[LostRange]) -> tuple[LostRange, ...]:
    """Return all ranges, ascending; of each new range only the parts that no other range covers."""
    ranges = sorted(known, key=_by_offset)
    for lost in sorted(new, key=_by_offset):
        base_offset = lost.base_offset
        for existing in list(ranges):
            if base_offset < min(existing.base_offset, lost.end_offset):
                end_offset = min(existing.base_offset, lost.end_offset)
                ranges.append(msgspec.structs.replace(lost, base_offset=base_offset, end_offset=end_offset))
            base_offset = max(base_offset, existing.end_offset)
        if base_offset < lost.end_offset:
            ranges.append(msgspec.structs.replace(lost, base_offset=base_offset))
        ranges.sort(key=_by_offset)
    return tuple(ranges)


def _by_offset(lost: LostRange) -> tuple[int, int]:
    return lost.base_offset, lost.end_offset
