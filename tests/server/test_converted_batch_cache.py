"""Batches of the library in Kafka's format: converted once for many clients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from leftovers import opened
from logs import NoSyncFileSystem, open_log
from server.wire_client import Desk, request_bytes

from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server import converted_batch_cache
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.converted_batch_cache import ConvertedBatchCache, DiskBatchCache
from segmentlog.server.server_settings import Limits, ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

PARTITIONS = 8
SIZE = 30_000
"""About what a batch of these takes."""


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def batches(tmp_path: Path) -> list[RecordBatch]:
    """Twenty of the library's."""
    log = open_log(tmp_path / "log")
    for number in range(20):
        log.append([b"%d" % number + b"v" * (index % 9 + 90) for index in range(300)])
    return list(log.read(0))


@pytest.fixture
def clock() -> Clock:
    """Provide the clock of the files on disk."""
    return Clock()


@pytest.fixture
def disk(tmp_path: Path, clock: Clock) -> Iterator[DiskBatchCache]:
    """Room for ten batches in five files."""
    disk = DiskBatchCache(str(tmp_path), 5 * 2 * 35_000, 2 * 35_000, clock)
    yield disk
    disk.close()


def joined(wire: list[converted_batch_cache.Buffer]) -> bytes:
    """Return the bytes of a batch."""
    return b"".join(wire)


def ask(kept: ConvertedBatchCache, batches: list[RecordBatch]) -> int:
    """Ask for all of them; how many had to be made."""
    before = kept.miss_count
    for batch in batches:
        assert joined(kept.convert("topic", batch)) == joined(to_wire_batches(batch))
    return kept.miss_count - before


def test_in_memory(batches: list[RecordBatch]) -> None:
    """The last ones that were asked for are there."""
    kept = ConvertedBatchCache(5 * SIZE)
    assert ask(kept, batches) == 20
    assert ask(kept, batches[-3:]) == 0
    assert ask(kept, batches) == 20


def test_on_disk_from_the_second_time_on(batches: list[RecordBatch], disk: DiskBatchCache) -> None:
    """A batch requested once is not written to disk; requested again, it is found from then on."""
    kept = ConvertedBatchCache(0, disk)
    assert ask(kept, batches[:8]) == 8
    assert disk.size_bytes == 0
    assert ask(kept, batches[:8]) == 8
    assert disk.size_bytes > 0
    assert ask(kept, batches[:8]) == 0


def test_the_disk_is_bounded(batches: list[RecordBatch], disk: DiskBatchCache, clock: Clock) -> None:
    """Recently requested batches stay although others are requested; the least recently used ones are deleted."""
    kept = ConvertedBatchCache(0, disk)
    for _ in range(4):
        ask(kept, batches)
        assert disk.size_bytes <= 5 * 2 * 35_000
    first = ask(kept, batches)
    assert 0 < first < 20  # some batches are found in each round, although not all of them fit
    assert ask(kept, batches) == first
    held = kept.convert("topic", batches[0])
    clock.now_s += 1000
    for _ in range(3):
        made = ask(kept, batches[-8:])
    assert made == 0
    assert joined(held) == joined(to_wire_batches(batches[0]))  # a reader that is being sent it


def test_a_full_disk_is_no_error(batches: list[RecordBatch], tmp_path: Path) -> None:
    """Without room, or without such files, batches are made each time."""
    for broken in (
        DiskBatchCache(str(tmp_path), 1 << 62, 1 << 60),
        DiskBatchCache(str(tmp_path / "none"), 1 << 30),
        DiskBatchCache(str(tmp_path), 0),
    ):
        kept = ConvertedBatchCache(0, broken)
        assert [ask(kept, batches[:4]) for _ in range(3)] == [4, 4, 4]
        assert broken.size_bytes == 0
        kept.close()


def test_side_by_side_it_is_made_once(batches: list[RecordBatch]) -> None:
    """A request waits for a conversion in progress; if that fails, the next request converts the batch."""
    kept = ConvertedBatchCache(1 << 20)
    begun, go_on = threading.Event(), threading.Event()
    calls = []

    def slowly(batch: RecordBatch) -> list[converted_batch_cache.Buffer]:
        calls.append(batch)
        begun.set()
        assert go_on.wait(10)
        if len(calls) == 1:
            raise MemoryError
        return to_wire_batches(batch)

    def first() -> None:
        with pytest.raises(MemoryError):
            kept.convert("topic", batches[0])

    found: list[bytes] = []
    with mock.patch.object(converted_batch_cache, "to_wire_batches", slowly):
        threads = [threading.Thread(target=first)]
        threads[0].start()
        assert begun.wait(10)
        threads.append(threading.Thread(target=lambda: found.append(joined(kept.convert("topic", batches[0])))))
        threads[1].start()
        go_on.set()
        for thread in threads:
            thread.join(10)
    assert found == [joined(to_wire_batches(batches[0]))]
    assert len(calls) == 2
    assert ask(kept, batches[:1]) == 0


# ---------------------------------------------------------------- the share of memory


def test_what_is_held_is_counted(batches: list[RecordBatch]) -> None:
    """A batch counts until the last reference to any part of it is gone; cached and referenced it counts once."""
    kept = ConvertedBatchCache(0)
    held = [kept.convert("topic", batch) for batch in batches]
    assert kept.held_bytes == sum(len(one) for wire in held for one in wire)
    left = memoryview(held[0][0])[-10:]
    size = len(held[0][0])
    held.clear()
    assert kept.held_bytes == size
    left.release()
    assert kept.held_bytes == 0
    kept = ConvertedBatchCache(1 << 30)
    size = sum(len(one) for batch in batches for one in kept.convert("topic", batch))
    again = [kept.convert("topic", batch) for batch in batches]
    assert kept.held_bytes == size
    assert len(again) == len(batches)


def test_beyond_the_share_it_goes_to_disk_at_once(batches: list[RecordBatch], tmp_path: Path) -> None:
    """Files can be dropped by the kernel when memory is short, and what an answer holds cannot."""
    disk = DiskBatchCache(str(tmp_path), 1 << 20, 1 << 20)
    kept = ConvertedBatchCache(0, disk, held_max_bytes=2 * SIZE)
    held = [kept.convert("topic", batch) for batch in batches]
    assert [joined(wire) for wire in held] == [joined(to_wire_batches(batch)) for batch in batches]
    assert kept.held_bytes <= 3 * SIZE + 10_000
    assert kept.disk_bytes == 1 << 20
    kept.close()


def test_answers_become_smaller_when_the_share_is_used_up(tmp_path: Path) -> None:
    """Clients that do not read use up the memory limit.

    Later fetches then get one batch each, and more once those are gone.
    """
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    store.create_topic("t", PARTITIONS)
    for number in range(PARTITIONS):
        for _ in range(10):
            store.open_partition("t", number).append([b"v" * 1000] * 30)
    limits = Limits(rendered_bytes=0, rendered_memory_bytes=10 * SIZE)
    cluster = WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1)
    broker = Broker(store, cluster, ServerSettings(limits=limits), OpenAuthorizer())
    try:
        sizes = []
        held = []
        for number in range(PARTITIONS):
            part = FetchPartition(number, partition_max_bytes=1 << 20)
            request = FetchRequest(max_wait_ms=0, max_bytes=1 << 20, topics=[FetchTopic("t", partitions=[part])])
            desk = Desk(broker)
            held.append(desk.dispatcher.handle(desk.connection, memoryview(request_bytes(1, 11, request)[4:])))
            sizes.append(sum(map(len, held[-1])))
        assert sizes[0] > 9 * SIZE
        assert all(SIZE < size < 2 * SIZE for size in sizes[2:]), sizes
        assert broker.converted_batches.held_bytes < (10 + PARTITIONS + 2) * 1.1 * SIZE
        held.clear()
        answer = Desk(broker).ask(1, 11, request)
        assert len(answer.responses[0].partitions[0].records) > 9 * SIZE
    finally:
        broker.close()
