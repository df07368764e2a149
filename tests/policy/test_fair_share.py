"""A limit that is shared among partitions starves none of them, whatever their backlogs are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.policy.fair_share import Turns, split_by_backlog

_LARGE = 2**62


@pytest.mark.parametrize(
    ("backlogs", "limit", "shares"),
    [
        ({}, 5, {}),
        ({"a": 0}, 5, {}),
        ({"a": 3, "b": 2}, 5, {"a": 3, "b": 2}),
        ({"a": 3, "b": 0}, 100, {"a": 3}),
        ({"a": 30, "b": 10}, 8, {"a": 6, "b": 2}),
        ({"a": 6000, "b": 3, "c": 3, "d": 3}, 200, {"a": 199, "b": 1, "c": 1, "d": 1}),  # Spark's rounding up
        ({"a": 10, "b": 10}, 1, {"a": 1, "b": 1}),
        # Shares are rounded down, and the rest is given out too.
        ({"a": 5, "b": 5, "c": 5}, 8, {"a": 3, "b": 3, "c": 2}),
        ({"a": _LARGE, "b": 1}, 2**53 + 1, {"a": 2**53, "b": 1}),  # whole numbers, not floats
    ],
)
def test_shares(backlogs: dict[str, int], limit: int, shares: dict[str, int]) -> None:
    """Each partition gets its part of the limit, rounded down, but at least 1 offset."""
    assert split_by_backlog(backlogs, limit) == shares


backlogs_of_partitions = st.dictionaries(st.integers(0, 20), st.integers(0, 10**9) | st.integers(0, 50), max_size=15)


@given(backlogs_of_partitions, st.integers(1, 10**6))
def test_every_backlog_advances(backlogs: dict[int, int], limit: int) -> None:
    """Each partition with a backlog gets 1 or more, none more than it has, and the sum stays within the limit."""
    shares = split_by_backlog(backlogs, limit)
    waiting = {key: backlog for key, backlog in backlogs.items() if backlog}
    total = sum(waiting.values())
    assert shares.keys() == waiting.keys()
    assert all(1 <= shares[key] <= waiting[key] for key in waiting)
    rounded_up = sum(backlog * limit < total for backlog in waiting.values())
    assert sum(shares.values()) <= limit + max(rounded_up - 1, 0)
    assert sum(shares.values()) >= min(limit, total)
    # Proportional: no partition is more than one offset from its part.
    if total > limit:
        assert all(abs(shares[key] * total - waiting[key] * limit) <= total for key in waiting)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(1, 20), st.integers(0, 50))
def test_a_backlog_ends_while_another_grows(backlogs: list[int], limit: int, growth: int) -> None:
    """A partition is done after at most as many cycles as it has offsets, while another one grows forever."""
    left = dict(enumerate(backlogs))
    left[-1] = 10_000
    for _ in range(max(backlogs)):
        left[-1] += growth
        for key, share in split_by_backlog(left, limit).items():
            left[key] -= share
    assert not any(left[number] for number in range(len(backlogs)))


@given(st.integers(1, 12), st.data())
def test_turns_reach_everybody(count: int, data: st.DataObject) -> None:
    """With room for one key a cycle, each of n keys that always wait is served once in any n cycles."""
    turns: Turns[int] = Turns()
    served: list[int] = []
    for _ in range(3 * count):
        order = turns.order(data.draw(st.permutations(range(count))))
        assert sorted(order) == list(range(count))
        served.append(order[0])
        turns.record_served(order[0])
    for begin in range(2 * count):
        assert set(served[begin : begin + count]) == set(range(count))


def test_keys_come_and_go() -> None:
    """A key that is new, or returns, waits from then on: those that come and go never overtake one that waits."""
    turns: Turns[str] = Turns()
    assert turns.order("abc") == ["a", "b", "c"]
    turns.record_served("a")
    assert turns.order("abc") == ["b", "c", "a"]
    turns.record_served("b")
    assert turns.order("xabc") == ["c", "a", "x", "b"]
    turns.record_served("c")
    assert turns.order("xbc") == ["x", "b", "c"]
    assert turns.order("axbc") == ["x", "b", "a", "c"]


@given(st.integers(2, 8), st.data())
def test_nobody_is_overtaken_twice(count: int, data: st.DataObject) -> None:
    """While a key waits, each other key is served before it at most once, whichever keys come and go."""
    turns: Turns[int] = Turns()
    for _ in range(4 * count):
        order = turns.order([*data.draw(st.lists(st.integers(1, count), unique=True)), 0])
        if order[0] == 0:
            return
        turns.record_served(order[0])
    raise AssertionError("key 0 was never first")
