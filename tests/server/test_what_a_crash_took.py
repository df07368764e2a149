"""Offsets lost in a crash, as Kafka's clients see them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import opened
from logs import NoSyncFileSystem, log_files, machine_dies
from server.wire_client import WireClient

from segmentlog.format.wire import WIRE_HEADER, WireHeader
from segmentlog.records import LostRange, TopicPartition
from segmentlog.security.security_settings import Security
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData
from segmentlog.server.codec.generated.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from segmentlog.server.codec.generated.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
)
from segmentlog.server.codec.generated.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Return a store after a machine's death: of ten records of topic t, the last five are gone."""
    first = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    first.create_topic("t", 1, {"fsync": "never"})
    partition = first.open_partition("t", 0)
    partition.append([b"%d" % number for number in range(5)], ack="durable")
    size = partition.segments()[-1].size_bytes
    partition.append([b"%d" % number for number in range(5, 10)])
    folder = Path(partition.folder)
    machine_dies(partition)
    os.truncate(log_files(folder)[-1], size)
    return opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))


@pytest.fixture
def server(store: LogStore) -> Iterator[Server]:
    """Serve that store."""
    with Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(),
        owns_store=False,
    ) as made:  # fmt: skip
        yield made


@pytest.fixture
def lost(store: LogStore) -> LostRange:
    """Return the lost range, which is long: its offsets may have been assigned."""
    (found,) = store.open_partition("t", 0).lost_ranges()
    assert found.base_offset == 5
    assert found.end_offset > 10
    return found


def fetched(client: WireClient, offset: int, version: int = 11, epoch: int = -1, last: int = -1) -> PartitionData:
    """Return the response to a fetch of the partition."""
    part = FetchPartition(0, epoch, offset, last, partition_max_bytes=1 << 20)
    topic = FetchTopic("t", partitions=[part])
    answer = client.ask(1, version, FetchRequest(max_wait_ms=200, min_bytes=1, max_bytes=1 << 20, topics=[topic]))
    return answer.responses[0].partitions[0]  # type: ignore[no-any-return]


def headers(records: object) -> list[WireHeader]:
    """Return the header of each batch."""
    found, data = [], memoryview(records or b"")  # type: ignore[arg-type]
    while data:
        header = WireHeader._make(WIRE_HEADER.unpack_from(data))
        found.append(header)
        data = data[12 + header.batch_length :]
    return found


@pytest.mark.parametrize("version", [2, 3, 4])
def test_the_epoch_before_ended_where_the_loss_begins(server: Server, lost: LostRange, version: int) -> None:
    """A client that has read more then learns of the truncation (KIP-320)."""
    epoch = server.store.open_partition("t", 0).epoch
    asked = [OffsetForLeaderPartition(0, -1, one) for one in (epoch - 1, epoch, epoch + 1)]
    with WireClient(server.bootstrap_servers) as client:
        answer = client.ask(23, version, OffsetForLeaderEpochRequest(-2, [OffsetForLeaderTopic("t", asked)]))
    ends = [(one.leader_epoch, one.end_offset) for one in answer.topics[0].partitions]
    assert ends == [(epoch - 1, lost.base_offset), (epoch, lost.end_offset), (-1, -1)]


def test_who_stands_inside_is_told(server: Server, lost: LostRange) -> None:
    """It gets OFFSET_OUT_OF_RANGE, FENCED_LEADER_EPOCH for its old epoch, or the diverging epoch and offset."""
    epoch = server.store.open_partition("t", 0).epoch
    with WireClient(server.bootstrap_servers) as client:
        for offset in (6, 9, lost.end_offset - 1):
            for version in (4, 8, 11):
                assert fetched(client, offset, version).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
            assert fetched(client, offset, 11, epoch - 1).error_code == ErrorCode.FENCED_LEADER_EPOCH
        part = FetchPartition(0, epoch, 8, epoch - 1, partition_max_bytes=1 << 20)
        topic = FetchTopic("t", partitions=[part])
        answer = client.ask(1, 12, FetchRequest(max_wait_ms=0, max_bytes=1 << 20, topics=[topic]))
        diverging = answer.responses[0].partitions[0].diverging_epoch
        assert (diverging.epoch, diverging.end_offset) == (epoch - 1, lost.base_offset)


@pytest.mark.parametrize("version", [4, 11])
def test_who_stands_at_its_start_is_led_over_it(server: Server, lost: LostRange, version: int) -> None:
    """Empty batches cover the lost range while no record follows it; a client that continues does not block."""
    with WireClient(server.bootstrap_servers) as client:
        found = headers(fetched(client, 5, version).records)
        assert found[0].base_offset == 5
        assert found[-1].base_offset + found[-1].last_offset_delta + 1 == lost.end_offset
        assert not any(header.record_count for header in found)
        server.store.open_partition("t", 0).append([b"new"])
        data = fetched(client, 5, version)
        reached = headers(data.records)[-1]
        assert reached.base_offset + reached.last_offset_delta + 1 >= lost.end_offset
        assert data.high_watermark == lost.end_offset + 1


def test_offsets_by_time_and_at_the_ends(server: Server, lost: LostRange) -> None:
    """The log end offset is after the lost range; the largest timestamp belongs to an existing record."""
    with WireClient(server.bootstrap_servers) as client:
        for timestamp, offset in ((-1, lost.end_offset), (-2, 0), (0, 0), (1 << 60, -1)):
            topic = ListOffsetsTopic("t", [ListOffsetsPartition(0, -1, timestamp)])
            answer = client.ask(2, 7, ListOffsetsRequest(-1, 0, [topic])).topics[0].partitions[0]
            assert (answer.error_code, answer.offset) == (0, offset)


@pytest.mark.parametrize("version", [5, 7, 8])
def test_committed_offsets_around_what_was_lost(server: Server, lost: LostRange, version: int) -> None:
    """An offset where the loss begins is answered as its end, with the epoch that begins there; no other is moved.

    One inside stays: the client's fetch there reports the loss. So does one at the end of the log, and before the loss.
    """
    epoch = server.store.open_partition("t", 0).epoch
    end = server.store.open_partition("t", 0).append([b"new"]) + 1
    tp = TopicPartition("t", 0)
    with WireClient(server.bootstrap_servers) as client:
        for committed, told in ((5, lost.end_offset), (3, 3), (7, 7), (lost.end_offset, lost.end_offset), (end, end)):
            server.store.groups.reset("g", {tp: committed})
            if version < 8:
                topics = [OffsetFetchRequestTopic("t", [0])]
                found = client.ask(9, version, OffsetFetchRequest(group_id="g", topics=topics)).topics[0].partitions[0]
            else:
                group = OffsetFetchRequestGroup(
                    group_id="g", topics=[OffsetFetchRequestTopics("t", partition_indexes=[0])]
                )
                found = client.ask(9, version, OffsetFetchRequest(groups=[group])).groups[0].topics[0].partitions[0]
            assert (found.error_code, found.committed_offset) == (0, told)
            if told != committed:
                assert found.committed_leader_epoch == epoch
                asked = OffsetForLeaderPartition(0, -1, found.committed_leader_epoch)
                topic = OffsetForLeaderTopic("t", [asked])
                answer = client.ask(23, 4, OffsetForLeaderEpochRequest(-2, [topic])).topics[0].partitions[0]
                assert answer.end_offset >= told, "a client takes it for no truncation (KIP-320)"


def test_committed_offsets_of_all_topics_open_no_partition(tmp_path: Path, store: LogStore, lost: LostRange) -> None:
    """A tool that describes a group gets the same answers from a worker that has opened none of its partitions."""
    partition = store.open_partition("t", 0)
    end = partition.append([b"new"]) + 1
    other = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    with (
        Server(
            other, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(),
            owns_store=False,
        ) as server,
        WireClient(server.bootstrap_servers) as client,
    ):  # fmt: skip
        for committed, told in ((5, lost.end_offset), (3, 3), (7, 7), (lost.end_offset, lost.end_offset), (end, end)):
            store.groups.reset("g", {TopicPartition("t", 0): committed})
            request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=None)])
            (topic,) = client.ask(9, 8, request).groups[0].topics
            assert (topic.partitions[0].error_code, topic.partitions[0].committed_offset) == (0, told)
            if told != committed:
                assert topic.partitions[0].committed_leader_epoch == partition.epoch
        assert "t" not in {one.topic for one in other.opened_partitions()}


@pytest.mark.long
def test_a_real_consumer_goes_on(server: Server) -> None:
    """librdkafka reads what is left, and then what is new, within a moment."""
    confluent_kafka = pytest.importorskip("confluent_kafka")
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": server.bootstrap_servers, "group.id": "x", "enable.partition.eof": True}
    )
    consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
    seen: list[bytes] = []
    ends = time.monotonic() + 20
    has_appended = False
    while len(seen) < 6 and time.monotonic() < ends:
        for message in consumer.consume(10, 0.1):
            if message.error() is None:
                seen.append(message.value())
        if len(seen) == 5 and not has_appended:
            has_appended = True
            server.store.open_partition("t", 0).append([b"new"])
    consumer.close()
    assert seen == [b"0", b"1", b"2", b"3", b"4", b"new"]
