"""Ranges of offsets that were given up: a history, ascending, whose ranges may touch but never overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from segmentlog.records import LostRange


def is_lost(ranges: Iterable[LostRange], base_offset: int, end_offset: int) -> bool:
    """Whether lost ranges, one or several that touch, explain that ``[base_offset, end_offset)`` holds no record.

    Not empty: ``base_offset`` lies below ``end_offset``.
    """
    for lost in ranges:
        if lost.base_offset <= base_offset < lost.end_offset:
            base_offset = lost.end_offset
    return base_offset >= end_offset


def first_behind(ranges: Iterable[LostRange], offset: int) -> int:
    """The first offset from ``offset`` on that lies in none of them."""
    for lost in ranges:
        if lost.base_offset <= offset < lost.end_offset:
            offset = lost.end_offset
    return offset


def with_lost_range(ranges: Sequence[LostRange], lost: LostRange) -> tuple[LostRange, ...]:
    """The ranges with one more; those that it covers are absorbed, so that ranges never overlap."""
    apart = [one for one in ranges if one.base_offset < lost.base_offset or one.end_offset > lost.end_offset]
    return (*apart, lost)


def add_lost_ranges(known: Iterable[LostRange], new: Iterable[LostRange]) -> tuple[LostRange, ...]:
    """All ranges, ascending; of a new one only what no other covers, so that ranges touch but never overlap."""
    ranges = sorted(known, key=_by_offset)
    for lost in sorted(new, key=_by_offset):
        base_offset = lost.base_offset
        for other in sorted(ranges, key=_by_offset):
            if base_offset < min(other.base_offset, lost.end_offset):
                end_offset = min(other.base_offset, lost.end_offset)
                ranges.append(msgspec.structs.replace(lost, base_offset=base_offset, end_offset=end_offset))
            base_offset = max(base_offset, other.end_offset)
        if base_offset < lost.end_offset:
            ranges.append(msgspec.structs.replace(lost, base_offset=base_offset))
    return tuple(sorted(ranges, key=_by_offset))


def _by_offset(lost: LostRange) -> tuple[int, int]:
    return lost.base_offset, lost.end_offset
