"""Changes a group with members from one group protocol to the other.

Members keep their partitions. Members of the classic protocol have to join again, as in any rebalance.
"""

from __future__ import annotations

from segmentlog.groups.server_group_file import SavedConsumerState, SavedGroup, SavedMember
from segmentlog.policy.reconciliation import Stage
from segmentlog.records import PartitionId
from segmentlog.server.codec.generated.consumer_protocol import ConsumerProtocolSubscription
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.classic_types import ClassicMember, GroupSettings, GroupState, elect_protocol
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.consumer_types import Partitions, TopicCatalog, TopicShape, by_topic, partition_set
from segmentlog.server.groups.subscriptions import (
    CONSUMER,
    encode_partitions,
    partitions_of,
    subscription_of,
    topics_of,
)

GroupStateMachine = ClassicGroup | ConsumerGroup
"""A group of either protocol."""


def may_upgrade(group: ClassicGroup, settings: GroupSettings) -> bool:
    """Return whether a member of the consumer protocol may join the group in its present state."""
    if group.state is GroupState.EMPTY:
        return True
    return (
        settings.may_upgrade
        and group.protocol_type == CONSUMER
        and all(_subscription(member, group) is not None for member in _members_with_generation(group))
    )


def _members_with_generation(group: ClassicGroup) -> list[ClassicMember]:
    """Return the members that have received a generation. Others own no partitions, and join again on request."""
    return [member for member in group.members.values() if not member.is_new]


def _subscription(member: ClassicMember, group: ClassicGroup) -> ConsumerProtocolSubscription | None:
    return subscription_of(member.metadata(group.protocol) or member.protocols[0][1])


def upgrade_group(group: ClassicGroup, settings: GroupSettings, catalog: TopicCatalog, now_ms: int) -> ConsumerGroup:
    """Return the group as a group of the consumer protocol; ``group`` is not changed.

    Each member keeps its assigned partitions. It must revoke partitions that it reports as owned but that are not
    assigned to it. If the group has no assignment yet, a member keeps the partitions that it reports.
    """
    members = _members_with_generation(group)
    names = {topic for member in members for topic in group.topics_of(member)}
    shapes = dict(catalog.shapes(names))
    given = {member.id: _partition_ids(shapes, partitions_of(CONSUMER, member.assignment)) for member in members}
    subscription = {member.id: _partition_ids(shapes, _owned_partitions(member, group)) for member in members}
    taken: set[PartitionId] = set()
    for member_id, assigned in given.items():
        given[member_id] = assigned - taken
        taken |= assigned
    saved = []
    for member in members:
        assigned, revoking = given[member.id], subscription[member.id] - taken
        taken |= revoking
        if not assigned and group.state is not GroupState.STABLE:
            assigned, revoking = revoking, assigned
        saved.append(_convert_to_consumer(member, group, assigned, revoking))
    found = ConsumerGroup(settings, catalog)
    found.restore(
        SavedGroup(
            generation=group.generation, is_consumer=True, members=tuple(saved),
            topics={name: (shape.id, shape.partition_count) for name, shape in shapes.items()},
        ),
        now_ms,
    )  # fmt: skip
    return found


def _partition_ids(shapes: dict[str, TopicShape], partitions: dict[str, list[int]]) -> Partitions:
    return partition_set({shapes[name].id: numbers for name, numbers in partitions.items() if name in shapes})


def _owned_partitions(member: ClassicMember, group: ClassicGroup) -> dict[str, list[int]]:
    subscription = _subscription(member, group)
    return (
        {part.topic: list(part.partitions) for part in subscription.owned_partitions}
        if subscription is not None
        else {}
    )


def _convert_to_consumer(
    member: ClassicMember, group: ClassicGroup, assigned: Partitions, revoking: Partitions
) -> SavedMember:
    subscription = _subscription(member, group)
    return SavedMember(
        member.id,
        member.instance_id,
        member.client_id,
        member.client_host,
        member.session_timeout_ms,
        member.rebalance_timeout_ms,
        member.protocols,
        consumer=SavedConsumerState(
            epoch=group.generation,
            previous_epoch=group.generation,
            stage=Stage.REVOKING if revoking else Stage.SETTLED,
            rack_id=subscription.rack_id if subscription is not None else None,
            topics=tuple(sorted(group.topics_of(member))),
            assigned=by_topic(assigned),
            revoking=by_topic(revoking),
            target=by_topic(assigned),
            is_classic=True,
        ),
    )


def downgrade_group(group: ConsumerGroup, settings: GroupSettings, now_ms: int) -> ClassicGroup:
    """Return the group as a group of the classic protocol, with the members that speak it. They must join again."""
    found = ClassicGroup(settings, topics_of)
    found.restore(
        SavedGroup(
            state=GroupState.PREPARING, generation=group.generation, protocol_type=CONSUMER,
            members=tuple(
                SavedMember(
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
