"""Requests and answers of the classic group protocol, members, settings, and the election of an assignment protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Final, Literal

import msgspec

from segmentlog.server.codec.kafka_errors import ErrorCode

Protocols = tuple[tuple[str, bytes], ...]
"""Assignment protocols that a member supports, the preferred one first, each with the member's metadata for it."""

Migration = Literal["bidirectional", "upgrade", "downgrade", "disabled"]

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60_000
"""Time for which a new member may wait for the answer to its first JoinGroup. The value is Kafka's. The group cannot
notice earlier that the client has gone away, because heartbeats begin after the answer.
"""


class GroupState(StrEnum):
    """The state of a group, under Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    """The group waits for its members to join."""
    COMPLETING = "CompletingRebalance"
    """All members have joined, and wait for the leader's assignment."""
    STABLE = "Stable"
    RECONCILING = "Reconciling"
    """A group of the consumer protocol moves partitions from one member to another."""
    DEAD = "Dead"
    """The group was deleted, or another process coordinates it."""


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and delays. Names and defaults are Kafka's where Kafka has the setting, except for the first default."""

    initial_rebalance_delay_ms: int = 150
    """`group.initial.rebalance.delay.ms`: time for which an empty group waits for further members after the first.
    Each new member extends the wait by this time.

    Kafka waits 3 s, because clients may reach brokers one after the other over a network; a single consumer waits as
    long. Processes that are started together on one machine join within this shorter delay. A member that joins
    later costs one more rebalance of some milliseconds."""
    min_session_timeout_ms: int = 6_000
    """`group.min.session.timeout.ms`."""
    max_session_timeout_ms: int = 1_800_000
    """`group.max.session.timeout.ms`."""
    max_size: int = 10_000
    """`group.max.size`: maximum number of members of a group. By default Kafka has no limit."""
    group_bytes: int = 64 << 20
    """Maximum bytes of the metadata of all members of a group together, and the same limit for their assignments. Every
    save writes the whole group. Kafka writes it as one record, which is limited to 1 MiB."""
    consumer_session_timeout_ms: int = 45_000
    """`group.consumer.session.timeout.ms`."""
    consumer_heartbeat_interval_ms: int = 5_000
    """`group.consumer.heartbeat.interval.ms`: the interval in which members send heartbeats."""
    consumer_min_heartbeat_interval_ms: int = 1_000
    """`group.consumer.min.heartbeat.interval.ms`: the lowest heartbeat interval that a group may be configured with.
    Kafka's default is 5 s. Session time-outs (Kafka: 45 s to 60 s) have the bounds of the classic protocol."""
    migration: Migration = "bidirectional"
    """`group.consumer.migration.policy`: in which directions a group with members may change its protocol."""

    @property
    def may_upgrade(self) -> bool:
        """Return whether a group of the classic protocol accepts members of the consumer protocol."""
        return self.migration in ("bidirectional", "upgrade")

    @property
    def may_downgrade(self) -> bool:
        """Return whether a group returns to the classic protocol when only members of that protocol remain."""
        return self.migration in ("bidirectional", "downgrade")


def allow_all(name: str) -> bool:
    """Return True: the access check for clients without restrictions."""
    return True


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A JoinGroup request."""

    member_id: str = ""
    """Empty if the client has no member id yet."""
    instance_id: str | None = None
    new_member_id: str = ""
    """The member id to assign to a new member. It must never have been used before."""
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int = 10_000
    rebalance_timeout_ms: int = 60_000
    protocol_type: str = "consumer"
    protocols: Protocols = ()
    requires_known_member_id: bool = False
    """Whether a new client only gets a member id, and must join again with it (KIP-394). So a client that gives up
    never becomes a member."""
    supports_skipping_assignment: bool = False
    """Whether the client understands an answer that makes it leader without having to assign (KIP-814)."""
    may_see: Callable[[str], bool] = allow_all
    """Return whether the member may describe a topic. Groups of the consumer protocol assign it no other topic."""


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a JoinGroup request. Only the leader gets the members."""

    error: ErrorCode = ErrorCode.NONE
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    """Member id, instance id, and metadata for the elected protocol, for each member."""
    skip_assignment: bool = False


class SyncAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a SyncGroup request: the member's assignment."""

    error: ErrorCode = ErrorCode.NONE
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class ClassicMember(msgspec.Struct):
    """A member of a classic group."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    deadline_ms: int
    """Time at which the member expires, unless it waits for an answer."""
    assignment: bytes = b""
    is_new: bool = False
    """Whether the member has not received a generation yet."""
    join_token: object = None
    sync_token: object = None

    @property
    def is_joining(self) -> bool:
        """Return whether the member waits for the others to join."""
        return self.join_token is not None

    @property
    def is_waiting(self) -> bool:
        """Return whether the member waits for an answer, and so cannot send heartbeats.

        False for a new member: its first wait is limited (`NEW_MEMBER_JOIN_TIMEOUT_MS`).
        """
        return not self.is_new and (self.join_token is not None or self.sync_token is not None)

    def metadata(self, protocol: str) -> bytes:
        """Return the member's metadata for a protocol; empty if it does not support the protocol."""
        return next((metadata for name, metadata in self.protocols if name == protocol), b"")


def metadata_size_bytes(protocols: Protocols) -> int:
    """Return the size in bytes of the names and the metadata."""
    return sum(len(name) + len(metadata) for name, metadata in protocols)


def common_protocols(members: Iterable[ClassicMember]) -> set[str]:
    """Return the protocols that every member supports."""
    offers = [{name for name, _ in member.protocols} for member in members]
    return set.intersection(*offers) if offers else set()


def elect_protocol(members: Collection[ClassicMember]) -> str:
    """Return the elected protocol. Each member votes for the protocol that it prefers among those that all support.

    If votes are equal, the protocol that got the first vote wins.
    """
    common = common_protocols(members)
    votes: dict[str, int] = {}
    for member in members:
        name = next((name for name, _ in member.protocols if name in common), "")
        votes[name] = votes.get(name, 0) + 1
    return max(votes, key=votes.__getitem__, default="")
