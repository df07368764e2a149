"""The part that a user may see of the bytes that members of a group exchange."""

from __future__ import annotations

import pytest

from segmentlog.server.codec.generated.consumer_protocol import (
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    TopicPartition,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from segmentlog.server.groups.subscriptions import visible_assignment, visible_subscription

SEEN, HIDDEN = "seen", "hidden"


def may_see(topic: str) -> bool:
    """Return whether the user may describe a topic."""
    return topic == SEEN


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("sees_cluster", [False, True])
def test_no_field_of_a_subscription_names_a_hidden_topic(version: int, sees_cluster: bool) -> None:
    """Its owned partitions and the data of its assignor are hidden, although it subscribes to no hidden topic."""
    owned = [TopicPartition(topic=topic, partitions=[0]) for topic in (SEEN, HIDDEN)] if version else []
    said = ConsumerProtocolSubscription(topics=[SEEN], user_data=b"sticky: hidden", owned_partitions=owned)
    shown = visible_subscription("consumer", encode_subscription(said, version), may_see, sees_cluster=sees_cluster)
    if version or not sees_cluster:
        assert HIDDEN.encode() not in shown
    found_version, found = decode_subscription(memoryview(shown))
    assert (found_version, found.topics) == (version, [SEEN])
    assert [one.topic for one in found.owned_partitions] == ([SEEN] if version else [])


@pytest.mark.parametrize("version", range(4))
def test_no_field_of_an_assignment_names_a_hidden_topic(version: int) -> None:
    """Streams puts the partitions of other members into its data."""
    said = ConsumerProtocolAssignment([TopicPartition(topic=SEEN, partitions=[1])], b"streams: hidden")
    shown = visible_assignment("consumer", encode_assignment(said, version), may_see, sees_cluster=False)
    assert HIDDEN.encode() not in shown
    assert decode_assignment(memoryview(shown))[1].assigned_partitions == said.assigned_partitions


def test_a_version_that_is_newer_than_known_is_shown_as_the_newest() -> None:
    """Unknown fields are left out: they could name a hidden topic."""
    said = encode_subscription(ConsumerProtocolSubscription(topics=[SEEN]), 3)
    shown = visible_subscription("consumer", b"\0\7" + said[2:] + b"hidden", may_see, sees_cluster=False)
    assert shown == said
    given = encode_assignment(ConsumerProtocolAssignment([TopicPartition(SEEN, [1])]), 3)
    assert visible_assignment("consumer", b"\0\7" + given[2:] + b"hidden", may_see, sees_cluster=False) == given


def test_who_may_describe_the_cluster_sees_the_bytes_as_they_are() -> None:
    """The bytes stay unchanged if they name no hidden topic.

    Other kinds of groups, whose bytes name no topics, are always shown.
    """
    subscription = encode_subscription(ConsumerProtocolSubscription(topics=[SEEN], user_data=b"data"), 3)
    assignment = encode_assignment(ConsumerProtocolAssignment([TopicPartition(SEEN, [1])], b"data"), 3)
    assert visible_subscription("consumer", subscription, may_see, sees_cluster=True) == subscription
    assert visible_assignment("consumer", assignment, may_see, sees_cluster=True) == assignment
    assert visible_subscription("connect", b"data", may_see, sees_cluster=False) == b"data"


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\x63hidden", b"\0\0\0\0\0\1\0\x63hidden"])
def test_bytes_that_nobody_understands_are_shown_to_those_who_may_describe_the_cluster(data: bytes) -> None:
    """The bytes could name any topic."""
    for show in (visible_subscription, visible_assignment):
        assert show("consumer", data, may_see, sees_cluster=True) == data
        assert show("consumer", data, may_see, sees_cluster=False) == b""
