"""Lost ranges: what they explain, and how a history of them grows without overlaps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.policy.lost_ranges import add_lost_ranges, first_behind, is_lost, with_lost_range
from segmentlog.records import LostRange


def lost(base_offset: int, end_offset: int, epoch: int = 1) -> LostRange:
    """A range of which only the offsets matter."""
    return LostRange(base_offset, end_offset, epoch, "for a test", 0)


_TOUCHING = (lost(10, 20), lost(20, 30), lost(40, 50))


@pytest.mark.parametrize(
    ("base_offset", "end_offset", "explained"),
    [
        (10, 20, True),
        (12, 18, True),
        (10, 30, True),  # by two that touch
        (10, 31, False),
        (9, 20, False),
        (25, 45, False),  # offsets in between are not lost
        (40, 50, True),
        (50, 51, False),
    ],
)
def test_a_gap_is_explained_by_ranges_that_cover_all_of_it(base_offset: int, end_offset: int, explained: bool) -> None:
    """One range or several that touch; a gap that is only partly lost is damage."""
    assert is_lost(_TOUCHING, base_offset, end_offset) == explained


@pytest.mark.parametrize(("offset", "behind"), [(9, 9), (10, 30), (19, 30), (20, 30), (30, 30), (45, 50), (50, 50)])
def test_what_lies_in_a_range_goes_on_behind_it_and_what_touches_it(offset: int, behind: int) -> None:
    """A truncation begins behind what is lost already, so that ranges never overlap."""
    assert first_behind(_TOUCHING, offset) == behind


def test_a_range_absorbs_those_that_it_covers() -> None:
    """A truncation before older ranges takes their offsets with it."""
    assert with_lost_range(_TOUCHING, lost(5, 35)) == (lost(40, 50), lost(5, 35))
    assert with_lost_range((), lost(5, 35)) == (lost(5, 35),)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=6))
def test_a_history_grows_without_overlaps(spans: list[tuple[int, int]]) -> None:
    """Whatever is added: every offset that was given up is in exactly one range, and they ascend."""
    ranges: tuple[LostRange, ...] = ()
    wanted: set[int] = set()
    for base_offset, count in spans:
        ranges = add_lost_ranges(ranges, [lost(base_offset, base_offset + count)])
        wanted |= set(range(base_offset, base_offset + count))
    covered = [offset for one in ranges for offset in range(one.base_offset, one.end_offset)]
    assert sorted(covered) == sorted(wanted)
    assert len(covered) == len(set(covered))
    assert all(before.end_offset <= after.base_offset for before, after in pairwise(ranges))
