"""What clients of protocol type ``consumer`` say to each other, as far as the server shows it. It decides nothing by it
but who has to join again, and what topics are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from segmentlog.groups.remote import RemoteGroup
from segmentlog.server.codec.messages import consumer_protocol
from segmentlog.server.codec.messages.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    TopicPartition,
)

CONSUMER: Final = "consumer"
_VERSION: Final = 0
"""That of what is encoded here: nobody needs more of it."""


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


def visible_subscription(protocol_type: str, metadata: bytes, may_see: Callable[[str], bool]) -> bytes:
    """What a member subscribes to, without topics that somebody may not see; the same bytes where there are none."""
    topics = topics_of(protocol_type, metadata)
    seen = tuple(filter(may_see, topics))
    return metadata if seen == topics else encode_topics(seen)


def visible_assignment(protocol_type: str, assignment: bytes, may_see: Callable[[str], bool]) -> bytes:
    """What a member was assigned, likewise."""
    partitions = partitions_of(protocol_type, assignment)
    seen = {topic: numbers for topic, numbers in partitions.items() if may_see(topic)}
    return assignment if seen == partitions else encode_partitions(seen)


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
