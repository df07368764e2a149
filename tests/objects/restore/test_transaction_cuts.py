"""Which partitions are cut so that no transaction is torn: as the decisions say, else as the time does."""

from __future__ import annotations

import pytest

from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.restore.transaction_cuts import CommitDecision, TransactionEnd, extend_cuts

A, B, C, POSITIONS = (("id", number) for number in range(4))


def ends(*markers: tuple[int, int], producer_id: int = 7, committed: bool = True) -> list[TransactionEnd]:
    """Markers at these offsets and times, each of a transaction of the record before it."""
    return [
        TransactionEnd(producer_id, offset - 1, offset, timestamp_ms, committed) for offset, timestamp_ms in markers
    ]


def commit(**of: int) -> CommitDecision:
    """Return a decision: the ends of its data, by partition."""
    return CommitDecision(7, {{"a": A, "b": B, "c": C, "p": POSITIONS}[name]: end for name, end in of.items()})


@pytest.mark.parametrize(
    ("cuts", "commits", "expected"),
    [
        ({A: 4}, [commit(a=1, b=1), commit(a=3, b=3)], {A: 4}),
        ({A: 3}, [commit(a=1, b=1), commit(a=3, b=3)], {A: 3, B: 3}),
        ({A: 2}, [commit(a=1, b=1), commit(a=3, b=3)], {A: 2, B: 3}),
        ({A: 1}, [commit(a=1, b=1), commit(a=3, b=3)], {A: 1, B: 1}),
        ({A: 3}, [commit(a=1, b=3), commit(a=3, b=1)], {A: 1, B: 1}),  # each tears the other one
        ({A: 3}, [commit(a=1), commit(a=3), commit(b=1), commit(b=3)], {A: 3}),
        ({A: 3, B: 0}, [commit(a=1, c=1), commit(a=3, c=3)], {A: 3, B: 0, C: 3}),
        ({}, [commit(a=1, b=1)], {}),
    ],
)
def test_as_the_decisions_say(
    cuts: dict[PartitionKey, int], commits: list[CommitDecision], expected: dict[PartitionKey, int]
) -> None:
    """The times do not matter; markers of one transaction have different offsets in each partition."""
    markers = {where: ends((1, 50), (3, 50)) for where in (A, B, C)}
    assert extend_cuts(cuts, markers, commits, set()).cuts == expected


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ([(1, 10), (3, 20), (5, 30)], 3),
        ([(1, 11), (3, 21), (5, 31)], 3),  # the second partition gets its marker a moment later
        ([(1, 9), (3, 19), (5, 29)], 3),
        ([(1, 10), (5, 30)], 5),  # the one that is cut is not there
        ([(1, 10)], None),
        ([(1, 500)], 1),  # far away, but the nearest: a better choice is unknown
        ([], None),
    ],
)
def test_as_the_time_says(there: list[tuple[int, int]], expected: int | None) -> None:
    """If no decision remains, the markers with the nearest times belong together."""
    markers = {A: ends((1, 10), (3, 20), (5, 30)), B: ends(*there)}
    assert extend_cuts({A: 3}, markers, [], set()).cuts.get(B) == expected


def test_in_one_millisecond_their_order_counts() -> None:
    """The first belongs to the first."""
    markers = {A: ends((1, 10), (3, 10), (5, 10)), B: ends((1, 10), (3, 10), (5, 10))}
    assert extend_cuts({A: 3}, markers, [], set()).cuts == {A: 3, B: 3}


def test_others_are_let_alone() -> None:
    """Transactions of other producers, and aborted ones, need no decision."""
    markers = {A: ends((1, 10)), B: ends((1, 10), producer_id=8), C: ends((1, 10), committed=False)}
    assert extend_cuts({A: 0}, markers, [], set()).cuts == {A: 0}


def test_what_is_never_cut_is_told() -> None:
    """Its markers do not count any more."""
    markers = {A: ends((1, 10)), POSITIONS: ends((5, 10))}
    kept = extend_cuts({A: 0}, markers, [commit(a=1, p=5)], {POSITIONS})
    assert (kept.cuts, kept.undone, kept.producers) == ({A: 0}, {POSITIONS: {5}}, {7})


def test_where_a_marker_is_not_there_yet() -> None:
    """It is aborted there if the transaction is taken back elsewhere; otherwise it needs nothing."""
    markers = {A: ends((1, 10)), B: []}
    taken_back = extend_cuts({A: 1}, markers, [commit(a=1, b=4)], set())
    assert (taken_back.undecided, taken_back.committed) == ({(B, 7)}, set())
    left_alone = extend_cuts({A: 2}, markers, [commit(a=1, b=4)], set())
    assert (left_alone.undecided, left_alone.committed) == (set(), {(B, 7)})
    cut = extend_cuts({B: 3}, markers, [commit(a=1, b=4)], set())
    assert (cut.cuts, cut.undecided) == ({A: 1, B: 3}, {(B, 7)})


def test_what_was_decided_later_is_taken_back() -> None:
    """Its missing markers cannot show that."""
    late = CommitDecision(7, {A: 1, B: 4}, decided_ms=50)
    kept = extend_cuts({}, {A: ends((1, 50)), B: []}, [late], set(), 49)
    assert (kept.cuts, kept.undecided) == ({A: 1}, {(B, 7)})
    assert extend_cuts({}, {A: ends((1, 50)), B: []}, [late], set(), 50).cuts == {}


def test_a_commit_of_which_nothing_is_left_but_a_reminder() -> None:
    """The marker that is missing is to be made up for, unless its data is cut; one that is there needs none."""
    rest = CommitDecision(7, {B: 4}, is_rest=True)
    assert extend_cuts({A: 1}, {A: [], B: []}, [rest], set()).committed == {(B, 7)}
    assert extend_cuts({B: 3}, {A: [], B: []}, [rest], set()).undecided == {(B, 7)}
    markers = {A: ends((1, 10)), B: ends((4, 10))}
    assert extend_cuts({A: 1}, markers, [rest], set()).cuts == {A: 1, B: 4}, "it is matched by its time"
