"""Lost ranges against sets of offsets, which know no arithmetic."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from segmentlog.policy.lost_ranges import (
    add_lost_ranges,
    advance,
    count_offsets,
    find_containing,
    find_overlapping,
    is_lost,
    skip_lost_ranges,
    with_lost_range,
)
from segmentlog.records import LostRange

END = 24

offsets = st.integers(0, END)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    """Draw an interval that is not empty."""
    base = draw(st.integers(0, END - 1))
    return base, draw(st.integers(base + 1, END))


@st.composite
def histories(draw: st.DrawFn) -> tuple[LostRange, ...]:
    """Ranges as a checkpoint has them: ascending, touching at most."""
    cuts = sorted(draw(st.sets(offsets, max_size=10)))
    pairs = [pair for pair in pairwise(cuts) if draw(st.booleans())]
    return tuple(LostRange(base, end, epoch, "test") for epoch, (base, end) in enumerate(pairs))


def numbers(ranges: tuple[LostRange, ...]) -> set[int]:
    """Return the offsets that they hold."""
    return {offset for lost in ranges for offset in range(lost.base_offset, lost.end_offset)}


def is_history(ranges: tuple[LostRange, ...]) -> bool:
    """Return whether the ranges ascend, are not empty, and do not overlap."""
    return all(lost.base_offset < lost.end_offset for lost in ranges) and all(
        before.end_offset <= after.base_offset for before, after in pairwise(ranges)
    )


@given(histories(), spans())
def test_what_overlaps_is_the_first_with_an_offset_in_common(ranges: tuple[LostRange, ...], span: tuple[int, int]):
    """The result is None exactly if the range and the history have no offset in common."""
    common = numbers(ranges) & set(range(*span))
    found = find_overlapping(ranges, *span)
    assert (found is None) == (not common)
    if found is not None:
        assert found.base_offset <= min(common) < found.end_offset


@given(histories(), offsets)
def test_where_history_goes_on(ranges: tuple[LostRange, ...], offset: int):
    """History resumes at the first offset that is not lost; such an offset stays unchanged."""
    lost = numbers(ranges)
    wanted = offset
    while wanted in lost:
        wanted += 1
    assert skip_lost_ranges(ranges, offset) == wanted
    assert (find_containing(ranges, offset) is not None) == (offset in lost)


@given(histories(), spans())
def test_a_gap_is_explained_when_every_offset_of_it_is_lost(ranges: tuple[LostRange, ...], span: tuple[int, int]):
    """One range or several adjacent ones may explain it."""
    assert is_lost(ranges, *span) == (set(range(*span)) <= numbers(ranges))


@given(histories(), st.lists(spans(), max_size=4))
def test_new_ranges_take_what_no_other_covers(known: tuple[LostRange, ...], new: list[tuple[int, int]]):
    """Known ones stay as they are, nothing overlaps, and together they hold what any of them held."""
    fresh = tuple(LostRange(base, end, 99, "new") for base, end in new)
    both = add_lost_ranges(known, fresh)
    assert is_history(both)
    assert set(known) <= set(both)
    assert numbers(both) == numbers(known) | numbers(fresh)


@given(histories(), st.integers(0, END))
def test_a_truncation_absorbs_what_it_covers(known: tuple[LostRange, ...], base: int):
    """A range from an offset that is not lost to beyond the end."""
    lost = LostRange(skip_lost_ranges(known, base), END + 10, 99, "truncated")
    both = with_lost_range(known, lost)
    assert is_history(both)
    assert both[-1] == lost
    assert numbers(both) == numbers(known) | numbers((lost,))


@given(histories(), offsets, offsets)
def test_a_count_leaves_lost_ranges_out(ranges: tuple[LostRange, ...], base: int, end: int) -> None:
    """`count_offsets` is the size of the interval without the offsets of the ranges; 0 for an empty one."""
    assert count_offsets(ranges, base, end) == len(set(range(base, end)) - numbers(ranges))


@given(histories(), offsets, st.integers(1, END))
def test_an_advance_is_the_inverse_of_a_count(ranges: tuple[LostRange, ...], base: int, count: int) -> None:
    """`advance` returns the first end with ``count`` offsets outside lost ranges between ``base`` and it."""
    end = advance(ranges, base, count)
    assert count_offsets(ranges, base, end) == count
    assert count_offsets(ranges, base, end - 1) == count - 1
