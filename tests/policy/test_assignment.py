"""Assigning partitions to members: whole, balanced, and with as little movement as can be."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import InvalidConfig
from segmentlog.policy.assignment import STRATEGIES, Assigned, assign
from segmentlog.records import TopicPartition

_COUNTS = st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), st.integers(0, 9), min_size=1)
_NAMES = st.lists(st.sampled_from([f"m{number}" for number in range(7)]), min_size=1, unique=True)
_SUBSCRIPTIONS = st.dictionaries(
    st.sampled_from([f"m{number}" for number in range(6)]), st.sets(st.sampled_from(["a", "b", "c", "d", "none"]))
)
_ANY_PARTITIONS = st.sets(
    st.builds(TopicPartition, st.sampled_from(["a", "b", "c", "d", "gone"]), st.integers(0, 10)), max_size=12
)


def _t(topic: str, *numbers: int) -> list[TopicPartition]:
    return [TopicPartition(topic, number) for number in numbers]


def _all(members: Collection[str], topics: list[str]) -> dict[str, list[str]]:
    """Members that all read the same."""
    return {member: topics for member in members}


def _moved(before: Assigned, after: Assigned) -> int:
    """Return how many owned partitions have another owner now."""
    owner = {tp: member for member, partitions in before.items() for tp in partitions}
    return sum(owner.get(tp, member) != member for member, partitions in after.items() for tp in partitions)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(members=_SUBSCRIPTIONS, counts=_COUNTS, data=st.data())
def test_every_partition_has_exactly_one_reader(
    strategy: str, members: dict[str, set[str]], counts: dict[str, int], data: st.DataObject
) -> None:
    """With any previous assignment, each subscribed partition has one reader, a member that subscribed to it."""
    previous = data.draw(st.dictionaries(st.sampled_from([*members, "stranger"]), _ANY_PARTITIONS))
    found = assign(strategy, members, counts, previous)
    assert list(found) == sorted(members)
    given_out = [tp for partitions in found.values() for tp in partitions]
    wanted = {
        TopicPartition(topic, number)
        for topic, count in counts.items()
        for number in range(count)
        if any(topic in topics for topics in members.values())
    }
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == wanted
    assert all(tp.topic in members[member] for member, partitions in found.items() for tp in partitions)
    shuffled = dict(reversed(members.items()))
    assert assign(strategy, shuffled, dict(reversed(counts.items())), previous) == found


@given(names=_NAMES, counts=_COUNTS, data=st.data())
def test_sticky_with_equal_subscriptions_is_balanced(
    names: list[str], counts: dict[str, int], data: st.DataObject
) -> None:
    """With any previous assignment, no member has two partitions more than another one."""
    previous = data.draw(st.dictionaries(st.sampled_from(names), _ANY_PARTITIONS))
    sizes = [len(one) for one in assign("sticky", _all(names, list(counts)), counts, previous).values()]
    assert max(sizes) - min(sizes) <= 1


@given(names=_NAMES, counts=_COUNTS)
def test_joining_moves_only_what_it_must_and_leaving_only_the_leavers(names: list[str], counts: dict[str, int]) -> None:
    """A joining member takes at most its share and nothing else moves; a leaving one's partitions alone move."""
    topics = list(counts)
    before = assign("sticky", _all(names, topics), counts)
    for newcomer in ("a-first", "z-last"):
        joined = assign("sticky", _all([*names, newcomer], topics), counts, before)
        assert _moved(before, joined) == len(joined[newcomer]) <= ceil(sum(counts.values()) / (len(names) + 1))
        left = assign("sticky", _all(names, topics), counts, joined)
        assert all(set(joined[member]) <= set(left[member]) for member in names)
    assert assign("sticky", _all(names, topics), counts, before) == before


@given(
    members=st.dictionaries(st.sampled_from(["m0", "m1", "m2"]), st.sets(st.sampled_from(["a", "b", "c"])), min_size=1),
    counts=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 2), min_size=1),
    data=st.data(),
)
def test_sticky_is_as_balanced_as_subscriptions_allow(
    members: dict[str, set[str]], counts: dict[str, int], data: st.DataObject
) -> None:
    """All possible assignments are tried, and none is more even."""
    previous = data.draw(st.dictionaries(st.sampled_from(list(members)), _ANY_PARTITIONS))
    found = assign("sticky", members, counts, previous)
    choices = [
        [member for member, topics in members.items() if topic in topics]
        for topic, count in counts.items()
        for _ in range(count)
    ]
    spread = [sum(chosen.count(member) ** 2 for member in members) for chosen in product(*filter(None, choices))]
    assert sum(len(partitions) ** 2 for partitions in found.values()) == min(spread)


def test_a_large_group_is_quick() -> None:
    """A thousand partitions and fifty members of two kinds: well below what a join may take."""
    members = {f"m{number}": ["a"] if number % 2 else ["a", "b"] for number in range(50)}
    before = assign("sticky", members, {"a": 900, "b": 100})
    del members["m7"]
    after = assign("sticky", members, {"a": 900, "b": 100}, before)
    sizes = [len(partitions) for partitions in after.values()]
    assert max(sizes) - min(sizes) <= 1
    assert _moved(before, after) == len(before["m7"])


def test_range_gives_consecutive_partitions_topic_by_topic() -> None:
    """Kafka's example: the first members get one more of each topic."""
    assert assign("range", {"c0": ["t0", "t1"], "c1": ["t0", "t1"]}, {"t0": 3, "t1": 3}) == {
        "c0": _t("t0", 0, 1) + _t("t1", 0, 1),
        "c1": _t("t0", 2) + _t("t1", 2),
    }


def test_roundrobin_deals_all_topics_in_one_row() -> None:
    """Kafka's examples hold, with equal and with different subscriptions."""
    assert assign("roundrobin", {"c0": ["t0", "t1"], "c1": ["t0", "t1"]}, {"t0": 3, "t1": 3}) == {
        "c0": _t("t0", 0, 2) + _t("t1", 1),
        "c1": _t("t0", 1) + _t("t1", 0, 2),
    }
    members = {"c0": ["t0"], "c1": ["t0", "t1"], "c2": ["t0", "t1", "t2"]}
    assert assign("roundrobin", members, {"t0": 1, "t1": 2, "t2": 3}) == {
        "c0": _t("t0", 0),
        "c1": _t("t1", 0),
        "c2": _t("t1", 1) + _t("t2", 0, 1, 2),
    }


def test_sticky_examples() -> None:
    """Kafka's: where round robin would move much, sticky moves the leaver's only; and it uses chains of members."""
    before = assign("sticky", _all(["c0", "c1", "c2"], ["t"]), {"t": 8})
    after = assign("sticky", _all(["c0", "c2"], ["t"]), {"t": 8}, before)
    assert set(before["c0"]) < set(after["c0"])
    assert set(before["c2"]) < set(after["c2"])
    # m2 reads only b, which m1 has; m1 can take of a, which m0 has.
    found = assign(
        "sticky",
        {"m0": ["a"], "m1": ["a", "b"], "m2": ["b"]},
        {"a": 4, "b": 2},
        {"m0": _t("a", 0, 1, 2, 3), "m1": _t("b", 0, 1)},
    )
    assert [len(partitions) for partitions in found.values()] == [2, 2, 2]


def test_an_unknown_strategy_is_refused() -> None:
    """The error has its name."""
    with pytest.raises(InvalidConfig, match="assignment_strategy"):
        assign("fair", {"m": ["t"]}, {"t": 1})
