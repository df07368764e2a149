"""Decodes and encodes the metadata of protocol type ``consumer``, which the server shows to tools.

For itself, the server uses subscriptions only to decide which members must join again and which topics are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from segmentlog.groups.server_group_file import SavedGroup
from segmentlog.server.codec.generated import consumer_protocol
from segmentlog.server.codec.generated.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    TopicPartition,
)

CONSUMER: Final = "consumer"
_VERSION: Final = 0
"""Version of the bytes that this module encodes. No client needs the fields of later versions."""
_NEWEST: Final = 3
"""The newest version that can be decoded. Bytes of a newer version are decoded as this version."""


def topics_of(protocol_type: str, metadata: bytes) -> tuple[str, ...]:
    """Return the topics that a member subscribes to; empty if they are unknown."""
    if protocol_type != CONSUMER:
        return ()
    try:
        return tuple(consumer_protocol.decode_subscription(memoryview(metadata))[1].topics)
    except Exception:  # a client may send any bytes as metadata
        return ()


def subscription_of(metadata: bytes) -> ConsumerProtocolSubscription | None:
    """Return the subscription of a member of protocol type ``consumer``; None if it cannot be decoded."""
    try:
        return consumer_protocol.decode_subscription(memoryview(metadata))[1]
    except Exception:  # a client may send any bytes
        return None


def partitions_of(protocol_type: str, assignment: bytes) -> dict[str, list[int]]:
    """Return the partitions that a member is assigned, by topic name; empty if they cannot be decoded."""
    if protocol_type != CONSUMER or not assignment:
        return {}
    try:
        decoded = consumer_protocol.decode_assignment(memoryview(assignment))[1]
    except Exception:  # a client may send any bytes
        return {}
    return {part.topic: list(part.partitions) for part in decoded.assigned_partitions}


def visible_subscription(
    protocol_type: str, metadata: bytes, may_see: Callable[[str], bool], *, sees_cluster: bool
) -> bytes:
    """Return a member's metadata without topics that the viewer may not see.

    User data of an assignor may name any topic, so only a viewer with ``sees_cluster`` gets it; the same holds for
    bytes that cannot be decoded. The bytes of other protocol types name no topics, so return them unchanged.
    """
    if protocol_type != CONSUMER:
        return metadata
    try:
        version, subscription = consumer_protocol.decode_subscription(memoryview(metadata))
    except Exception:  # a client may send any bytes
        return metadata if sees_cluster else b""
    topics = list(filter(may_see, subscription.topics))
    owned = [part for part in subscription.owned_partitions if may_see(part.topic)]
    if sees_cluster and len(topics) == len(subscription.topics) and len(owned) == len(subscription.owned_partitions):
        return metadata
    seen = msgspec.structs.replace(subscription, topics=topics, owned_partitions=owned, user_data=None)
    return consumer_protocol.encode_subscription(seen, min(version, _NEWEST))


def visible_assignment(
    protocol_type: str, assignment: bytes, may_see: Callable[[str], bool], *, sees_cluster: bool
) -> bytes:
    """Return a member's assignment without topics that the viewer may not see, as `visible_subscription` does."""
    if protocol_type != CONSUMER:
        return assignment
    try:
        version, subscription = consumer_protocol.decode_assignment(memoryview(assignment))
    except Exception:  # a client may send any bytes
        return assignment if sees_cluster else b""
    partitions = [part for part in subscription.assigned_partitions if may_see(part.topic)]
    if sees_cluster and len(partitions) == len(subscription.assigned_partitions):
        return assignment
    seen = msgspec.structs.replace(subscription, assigned_partitions=partitions, user_data=None)
    return consumer_protocol.encode_assignment(seen, min(version, _NEWEST))


def with_descriptions(group: SavedGroup) -> SavedGroup:
    """Return the group with the topics and partitions of each member, for people who read the saved file."""
    if group.is_consumer:
        return group  # has them already
    members = tuple(
        msgspec.structs.replace(
            member,
            topics=topics_of(group.protocol_type, dict(member.protocols).get(group.protocol, b"")),
            partitions=partitions_of(group.protocol_type, member.assignment),
        )
        for member in group.members
    )
    return msgspec.structs.replace(group, members=members)


def encode_topics(topics: tuple[str, ...]) -> bytes:
    """Encode a subscription, for members of library groups that Kafka's tools display."""
    return consumer_protocol.encode_subscription(ConsumerProtocolSubscription(topics=list(topics)), _VERSION)


def encode_partitions(partitions: Mapping[str, list[int]]) -> bytes:
    """Encode an assignment, for members of library groups that Kafka's tools display."""
    assigned = [TopicPartition(topic=topic, partitions=numbers) for topic, numbers in partitions.items()]
    return consumer_protocol.encode_assignment(ConsumerProtocolAssignment(assigned_partitions=assigned), _VERSION)
