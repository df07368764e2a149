"""Requests about many things: each is answered, what it takes is bounded, and what is asked for twice is answered once.

SEGMENTLOG_SERVER_PARTITIONS  partitions of one fetch
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.memory import Memory
from server.test_limits import MakeServer, is_served, make_server, producing
from server.wire_client import Desk, Refused, WireClient, request_bytes
from wire import Sent, foreign

from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.server.api_table import SERVED
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated.create_topics import CreatableTopic, CreateTopicsRequest
from segmentlog.server.codec.generated.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from segmentlog.server.codec.generated.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from segmentlog.server.codec.generated.describe_groups import DescribeGroupsRequest
from segmentlog.server.codec.generated.describe_log_dirs import DescribableLogDirTopic, DescribeLogDirsRequest
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic, ForgottenTopic
from segmentlog.server.codec.generated.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from segmentlog.server.codec.generated.metadata import MetadataRequest, MetadataRequestTopic
from segmentlog.server.codec.generated.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from segmentlog.server.codec.generated.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.codec.primitives import ELEMENTS_MAX, uvarint
from segmentlog.server.frames import BadFrame
from segmentlog.server.server_settings import Limits, ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore
from segmentlog.topics.topic_folders import TopicFolders

__all__ = ["make_server"]

PARTITIONS = int(os.environ.get("SEGMENTLOG_SERVER_PARTITIONS", "10000"))
MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk(tmp_path: Path) -> Iterator[MakeDesk]:
    """Provide a broker with limits, over a store with topic t of ``partitions`` partitions."""
    brokers: list[Broker] = []

    def make(partitions: int = 1, **limits: Any) -> Desk:
        store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
        store.create_topic("t", partitions)
        settings = ServerSettings(limits=Limits(**limits))
        brokers.append(
            Broker(store, WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1), settings, OpenAuthorizer())
        )
        return Desk(brokers[-1])

    yield make
    for broker in brokers:
        broker.close()


# ---------------------------------------------------------------- bytes of a request


@pytest.mark.parametrize("key", [key for key in SERVED if key])
def test_only_produce_may_be_large(make_server: MakeServer, key: int) -> None:
    """Other requests are refused once their length and API are known, before a buffer is allocated."""
    server = make_server(control_request_bytes=100_000)
    head = key.to_bytes(2, "big") + APIS[key].max_version.to_bytes(2, "big")
    with WireClient(server.bootstrap_servers) as client:
        client.raw((100_001).to_bytes(4, "big") + head)
        assert client.is_closed_by_peer()
    with WireClient(server.bootstrap_servers) as client:
        client.raw((100_000).to_bytes(4, "big") + head + bytes(20_000))
        client.sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.frame()


def test_produce_may_be_as_large_as_ever(make_server: MakeServer) -> None:
    """This also holds if its first bytes come one by one."""
    server = make_server(control_request_bytes=1000)
    data = request_bytes(0, 7, producing(1, foreign([Sent(b"k", os.urandom(500_000))])), 1)
    with WireClient(server.bootstrap_servers) as client:
        for at in range(8):
            client.raw(data[at : at + 1])
        client.raw(data[8:])
        client._expected.append((1, 0, 7))
        assert client.answer().responses[0].partition_responses[0].error_code == 0
        client.raw(data[:5])
    assert is_served(server)


# ---------------------------------------------------------------- elements of a request


def listing(count: int) -> bytes:
    """Return a request about ``count`` topics without names, of three bytes each."""
    head = request_bytes(35, 2, DescribeLogDirsRequest(topics=[]), 7)[4:-2]
    return head + uvarint(count + 1) + b"\x01\x01\0" * count + b"\0"


def test_listing_is_a_request() -> None:
    """This shows that the tests below are effective."""
    made = request_bytes(35, 2, DescribeLogDirsRequest(topics=[DescribableLogDirTopic()] * 200), 7)[4:]
    assert listing(200) == made


def test_elements_of_a_request_are_bounded(make_desk: MakeDesk) -> None:
    """This holds for elements of few bytes; the maximal number of elements takes tens of megabytes."""
    desk = make_desk()
    frame = listing(ELEMENTS_MAX)
    memory = Memory()
    assert desk.ask_bytes(frame) is not None
    with pytest.raises(BadFrame, match="elements"):
        desk.ask_bytes(listing(ELEMENTS_MAX + 1))
    with pytest.raises(BadFrame, match="elements"):
        desk.ask_bytes(listing(20_000_000))
    assert memory.peak() < 200 << 20


# ---------------------------------------------------------------- the same asked for again


def test_configs_asked_for_twice_are_told_once(make_desk: MakeDesk) -> None:
    """They come in the order of the request; a request for other keys is a different one."""
    desk = make_desk()
    named = DescribeConfigsResource(2, "t", ["retention.ms"])
    resources = [DescribeConfigsResource(2, "t", None), named, DescribeConfigsResource(2, "u", None)]
    answer = desk.ask(32, 4, DescribeConfigsRequest(resources * 1000))
    assert [one.resource_name for one in answer.results] == ["t", "t", "u"]
    assert [len(one.configs) > 1 for one in answer.results] == [True, False, False]


def test_a_topic_is_described_once_however_it_is_named(make_desk: MakeDesk) -> None:
    """Its name, its id, and its id with wrong names count as one topic."""
    desk = make_desk(3)
    topic_id = uuid.UUID(desk.broker.store.topic("t").id).bytes
    named = [MetadataRequestTopic(topic_id, name) for name in (None, "t", "u", "v")]
    answer = desk.ask(3, 12, MetadataRequest(topics=[*named, MetadataRequestTopic(name="t")]))
    (told,) = answer.topics
    assert (told.name, len(told.partitions)) == ("t", 3)


def test_an_id_tells_no_name_to_who_may_not_see_it(tmp_path: Path, make_desk: MakeDesk) -> None:
    """A hidden topic by its id and by its name is answered twice, as two things that the client cannot connect."""
    desk = make_desk()
    topic_id = uuid.UUID(desk.broker.store.topic("t").id).bytes
    (tmp_path / "rules").write_text("")
    desk.broker.authorizer = Authorizer(str(tmp_path / "rules"))
    asked = [MetadataRequestTopic(topic_id, None), MetadataRequestTopic(name="t")]
    codes = [one.error_code for one in desk.ask(3, 12, MetadataRequest(topics=asked)).topics]
    assert codes == [ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.TOPIC_AUTHORIZATION_FAILED]


def test_unknown_ids_are_looked_for_once(make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lookup reads the files of all topics, and a request may have half a million ids."""
    desk, looks = make_desk(), []
    by_id = TopicFolders.by_id
    monkeypatch.setattr(TopicFolders, "by_id", lambda self: looks.append(1) or by_id(self))
    topic_id = uuid.UUID(desk.broker.store.topic("t").id).bytes
    ids = [*(number.to_bytes(16, "big") for number in range(1, 50)), topic_id]
    answer = desk.ask(3, 12, MetadataRequest(topics=[MetadataRequestTopic(one, None) for one in ids]))
    assert [one.error_code for one in answer.topics] == [ErrorCode.UNKNOWN_TOPIC_ID] * 49 + [0]
    assert len(looks) == 1


def test_only_this_broker_is_described(make_desk: MakeDesk) -> None:
    """Another id is refused as in Kafka."""
    resources = [DescribeConfigsResource(4, name, None) for name in ("1", "", "2", "x")]
    answer = make_desk().ask(32, 4, DescribeConfigsRequest(resources))
    assert [one.error_code for one in answer.results] == [0, 0, ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST]
    assert answer.results[2].error_message == "Unexpected broker id, expected 1 or empty string, but received 2"


def test_what_has_no_room_in_the_answer_is_an_error(make_desk: MakeDesk) -> None:
    """Each API that describes much returns what comes before it; CreateTopics returns what it created regardless."""
    desk = make_desk(3, answer_elements=100, answer_config_bytes=2500)
    desk.broker.store.create_topic("wide", 101)
    resources = [DescribeConfigsResource(2, "t", None), DescribeConfigsResource(2, "wide", None)] * 2
    answer = desk.ask(32, 4, DescribeConfigsRequest(resources))
    assert [one.error_code for one in answer.results] == [0, ErrorCode.POLICY_VIOLATION]
    assert "request fewer elements" in answer.results[1].error_message
    answer = desk.ask(3, 12, MetadataRequest(topics=None))
    assert {one.name: one.error_code for one in answer.topics} == {"t": 0, "wide": ErrorCode.POLICY_VIOLATION}
    made = desk.ask(19, 7, CreateTopicsRequest([CreatableTopic(name, 1, 1) for name in ("a", "b", "c")]))
    assert [one.error_code for one in made.topics] == [0, 0, 0]
    assert [one.configs is None for one in made.topics] == [False, True, True]


@pytest.mark.parametrize("key", [2, 21])
def test_two_wishes_for_a_partition_are_refused(make_desk: MakeDesk, key: int) -> None:
    """ListOffsets of several times, as in Kafka, and DeleteRecords up to several offsets; the same twice is once."""
    desk = make_desk(2)
    if key == 2:
        parts = [
            ListOffsetsPartition(number, -1, timestamp) for number, timestamp in ((0, -1), (1, -1), (0, 5), (1, -1))
        ]
        answer = desk.ask(2, 5, ListOffsetsRequest(-1, 0, [ListOffsetsTopic("t", [one]) for one in parts]))
    else:
        wishes = [DeleteRecordsPartition(number, offset) for number, offset in ((0, 0), (1, 0), (0, -1), (1, 0))]
        answer = desk.ask(21, 2, DeleteRecordsRequest([DeleteRecordsTopic("t", [one]) for one in wishes]))
    (topic,) = answer.topics
    told = [(one.partition_index, one.error_code) for one in topic.partitions]
    assert sorted(told) == [(0, ErrorCode.INVALID_REQUEST), (1, 0)]


@pytest.mark.parametrize("version", range(7))
def test_groups_asked_for_twice_are_told_once(make_desk: MakeDesk, version: int) -> None:
    """This holds in every version of DescribeGroups."""
    answer = make_desk().ask(15, version, DescribeGroupsRequest(["g", "h"] * 1000))
    assert [one.group_id for one in answer.groups] == ["g", "h"]


@pytest.mark.parametrize("version", range(1, 11))
def test_positions_asked_for_twice_are_told_once(make_desk: MakeDesk, version: int) -> None:
    """A group or topic is answered once with everything that the request asks about it; metadata may be 4 KB each."""
    desk = make_desk(3)
    topic_id = bytes.fromhex(desk.broker.store.topic("t").id.replace("-", ""))
    partitions = [OffsetCommitRequestPartition(number, 7, committed_metadata="m" * 4000) for number in range(3)]
    desk.ask(8, 2, OffsetCommitRequest("g", topics=[OffsetCommitRequestTopic("t", partitions=partitions)]))
    numbers = [0, 1, 0] * 1000
    if version < 8:
        topics = [OffsetFetchRequestTopic("t", numbers), OffsetFetchRequestTopic("t", [2, 0])]
        answer = desk.ask(9, version, OffsetFetchRequest("g", topics))
    else:
        name, named_by_id = ("t", bytes(16)) if version < 10 else ("", topic_id)
        asked = [OffsetFetchRequestTopics(name, named_by_id, some) for some in (numbers, [2, 0])]
        groups = [OffsetFetchRequestGroup("g", topics=[one]) for one in asked]
        (answer,) = desk.ask(9, version, OffsetFetchRequest(groups=groups)).groups
    (told,) = answer.topics
    assert [one.partition_index for one in told.partitions] == [0, 1, 2]
    assert [one.committed_offset for one in told.partitions] == [7, 7, 7]
    if version >= 8:
        groups += [OffsetFetchRequestGroup("g", topics=None)]
        (answer,) = desk.ask(9, version, OffsetFetchRequest(groups=groups)).groups
        assert [len(one.partitions) for one in answer.topics] == [3]


def test_asking_for_topics_makes_no_more_of_them_than_creating_them(make_desk: MakeDesk) -> None:
    """`auto.create.topics.enable` has the limit of CreateTopics."""
    desk = make_desk(partitions_made=5)
    names = [MetadataRequestTopic(name=f"new-{number}") for number in range(9)]
    answer = desk.ask(3, 12, MetadataRequest(topics=names))
    codes = [one.error_code for one in answer.topics]
    assert codes == [0] * 5 + [ErrorCode.POLICY_VIOLATION] * 4
    assert len(desk.broker.store.topics()) == 6
    again = desk.ask(3, 12, MetadataRequest(topics=names))
    assert [one.error_code for one in again.topics] == [0] * 9


# ---------------------------------------------------------------- partitions of a fetch


def fetch(numbers: range, session_id: int = 0, epoch: int = 0, forgotten: range = range(0)) -> FetchRequest:
    """Return a fetch of partitions of topic t."""
    parts = [FetchPartition(number, partition_max_bytes=1 << 20) for number in numbers]
    return FetchRequest(
        max_wait_ms=0, max_bytes=1 << 20, session_id=session_id, session_epoch=epoch,
        topics=[FetchTopic("t", partitions=parts)] if parts else [],
        forgotten_topics_data=[ForgottenTopic("t", partitions=list(forgotten))] if forgotten else [],
    )  # fmt: skip


def told(answer: Any) -> list[int]:
    """Return the partitions in an answer."""
    return sorted(one.partition_index for topic in answer.responses for one in topic.partitions)


@pytest.mark.long
def test_ten_thousand_partitions_in_one_fetch(make_desk: MakeDesk) -> None:
    """The first response contains all of them, later ones those with news."""
    desk = make_desk(PARTITIONS)
    whole = desk.ask(1, 11, fetch(range(PARTITIONS)))
    assert whole.error_code == 0
    assert told(whole) == list(range(PARTITIONS))
    news = [0, PARTITIONS // 2, PARTITIONS - 1]
    assert told(desk.ask(1, 11, fetch(range(0), whole.session_id, 1))) == []
    for number in news:
        desk.broker.store.open_partition("t", number).append([b"v"])
    assert told(desk.ask(1, 11, fetch(range(0), whole.session_id, 2))) == news
    assert told(desk.ask(1, 11, fetch(range(PARTITIONS)))) == list(range(PARTITIONS))


def test_a_session_grows_up_to_the_bound(make_desk: MakeDesk) -> None:
    """Above the limit the session is deleted, and the client gets full responses without one."""
    desk = make_desk(25, fetch_session_partitions=20)
    session_id = desk.ask(1, 11, fetch(range(10))).session_id
    assert session_id
    assert told(desk.ask(1, 11, fetch(range(10, 20), session_id, 1))) == list(range(10, 20))
    # Repeated partitions add nothing, and forgotten ones make room.
    assert desk.ask(1, 11, fetch(range(20), session_id, 2)).error_code == 0
    assert desk.ask(1, 11, fetch(range(0), session_id, 3, range(5))).error_code == 0
    assert desk.ask(1, 11, fetch(range(5), session_id, 4)).error_code == 0
    refused = desk.ask(1, 11, fetch(range(20, 25), session_id, 5))
    assert refused.error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert len(desk.broker.fetch_sessions) == 0
    whole = desk.ask(1, 11, fetch(range(25)))
    assert (whole.error_code, whole.session_id) == (0, 0)
    assert told(whole) == list(range(25))
    assert desk.ask(1, 11, fetch(range(20))).session_id


def test_sessions_share_the_bound(make_desk: MakeDesk) -> None:
    """A session cannot use room reserved by another; a closed session makes room."""
    desk = make_desk(25, fetch_session_partitions=20)
    first, second = (desk.ask(1, 11, fetch(range(8))).session_id for _ in range(2))
    assert desk.ask(1, 11, fetch(range(8, 13), first, 1)).error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert desk.ask(1, 11, fetch(range(8, 13), second, 1)).error_code == 0
    assert desk.ask(1, 11, fetch(range(7))).session_id


def test_a_refused_connection_says_so(make_server: MakeServer) -> None:
    """Too many elements end the connection of who sent them, and no other."""
    server = make_server()
    frame = listing(ELEMENTS_MAX + 1)
    with WireClient(server.bootstrap_servers) as client:
        client.raw(len(frame).to_bytes(4, "big") + frame)
        with pytest.raises(Refused):
            client.frame()
    assert is_served(server)
