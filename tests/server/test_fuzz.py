"""Hostile bytes on every API are refused or answered, without other effects.

SEGMENTLOG_SERVER_FUZZ          requests without sockets
SEGMENTLOG_SERVER_FUZZ_SOCKETS  and over connections
SEGMENTLOG_SERVER_LIES          batches whose fields are wrong
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from seeds import seeds, share
from server.codec.test_captured import FILES, frames
from server.hostile import TOPICS, Asker, batch, every_api, lying, mutated
from server.memory import Memory
from server.test_every_api import SETTINGS, fill, ids_of
from server.wire_client import Desk, WireClient, request_bytes
from wire import NOW_MS

from segmentlog.format.wire import WIRE_HEADER, WireHeader
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.security.security_settings import Security
from segmentlog.server.api_table import SERVED
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.embedded import Server
from segmentlog.server.frames import BadFrame
from segmentlog.server.server_settings import Limits
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

pytestmark = pytest.mark.long

REQUESTS = int(os.environ.get("SEGMENTLOG_SERVER_FUZZ", "100000"))
OVER_SOCKETS = int(os.environ.get("SEGMENTLOG_SERVER_FUZZ_SOCKETS", "4000"))
LIES = int(os.environ.get("SEGMENTLOG_SERVER_LIES", "1500"))
_GROWTH_MAX = 64 << 20
"""Bytes that a broker may hold more of after all these requests; it has caches of 48 MB."""

HURRIED = msgspec.structs.replace(
    SETTINGS, limits=Limits(patience_s=1.0, idle_s=1.0, fetch_wait_ms_max=50, partitions_made=50)
)


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Return a store with the topics that requests name."""
    made = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    fill(made)
    return made


@pytest.fixture
def broker(store: LogStore) -> Iterator[Broker]:
    """Yield a broker of the store, without connections."""
    made = Broker(store, WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1), HURRIED, OpenAuthorizer())  # type: ignore[arg-type]
    yield made
    made.close()


def captured() -> list[bytes]:
    """Return requests of real clients to the served APIs, without their lengths."""
    return [
        frame for path in FILES for word, key, _, frame in frames(path) if word == "request" and key in SERVED
    ]  # fmt: skip


def hostile_frames(random: Random, store: LogStore, count: int) -> Iterator[bytes]:
    """Yield requests without their lengths: noise, mutated captured ones, and requests that nearly make sense."""
    real, apis = captured(), every_api()
    asker = Asker(random, ids_of(store), extreme=0.1)
    for number in range(count):
        if number % 1000 == 0:  # topics come and go
            fill(store)
            asker = Asker(random, ids_of(store), extreme=0.1)
        key, version = apis[number % len(apis)]
        kind = random.random()
        if kind < 0.15:
            head = key.to_bytes(2, "big") + version.to_bytes(2, "big") + random.randbytes(4) + b"\0\0"
            noise = bytes(
                random.choice((0, 1, 2, 127, 255, random.randrange(256))) for _ in range(random.randrange(60))
            )
            yield (head if random.random() < 0.9 else b"") + noise
        elif kind < 0.55:
            yield mutated(random, random.choice(real))
        else:
            frame = request_bytes(key, version, asker.request(key, version), number)[4:]
            yield frame if kind < 0.65 else mutated(random, frame)


def quietly(ask: Callable[[bytes], Any], frame: bytes) -> bool:
    """Return whether a request was answered, or needs no answer; False if `BadFrame` came instead."""
    try:
        ask(frame)
    except BadFrame:
        return False
    return True


@pytest.mark.parametrize("seed", seeds("server fuzz"))
def test_hostile_requests_are_refused_or_answered(store: LogStore, broker: Broker, seed: int) -> None:
    """Only the exception that closes a connection comes, memory does not grow, and the log stays clean."""
    random, desk = Random(seed), Desk(broker)
    count = share(REQUESTS, "server fuzz")
    answered = 0
    for number, frame in enumerate(hostile_frames(random, store, count)):
        if number == count // 10:
            memory = Memory()
        try:
            answered += quietly(desk.ask_bytes, frame)
        except Exception as error:
            raise AssertionError(frame.hex()) from error
    assert memory.grown() < _GROWTH_MAX
    assert memory.peak() < 2 * _GROWTH_MAX
    assert answered > count // 20
    print(f"{count:,} requests, {answered:,} answered, at most {memory.peak() >> 10:,} KiB more")
    check_everything(store)


def check_everything(store: LogStore) -> None:
    """Check that the library and a client can read every partition, compaction works, and the files are intact."""
    desk = Desk(Broker(store, WorkerCluster("c", [WorkerNode(1, "h", 1)], 1), SETTINGS, OpenAuthorizer()))  # type: ignore[arg-type]
    for name in store.topics():
        for partition in store.topic(name).partitions():
            partition.roll()
            if partition.config.compacts:
                assert not partition.compact().unreadable
            for found in partition.read(partition.log_start_offset, control=True):
                list(found.records())
            if not name.startswith("__"):
                assert fetch_all(desk, name, partition) >= partition.log_end_offset
                for timestamp in (-1, -2, -3, 0, NOW_MS + 2):
                    ask = ListOffsetsTopic(name, [ListOffsetsPartition(partition.number, -1, timestamp)])
                    desk.ask(2, 7, ListOffsetsRequest(-1, 0, [ask]))
    assert [one for one in inspect_store(store.path) if one.severity != "note"] == []
    desk.broker.close()


def fetch_all(desk: Desk, name: str, partition: Partition) -> int:
    """Read by a client, to the end; up to which offset it came."""
    offset = partition.log_start_offset
    while True:
        part = FetchPartition(partition.number, fetch_offset=offset, partition_max_bytes=1 << 20)
        wanted = FetchTopic(name, partitions=[part])
        request = FetchRequest(max_wait_ms=0, min_bytes=0, max_bytes=1 << 20, topics=[wanted])
        data = desk.ask(1, 11, request).responses[0].partitions[0]
        assert data.error_code == 0, (name, offset, data.error_code)
        records, at = memoryview(data.records or b""), 0
        while at + 61 <= len(records):
            header = WireHeader._make(WIRE_HEADER.unpack_from(records, at))
            assert offset <= header.base_offset + header.last_offset_delta
            offset = header.base_offset + header.last_offset_delta + 1
            at += 12 + header.batch_length
        if not records:
            return offset


@pytest.mark.parametrize("seed", seeds("lying batches"))
def test_lying_batches_harm_nobody(store: LogStore, broker: Broker, seed: int) -> None:
    """A batch that lies about something is stored only if every reader reads it."""
    random, desk = Random(seed), Desk(broker)
    lies = taken = 0
    for number in range(LIES):
        made = batch(random, honest=True)
        assert made is not None
        name, is_lie = random.choice(TOPICS), number % 10 != 0
        records = lying(random, made) if is_lie else made
        answer = desk.ask(0, 7, ProduceRequest(None, 1, 1000, [produced(name, records)])).responses[0]
        told = answer.partition_responses[0]
        taken += told.error_code == 0
        lies += is_lie and not told.error_code
        assert is_lie or not told.error_code
    assert lies > LIES // 20
    check_everything(store)
    print(f"{taken} of {LIES} taken, {lies} of them lies")


def produced(topic: str, records: bytes) -> TopicProduceData:
    """Return a batch for partition 0."""
    return TopicProduceData(topic, partition_data=[PartitionProduceData(0, records)])


@pytest.mark.parametrize("seed", seeds("server fuzz"))
def test_hostile_connections_disturb_nobody(store: LogStore, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    """Random requests over sockets, several at once and in pieces: a well-behaved client is served all the time."""
    random = Random(seed)
    server = Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=HURRIED, security=Security(), owns_store=False
    )
    with server, caplog.at_level(logging.WARNING, "segmentlog.server"), WireClient(server.bootstrap_servers) as good:
        client = WireClient(server.bootstrap_servers)
        for number, frame in enumerate(hostile_frames(random, store, share(OVER_SOCKETS, "server fuzz"))):
            data = len(frame).to_bytes(4, "big") + frame
            if random.random() < 0.02:
                data = data[: random.randrange(len(data))] + random.randbytes(random.randrange(5))
            try:
                client.raw(data)
            except OSError:
                client.close()
                client = WireClient(server.bootstrap_servers)
            if number % 20 == 0:
                assert good.ask(18, 0, ApiVersionsRequest()).error_code == 0
                client.close()
                client = WireClient(server.bootstrap_servers)
        client.close()
    assert not [record.getMessage() for record in caplog.records if record.exc_info]
    check_everything(store)
