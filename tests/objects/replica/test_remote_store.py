"""A store that is read from where it lies: what comes, when, and how much of it stays."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from logs import values, values_by_offset
from objects.buckets import Memory

import segmentlog
from segmentlog.errors import CorruptBatch, InvalidConfig, ObjectStoreError, ReadOnlyStore, ShippingRefused
from segmentlog.objects.manifest.garbage_collection import sweep
from segmentlog.objects.manifest.object_ranges import ObjectRange, ObjectRanges
from segmentlog.objects.replica.lazy_file_system import LazyFileSystem
from segmentlog.objects.replica.remote_store import RemoteStore
from segmentlog.objects.tier.block_cache import BLOCK_BYTES, BlockCache, CachedFile
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.records import TopicPartition
from segmentlog.storage.file_operations import read_file
from segmentlog.store import LogStore

NOISE = random.Random(1).randbytes(1 << 20)
"""Bytes that do not compress."""


class Counting(Memory):
    """Counts what is brought, and fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []
        self.got: list[str] = []
        self.fails = 0

    def get(self, key: str) -> tuple[bytes, str]:
        self.got.append(key)
        return super().get(key)

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        self.ranges.append((key, start, size_bytes))
        if self.fails:
            self.fails -= 1
            raise ObjectStoreError(self.url, key, "no answer in time")
        return super().get(key)[0][start : start + size_bytes]

    @property
    def brought(self) -> int:
        """Bytes of ranges."""
        return sum(size_bytes for _, _, size_bytes in self.ranges)


@pytest.fixture
def bucket() -> Counting:
    """Return the bucket that the store is shipped to."""
    return Counting()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store of one topic: six sealed segments of 4 MiB, and a batch."""
    with LogStore(tmp_path / "store", background=False) as opened:
        log = opened.create_topic("a", segment_records=16).partition(0)
        for number in range(6 * 16 + 1):
            log.append([b"%d/" % number + NOISE[: 1 << 18]])
        yield opened


def ship(store: LogStore, bucket: Memory, now_ms: int | None = None) -> None:
    """Ship everything, and run another cycle."""
    for log in store.opened_partitions():
        log.flush()
    shipper = Shipper(store._topics, bucket, parallel=0, grace_ms=0)
    shipper.ship()
    if now_ms is not None:
        shipper.run_cycle(now_ms)
    shipper.close()


class Visit:
    """A store that is read from a bucket, for as long as the context lasts."""

    def __init__(self, bucket: Memory, folder: Path, **options: Any) -> None:
        given = {"cache_bytes": 1 << 30, "refresh_ms": 1000, "threads": False, "parallel": 0}
        self.attached = RemoteStore("memory://bucket", cache_dir=folder, bucket=bucket, **(given | options))
        self.store = LogStore(self.attached.path, read_only=True, background=False, fs=self.attached.fs)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()
        self.attached.close()


def test_what_is_not_read_does_not_come(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Opening downloads no segment; the lookup of an offset downloads an index and a block or two."""
    ship(store, bucket)
    with Visit(bucket, tmp_path / "cache") as visit:
        log = visit.store.topic("a").partition(0)
        assert (log.log_start_offset, log.log_end_offset) == (0, 97)
        assert bucket.brought == 0
        bucket.got.clear()
        (batch,) = log.read(37, max_bytes=1)
        assert [record.offset for record in batch] == [37]
        assert 0 < bucket.brought <= 3 * BLOCK_BYTES
        assert [key.partition("-")[2].partition(".")[2] for key in bucket.got] == ["index"]
        before = bucket.brought
        assert values(log, 37, max_bytes=1) == [b"37/" + NOISE[: 1 << 18]]
        assert bucket.brought == before


@pytest.mark.parametrize("parallel", [0, 4])
@pytest.mark.parametrize("cache_bytes", [1 << 30, 5 << 20])
def test_all_of_it_is_what_was_shipped(
    tmp_path: Path, store: LogStore, bucket: Counting, parallel: int, cache_bytes: int
) -> None:
    """A read of everything downloads each byte once.

    A second read downloads only the bytes that the cache had no room for.
    """
    ship(store, bucket)
    wanted = values_by_offset(store.topic("a").partition(0))
    with Visit(bucket, tmp_path / "cache", parallel=parallel, cache_bytes=cache_bytes) as visit:
        log = visit.store.topic("a").partition(0)
        assert values_by_offset(log) == wanted
        size_bytes = sum(segment.size_bytes for segment in log.segments())
        assert bucket.brought == size_bytes
        assert values_by_offset(log) == wanted
        assert (bucket.brought > size_bytes) == (cache_bytes < size_bytes)
        assert visit.attached.held_bytes <= max(cache_bytes, 5 << 20)


def test_who_reads_while_it_is_put_aside_reads_on(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Views of what was read stay what they are."""
    ship(store, bucket)
    with Visit(bucket, tmp_path / "cache", cache_bytes=1) as visit:
        log = visit.store.topic("a").partition(0)
        readers = [log.read(offset) for offset in (0, 20, 40, 60, 80)]
        batches = [next(reader) for _ in range(10) for reader in readers]
        for batch in batches:
            assert batch.values == [b"%d/" % batch.base_offset + NOISE[: 1 << 18]]


def test_times_transactions_and_positions(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Times, transactions and positions are looked up as in any store."""
    log = store.create_topic("b", segment_records=4).partition(0)
    for number in range(10):
        log.append([b"%d" % number], timestamps=[1000 + 10 * number])
    with store.producer(name="p", linger_ms=0) as producer:
        for verdict in (producer.abort_transaction, producer.commit_transaction):
            producer.begin_transaction()
            producer.send("b", b"of a transaction").result()
            verdict()
    store.groups.reset("g", {TopicPartition("b", 0): 7})
    ship(store, bucket)
    ship(store, bucket)
    with Visit(bucket, tmp_path / "cache") as visit:
        there = visit.store.topic("b").partition(0)
        assert there.offset_for_timestamp(1055) == 6
        assert values_by_offset(there) == values_by_offset(log)
        committed = values(log, isolation="read_committed")
        assert values(there, isolation="read_committed") == committed
        assert len(committed) == 11
        assert visit.store.group_offsets.by_topic_id("g") == store.group_offsets.by_topic_id("g")
        (known,), (wanted,) = there.producers(), log.producers()
        assert (known.producer_id, known.runs, known.transaction_offset) == (wanted.producer_id, wanted.runs, -1)
        with pytest.raises(ReadOnlyStore):
            there.append([b"x"])


def test_what_is_new_shows_and_a_place_near_the_end_takes_little(
    tmp_path: Path, store: LogStore, bucket: Counting
) -> None:
    """The active segment is shipped in chunks whose starts are known."""
    log = store.create_topic("b").partition(0)
    with Ships(store, bucket) as shipper, Visit(bucket, tmp_path / "cache") as visit:
        for number in range(12):
            log.append([b"%d/" % number + NOISE[: 3 << 18]])
            log.flush()
            shipper.run_cycle()
        assert visit.attached.refresh()
        assert not visit.attached.refresh()
        there = visit.store.topic("b").partition(0)
        assert there.log_end_offset == 12
        assert values(there, 11) == [b"11/" + NOISE[: 3 << 18]]
        assert bucket.brought <= 5 * BLOCK_BYTES, "of nine"
        assert values_by_offset(there) == values_by_offset(log)


class Ships:
    """A shipper without threads, closed in the end."""

    def __init__(self, store: LogStore, bucket: Memory) -> None:
        self._shipper = Shipper(store._topics, bucket, parallel=0)

    def __enter__(self) -> Shipper:
        self._shipper.run_cycle()
        return self._shipper

    def __exit__(self, *error: object) -> None:
        self._shipper.close()


def test_an_object_that_is_gone_is_explained_by_the_manifest(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """A reader in a compacted segment continues in its replacement. If an object is missing, the error names it."""
    keys = store.create_topic("keys", cleanup_policy="compact", segment_records=8).partition(0)
    for number in range(40):
        keys.append([b"%d" % number], [b"k%d" % (number % 4)])
    ship(store, bucket)
    with Visit(bucket, tmp_path / "cache") as visit:
        log = visit.store.topic("keys").partition(0)
        assert values(log, 0, max_bytes=1) == [b"0"]
        keys.roll()
        keys.compact()
        ship(store, bucket, 10**15)
        sweep(bucket, 10**15 + 1, grace_ms=0)
        sweep(bucket, 10**15 + 2, grace_ms=0)
        found = values_by_offset(log)  # blocks that were read before, and then the current content
        assert found.items() > values_by_offset(keys).items()
        assert values_by_offset(log) == values_by_offset(keys)
        for key in [key for key in bucket._objects if key.startswith("segments/")]:
            del bucket._objects[key]
        with pytest.raises(ShippingRefused, match="is missing, although the manifest refers to it"):
            values(visit.store.topic("a").partition(0))


def test_a_request_that_fails_is_tried_again_by_the_next_read(
    tmp_path: Path, store: LogStore, bucket: Counting
) -> None:
    """The error is the object store's, and no damage."""
    ship(store, bucket)
    for parallel in (0, 4):
        with Visit(bucket, tmp_path / "cache", parallel=parallel) as visit:
            log = visit.store.topic("a").partition(0)
            bucket.fails = 1000
            with pytest.raises(ObjectStoreError, match="no answer in time"):
                values(log)
            bucket.fails = 0
            assert values_by_offset(log) == values_by_offset(store.topic("a").partition(0))


def test_what_fails_for_others_is_asked_for_once_more(tmp_path: Path) -> None:
    """A read that waits for blocks of another request, such as a prefetch, does not fail with it."""
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)

    class Failing(Memory):
        """It answers when it is told to, the first time with an error."""

        def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
            asked.release()
            assert answered.acquire(timeout=30)
            if not is_well:
                is_well.append(True)
                raise ObjectStoreError(self.url, key, "no answer in time")
            return bytes(size_bytes)

    is_well: list[bool] = []
    cache = BlockCache(Failing(), 1 << 30, 2)
    try:
        file = CachedFile(cache, str(tmp_path / "0.log"), (ObjectRange(0, BLOCK_BYTES, "key", 0, ""),))
        held, joined = file.open(), threading.Event()
        begin = file._start_downloads

        def count_joined(*args: Any) -> Any:
            found = begin(*args)
            if found[1]:
                joined.set()
            return found

        file._start_downloads = count_joined  # type: ignore[method-assign]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(held.need, 0, 10)
            assert asked.acquire(timeout=30)
            second = pool.submit(held.need, 0, 10)
            assert joined.wait(30)
            answered.release(2)
            with pytest.raises(ObjectStoreError, match="no answer in time"):
                first.result(30)
            second.result(30)
    finally:
        answered.release(9)
        cache.close()


def test_damage_there_is_damage_here(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Found by the checksums of batches, as in a file."""
    ship(store, bucket)
    key = min(key for key in bucket._objects if key.startswith("segments/") and "." not in key)
    data, tag = bucket._objects[key]
    bucket._objects[key] = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], tag
    with Visit(bucket, tmp_path / "cache") as visit:
        log = visit.store.topic("a").partition(0)
        with pytest.raises(CorruptBatch):
            values(log)
        skipped: list[tuple[int, int]] = []
        kept = values(log, on_skip=lambda base, end, damage: skipped.append((base, end)))
        assert (len(kept), skipped) == (96, [(0, 1)])


def test_without_indexes_it_takes_more_and_is_the_same(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """Indexes are only caches there, too."""
    ship(store, bucket)
    for key in [key for key in bucket._objects if key.endswith(".index")]:
        del bucket._objects[key]
    with Visit(bucket, tmp_path / "cache") as visit:
        log = visit.store.topic("a").partition(0)
        assert values(log, 37, max_bytes=1) == [b"37/" + NOISE[: 1 << 18]]


def test_it_goes_when_it_is_closed_and_what_was_killed_goes_with_the_next(
    tmp_path: Path, store: LogStore, bucket: Counting
) -> None:
    """Folders of other programs stay."""
    ship(store, bucket)
    cache = tmp_path / "cache"
    (cache / "segmentlog-mine").mkdir(parents=True)
    (cache / "segmentlog-killed").mkdir()
    (cache / "segmentlog-killed" / "@replica").touch()
    with Visit(bucket, cache) as first, Visit(bucket, cache) as second:
        assert sorted(os.listdir(cache)) == sorted(
            ["segmentlog-mine", os.path.basename(first.attached.path), os.path.basename(second.attached.path)]
        )
    assert os.listdir(cache) == ["segmentlog-mine"]
    with pytest.raises(ShippingRefused, match="no store was shipped to this URL"):
        Visit(Counting(), cache)
    assert os.listdir(cache) == ["segmentlog-mine"]


def test_what_it_cannot_be_told(tmp_path: Path) -> None:
    """Invalid sizes, folders and URLs are refused, and so is shipping the store elsewhere."""
    url = f"file://{tmp_path}/bucket"
    (tmp_path / "file").touch()
    for options in ({"cache_bytes": 0}, {"cache_bytes": 1.5}, {"refresh_ms": 0}, {"cache_dir": tmp_path / "file"},
                    {"ship": "file:///elsewhere"}):  # fmt: skip
        with pytest.raises(InvalidConfig, match=next(iter(options))):
            segmentlog.open(url, **options)  # type: ignore[arg-type]
    with pytest.raises(ShippingRefused, match="no store was shipped to this URL"):
        segmentlog.open(url)
    with pytest.raises(InvalidConfig, match="url"):
        segmentlog.open("ftp://nowhere")
    with segmentlog.open(tmp_path / "store", background=False) as store, pytest.raises(InvalidConfig, match="URL"):
        store.refresh_tick()
    with pytest.raises(InvalidConfig, match=r"only_topics.*in an object store"):
        segmentlog.open(tmp_path / "store", only_topics=["a"])


def test_only_topics_that_are_wanted(tmp_path: Path) -> None:
    """Names and patterns select topics, one or several; errors name the URL and not the cache folder."""
    url = f"file://{tmp_path}/bucket"
    with segmentlog.open(tmp_path / "store", background=False) as store:
        for name in ("orders", "orders-old", "o", "clicks"):
            store.create_topic(name).partition(0).append([name.encode()])
        store.ship(url)
    for wanted, there in (
        ((), ["clicks", "o", "orders", "orders-old"]),
        ("orders", ["orders"]),
        (["orders*"], ["orders", "orders-old"]),
        (iter(("clicks", "o?*")), ["clicks", "orders", "orders-old"]),
    ):
        with segmentlog.open(url, background=False, only_topics=wanted) as found:
            assert found.topics() == there
            assert found.url == url
            assert [record.value for name in there for record in found.consumer(name)] == [
                name.encode() for name in there
            ]
            with pytest.raises(ReadOnlyStore, match=f"^{url}: "):
                found.create_topic("new")
    for bad in (7, None, b"orders", ["orders", ""], [b"orders"], ""):
        with pytest.raises(InvalidConfig, match="only_topics"):
            segmentlog.open(url, only_topics=bad)  # type: ignore[arg-type]
    assert store.url is None


def test_followed_by_a_url(tmp_path: Path) -> None:
    """A thread looks for what is new; without one `refresh_tick` does."""
    url = f"file://{tmp_path}/bucket"
    with segmentlog.open(tmp_path / "store") as store:
        log = store.create_topic("a").partition(0)
        log.append([b"0"])
        store.ship(url)
        with (
            segmentlog.open(url, refresh_ms=20) as there,
            segmentlog.open(url, background=False) as later,
            there.consumer("a", follow=True) as consumer,
        ):
            assert repr(there) == f"<LogStore {url}>"
            seen: list[bytes | None] = []
            reader = threading.Thread(target=lambda: seen.extend(next(consumer).value for _ in range(2)))
            reader.start()
            log.append([b"1"])
            store.ship(url)
            reader.join(30)
            assert seen == [b"0", b"1"]
            assert there.health() == {}
            assert values(later.topic("a").partition(0)) == [b"0"]
            assert later.refresh_tick()
            assert values(later.topic("a").partition(0)) == [b"0", b"1"]
            (tmp_path / "bucket" / "manifest.json").unlink()
            with pytest.raises(ShippingRefused):
                later.refresh_tick()
            assert "no store was shipped to this URL" in later.health()["object store"]


def test_a_child_is_told_to_open_it_anew(tmp_path: Path, store: LogStore, bucket: Counting) -> None:
    """The threads that bring are the parent's; and what the parent has stays."""
    ship(store, bucket)
    with Visit(bucket, tmp_path / "cache") as visit:
        log = visit.store.topic("a").partition(0)
        child = os.fork()
        if not child:
            status = 1
            try:
                for use in (visit.attached.refresh, lambda: values(log)):
                    with pytest.raises(ObjectStoreError, match="open it again in the child"):
                        use()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert len(values(log)) == 97


# ---------------------------------------------------------------- files of ranges by themselves


def object_ranges(bucket: Memory, data: bytes, cuts: list[int]) -> ObjectRanges:
    """Put an object for each part, and return the ranges."""
    spans = []
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True)):
        bucket.put(f"o{number}", b"before" + data[start:end])
        spans.append(ObjectRange(start, end - start, f"o{number}", 6, ""))
    return tuple(spans)


@pytest.mark.parametrize("parallel", [0, 3])
def test_ranges_from_many_threads(tmp_path: Path, bucket: Counting, parallel: int, monkeypatch: Any) -> None:
    """Threads that read any ranges in any order get the right bytes, while the cache evicts and reloads blocks."""
    monkeypatch.setattr("segmentlog.objects.tier.block_cache.BLOCK_BYTES", 1000)
    data = NOISE[:100_500]
    cache = BlockCache(bucket, 20_000, parallel)
    path, other = str(tmp_path / "a.log"), str(tmp_path / "b.log")
    whole = object_ranges(bucket, data, [7, 40_000, 40_001, 77_777])
    files = LazyFileSystem(cache)
    for one in (path, other):
        assert files.extend(one, 0, whole[:2])

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            held = files.ranged(rng.choice((path, other)))
            assert held is not None
            view = held.map()
            start = rng.randrange(len(view))
            end = min(start + rng.choice((1, 900, 5000, 30_000)), len(view))
            held.need(start, end)
            assert view[start:end] == data[start:end]

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(read, seed) for seed in range(8)]
        for count in (3, 4, 5):
            for one in (path, other):
                assert files.extend(one, 0, whole[:count])
        for future in running:
            future.result()
    assert not files.extend(path, 0, whole[:2]), "it became shorter"
    for one in (path, other):
        assert read_file(files, one) == data
        assert files.stat(one).st_size == len(data)
    cache.close()


def test_who_reads_on_has_it_brought_ahead(tmp_path: Path, bucket: Counting) -> None:
    """For reads in order, ever more blocks are fetched ahead; for reads at random, none."""
    data = NOISE * 40
    spans = object_ranges(bucket, data, [])
    for jumps in (False, True):
        cache = BlockCache(bucket, 1 << 30, 0)
        file = CachedFile(cache, str(tmp_path / f"{jumps}.log"), spans)
        held = file.open()
        bucket.ranges.clear()
        for at in range(8):
            block = (at * 7) % 40 if jumps else at
            held.need(block * BLOCK_BYTES, block * BLOCK_BYTES + 10)
        blocks = bucket.brought // BLOCK_BYTES
        assert blocks <= 9 if jumps else blocks > 11
        cache.close()
