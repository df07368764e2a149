"""The arithmetic of lost ranges: which offsets hold no record, and never will.

Those of a partition ascend. They may touch, but never overlap: of a new one only that is added which no other covers,
or it absorbs those that it covers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from segmentlog.records import LostRange

Ranges = Sequence[LostRange]


def overlapping(ranges: Ranges, base_offset: int, end_offset: int) -> LostRange | None:
    """The first that has an offset in common with ``[base_offset, end_offset)``."""
    for lost in ranges:
        if lost.base_offset < end_offset and base_offset < lost.end_offset:
            return lost
    return None


def containing(ranges: Ranges, offset: int) -> LostRange | None:
    """The one that an offset lies in."""
    return overlapping(ranges, offset, offset + 1)


def first_behind(ranges: Ranges, offset: int) -> int:
    """Where history goes on when there is no record from ``offset`` on: behind the ranges that begin or lie there."""
    for lost in ranges:
        if lost.base_offset <= offset < lost.end_offset:
            offset = lost.end_offset
    return offset


def is_lost(ranges: Ranges, base_offset: int, end_offset: int) -> bool:
    """Whether lost ranges, one or several that touch, are why ``[base_offset, end_offset)`` holds no record."""
    return first_behind(ranges, base_offset) >= end_offset


def count_offsets(ranges: Ranges, base_offset: int, end_offset: int) -> int:
    """Count the offsets in ``[base_offset, end_offset)`` that no lost range covers; 0 for an empty interval.

    Every count and every lag comes from here. It is an upper bound of the number of records: compaction, control
    batches and aborted transactions leave further offsets without a record.
    """
    lost = (min(one.end_offset, end_offset) - max(one.base_offset, base_offset) for one in ranges)
    return max(end_offset - base_offset, 0) - sum(count for count in lost if count > 0)


def advance(ranges: Ranges, offset: int, count: int) -> int:
    """Return the lowest end offset for which `count_offsets` from ``offset`` is ``count``, which is 1 or more."""
    for lost in ranges:
        if lost.end_offset > offset:
            before = max(lost.base_offset - offset, 0)
            if before >= count:
                break
            offset, count = lost.end_offset, count - before
    return offset + count


def with_lost_range(ranges: Ranges, lost: LostRange) -> tuple[LostRange, ...]:
    """The ranges with one more at their end, which takes in those that it covers."""
    apart = [known for known in ranges if known.base_offset < lost.base_offset or known.end_offset > lost.end_offset]
    return (*apart, lost)


def add_lost_ranges(known: Iterable[LostRange], new: Iterable[LostRange]) -> tuple[LostRange, ...]:
    """All ranges, ascending; of a new one only what no other covers."""
    ranges = sorted(known, key=_by_offset)
    for lost in sorted(new, key=_by_offset):
        base_offset = lost.base_offset
        for there in list(ranges):
            if base_offset < min(there.base_offset, lost.end_offset):
                end_offset = min(there.base_offset, lost.end_offset)
                ranges.append(msgspec.structs.replace(lost, base_offset=base_offset, end_offset=end_offset))
            base_offset = max(base_offset, there.end_offset)
        if base_offset < lost.end_offset:
            ranges.append(msgspec.structs.replace(lost, base_offset=base_offset))
        ranges.sort(key=_by_offset)
    return tuple(ranges)


def _by_offset(lost: LostRange) -> tuple[int, int]:
    return lost.base_offset, lost.end_offset
