"""Requests, answers and members of the consumer group protocol (KIP-848)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec

from segmentlog.policy.reconciliation import Holding
from segmentlog.records import PartitionId
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import Protocols, allow_all

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
STATIC_LEAVE_EPOCH: Final = -2
"""Member epochs with a meaning of their own: join, leave, and the temporary leave of a static member, which keeps its
partitions."""

ASSIGNORS: Final = {"uniform": "sticky", "range": "range"}
"""Server-side assignors with their strategies in `policy.assignment`. The first is the default."""

Partitions = frozenset[PartitionId]


class Ownership(NamedTuple):
    """The member that holds a partition, and the group's epoch in which it received the partition."""

    member_id: str
    since_epoch: int


class TopicShape(NamedTuple):
    """Id and partition count of a topic."""

    id: str
    partition_count: int


class TopicCatalog(Protocol):
    """Lists the existing topics. The list may be some seconds old."""

    def shapes(self, names: Collection[str]) -> Mapping[str, TopicShape]:
        """Return id and partition count of each topic that exists."""

    def names(self) -> Collection[str]:
        """Return all topics that clients can see."""


class HeartbeatFields(msgspec.Struct, frozen=True, kw_only=True):
    """A ConsumerGroupHeartbeat request. None in a field means: unchanged since the member last sent this field."""

    member_id: str
    epoch: int = JOIN_EPOCH
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] | None = None
    regex: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None
    may_see: Callable[[str], bool] = allow_all
    """Return whether the member may see a topic that its expression matches."""

    @property
    def is_full(self) -> bool:
        """Return whether the request has all fields. The answer then contains the assignment."""
        return (
            self.rebalance_timeout_ms >= 0
            and (self.topics is not None or self.regex is not None)
            and self.owned is not None
        )


class HeartbeatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a `HeartbeatFields`."""

    error: ErrorCode = ErrorCode.NONE
    message: str | None = None
    member_id: str | None = None
    epoch: int = 0
    heartbeat_ms: int = 0
    assigned: Mapping[str, list[int]] | None = None
    """Partitions by topic id; None: unchanged since the last answer."""


class ClassicProtocolState(msgspec.Struct):
    """State of a member that speaks the classic protocol in a group of the consumer protocol."""

    session_timeout_ms: int
    protocols: Protocols
    join_deadline_ms: int | None = None
    """Time by which the member must join again, after the group asked it to."""
    sync_deadline_ms: int | None = None
    """Time by which the member must ask for its assignment."""


class ConsumerMember(msgspec.Struct):
    """A member of a group of the consumer protocol."""

    id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] = ()
    regex: str = ""
    matched: tuple[str, ...] = ()
    """Topics that the member's regular expression matched at its last evaluation."""
    assignor: str | None = None
    holding: Holding = Holding()
    target: Partitions = frozenset()
    deadline_ms: int = 0
    """Time at which the member expires unless it sends a heartbeat."""
    revoked_by_ms: int | None = None
    """Time at which the member expires unless it has released the partitions that it must revoke."""
    classic: ClassicProtocolState | None = None

    @property
    def due_ms(self) -> int:
        """Return the time at which the member expires, unless it sends the awaited request before."""
        times = [self.deadline_ms]
        if self.revoked_by_ms is not None:
            times.append(self.revoked_by_ms)
        if self.classic is not None:
            times += [
                time for time in (self.classic.join_deadline_ms, self.classic.sync_deadline_ms) if time is not None
            ]
        return min(times)

    def extend_deadlines(self, by_ms: int) -> None:
        """Extend all deadlines of the member."""
        self.deadline_ms += by_ms
        if self.revoked_by_ms is not None:
            self.revoked_by_ms += by_ms
        classic = self.classic
        if classic is not None and classic.join_deadline_ms is not None:
            classic.join_deadline_ms += by_ms
        if classic is not None and classic.sync_deadline_ms is not None:
            classic.sync_deadline_ms += by_ms

    @property
    def subscribed(self) -> set[str]:
        """Return the names of the topics that the member reads."""
        return {*self.topics, *self.matched}


def by_topic(partitions: Collection[PartitionId]) -> dict[str, list[int]]:
    """Return sorted partition numbers by topic id."""
    found: dict[str, list[int]] = {}
    for topic_id, number in sorted(partitions):
        found.setdefault(topic_id, []).append(number)
    return found


def partition_set(partitions: Mapping[str, Collection[int]]) -> Partitions:
    """Return the partitions as a set: the inverse of `by_topic`."""
    return frozenset(PartitionId(topic_id, number) for topic_id, numbers in partitions.items() for number in numbers)
