"""What clients of protocol type ``consumer`` say to each other, as far as the server shows it. It decides nothing by it
but who has to join again, and what topics are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from segmentlog.groups.server_group_file import RemoteGroup
from segmentlog.server.codec.generated import consumer_protocol
from segmentlog.server.codec.generated.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    TopicPartition,
)

CONSUMER: Final = "consumer"
_VERSION: Final = 0
"""That of what is encoded here: nobody needs more of it."""
_NEWEST: Final = 3
"""A newer version is read as this one."""


def topics_of(protocol_type: str, metadata: bytes) -> tuple[str, ...]:
    """The topics that a member subscribes to; empty when nobody can tell."""
    if protocol_type != CONSUMER:
        return ()
    try:
        return tuple(consumer_protocol.decode_subscription(memoryview(metadata))[1].topics)
    except Exception:  # a client may write there what it likes
        return ()


def subscription_of(metadata: bytes) -> ConsumerProtocolSubscription | None:
    """What a member of protocol type ``consumer`` says; None when nobody can tell."""
    try:
        return consumer_protocol.decode_subscription(memoryview(metadata))[1]
    except Exception:  # as above
        return None


def partitions_of(protocol_type: str, assignment: bytes) -> dict[str, list[int]]:
    """What a member was assigned; empty when nobody can tell."""
    if protocol_type != CONSUMER or not assignment:
        return {}
    try:
        decoded = consumer_protocol.decode_assignment(memoryview(assignment))[1]
    except Exception:  # as above
        return {}
    return {one.topic: list(one.partitions) for one in decoded.assigned_partitions}


def visible_subscription(
    protocol_type: str, metadata: bytes, may_see: Callable[[str], bool], *, sees_cluster: bool
) -> bytes:
    """Return what a member subscribes to, without topics that the viewer may not see.

    The data of an assignor may name any topic, so only a viewer that ``sees_cluster`` gets it, and bytes that are not
    understood. Members of other protocol types name no topics: their bytes are returned as they are.
    """
    if protocol_type != CONSUMER:
        return metadata
    try:
        version, said = consumer_protocol.decode_subscription(memoryview(metadata))
    except Exception:  # as above
        return metadata if sees_cluster else b""
    topics = list(filter(may_see, said.topics))
    owned = [one for one in said.owned_partitions if may_see(one.topic)]
    if sees_cluster and len(topics) == len(said.topics) and len(owned) == len(said.owned_partitions):
        return metadata
    seen = msgspec.structs.replace(said, topics=topics, owned_partitions=owned, user_data=None)
    return consumer_protocol.encode_subscription(seen, min(version, _NEWEST))


def visible_assignment(
    protocol_type: str, assignment: bytes, may_see: Callable[[str], bool], *, sees_cluster: bool
) -> bytes:
    """Return what a member was assigned, likewise."""
    if protocol_type != CONSUMER:
        return assignment
    try:
        version, said = consumer_protocol.decode_assignment(memoryview(assignment))
    except Exception:  # as above
        return assignment if sees_cluster else b""
    partitions = [one for one in said.assigned_partitions if may_see(one.topic)]
    if sees_cluster and len(partitions) == len(said.assigned_partitions):
        return assignment
    seen = msgspec.structs.replace(said, assigned_partitions=partitions, user_data=None)
    return consumer_protocol.encode_assignment(seen, min(version, _NEWEST))


def with_descriptions(group: RemoteGroup) -> RemoteGroup:
    """The same, with what each member reads, for people who look at the file."""
    if group.is_consumer:
        return group  # which knows what it assigns
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
    """A subscription, for members of the library that Kafka's tools are shown."""
    return consumer_protocol.encode_subscription(ConsumerProtocolSubscription(topics=list(topics)), _VERSION)


def encode_partitions(partitions: Mapping[str, list[int]]) -> bytes:
    """An assignment, likewise."""
    assigned = [TopicPartition(topic=topic, partitions=numbers) for topic, numbers in partitions.items()]
    return consumer_protocol.encode_assignment(ConsumerProtocolAssignment(assigned_partitions=assigned), _VERSION)
