"""A topic that is deleted and made again under its name is never reached by the id of the one before.

The other process acts at the worst time: when the name of the id is known already and its rights are being looked at.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.wire_client import Desk
from wire import Sent, foreign

from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated.delete_topics import DeleteTopicsRequest, DeleteTopicState
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.metadata import MetadataRequest, MetadataRequestTopic
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
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore


class _Recreating(OpenAuthorizer):
    """Allows everything; at the first question about topic ``t`` after `arm` the topic is made again."""

    def __init__(self, other: LogStore) -> None:
        super().__init__()
        self._other = other
        self._is_armed = False

    def arm(self) -> None:
        """Trigger at the next question."""
        self._is_armed = True

    def allows(self, *args: Any) -> bool:
        if self._is_armed and args[-1] == "t":
            self._is_armed = False
            self._other.delete_topic("t")
            self._other.create_topic("t", 2)
            self._other.open_partition("t", 0).append([b"new"])
        return True


class _Race:
    """A server's store, the same store in another hand, and what the server is asked."""

    def __init__(self, path: Path) -> None:
        self.store, self.other = (
            opened(LogStore(path, background=False, fs=NoSyncFileSystem())) for _ in range(2)
        )  # fmt: skip
        self.other.create_topic("t", 2)
        self.other.open_partition("t", 0).append([b"old"])
        self.rules = _Recreating(self.other)
        cluster = WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1)
        self.broker = Broker(self.store, cluster, ServerSettings(), self.rules)
        self.desk = Desk(self.broker)

    def ask(self, key: int, version: int, make: Callable[[bytes], Any]) -> Any:
        """Ask about the id of the topic that there is now, and have it made again meanwhile."""
        old_id = uuid.UUID(self.other.topic("t").id).bytes
        self.rules.arm()
        return self.desk.ask(key, version, make(old_id))

    def values(self) -> list[bytes | None]:
        """Return the values that the topic of that name holds now."""
        found = self.other.open_partition("t", 0).read(0)
        return [record.value for batch in found for record in batch.records()]


@pytest.fixture
def race(tmp_path: Path) -> Iterator[_Race]:
    """Yield a race."""
    made = _Race(tmp_path / "store")
    yield made
    made.broker.close()


def test_produce_reaches_no_other_topic(race: _Race) -> None:
    """Nothing is appended, and the client gets the error that the id is unknown."""
    batch = memoryview(foreign([Sent(b"k", b"for the old one")]))
    part = PartitionProduceData(0, batch)

    def request(topic_id: bytes) -> ProduceRequest:
        return ProduceRequest(None, 1, 1000, [TopicProduceData(topic_id=topic_id, partition_data=[part])])

    answer = race.ask(0, 13, request)
    (told,) = answer.responses[0].partition_responses
    assert (told.error_code, told.base_offset) == (ErrorCode.UNKNOWN_TOPIC_ID, -1)
    assert race.values() == [b"new"]


def test_fetch_reads_no_other_topic(race: _Race) -> None:
    """The answer has no record and no offset of the new topic."""
    part = FetchPartition(0, partition_max_bytes=1 << 20)

    def request(topic_id: bytes) -> FetchRequest:
        topics = [FetchTopic(topic_id=topic_id, partitions=[part])]
        return FetchRequest(max_wait_ms=0, max_bytes=1 << 20, session_epoch=-1, topics=topics)

    answer = race.ask(1, 13, request)
    (told,) = answer.responses[0].partitions
    assert (told.error_code, told.high_watermark) == (ErrorCode.UNKNOWN_TOPIC_ID, -1)
    assert not told.records


def test_deleting_by_id_deletes_no_other_topic(race: _Race) -> None:
    """The new topic stays, with its records."""
    answer = race.ask(
        20, 6, lambda topic_id: DeleteTopicsRequest(topics=[DeleteTopicState(name=None, topic_id=topic_id)])
    )
    assert answer.responses[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert race.other.topics() == ["t"]
    assert race.values() == [b"new"]


def test_metadata_describes_no_other_topic(race: _Race) -> None:
    """The answer to an id has this id, or that it is unknown."""
    answer = race.ask(
        3, 12, lambda topic_id: MetadataRequest(topics=[MetadataRequestTopic(topic_id=topic_id, name=None)])
    )
    (told,) = answer.topics
    assert told.error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert not told.partitions


@pytest.mark.parametrize("offset", [1, -1])
def test_positions_are_of_no_other_topic(race: _Race, offset: int) -> None:
    """A commit and a fetch of positions by id leave the new one alone; -1 stands for the end of the topic."""
    one = OffsetCommitRequestPartition(0, offset)
    committed = race.ask(
        8, 10,
        lambda topic_id: OffsetCommitRequest(
            "g", topics=[OffsetCommitRequestTopic(topic_id=topic_id, partitions=[one])]
        ),
    )  # fmt: skip
    assert committed.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    fetched = race.ask(
        9, 10,
        lambda topic_id: OffsetFetchRequest(
            groups=[OffsetFetchRequestGroup("g", topics=[OffsetFetchRequestTopics("", topic_id, [0])])]
        ),
    )  # fmt: skip
    assert fetched.groups[0].topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


def test_a_topic_is_deleted_by_its_id_alone(race: _Race) -> None:
    """Compared under the lock that every change of topics takes: a name that another topic has is left alone."""
    old_id = race.other.topic("t").id
    race.other.delete_topic("t")
    new = race.other.create_topic("t")
    with pytest.raises(LookupError, match="another topic has the name now"):
        race.store.delete_topic("t", old_id)
    assert race.store.topic("t").id == new.id
    race.store.delete_topic("t", new.id)
    assert race.store.topics() == []
