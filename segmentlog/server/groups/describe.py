"""Group descriptions for Kafka's tools: groups of clients, and groups of the library in the same format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from segmentlog.server.groups.classic_types import GroupState
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.consumer_types import by_topic
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.migration import GroupStateMachine
from segmentlog.server.groups.subscriptions import CONSUMER, encode_partitions, encode_topics

if TYPE_CHECKING:
    from segmentlog.store import LogStore


CLASSIC_TYPE: Final = "classic"
CONSUMER_TYPE: Final = "consumer"


class ClassicMemberDescription(msgspec.Struct, frozen=True):
    """A member in DescribeGroups. Metadata and assignment are empty unless the group is stable."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class ClassicGroupDescription(msgspec.Struct, frozen=True):
    """A group in DescribeGroups."""

    state: str
    protocol_type: str
    protocol: str
    members: tuple[ClassicMemberDescription, ...]


class ConsumerDescription(msgspec.Struct, frozen=True):
    """A member of a group of the consumer protocol. Its partitions are lists of numbers by topic id."""

    id: str
    instance_id: str | None
    rack_id: str | None
    epoch: int
    client_id: str
    client_host: str
    topics: tuple[str, ...]
    regex: str
    assigned: dict[str, list[int]]
    target: dict[str, list[int]]
    is_classic: bool


class ConsumerGroupDescription(msgspec.Struct, frozen=True):
    """A group of the consumer protocol."""

    state: str
    epoch: int
    assignor: str
    members: tuple[ConsumerDescription, ...]


class GroupOverview(NamedTuple):
    """A group in ListGroups."""

    state: str
    protocol_type: str
    type: str


def group_overview(coordinator: GroupCoordinator, store: LogStore, group: str) -> GroupOverview:
    """Return state, protocol type and type of a group, for ListGroups."""
    with coordinator.locked_group(group) as machine:
        protocol_type = machine.protocol_type or CONSUMER
        group_type = CONSUMER_TYPE if isinstance(machine, ConsumerGroup) else CLASSIC_TYPE
        if machine.state is not GroupState.EMPTY:
            return GroupOverview(machine.state, protocol_type, group_type)
    if store.groups.has_members(group):
        return GroupOverview(GroupState.STABLE, CONSUMER, CLASSIC_TYPE)
    return GroupOverview(GroupState.EMPTY, protocol_type, group_type)


def describe_consumer_group(
    coordinator: GroupCoordinator, store: LogStore, group: str
) -> ConsumerGroupDescription | None:
    """Return a group of the consumer protocol; None if the group does not exist or has another protocol."""
    with coordinator.locked_group(group) as machine:
        if not isinstance(machine, ConsumerGroup) or (not machine.members and store.groups.has_members(group)):
            return None
        members = tuple(
            ConsumerDescription(
                member.id,
                member.instance_id,
                member.rack_id,
                member.holding.epoch,
                member.client_id,
                member.client_host,
                member.topics,
                member.regex,
                by_topic(member.holding.assigned),
                by_topic(member.target),
                member.classic is not None,
            )
            for member in machine.all()
        )
        return ConsumerGroupDescription(machine.state, machine.generation, machine.assignor, members)


def describe(coordinator: GroupCoordinator, store: LogStore, group: str) -> ClassicGroupDescription | None:
    """Return a group in the format of DescribeGroups; None if it does not exist."""
    with coordinator.locked_group(group) as machine:
        if machine.state is not GroupState.EMPTY:
            return _describe_client_group(machine)
        protocol_type = machine.protocol_type
    if group not in store.groups.names():
        return None
    found = store.groups.describe(group)
    if not found.members:
        return ClassicGroupDescription(GroupState.EMPTY, protocol_type or CONSUMER, "", ())
    members = []
    for member in found.members:
        numbers: dict[str, list[int]] = {}
        for tp in member.partitions:
            numbers.setdefault(tp.topic, []).append(tp.partition)
        members.append(
            ClassicMemberDescription(
                member.id, None, member.client_id, member.host, encode_topics(member.topics), encode_partitions(numbers)
            )
        )
    # Members of the library exchange partitions without joining again, so the group is always stable.
    return ClassicGroupDescription(GroupState.STABLE, CONSUMER, found.strategy, tuple(members))


def _describe_client_group(machine: GroupStateMachine) -> ClassicGroupDescription:
    if isinstance(machine, ConsumerGroup):
        return _describe_as_classic(machine)
    is_stable = machine.state is GroupState.STABLE
    return ClassicGroupDescription(
        machine.state, machine.protocol_type, machine.protocol if is_stable else "",
        tuple(
            ClassicMemberDescription(
                member.id, member.instance_id, member.client_id, member.client_host,
                member.metadata(machine.protocol) if is_stable else b"", member.assignment if is_stable else b"",
            )
            for member in machine.members.values()
        ),
    )  # fmt: skip


def _describe_as_classic(machine: ConsumerGroup) -> ClassicGroupDescription:
    """Return a group of the consumer protocol in the format of the classic protocol, for older tools."""
    return ClassicGroupDescription(
        machine.state, machine.protocol_type, machine.assignor,
        tuple(
            ClassicMemberDescription(
                member.id, member.instance_id, member.client_id, member.client_host,
                encode_topics(tuple(sorted(member.subscribed))),
                encode_partitions(machine.names_of(member.holding.assigned)),
            )
            for member in machine.all()
        ),
    )  # fmt: skip
