"""Positions of groups in transactions of Kafka's clients: they count with what was written, or not at all."""

from __future__ import annotations

import pytest
from server.transactions.clients import Client, both
from server.wire_client import Desk

from segmentlog.records import TopicPartition
from segmentlog.server.codec.generated.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest, TopicPartitions
from segmentlog.server.codec.generated.heartbeat import HeartbeatRequest
from segmentlog.server.codec.generated.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from segmentlog.server.codec.generated.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from segmentlog.server.codec.generated.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from segmentlog.server.codec.generated.sync_group import SyncGroupRequest
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.topic_ids import wire_id

NONE = ErrorCode.NONE
PROTOCOLS = pytest.mark.parametrize("is_new", [False, True], ids=["old", "new"])


def position(desk: Desk, *, stable: bool = False) -> tuple[int, int]:
    """OffsetFetch: (offset, error) of group g in t/0."""
    topics = [OffsetFetchRequestTopics("t", partition_indexes=[0])]
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup("g", topics=topics)], require_stable=stable)
    told = desk.ask(9, 8, request).groups[0].topics[0].partitions[0]
    return told.committed_offset, told.error_code


@PROTOCOLS
def test_positions_count_with_the_records(desk: Desk, is_new: bool) -> None:
    """While they are pending, requests for stable offsets must be repeated; the library sees the same."""
    client = Client(desk, is_new=is_new)
    client.begin()
    offsets = desk.broker.store.group_offsets
    expected = -1
    for number, committed in enumerate((True, False, True)):
        assert client.write(b"%d" % number) == NONE
        assert client.commit_offset(number + 5) == NONE
        assert position(desk) == (expected, NONE)
        assert position(desk, stable=True) == (-1000, ErrorCode.UNSTABLE_OFFSET_COMMIT)
        assert offsets.pending("g") == {TopicPartition("t", 0)}
        assert client.end(committed=committed) == NONE
        expected = number + 5 if committed else expected
        assert position(desk, stable=True) == (expected, NONE)
        assert offsets.committed("g")[TopicPartition("t", 0)].offset == expected
    assert both(desk) == [b"0", b"2"]


@PROTOCOLS
def test_positions_alone(desk: Desk, is_new: bool) -> None:
    """A transaction may hold nothing else."""
    client = Client(desk, is_new=is_new)
    client.begin()
    assert client.commit_offset(1) == client.commit_offset(2) == client.end() == NONE
    assert position(desk) == (2, NONE)


def test_a_member_of_the_generation(desk: Desk) -> None:
    """A client that names a member must be a current member of this generation; others may commit as well."""
    protocol = JoinGroupRequestProtocol("range", b"\0\0\0\0\0\0\xff\xff\xff\xff")
    request = JoinGroupRequest("g", 10_000, 10_000, protocol_type="consumer", protocols=[protocol])
    joined = desk.ask(11, 3, request)
    assert desk.ask(14, 2, SyncGroupRequest("g", joined.generation_id, joined.member_id)).error_code == 0
    client = Client(desk, is_new=True)
    client.begin()
    member = {"generation_id_or_member_epoch": joined.generation_id, "member_id": joined.member_id}
    assert client.commit_offset(1, **member) == NONE
    assert client.commit_offset(2, **member | {"member_id": "other"}) == ErrorCode.UNKNOWN_MEMBER_ID
    assert client.commit_offset(2, **member | {"generation_id_or_member_epoch": 7}) == ErrorCode.ILLEGAL_GENERATION
    assert client.end() == NONE
    assert position(desk) == (1, NONE)
    assert client.commit_offset(3) == NONE
    assert client.end() == NONE
    assert position(desk) == (3, NONE)
    assert desk.ask(12, 3, HeartbeatRequest("g", joined.generation_id, joined.member_id)).error_code == 0


def test_a_topic_by_its_id(desk: Desk) -> None:
    """The id means the topic under each of its names; of a topic that was deleted and made again it means neither."""
    store = desk.broker.store
    former = wire_id(store.topic("t").id)
    client = Client(desk, is_new=True)
    client.begin()
    store.rename_topic("t", "u")
    assert client.commit_offset(1, topic_id=former) == client.end() == NONE
    assert store.group_offsets.committed("g")[TopicPartition("u", 0)].offset == 1
    store.delete_topic("u")
    store.create_topic("u", 2)
    for wrong in (former, bytes(16), b"\1" * 16):
        assert client.commit_offset(2, topic_id=wrong) == ErrorCode.UNKNOWN_TOPIC_ID
    assert client.commit_offset(3, topic="u") == client.end() == NONE
    found = store.group_offsets.committed("g")
    assert {where: one.offset for where, one in found.items()} == {TopicPartition("u", 0): 3}


@pytest.mark.parametrize("version", [3, 4, 5, 6])
def test_words_that_a_version_has(desk: Desk, version: int) -> None:
    """A stale epoch, and a missing group: clients of older versions get a code that they know.

    After each of these codes a client aborts its transaction. An unknown code ends its producer.
    """
    client = Client(desk, is_new=version >= 5)
    client.begin()
    nobody = {"generation_id_or_member_epoch": 3, "member_id": "m"}
    assert client.commit_offset(1, group="nowhere", version=version, **nobody) == (
        ErrorCode.GROUP_ID_NOT_FOUND if version == 6 else ErrorCode.UNKNOWN_MEMBER_ID
    )
    beat = ConsumerGroupHeartbeatRequest(
        "g", "m", 0, subscribed_topic_names=["t"], rebalance_timeout_ms=5000, topic_partitions=[]
    )
    epoch = desk.ask(68, 1, beat).member_epoch
    assert epoch > 0
    for stale in (epoch - 1, epoch + 1):
        member = {"generation_id_or_member_epoch": stale, "member_id": "m"}
        assert client.commit_offset(1, version=version, **member) == (
            ErrorCode.STALE_MEMBER_EPOCH if version == 6 else ErrorCode.ILLEGAL_GENERATION
        )
    other = {"generation_id_or_member_epoch": epoch, "member_id": "other"}
    assert client.commit_offset(1, version=version, **other) == ErrorCode.UNKNOWN_MEMBER_ID
    member = {"generation_id_or_member_epoch": epoch, "member_id": "m"}
    assert client.commit_offset(7, version=version, **member) == client.end() == NONE
    assert desk.broker.store.group_offsets.committed("g")[TopicPartition("t", 0)].offset == 7


@pytest.mark.parametrize("version", [5, 6])
def test_an_epoch_older_than_the_members(desk: Desk, version: int) -> None:
    """OffsetCommit and TxnOffsetCommit accept it for partitions that the member has held since, and for no other."""
    topic_id = wire_id(desk.broker.store.topic("t").id)

    def beat(member: str, epoch: int, *owned: int) -> int:
        request = ConsumerGroupHeartbeatRequest(
            "g", member, epoch, subscribed_topic_names=["t"], rebalance_timeout_ms=5000,
            topic_partitions=[TopicPartitions(topic_id, list(owned))] if owned else [],
        )  # fmt: skip
        return int(desk.ask(68, 1, request).member_epoch)

    def commit(member: str, epoch: int, *partitions: int) -> list[int]:
        wanted = [OffsetCommitRequestPartition(number, 7) for number in partitions]
        request = OffsetCommitRequest("g", epoch, member, topics=[OffsetCommitRequestTopic("t", partitions=wanted)])
        return [one.error_code for one in desk.ask(8, 9, request).topics[0].partitions]

    former = beat("a", 0)
    beat("b", 0)
    beat("a", former, 0, 1)
    assert beat("a", former, 0) > former
    client = Client(desk, is_new=True)
    client.begin()
    member = {"generation_id_or_member_epoch": former, "member_id": "a", "version": version}
    stale = ErrorCode.STALE_MEMBER_EPOCH
    in_words = stale if version == 6 else ErrorCode.ILLEGAL_GENERATION
    assert client.commit_offset(5, partition=1, **member) == in_words
    assert client.commit_offset(5, **member) == client.end() == NONE
    assert position(desk) == (5, NONE)
    assert commit("a", former, 0, 1) == [stale, stale]
    assert position(desk) == (5, NONE)
    assert commit("a", former, 0) == [NONE]
    assert position(desk) == (7, NONE)


def test_members_of_the_library_keep_others_out(desk: Desk) -> None:
    """A group has members of one kind; those commit its positions."""
    store = desk.broker.store
    client = Client(desk, is_new=True)
    client.begin()
    with store.consumer("t", group="g") as consumer:
        list(consumer)
        assert client.commit_offset(1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert client.end(committed=False) == NONE


def test_late_positions(desk: Desk) -> None:
    """Offsets that arrive after their transaction are rejected, in either protocol."""
    for is_new in (False, True):
        client = Client(desk, f"app-{is_new}", is_new=is_new)
        client.begin()
        numbers = client.numbers
        assert client.commit_offset(1) == client.end() == NONE
        client.numbers = numbers
        late = client.send_offset(9, group="g", topic="t", partition=0)
        assert late == (ErrorCode.INVALID_PRODUCER_EPOCH if is_new else ErrorCode.INVALID_TXN_STATE)
        assert position(desk, stable=True) == (1, NONE)


def test_what_is_no_position(desk: Desk) -> None:
    """Invalid offsets, and partitions that do not exist, are refused; a valid one in the request is accepted."""
    client = Client(desk, is_new=True)
    client.begin()
    assert client.commit_offset(1, topic="nowhere") == ErrorCode.UNKNOWN_TOPIC_ID
    assert client.commit_offset(1, topic="nowhere", version=5) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert client.commit_offset(1, partition=2) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert client.commit_offset(-1) == ErrorCode.INVALID_COMMIT_OFFSET_SIZE
    assert client.commit_offset(7) == client.end() == NONE
    assert position(desk) == (7, NONE)
