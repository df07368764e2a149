"""Changes a group with members from one group protocol to the other.

Members keep their partitions. Members of the classic protocol have to join again, as in any rebalance.
"""

from __future__ import annotations

from segmentlog.groups.server_group_file import RemoteConsumer, RemoteGroup, RemoteMember
from segmentlog.policy.reconciliation import Stage
from segmentlog.records import PartitionId
from segmentlog.server.codec.generated.consumer_protocol import ConsumerProtocolSubscription
from segmentlog.server.groups.classic_group import Group
from segmentlog.server.groups.classic_types import GroupSettings, Member, State, elect_protocol
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.consumer_types import Catalog, Partitions, Shape, by_topic, in_a_set
from segmentlog.server.groups.subscriptions import (
    CONSUMER,
    encode_partitions,
    partitions_of,
    subscription_of,
    topics_of,
)

Machine = Group | ConsumerGroup
"""A group of either protocol."""


def may_upgrade(group: Group, settings: GroupSettings) -> bool:
    """Return whether a member of the consumer protocol may join the group as it is."""
    if group.state is State.EMPTY:
        return True
    return (
        settings.may_upgrade
        and group.protocol_type == CONSUMER
        and all(_said_by(member, group) is not None for member in _known(group))
    )


def _known(group: Group) -> list[Member]:
    """Return the members that have received a generation. The others hold no partitions, and join again when asked
    to."""
    return [member for member in group.members.values() if not member.is_new]


def _said_by(member: Member, group: Group) -> ConsumerProtocolSubscription | None:
    return subscription_of(member.metadata(group.protocol) or member.protocols[0][1])


def upgraded(group: Group, settings: GroupSettings, catalog: Catalog, now_ms: int) -> ConsumerGroup:
    """Return the group as a group of the consumer protocol; ``group`` is not changed.

    Each member keeps its assigned partitions. Partitions that it reports as owned, but is not assigned, it must revoke.
    While no assignment exists, a member keeps the partitions that it reports.
    """
    members = _known(group)
    names = {topic for member in members for topic in group.topics_of(member)}
    shapes = dict(catalog.shapes(names))
    given = {member.id: _ids(shapes, partitions_of(CONSUMER, member.assignment)) for member in members}
    said = {member.id: _ids(shapes, _owned_by(member, group)) for member in members}
    taken: set[PartitionId] = set()
    for one, assigned in given.items():
        given[one] = assigned - taken
        taken |= assigned
    saved = []
    for member in members:
        assigned, revoking = given[member.id], said[member.id] - taken
        taken |= revoking
        if not assigned and group.state is not State.STABLE:
            assigned, revoking = revoking, assigned
        saved.append(_as_consumer(member, group, assigned, revoking))
    found = ConsumerGroup(settings, catalog)
    found.restore(
        RemoteGroup(
            generation=group.generation, is_consumer=True, members=tuple(saved),
            topics={name: (shape.id, shape.partition_count) for name, shape in shapes.items()},
        ),
        now_ms,
    )  # fmt: skip
    return found


def _ids(shapes: dict[str, Shape], partitions: dict[str, list[int]]) -> Partitions:
    return in_a_set({shapes[name].id: numbers for name, numbers in partitions.items() if name in shapes})


def _owned_by(member: Member, group: Group) -> dict[str, list[int]]:
    said = _said_by(member, group)
    return {one.topic: list(one.partitions) for one in said.owned_partitions} if said is not None else {}


def _as_consumer(member: Member, group: Group, assigned: Partitions, revoking: Partitions) -> RemoteMember:
    said = _said_by(member, group)
    return RemoteMember(
        member.id, member.instance_id, member.client_id, member.client_host, member.session_timeout_ms,
        member.rebalance_timeout_ms, member.protocols,
        consumer=RemoteConsumer(
            epoch=group.generation, previous_epoch=group.generation,
            stage=Stage.REVOKING if revoking else Stage.SETTLED,
            rack_id=said.rack_id if said is not None else None, topics=tuple(sorted(group.topics_of(member))),
            assigned=by_topic(assigned), revoking=by_topic(revoking), target=by_topic(assigned), is_classic=True,
        ),
    )  # fmt: skip


def downgraded(group: ConsumerGroup, settings: GroupSettings, now_ms: int) -> Group:
    """Return the group as a group of the classic protocol, with the members that speak it. They must join again."""
    found = Group(settings, topics_of)
    found.restore(
        RemoteGroup(
            state=State.PREPARING, generation=group.generation, protocol_type=CONSUMER,
            members=tuple(
                RemoteMember(
                    member.id, member.instance_id, member.client_id, member.client_host,
                    member.classic.session_timeout_ms, member.rebalance_timeout_ms, member.classic.protocols,
                    encode_partitions(group.names_of(member.holding.assigned)),
                )
                for member in group.all()
                if member.classic is not None
            ),
        ),
        now_ms,
    )  # fmt: skip
    found.protocol = elect_protocol(found.members.values())
    found.is_changed = True
    return found
