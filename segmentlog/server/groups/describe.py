"""Group descriptions for Kafka's tools: groups of clients, and groups of the library in the same format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from segmentlog.server.groups.classic_types import State
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.consumer_types import by_topic
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.migration import Machine
from segmentlog.server.groups.subscriptions import CONSUMER, encode_partitions, encode_topics

if TYPE_CHECKING:
    from segmentlog.store import LogStore


CLASSIC_TYPE: Final = "classic"
CONSUMER_TYPE: Final = "consumer"


class ShownMember(msgspec.Struct, frozen=True):
    """A member in DescribeGroups. Metadata and assignment are empty unless the group is stable."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class ShownGroup(msgspec.Struct, frozen=True):
    """A group in DescribeGroups."""

    state: str
    protocol_type: str
    protocol: str
    members: tuple[ShownMember, ...]


class ShownConsumer(msgspec.Struct, frozen=True):
    """A member of a group of the consumer protocol. Partition numbers by topic id."""

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


class ShownConsumerGroup(msgspec.Struct, frozen=True):
    """A group of the consumer protocol."""

    state: str
    epoch: int
    assignor: str
    members: tuple[ShownConsumer, ...]


class Overview(NamedTuple):
    """A group in ListGroups."""

    state: str
    protocol_type: str
    type: str


def overview(coordinator: GroupCoordinator, store: LogStore, group: str) -> Overview:
    """Return state, protocol type and type of a group, for ListGroups."""
    with coordinator.looking_at(group) as machine:
        protocol_type = machine.protocol_type or CONSUMER
        group_type = CONSUMER_TYPE if isinstance(machine, ConsumerGroup) else CLASSIC_TYPE
        if machine.state is not State.EMPTY:
            return Overview(machine.state, protocol_type, group_type)
    if store.groups.has_members(group):
        return Overview(State.STABLE, CONSUMER, CLASSIC_TYPE)
    return Overview(State.EMPTY, protocol_type, group_type)


def describe_consumer(coordinator: GroupCoordinator, store: LogStore, group: str) -> ShownConsumerGroup | None:
    """Return a group of the consumer protocol; None if the group does not exist or has another protocol."""
    with coordinator.looking_at(group) as machine:
        if not isinstance(machine, ConsumerGroup) or (not machine.members and store.groups.has_members(group)):
            return None
        members = tuple(
            ShownConsumer(
                one.id, one.instance_id, one.rack_id, one.holding.epoch, one.client_id, one.client_host, one.topics,
                one.regex, by_topic(one.holding.assigned), by_topic(one.target), one.classic is not None,
            )
            for one in machine.all()
        )  # fmt: skip
        return ShownConsumerGroup(machine.state, machine.generation, machine.assignor, members)


def describe(coordinator: GroupCoordinator, store: LogStore, group: str) -> ShownGroup | None:
    """Return a group in the format of DescribeGroups; None if it does not exist."""
    with coordinator.looking_at(group) as machine:
        if machine.state is not State.EMPTY:
            return _of_clients(machine)
        protocol_type = machine.protocol_type
    if group not in store.groups.names():
        return None
    found = store.groups.describe(group)
    if not found.members:
        return ShownGroup(State.EMPTY, protocol_type or CONSUMER, "", ())
    members = []
    for member in found.members:
        numbers: dict[str, list[int]] = {}
        for tp in member.partitions:
            numbers.setdefault(tp.topic, []).append(tp.partition)
        members.append(
            ShownMember(
                member.id, None, member.client_id, member.host, encode_topics(member.topics), encode_partitions(numbers)
            )
        )
    # Members of the library exchange partitions without joining again, so the group is always stable.
    return ShownGroup(State.STABLE, CONSUMER, found.strategy, tuple(members))


def _of_clients(machine: Machine) -> ShownGroup:
    if isinstance(machine, ConsumerGroup):
        return _of_consumers(machine)
    is_stable = machine.state is State.STABLE
    return ShownGroup(
        machine.state, machine.protocol_type, machine.protocol if is_stable else "",
        tuple(
            ShownMember(
                member.id, member.instance_id, member.client_id, member.client_host,
                member.metadata(machine.protocol) if is_stable else b"", member.assignment if is_stable else b"",
            )
            for member in machine.members.values()
        ),
    )  # fmt: skip


def _of_consumers(machine: ConsumerGroup) -> ShownGroup:
    """Return a group of the consumer protocol in the format of the classic one, for tools that know no other."""
    return ShownGroup(
        machine.state, machine.protocol_type, machine.assignor,
        tuple(
            ShownMember(
                member.id, member.instance_id, member.client_id, member.client_host,
                encode_topics(tuple(sorted(member.subscribed))),
                encode_partitions(machine.names_of(member.holding.assigned)),
            )
            for member in machine.all()
        ),
    )  # fmt: skip
