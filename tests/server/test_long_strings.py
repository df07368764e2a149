"""Strings have at most 32,767 bytes in Kafka's protocol: longer ones are refused, and no answer has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.wire_client import Desk

from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated import incremental_alter_configs as incremental
from segmentlog.server.codec.generated.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from segmentlog.server.codec.generated.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from segmentlog.server.codec.generated.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from segmentlog.server.codec.generated.describe_groups import DescribeGroupsRequest
from segmentlog.server.codec.generated.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.frames import BadFrame
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

LONGEST = "x" * 32_767


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Provide a worker of a store with topic t."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    store.create_topic("t")
    settings = ServerSettings(groups=GroupSettings(initial_rebalance_delay_ms=0))
    broker = Broker(store, WorkerCluster("c", [WorkerNode(1, "localhost", 9093)], 1), settings, OpenAuthorizer())
    yield Desk(broker)
    broker.close()


def config(value: str) -> Any:
    """IncrementalAlterConfigs of t: its retention."""
    changes = [incremental.AlterableConfig("retention.ms", 0, value)]
    return incremental.IncrementalAlterConfigsRequest([incremental.AlterConfigsResource(2, "t", changes)])


def join(instance_id: str | None = None, member_id: str = "") -> Any:
    """JoinGroup."""
    return JoinGroupRequest(
        "g", 10_000, 10_000, member_id, instance_id, "consumer", [JoinGroupRequestProtocol("range", b"")]
    )


@pytest.mark.parametrize(
    ("key", "versions", "request_"),
    [
        pytest.param(19, (4, 7), CreateTopicsRequest([CreatableTopic(LONGEST, 1, 1)]), id="a topic's name"),
        pytest.param(
            19, (4, 7), CreateTopicsRequest([CreatableTopic("n", 1, 1, [], [CreatableTopicConfig(LONGEST, "1")])]),
            id="a key",
        ),
        pytest.param(44, (0, 1), config("\1" * 32_767), id="a value that is longer for people"),
        pytest.param(32, (3, 4), DescribeConfigsRequest([DescribeConfigsResource(2, LONGEST, None)]), id="keys"),
        pytest.param(37, (1, 3), CreatePartitionsRequest([CreatePartitionsTopic(LONGEST, 2)]), id="partitions"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_shortly(desk: Desk, key: int, versions: tuple[int, int], request_: Any) -> None:
    """An error that repeats what was said is an answer all the same, and in no version longer than clients can read."""
    for version in versions:
        answer = desk.ask(key, version, request_)
        (told,) = getattr(answer, {19: "topics", 44: "responses"}.get(key, "results"))
        assert told.error_code in (ErrorCode.INVALID_TOPIC_EXCEPTION, ErrorCode.INVALID_CONFIG)
        assert 0 < len(told.error_message) <= 4000


def test_longer_ones_are_not_taken(desk: Desk) -> None:
    """Otherwise other clients would get them in versions that cannot represent them."""
    with pytest.raises(BadFrame, match="a string has 32768 bytes"):
        desk.ask(11, 9, join(LONGEST + "x"))
    assert desk.ask(11, 9, join(LONGEST)).error_code == ErrorCode.NONE
    (group,) = desk.ask(15, 4, DescribeGroupsRequest(["g"])).groups
    assert [one.group_instance_id for one in group.members] == [LONGEST]


def test_members_ids_are_short(desk: Desk) -> None:
    """Member ids are short for any client id: they are sent to other members."""
    client_id = desk.broker.groups.new_member_id(LONGEST)
    assert client_id != desk.broker.groups.new_member_id(LONGEST)
    assert len(client_id) < 400
    (member,) = desk.ask(11, 5, join(LONGEST)).members
    assert len(member.member_id) < 400
