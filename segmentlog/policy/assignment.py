"""Assign partitions to the members of a consumer group. Pure: every process computes the same result.

range       each topic separately: its subscribers, in order of their ids, get consecutive partitions
roundrobin  the partitions of all topics, assigned to the members in turn
sticky      as balanced as subscriptions allow, and as few partitions as possible move to another member

The strategies are Kafka's. *Rejected* for sticky: compute a fair assignment, then permute members to match
the previous assignment. Repairing the previous assignment moves fewer partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Final, Literal, get_args

from segmentlog.errors import InvalidConfig
from segmentlog.records import TopicPartition

Strategy = Literal["sticky", "range", "roundrobin"]
Subscriptions = Mapping[str, Collection[str]]
"""The topics that each member subscribes to."""
Assigned = dict[str, list[TopicPartition]]

STRATEGIES: Final = get_args(Strategy)


def assign(
    strategy: str,
    members: Subscriptions,
    partition_counts: Mapping[str, int],
    previous: Mapping[str, Collection[TopicPartition]] | None = None,
) -> Assigned:
    """Assign each partition of each subscribed topic to exactly one subscriber.

    members           the topics of each member; topics without partitions (unknown topics) are ignored
    partition_counts  number of partitions of each topic
    previous          the previous assignment; only "sticky" uses it

    Return the sorted partitions of every member, members in order. Raise `InvalidConfig` for an
    unknown strategy.
    """
    subscribers: dict[str, list[str]] = {}
    for member in sorted(members):
        for topic in set(members[member]):
            if partition_counts.get(topic, 0) > 0:
                subscribers.setdefault(topic, []).append(member)
    if strategy == "range":
        found = _range(sorted(members), subscribers, partition_counts)
    elif strategy == "roundrobin":
        found = _roundrobin(sorted(members), subscribers, partition_counts)
    elif strategy == "sticky":
        found = _Sticky(sorted(members), subscribers, partition_counts, previous or {}).run()
    else:
        raise InvalidConfig("assignment_strategy", strategy, "'sticky', 'range' or 'roundrobin'")
    return {member: sorted(partitions) for member, partitions in found.items()}


def _range(members: list[str], subscribers: Mapping[str, list[str]], counts: Mapping[str, int]) -> Assigned:
    found: Assigned = {member: [] for member in members}
    for topic, readers in subscribers.items():
        share, more = divmod(counts[topic], len(readers))
        start = 0
        for at, member in enumerate(readers):
            stop = start + share + (at < more)
            found[member] += [TopicPartition(topic, number) for number in range(start, stop)]
            start = stop
    return found


def _roundrobin(members: list[str], subscribers: Mapping[str, list[str]], counts: Mapping[str, int]) -> Assigned:
    found: Assigned = {member: [] for member in members}
    turn = deque(members)
    for topic in sorted(subscribers):
        readers = set(subscribers[topic])
        for number in range(counts[topic]):
            while turn[0] not in readers:
                turn.rotate(-1)
            found[turn[0]].append(TopicPartition(topic, number))
            turn.rotate(-1)
    return found


class _Sticky:
    """The sticky strategy: keep valid parts of the previous assignment, assign free partitions, then balance.

    Balancing searches for a chain of members in which each member can pass a partition to the next. The last member
    must have at least two partitions fewer than the first. With equal subscriptions a chain has one step. If no chain
    is left, no other assignment is more balanced (optimal semi-matchings: Harvey, Ladner, Lovasz and Tamir 2003).
    """

    def __init__(
        self,
        members: list[str],
        subscribers: dict[str, list[str]],
        counts: Mapping[str, int],
        previous: Mapping[str, Collection[TopicPartition]],
    ) -> None:
        self._members = members
        self._subscribers = subscribers
        self._before: dict[TopicPartition, str] = {}
        self._owned: dict[str, dict[str, list[TopicPartition]]] = {member: {} for member in members}
        self._load = dict.fromkeys(members, 0)
        for member in members:
            for tp in sorted(previous.get(member, ())):
                reads = member in subscribers.get(tp.topic, ())
                if reads and 0 <= tp.partition < counts[tp.topic] and tp not in self._before:
                    self._before[tp] = member
                    self._give(tp, member)
        self._free = [
            TopicPartition(topic, number)
            for topic in sorted(subscribers, key=lambda topic: (len(subscribers[topic]), topic))
            for number in range(counts[topic])
            if TopicPartition(topic, number) not in self._before
        ]

    def run(self) -> Assigned:
        for tp in self._free:
            self._give(tp, min(self._subscribers[tp.topic], key=lambda member: (self._load[member], member)))
        while self._even_out():
            pass
        return {
            member: [tp for partitions in self._owned[member].values() for tp in partitions] for member in self._members
        }

    def _give(self, tp: TopicPartition, member: str) -> None:
        self._owned[member].setdefault(tp.topic, []).append(tp)
        self._load[member] += 1

    def _even_out(self) -> bool:
        """Move partitions along one chain. Return False if no chain exists."""
        least = min(self._load.values(), default=0)
        for member in sorted(self._members, key=lambda member: (-self._load[member], member)):
            if self._load[member] < least + 2:
                return False
            chain = self._chain_from(member)
            if chain is not None:
                for giver, topic, taker in chain:
                    self._move(giver, topic, taker)
                return True
        return False

    def _chain_from(self, start: str) -> list[tuple[str, str, str]] | None:
        """Return the shortest chain from ``start`` to a member with at least two partitions fewer, or None.

        Among chains of equal length, choose the end with the fewest partitions.
        """
        came: dict[str, tuple[str, str] | None] = {start: None}
        level = [start]
        seen_topics: set[str] = set()
        while level:
            following: list[str] = []
            for giver in level:
                for topic in sorted(self._owned[giver]):
                    if not self._owned[giver][topic] or topic in seen_topics:
                        continue
                    seen_topics.add(topic)  # the first giver of this topic has already reached all of its subscribers
                    for taker in self._subscribers[topic]:
                        if taker not in came:
                            came[taker] = (giver, topic)
                            following.append(taker)
            ends = [member for member in following if self._load[member] <= self._load[start] - 2]
            if ends:
                chain = []
                at = min(ends, key=lambda member: (self._load[member], member))
                while (step := came[at]) is not None:
                    chain.append((step[0], step[1], at))
                    at = step[0]
                return chain
            level = following
        return None

    def _move(self, giver: str, topic: str, taker: str) -> None:
        """Move a partition.

        Prefer a partition that the taker had before, then a partition that the giver did not have before.
        """
        partitions = self._owned[giver][topic]
        had = self._before.get
        tp = min(partitions, key=lambda tp: (had(tp) != taker, had(tp) == giver, -tp.partition))
        partitions.remove(tp)
        self._load[giver] -= 1
        self._give(tp, taker)
