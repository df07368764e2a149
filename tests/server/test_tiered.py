"""Topics with tiered storage: Kafka's clients read segments that are only in the object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from objects.tiering import TIERED, remote, url_of
from server.wire_client import WireClient
from wire import Sent, foreign

from segmentlog.format.wire import WIRE_HEADER, WireHeader
from segmentlog.security.security_settings import Security
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic, PartitionData
from segmentlog.server.codec.generated.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

EARLIEST, LATEST, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING = -2, -1, -4, -5, -6


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Provide 45 records, every third batch the library's, in segments of ten, four of which are evicted."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    log = store.create_topic("t", 1, TIERED).partition(0)
    for number in range(45):
        if number % 3:
            log.append_wire(foreign([Sent(None, b"%d" % number * 20)]))
        else:
            log.append([b"%d" % number * 20])
    log.flush()
    store.ship(url_of(tmp_path))
    assert remote(log) == [0, 10, 20, 30]
    return store


@pytest.fixture
def server(store: LogStore) -> Iterator[Server]:
    """Serve that store."""
    with Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(),
        owns_store=False,
    ) as made:  # fmt: skip
        yield made


def fetched(client: WireClient, offset: int, size_bytes: int = 1 << 20) -> PartitionData:
    """Return the response to a fetch of the partition."""
    topic = FetchTopic("t", partitions=[FetchPartition(0, -1, offset, partition_max_bytes=size_bytes)])
    answer = client.ask(1, 11, FetchRequest(max_wait_ms=200, min_bytes=1, max_bytes=size_bytes, topics=[topic]))
    return answer.responses[0].partitions[0]  # type: ignore[no-any-return]


def offsets(data: PartitionData) -> list[int]:
    """Return the offsets of the batches in a response."""
    found, left = [], memoryview(data.records or b"")
    while left:
        header = WireHeader._make(WIRE_HEADER.unpack_from(left))
        found.append(header.base_offset)
        left = left[12 + header.batch_length :]
    return found


def listed(client: WireClient, timestamp: int) -> tuple[int, int]:
    """(error, offset) that ListOffsets answers."""
    topic = ListOffsetsTopic("t", [ListOffsetsPartition(0, -1, timestamp)])
    answer = client.ask(2, 11, ListOffsetsRequest(-1, 0, [topic], 1000)).topics[0].partitions[0]
    return answer.error_code, answer.offset


@pytest.mark.parametrize("size_bytes", [1, 700, 1 << 20])
def test_a_client_reads_all_of_it(server: Server, size_bytes: int) -> None:
    """A client reads every batch in order with any fetch limit, and a second time, too."""
    with WireClient(server.bootstrap_servers) as client:
        for _ in range(2):
            reached: list[int] = []
            while len(reached) < 45:
                data = fetched(client, len(reached), size_bytes)
                assert data.error_code == 0
                found = offsets(data)
                assert found
                reached += found
            assert reached == list(range(45))


def test_where_it_begins_here_and_ends_there(server: Server, store: LogStore, tmp_path: Path) -> None:
    """The earliest local offset (KIP-405), the last one that is there (KIP-1005), the first that is not (KIP-1023)."""
    log = store.open_partition("t", 0)
    with WireClient(server.bootstrap_servers) as client:
        assert listed(client, EARLIEST) == (0, 0)
        assert listed(client, EARLIEST_LOCAL) == (0, 40)
        assert listed(client, LATEST_TIERED) == (0, 44)
        assert listed(client, EARLIEST_PENDING) == (0, 45)
        log.append([b"new"])
        log.flush()
        assert listed(client, LATEST) == (0, 46)
        assert listed(client, LATEST_TIERED) == (0, 44)
        log.trim(43)
        assert listed(client, EARLIEST_LOCAL) == (0, 43)
        store.alter_topic("t", remote_storage_enable=False)
        for wanted in (LATEST_TIERED, EARLIEST_PENDING):
            assert listed(client, wanted) == (0, -1)


def test_while_it_cannot_be_reached_a_client_tries_again(server: Server, tmp_path: Path) -> None:
    """Local records are served; for the others the client gets a storage error, which it retries."""
    os.rename(tmp_path / "bucket", tmp_path / "away")
    with WireClient(server.bootstrap_servers) as client:
        assert fetched(client, 3).error_code == ErrorCode.KAFKA_STORAGE_ERROR
        assert offsets(fetched(client, 40)) == [40, 41, 42, 43, 44]
        os.rename(tmp_path / "away", tmp_path / "bucket")
        assert offsets(fetched(client, 3))[0] == 3
