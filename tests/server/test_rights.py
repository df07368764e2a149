"""A user with one right sees only the objects of that right, in every API that lists or describes.

`test_leaks` asks every API in every version about one hidden object; here each kind of object has its users.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rights_world import SECRETS, TOPIC, USERS, World, fill, principal, shown
from server.wire_client import Desk, message, request_bytes

from segmentlog.security.principals import ResourceType
from segmentlog.server.api_table import HANDLERS
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.groups.subscriptions import partitions_of, topics_of
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.topic_ids import wire_id
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode

_TOPICS = ("open", "hidden-topic", "_schemas", "__consumer_offsets", "__transaction_state")
_GROUPS = ("open-group", "hidden-group")
_NAMES = ("open-txn", "hidden-txn", "hidden-producer")
_ANY = 1


def _of(key: int) -> Callable[..., Any]:
    """Return a function that creates messages of an API."""
    return lambda name, /, **fields: message(key, name)(**fields)


def _metadata(world: World) -> Iterator[Any]:
    make = _of(3)
    yield make("MetadataRequest", topics=None)
    for topic in _TOPICS:
        yield make("MetadataRequest", topics=[make("MetadataRequestTopic", name=topic)])
    for topic in ("open", "hidden-topic"):
        topic_id = wire_id(world.store.topic(topic).id)
        yield make("MetadataRequest", topics=[make("MetadataRequestTopic", topic_id=topic_id, name=None)])


def _fetch(world: World) -> Iterator[Any]:
    make = _of(1)
    for topic in ("open", "hidden-topic", "_schemas"):
        topic_id = wire_id(world.store.topic(topic).id)
        partitions = [make("FetchPartition", partition=0, partition_max_bytes=1 << 20)]
        yield make("FetchRequest", topics=[make("FetchTopic", topic_id=topic_id, partitions=partitions)])


def _list_offsets(world: World) -> Iterator[Any]:
    make = _of(2)
    for topic in _TOPICS:
        partitions = [make("ListOffsetsPartition", partition_index=0, timestamp=-1)]
        yield make("ListOffsetsRequest", topics=[make("ListOffsetsTopic", name=topic, partitions=partitions)])


def _offset_fetch(world: World) -> Iterator[Any]:
    make = _of(9)
    for group in _GROUPS:
        yield make("OffsetFetchRequest", groups=[make("OffsetFetchRequestGroup", group_id=group, topics=None)])


def _find_coordinator(world: World) -> Iterator[Any]:
    make = _of(10)
    yield make("FindCoordinatorRequest", key_type=0, coordinator_keys=list(_GROUPS))
    yield make("FindCoordinatorRequest", key_type=1, coordinator_keys=list(_NAMES))


def _each(key: int, field: str, names: tuple[str, ...]) -> Callable[[World], Iterator[Any]]:
    """Yield one request for each name, in a list of texts."""

    def make(world: World) -> Iterator[Any]:
        for name in names:
            yield _of(key)(f"{APIS[key].name}Request", **{field: [name]})

    return make


def _plain(key: int, **fields: Any) -> Callable[[World], Iterator[Any]]:
    return lambda world: iter([_of(key)(f"{APIS[key].name}Request", **fields)])


def _create_topics(world: World) -> Iterator[Any]:
    make = _of(19)
    for topic in ("open", "another"):
        configs = [make("CreatableTopicConfig", name="retention.ms", value="123456789")]
        topics = [make("CreatableTopic", name=topic, num_partitions=1, replication_factor=1, configs=configs)]
        yield make("CreateTopicsRequest", topics=topics, validate_only=True)


def _describe_acls(world: World) -> Iterator[Any]:
    yield _of(29)(
        "DescribeAclsRequest", resource_type_filter=_ANY, resource_name_filter=None, pattern_type_filter=_ANY,
        principal_filter=None, host_filter=None, operation=_ANY, permission_type=_ANY,
    )  # fmt: skip


def _describe_configs(world: World) -> Iterator[Any]:
    make = _of(32)
    group_type = 32
    named = [(int(ResourceType.TOPIC), topic) for topic in _TOPICS]
    for kind, name in (*named, *((group_type, group) for group in _GROUPS), (int(ResourceType.CLUSTER), "1")):
        resource = make("DescribeConfigsResource", resource_type=kind, resource_name=name, configuration_keys=None)
        yield make("DescribeConfigsRequest", resources=[resource])


def _describe_producers(world: World) -> Iterator[Any]:
    make = _of(61)
    for topic in _TOPICS:
        yield make("DescribeProducersRequest", topics=[make("TopicRequest", name=topic, partition_indexes=[0])])


def _epochs(world: World) -> Iterator[Any]:
    make = _of(23)
    for topic in _TOPICS:
        topics = [make("OffsetForLeaderTopic", topic=topic, partitions=[make("OffsetForLeaderPartition")])]
        yield make("OffsetForLeaderEpochRequest", topics=topics)


def _partitions(world: World) -> Iterator[Any]:
    make = _of(75)
    yield make("DescribeTopicPartitionsRequest")
    for topic in _TOPICS:
        yield make("DescribeTopicPartitionsRequest", topics=[make("TopicRequest", name=topic)])


ASKS: dict[int, Callable[[World], Iterator[Any]]] = {
    1: _fetch, 2: _list_offsets, 3: _metadata, 9: _offset_fetch, 10: _find_coordinator,
    15: _each(15, "groups", _GROUPS), 16: _plain(16), 19: _create_topics, 23: _epochs, 29: _describe_acls,
    32: _describe_configs, 35: _plain(35, topics=None), 46: _plain(46), 60: _plain(60), 61: _describe_producers,
    65: _each(65, "transactional_ids", _NAMES), 66: _plain(66), 69: _each(69, "group_ids", _GROUPS), 75: _partitions,
}  # fmt: skip
"""APIs that list or describe, and what is asked of them."""
CHANGES = {0, 8, 11, 12, 13, 14, 17, 18, 20, 21, 22, 24, 25, 26, 27, 28, 30, 31, 33, 36, 37, 42, 44, 47, 68}
"""APIs that change something, or reveal nothing that exists: `test_leaks` and the test of assignments cover them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a store that is filled once, and that no test changes."""
    made = tmp_path_factory.mktemp("rights")
    fill(made)
    return made


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    """Yield the world, with an open store."""
    made = World(folder)
    yield made
    made.close()


@pytest.fixture
def broker(world: World) -> Iterator[Broker]:
    """Yield the only worker."""
    groups = GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=1)
    settings = ServerSettings(groups=groups, auto_create=False)
    made = Broker(world.store, WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1), settings, world.authorizer)
    yield made
    made.close()


def test_every_api_is_asked() -> None:
    """A new API must state here whether its response reveals anything."""
    assert set(ASKS) | CHANGES == set(HANDLERS)
    assert not set(ASKS) & CHANGES


@pytest.mark.parametrize("name", USERS)
def test_who_has_a_right_is_shown_that_and_nothing_else(world: World, broker: Broker, name: str) -> None:
    """No answer shows objects that the rules deny, and some API shows the allowed ones."""
    user, desk = USERS[name], Desk(broker, principal(name))
    allowed = user.sees | user.over_kafka
    seen: set[str] = set()
    for key, make in ASKS.items():
        version = APIS[key].max_version
        for request in make(world):
            asked = request_bytes(key, version, request, 7)[4:]
            answer = desk.ask_bytes(asked)
            assert answer is not None
            found = shown(answer)
            seen |= found & allowed
            for kind in found - allowed:
                marks = [mark for mark in SECRETS[kind] if mark in answer and mark not in asked]
                assert not marks, f"{APIS[key]}: {kind} for {name}: {request}\n{answer!r}"
    # A request for a configuration names the topic, and the answer has no other one.
    assert seen >= allowed - ({TOPIC} if "configs" in name else set())


def _subscription(*topics: str) -> bytes:
    named = b"".join(struct.pack(">h", len(topic)) + topic.encode() for topic in topics)
    return struct.pack(">hi", 1, len(topics)) + named + struct.pack(">ii", -1, 0)


def test_a_group_assigns_no_topic_that_a_member_may_not_describe(broker: Broker) -> None:
    """A classic member of a group of the consumer protocol would learn that the topic exists."""
    desk = Desk(broker, principal("open-things"))
    beat = _of(68)(
        "ConsumerGroupHeartbeatRequest", group_id="rest-group", member_id="m1", member_epoch=0,
        rebalance_timeout_ms=10_000, subscribed_topic_names=["open"], topic_partitions=[],
    )  # fmt: skip
    assert desk.ask(68, 0, beat).error_code == ErrorCode.NONE

    def assigned_to(who: str, *topics: str) -> dict[str, list[int]]:
        protocols = [_of(11)("JoinGroupRequestProtocol", name="range", metadata=_subscription(*topics))]
        join = _of(11)(
            "JoinGroupRequest", group_id="rest-group", session_timeout_ms=10_000, rebalance_timeout_ms=10_000,
            protocol_type="consumer", protocols=protocols,
        )  # fmt: skip
        member = Desk(broker, principal(who))
        joined = member.ask(11, 3, join)
        assert joined.error_code == ErrorCode.NONE
        sync = _of(14)("SyncGroupRequest", group_id="rest-group", generation_id=joined.generation_id,
                       member_id=joined.member_id)  # fmt: skip
        found = partitions_of("consumer", bytes(member.ask(14, 2, sync).assignment))
        leave = _of(13)("LeaveGroupRequest", group_id="rest-group", member_id=joined.member_id)
        assert member.ask(13, 0, leave).error_code == ErrorCode.NONE
        return found

    assert assigned_to("open-things", "hidden-topic") == {}
    assert assigned_to("open-things", "no-such-topic") == {}
    assert assigned_to("super", "hidden-topic") == {"hidden-topic": [0, 1]}


def test_a_description_of_a_group_leaves_out_hidden_topics(broker: Broker) -> None:
    """Subscriptions and assignments of members contain only topics that the client may describe."""

    def described(who: str) -> tuple[set[str], set[str]]:
        request = _of(15)("DescribeGroupsRequest", groups=["open-group"])
        (group,) = Desk(broker, principal(who)).ask(15, 5, request).groups
        (member,) = group.members
        return (
            set(topics_of("consumer", bytes(member.member_metadata))),
            set(partitions_of("consumer", bytes(member.member_assignment))),
        )

    assert described("open-things") == ({"open"}, {"open"})
    assert described("super") == ({"open", "hidden-topic"}, {"open", "hidden-topic"})
