"""What is asked of a group and what it answers; and how its members choose a protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Final, Literal

import msgspec

from segmentlog.server.codec.kafka_errors import ErrorCode

Protocols = tuple[tuple[str, bytes], ...]
"""Ways to assign that a member offers, the best first, each with what it says under it."""

Migration = Literal["bidirectional", "upgrade", "downgrade", "disabled"]

NEW_MEMBER_MS: Final = 5 * 60_000
"""How long who has never been answered may wait to join: Kafka's time, for a client that is gone is not seen to be."""


class State(StrEnum):
    """Of a group, under Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    """Members are to join."""
    COMPLETING = "CompletingRebalance"
    """They have, and wait for their leader's assignment."""
    STABLE = "Stable"
    RECONCILING = "Reconciling"
    """Partitions change hands, in a group of the consumer protocol."""
    DEAD = "Dead"
    """It was deleted, or somebody else coordinates it."""


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and delays; where Kafka has them, under its names, and with its defaults but for the first."""

    initial_rebalance_delay_ms: int = 150
    """`group.initial.rebalance.delay.ms`: how long a group without members waits for more once the first has come, and
    again as long as more come. Kafka waits 3 s, for brokers that clients reach one after the other over a network, and
    whoever starts a single consumer waits with it. On one machine processes that are started together join
    within this; who comes later costs one more rebalance of some milliseconds."""
    min_session_timeout_ms: int = 6_000
    """`group.min.session.timeout.ms`."""
    max_session_timeout_ms: int = 1_800_000
    """`group.max.session.timeout.ms`."""
    max_size: int = 10_000
    """`group.max.size`: members of a group. Kafka has no limit unless it is told one."""
    group_bytes: int = 64 << 20
    """What the members of a group say of themselves, together; and what they are assigned. A group is saved as a
    whole, in Kafka as one record, which may have 1 MiB."""
    consumer_session_timeout_ms: int = 45_000
    """`group.consumer.session.timeout.ms`."""
    consumer_heartbeat_interval_ms: int = 5_000
    """`group.consumer.heartbeat.interval.ms`: members send one so often."""
    consumer_min_heartbeat_interval_ms: int = 1_000
    """`group.consumer.min.heartbeat.interval.ms`, of what a group may be configured with. Kafka has 5 s; its bounds of
    sessions, 45 s to 60 s, are those of the classic protocol here."""
    migration: Migration = "bidirectional"
    """`group.consumer.migration.policy`: which way a group may go from one protocol to the other while it has
    members."""

    @property
    def may_upgrade(self) -> bool:
        """Whether a group of the classic protocol takes members of the consumer protocol."""
        return self.migration in ("bidirectional", "upgrade")

    @property
    def may_downgrade(self) -> bool:
        """Whether a group goes back to the classic protocol when only members of that are left."""
        return self.migration in ("bidirectional", "downgrade")


def everything(name: str) -> bool:
    """For a client whose rights are not looked at."""
    return True


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who wants to join."""

    member_id: str = ""
    """Empty: it has none yet."""
    instance_id: str | None = None
    fresh_id: str = ""
    """Which it gets then: one that nobody ever had."""
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int = 10_000
    rebalance_timeout_ms: int = 60_000
    protocol_type: str = "consumer"
    protocols: Protocols = ()
    is_told_its_id: bool = False
    """Whether it is sent away with its id first (KIP-394), so that who never comes back is no member."""
    may_skip_assignment: bool = False
    """Whether it understands that it leads without having to assign anything."""
    may_see: Callable[[str], bool] = everything
    """Whether the member may describe a topic. A group of the consumer protocol assigns it no other."""


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What it is told; the members only when it leads."""

    error: ErrorCode = ErrorCode.NONE
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    """Ids, instance ids, and what each says under the protocol."""
    skip_assignment: bool = False


class SyncAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a member is to do."""

    error: ErrorCode = ErrorCode.NONE
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class Member(msgspec.Struct):
    """A member as the machine has it."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    deadline_ms: int
    """When it is given up, unless it waits for an answer."""
    assignment: bytes = b""
    is_new: bool = False
    """Whether it has not been told a generation yet."""
    join_token: object = None
    sync_token: object = None

    @property
    def is_joining(self) -> bool:
        """Whether it waits for the others to join."""
        return self.join_token is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for an answer, and cannot say that it lives. Not for ever, the first time."""
        return not self.is_new and (self.join_token is not None or self.sync_token is not None)

    def metadata(self, protocol: str) -> bytes:
        """What it says under a protocol."""
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")


def size_of(protocols: Protocols) -> int:
    """Bytes of what is said under them."""
    return sum(len(name) + len(metadata) for name, metadata in protocols)


def common_protocols(members: Iterable[Member]) -> set[str]:
    """Those that every member offers."""
    offers = [{name for name, _ in member.protocols} for member in members]
    return set.intersection(*offers) if offers else set()


def elect_protocol(members: Collection[Member]) -> str:
    """Each member votes for the best of its protocols that all have; of equals the one that was voted for first."""
    common = common_protocols(members)
    votes: dict[str, int] = {}
    for member in members:
        name = next((name for name, _ in member.protocols if name in common), "")
        votes[name] = votes.get(name, 0) + 1
    return max(votes, key=votes.__getitem__, default="")
