"""What is asked of a group of the consumer protocol (KIP-848) and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple, Protocol

import msgspec

from segmentlog.policy.reconciliation import Holding
from segmentlog.records import PartitionId
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import Protocols, everything

JOINS: Final = 0
LEAVES: Final = -1
STEPS_OUT: Final = -2
"""Member epochs that are none: who joins, who leaves, and the static member who leaves its place to itself."""

ASSIGNORS: Final = {"uniform": "sticky", "range": "range"}
"""Those of the server, the default first, and the strategies that they are."""

Partitions = frozenset[PartitionId]


class Shape(NamedTuple):
    """Of a topic."""

    id: str
    partition_count: int


class Catalog(Protocol):
    """The topics that there are. May be behind by a moment."""

    def shapes(self, names: Collection[str]) -> Mapping[str, Shape]:
        """Of those of the topics that there are."""

    def names(self) -> Collection[str]:
        """All topics that clients are told of."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A ConsumerGroupHeartbeat. What is None has not changed since it was said last."""

    member_id: str
    epoch: int = JOINS
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] | None = None
    regex: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None
    may_see: Callable[[str], bool] = everything
    """Whether it may know of a topic that its expression matches."""

    @property
    def is_full(self) -> bool:
        """Whether it says everything, as who wants to be told everything does."""
        return (
            self.rebalance_timeout_ms >= 0
            and (self.topics is not None or self.regex is not None)
            and self.owned is not None
        )


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a `Heartbeat`."""

    error: ErrorCode = ErrorCode.NONE
    message: str | None = None
    member_id: str | None = None
    epoch: int = 0
    heartbeat_ms: int = 0
    assigned: Mapping[str, list[int]] | None = None
    """Partitions by topic id; None: what it was told last."""


class ClassicSide(msgspec.Struct):
    """What a member that speaks the classic protocol has beside the others."""

    session_timeout_ms: int
    protocols: Protocols
    join_ends_ms: int | None = None
    """When it has to have joined again, once it was told to."""
    sync_ends_ms: int | None = None
    """When it has to have asked for its assignment."""


class ConsumerMember(msgspec.Struct):
    """A member as the machine has it."""

    id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topics: tuple[str, ...] = ()
    regex: str = ""
    matched: tuple[str, ...] = ()
    """Topics that the expression meant when it was looked at last."""
    assignor: str | None = None
    holding: Holding = Holding()
    target: Partitions = frozenset()
    deadline_ms: int = 0
    """When it is given up unless it is heard of."""
    revoked_by_ms: int | None = None
    """When it is given up unless it has let go of what it is to let go of."""
    classic: ClassicSide | None = None

    @property
    def due_ms(self) -> int:
        """When it is given up, unless it does what it is to do."""
        times = [self.deadline_ms]
        if self.revoked_by_ms is not None:
            times.append(self.revoked_by_ms)
        if self.classic is not None:
            times += [time for time in (self.classic.join_ends_ms, self.classic.sync_ends_ms) if time is not None]
        return min(times)

    def put_off(self, by_ms: int) -> None:
        """It has so much longer for everything."""
        self.deadline_ms += by_ms
        if self.revoked_by_ms is not None:
            self.revoked_by_ms += by_ms
        classic = self.classic
        if classic is not None and classic.join_ends_ms is not None:
            classic.join_ends_ms += by_ms
        if classic is not None and classic.sync_ends_ms is not None:
            classic.sync_ends_ms += by_ms

    @property
    def subscribed(self) -> set[str]:
        """Names of the topics that it reads."""
        return {*self.topics, *self.matched}


def by_topic(partitions: Collection[PartitionId]) -> dict[str, list[int]]:
    """Sorted numbers by topic id."""
    found: dict[str, list[int]] = {}
    for topic_id, number in sorted(partitions):
        found.setdefault(topic_id, []).append(number)
    return found


def in_a_set(partitions: Mapping[str, Collection[int]]) -> Partitions:
    """What `by_topic` was given."""
    return frozenset(PartitionId(topic_id, number) for topic_id, numbers in partitions.items() for number in numbers)
