"""Which member of a consumer group reads which partition. Pure: the same input gives the same answer everywhere.

range       each topic by itself: its subscribers, in order of their ids, get consecutive partitions
roundrobin  all partitions of all topics in one row, dealt to the members in turn
sticky      balanced as well as subscriptions allow, and as few partitions as possible change hands

As in Kafka. Rejected for sticky: computing a fair assignment first and then permuting members to
match the previous one. Starting from the previous one and repairing it keeps more in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Final, Literal, get_args

from segmentlog.errors import InvalidConfig
from segmentlog.records import TopicPartition

Strategy = Literal["sticky", "range", "roundrobin"]
Subscriptions = Mapping[str, Collection[str]]
"""The topics that each member reads."""
Assigned = dict[str, list[TopicPartition]]

STRATEGIES: Final = get_args(Strategy)


def assign(
    strategy: str,
    members: Subscriptions,
    partition_counts: Mapping[str, int],
    previous: Mapping[str, Collection[TopicPartition]] | None = None,
) -> Assigned:
    """Every partition of a topic that somebody reads, given to exactly one of those who read it.

    members           the topics of each member; those without partitions (unknown ones) do not count
    partition_counts  of each topic
    previous          what each member had; only "sticky" looks at it

    Returns the sorted partitions of every member, members in order. Raises `InvalidConfig` for
    a strategy that there is not.
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
    """The previous assignment, repaired: keep what may stay, deal out what is free, then even out.

    Evening out looks for a chain of members, each of which can hand a partition to the next, from
    one with many to one with at least two less. With equal subscriptions a chain is one step
    long. When there is no chain left, no other assignment is more even (as in optimal semi-matchings,
    Harvey, Ladner, Lovasz and Tamir 2003).
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
        """Move partitions along one chain; False when there is none."""
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
        """The shortest chain to a member with at least two less than ``start``; of those, the one with the least."""
        came: dict[str, tuple[str, str] | None] = {start: None}
        level = [start]
        seen_topics: set[str] = set()
        while level:
            following: list[str] = []
            for giver in level:
                for topic in sorted(self._owned[giver]):
                    if not self._owned[giver][topic] or topic in seen_topics:
                        continue
                    seen_topics.add(topic)  # all who read it are found at the first sight of it
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
        """Hand over the partition whose move costs least: the taker's own of before, then one new to the giver."""
        partitions = self._owned[giver][topic]
        had = self._before.get
        tp = min(partitions, key=lambda tp: (had(tp) != taker, had(tp) == giver, -tp.partition))
        partitions.remove(tp)
        self._load[giver] -= 1
        self._give(tp, taker)
