"""Batches that decompress to gigabytes are refused; readers treat those that earlier versions stored as damage.

The memory for one is bounded (`wire_raw_max`), records before and after it are served, and the cleaner continues.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cramjam
import lz4.frame
import pytest
from leftovers import opened
from logs import NOW_MS, NoSyncFileSystem
from server.memory import Memory
from server.test_limits import is_served, producing
from server.wire_client import WireClient
from wire import CODECS, Sent, append_unchecked, foreign, forged

from segmentlog.errors import CorruptBatch
from segmentlog.format import wire_records
from segmentlog.format.wire import WIRE_HEADER_SIZE
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.append.wire_append import SMALL_RAW_BYTES
from segmentlog.security.security_settings import Security
from segmentlog.server.broker import DECOMPRESSED_MAX
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

pytestmark = pytest.mark.long

_MANY = 240 << 20
_NEARLY = 120 << 20
"""Less than the bound of 128 MiB."""
_PEAK_MAX = 640 << 20
"""The bound, and what is made of that much; the bombs claim up to 32 GB."""
_CLAIMING = b"\xff\xff\xff\xff\x0f" + bytes(100_000)
"""A block of Snappy that says that it is 4 GB."""
_STANDING_FOR_MUCH = ((1 << 17) << 3 | 2).to_bytes(3, "little") + b"\0"
"""A block of Zstandard of one byte, 128 Ki times."""
BOMBS: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: gzip.compress(bytes(_MANY), 9),
    "gzip of members": lambda: gzip.compress(bytes(1 << 20), 9) * (_MANY >> 20),
    "snappy": lambda: _CLAIMING,
    "snappy of Java": lambda: b"\x82SNAPPY\0" + bytes(8) + len(_CLAIMING).to_bytes(4, "big") + _CLAIMING,
    "lz4": lambda: lz4.frame.compress(bytes(_MANY)),
    "lz4 of frames": lambda: lz4.frame.compress(bytes(1 << 20)) * (_MANY >> 20),
    "zstd": lambda: bytes(cramjam.zstd.compress(bytes(_MANY))),
    "zstd of 32 GB": lambda: b"\x28\xb5\x2f\xfd\0\x58" + _STANDING_FOR_MUCH * 250_000 + b"\1\0\0",
    "gzip below the bound": lambda: gzip.compress(bytes(_NEARLY), 9),
    "lz4 below the bound": lambda: lz4.frame.compress(bytes(_NEARLY)),
    "zstd below the bound": lambda: bytes(cramjam.zstd.compress(bytes(_NEARLY))),
}
_BEFORE, _AFTER = Sent(b"before", b"1", NOW_MS), Sent(b"after", b"2", NOW_MS)


def bomb(name: str, count: int) -> bytes:
    """Return a batch whose header claims ``count`` records."""
    made = foreign([Sent(b"k", b"v", NOW_MS)])[:WIRE_HEADER_SIZE] + BOMBS[name]()
    codec = CODECS[name.split()[0]]
    return forged(made, attributes=codec, batch_length=len(made) - 12, record_count=count, last_offset_delta=count - 1)


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Return a store with a topic for bombs, and one that is compacted."""
    made = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    made.create_topic("t", config={"max.message.bytes": 2 << 20})
    made.create_topic("compacted", config={"cleanup.policy": "compact", "max.message.bytes": 2 << 20})
    return made


@pytest.fixture
def server(store: LogStore) -> Iterator[Server]:
    """Serve the store."""
    with Server(
        store,
        host="127.0.0.1",
        port=0,
        advertise=None,
        settings=ServerSettings(),
        security=Security(),
        owns_store=False,
    ) as made:
        yield made


def code_of(client: WireClient, topic: str, batch: bytes) -> int:
    """Return the error code of an append."""
    request = producing(-1, batch)
    request.topic_data[0].name = topic
    return int(client.ask(0, 7, request).responses[0].partition_responses[0].error_code)


@pytest.mark.parametrize("count", [1, 1 << 23])
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_harms_nobody(store: LogStore, server: Server, name: str, count: int) -> None:
    """Read, made a table, compacted, verified and fetched: bounded, said clearly, and the others are there."""
    made = bomb(name, count)
    memory = Memory()
    with WireClient(server.bootstrap_servers, timeout_s=60) as client:
        assert code_of(client, "t", foreign([_BEFORE])) == 0
        for topic in ("t", "compacted"):
            assert code_of(client, topic, made) in (ErrorCode.INVALID_RECORD, ErrorCode.MESSAGE_TOO_LARGE)
        assert memory.peak() < _PEAK_MAX, f"{memory.peak() >> 20} MiB"
        assert append_unchecked(store.open_partition("t", 0), made) == 1
        assert code_of(client, "t", foreign([_AFTER])) == 0
        wanted = FetchTopic("t", partitions=[FetchPartition(0, partition_max_bytes=4 << 20)])
        fetched = client.ask(1, 11, FetchRequest(max_wait_ms=0, max_bytes=4 << 20, topics=[wanted]))
        assert bytes(fetched.responses[0].partitions[0].records).count(made[WIRE_HEADER_SIZE:]) == 1
        assert code_of(client, "compacted", foreign([_BEFORE])) == 0
        # A lookup by time decodes the records.
        asked = ListOffsetsTopic("t", [ListOffsetsPartition(0, -1, NOW_MS + 1)])
        told = client.ask(2, 5, ListOffsetsRequest(-1, 0, [asked])).topics[0].partitions[0]
        assert told.error_code in (0, ErrorCode.CORRUPT_MESSAGE)

    partition = store.open_partition("t", 0)
    readable: list[bytes | None] = []
    for found in partition.read(0):
        try:
            readable += [record.value for record in found.records()]
        except CorruptBatch:
            readable.append(None)
    assert readable == [b"1", None, b"2"]

    with pytest.raises(CorruptBatch), store.table("t") as table:
        len(table)
    damage = [one for one in inspect_store(store.path) if one.severity != "note"]
    assert {(one.topic, one.base_offset) for one in damage} == {("t", 1)}

    # The cleaner leaves that log as it is, says why, and cleans the others.
    store.alter_topic("t", {"cleanup.policy": "compact"})
    store.open_partition("t", 0).roll()
    compacted = store.open_partition("compacted", 0)
    compacted.append([b"1", b"2"], keys=[b"k", b"k"])
    compacted.roll()
    for _ in range(3):
        store.cleaner_tick(int(time.time() * 1000) + 100_000_000)
    assert [record.value for found in compacted.read(0) for record in found.records()] == [b"1", b"2"]
    assert is_served(server)
    assert memory.peak() < _PEAK_MAX, f"{memory.peak() >> 20} MiB"


def test_few_are_unpacked_at_a_time(store: LogStore, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bombs over many connections, to partitions of their own: no more of them go off together than there may.

    A first look at a batch that is small as stored ends at `SMALL_RAW_BYTES`, and is not counted.
    """
    store.create_topic("many", 8)
    mutex, running, most = threading.Lock(), [0], [0]
    decompress = wire_records.decompress_records

    def counted(codec: int, stored: memoryview, limit_bytes: int) -> bytes:
        if limit_bytes <= SMALL_RAW_BYTES:
            return decompress(codec, stored, limit_bytes)
        with mutex:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.05)
        try:
            return decompress(codec, stored, limit_bytes)
        finally:
            with mutex:
                running[0] -= 1

    monkeypatch.setattr(wire_records, "decompress_records", counted)
    made, codes = bomb("snappy", 1), []

    def produce(number: int) -> None:
        request = producing(-1, made)
        request.topic_data[0].name = "many"
        request.topic_data[0].partition_data[0].index = number
        with WireClient(server.bootstrap_servers) as client:
            codes.append(client.ask(0, 7, request).responses[0].partition_responses[0].error_code)

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(codes) == 8
    assert all(codes)
    assert 1 <= most[0] <= DECOMPRESSED_MAX
