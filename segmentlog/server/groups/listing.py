"""Groups as Kafka's tools are shown them: those of clients, and those of the library in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.machine import Group
from segmentlog.server.groups.subscriptions import CONSUMER, encode_partitions, encode_topics
from segmentlog.server.groups.words import State

if TYPE_CHECKING:
    from segmentlog.store import LogStore


class ShownMember(msgspec.Struct, frozen=True):
    """A member. Bytes are empty while the group is not stable."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class ShownGroup(msgspec.Struct, frozen=True):
    """A group."""

    state: str
    protocol_type: str
    protocol: str
    members: tuple[ShownMember, ...]


def overview(coordinator: GroupCoordinator, store: LogStore, group: str) -> tuple[str, str]:
    """State and protocol type of a group."""
    with coordinator.looking_at(group) as machine:
        if machine.state is not State.EMPTY:
            return machine.state, machine.protocol_type
        protocol_type = machine.protocol_type
    if store.groups.has_members(group):
        return State.STABLE, CONSUMER
    return State.EMPTY, protocol_type or CONSUMER


def describe(coordinator: GroupCoordinator, store: LogStore, group: str) -> ShownGroup | None:
    """A group; None when nobody knows it."""
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
    # Whatever changes hands between them does so without anybody joining anew.
    return ShownGroup(State.STABLE, CONSUMER, found.strategy, tuple(members))


def _of_clients(machine: Group) -> ShownGroup:
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
