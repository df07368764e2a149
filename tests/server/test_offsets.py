"""ListOffsets and DeleteRecords: offsets that clients ask for, and those below which they delete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.transactions.clients import Client
from server.wire_client import Desk
from wire import NOW_MS, Sent, foreign

from segmentlog.errors import InvalidWireBatch
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from segmentlog.server.codec.generated.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

MAX_TIMESTAMP = -3
NOTHING = (-1, -1)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Provide a worker of a store with topic t."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    store.create_topic("t")
    broker = Broker(
        store, WorkerCluster("c", [WorkerNode(1, "localhost", 9093)], 1), ServerSettings(), OpenAuthorizer()
    )
    yield Desk(broker)
    broker.close()


def append(desk: Desk, *timestamps: int) -> None:
    """Append one batch of records with these timestamps, outside of transactions."""
    data = foreign([Sent(b"k", b"v", timestamp) for timestamp in timestamps])
    desk.broker.partition("t", 0).append_wire(memoryview(data))


def largest(desk: Desk, *, committed: bool = False) -> tuple[int, int]:
    """(offset, timestamp) of the record with the largest timestamp."""
    topics = [ListOffsetsTopic("t", [ListOffsetsPartition(0, -1, MAX_TIMESTAMP)])]
    answer = desk.ask(2, 8, ListOffsetsRequest(-1, int(committed), topics)).topics[0].partitions[0]
    assert answer.error_code == ErrorCode.NONE
    return answer.offset, answer.timestamp


def delete(desk: Desk, before_offset: int) -> Any:
    """DeleteRecords: (error, log start offset)."""
    topics = [DeleteRecordsTopic("t", [DeleteRecordsPartition(0, before_offset)])]
    answer = desk.ask(21, 2, DeleteRecordsRequest(topics, 1000)).topics[0].partitions[0]
    return answer.error_code, answer.low_watermark


def test_the_largest_timestamp_is_a_records(desk: Desk) -> None:
    """The end of a transaction is later than its records, but does not count."""
    assert largest(desk) == NOTHING
    append(desk, NOW_MS + 1, NOW_MS + 7, NOW_MS + 2)
    append(desk, NOW_MS + 3)
    client = Client(desk, is_new=True)
    client.begin()
    client.write(b"a")
    assert largest(desk) == (1, NOW_MS + 7)
    client.end()
    assert desk.broker.partition("t", 0).log_end_offset == 6
    assert largest(desk) == (1, NOW_MS + 7)


def test_the_largest_timestamp_that_may_be_seen(desk: Desk) -> None:
    """Undecided records do not hide earlier ones."""
    append(desk, NOW_MS - 5)
    append(desk, NOW_MS - 4, NOW_MS - 9)
    client = Client(desk, is_new=True)
    client.begin()
    client.write(b"a")
    assert largest(desk) == (3, NOW_MS)
    assert largest(desk, committed=True) == (1, NOW_MS - 4)


def test_the_largest_timestamp_of_what_is_left(desk: Desk) -> None:
    """Deleted records do not count: whole batches and segments, and the front of the first remaining one."""
    append(desk, NOW_MS + 9)
    append(desk, NOW_MS + 8, NOW_MS + 1, NOW_MS + 2)
    append(desk, NOW_MS)
    assert largest(desk) == (0, NOW_MS + 9)
    delete(desk, 1)
    assert largest(desk) == (1, NOW_MS + 8)
    delete(desk, 2)
    assert largest(desk) == (3, NOW_MS + 2)
    desk.broker.partition("t", 0).roll()
    append(desk, NOW_MS + 3)
    assert largest(desk) == (5, NOW_MS + 3)
    delete(desk, -1)
    assert largest(desk) == NOTHING


def test_records_of_before_1970(desk: Desk) -> None:
    """They are accepted. As in Kafka, none of them is the largest, and requests cannot name a time before 1970."""
    append(desk, -14_182_940_000, -62_135_596_800_000, -1)
    append(desk, -2)
    assert largest(desk) == NOTHING
    append(desk, 0, 5, -5)
    assert largest(desk) == (5, 5)
    topics = [ListOffsetsTopic("t", [ListOffsetsPartition(0, -1, timestamp)]) for timestamp in (0, 1, -14_182_940_000)]
    found = [desk.ask(2, 8, ListOffsetsRequest(-1, 0, [one])).topics[0].partitions[0] for one in topics]
    assert [(one.error_code, one.offset) for one in found] == [(0, 4), (0, 5), (ErrorCode.UNSUPPORTED_VERSION, -1)]


def test_records_of_before_the_year_1_are_refused(desk: Desk) -> None:
    """Their time could not be shown by other interfaces: in the header, or in a record in the middle."""
    for stamps in ((-62_135_596_800_001,), (-(2**62), 5)):
        with pytest.raises(InvalidWireBatch, match="timestamp"):
            append(desk, *stamps)
    assert desk.broker.partition("t", 0).log_end_offset == 0


def test_to_delete_what_is_gone_is_no_error(desk: Desk) -> None:
    """As in Kafka, a repeated or late request gets the log start offset."""
    append(desk, NOW_MS, NOW_MS, NOW_MS, NOW_MS)
    assert delete(desk, 3) == (ErrorCode.NONE, 3)
    assert delete(desk, 3) == (ErrorCode.NONE, 3)
    assert delete(desk, 1) == (ErrorCode.NONE, 3)
    assert delete(desk, 0) == (ErrorCode.NONE, 3)
    assert delete(desk, 5) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
    assert delete(desk, -2) == (ErrorCode.OFFSET_OUT_OF_RANGE, -1)
    assert delete(desk, -1) == (ErrorCode.NONE, 4)
