"""Downloaded bytes of an object store are on a disk, too, which may be cleared, full, or broken."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import values, values_by_offset
from objects.buckets import Memory
from objects.tiering import TIERED, fill, hurried, remote, tiered_store, turn, url_of, value

import segmentlog
from segmentlog.errors import DiskFull, ObjectStoreError, SegmentGone
from segmentlog.log.partition import Partition
from segmentlog.log.segment_tiering import recall_segment
from segmentlog.objects.manifest.object_ranges import ObjectRange
from segmentlog.objects.tier import remote_reader as tiered_module
from segmentlog.objects.tier.block_cache import BlockCache, CachedFile
from segmentlog.objects.tier.remote_reader import RemoteReader
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore

__all__ = ["hurried"]
ALL = {number: value(number) for number in range(45)}


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """Return a cache folder that the system may clear."""
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path, cache_dir: Path) -> Iterator[LogStore]:
    """Yield a store of 45 records in five segments, of which four exist only in the object store."""
    with tiered_store(tmp_path, cache_dir=cache_dir) as opened:
        yield opened


@pytest.fixture
def log(store: LogStore) -> Partition:
    """Return the only partition."""
    return store.topic("a").partition(0)


def close_lockable(log: Partition) -> None:
    """Unmap all segments of the log."""
    gc.collect()
    log._open_segments.unmap_deleted()
    log._open_segments._open.clear()
    gc.collect()


def clear(cache_dir: Path, what: str) -> None:
    """Remove downloaded files like a program that clears temporary folders."""
    for folder in cache_dir.glob("segmentlog-*"):
        if what == "folder":
            shutil.rmtree(folder)
            continue
        for path in folder.rglob("*"):
            if path.is_file() and (what == "files" or path.suffix == what):
                path.unlink()


# ---------------------------------------------------------------- cleared


@pytest.mark.parametrize("what", ["files", "folder"])
def test_what_is_cleared_is_brought_anew(log: Partition, cache_dir: Path, what: str) -> None:
    """Mapped segments stay readable; all other reads, and lookups of a time, download the bytes again."""
    for _ in range(2):
        assert values_by_offset(log) == ALL
        close_lockable(log)
        clear(cache_dir, what)
        assert values_by_offset(log) == ALL
        close_lockable(log)
        clear(cache_dir, what)
        assert log.offset_for_timestamp(1_017) == 17
        reading = log.read(0)
        assert next(reading).values[0] == value(0)
        clear(cache_dir, what)
        assert [batch.values[0] for batch in reading] == [value(number) for number in range(1, 45)]
        close_lockable(log)
    assert remote(log) == [0, 10, 20, 30]


@pytest.mark.parametrize("what", ["files", "folder"])
def test_what_was_aborted_is_not_served_for_it(tmp_path: Path, cache_dir: Path, what: str) -> None:
    """The end of a transaction is in a segment whose cached bytes were cleared."""
    with LogStore(tmp_path / "store", background=False, cache_dir=cache_dir) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        with store.producer(name="p", linger_ms=0) as producer:
            producer.begin_transaction()
            for number in range(12):
                producer.send("a", b"aborted%d" % number, partition=0).result()
            producer.abort_transaction()
        fill(log, 20)
        store.ship(url_of(tmp_path))
        wanted = [value(number) for number in range(13, 33)]
    with LogStore(tmp_path / "store", background=False, cache_dir=cache_dir) as store:
        log = store.topic("a").partition(0)
        values(log)
        close_lockable(log)
        clear(cache_dir, what)
        assert values(log, isolation="read_committed") == wanted


@pytest.mark.parametrize("what", ["files", "folder"])
def test_it_comes_back_though_it_was_cleared(
    tmp_path: Path, store: LogStore, log: Partition, cache_dir: Path, what: str
) -> None:
    """Truncating does, and the end of shipping, after which all of it is here."""
    assert values_by_offset(log) == ALL
    close_lockable(log)
    clear(cache_dir, what)
    assert log.truncate(35) is not None
    assert remote(log) == [0, 10, 20]
    clear(cache_dir, what)
    assert store.shipping.stop_permanently() == url_of(tmp_path)
    assert remote(log) == []
    assert list(values_by_offset(log)) == list(range(35))


def test_room_is_made_where_something_was_cleared(tmp_path: Path, cache_dir: Path) -> None:
    """Blocks are read although the files that should make room for them are gone."""
    with tiered_store(tmp_path, cache_dir=cache_dir, cache_bytes=1_000) as store:
        log = store.topic("a").partition(0)
        reading = log.read(0)
        assert next(reading).values[0] == value(0)
        clear(cache_dir, "folder")
        assert [batch.values[0] for batch in reading] == [value(number) for number in range(1, 45)]


def test_what_makes_no_room_is_tried_again(tmp_path: Path) -> None:
    """A file that was used long ago stays where no other one can be put in its place; what comes meanwhile is here."""
    bucket = Memory()
    bucket.put("x", b"x" * 100)
    cache = BlockCache(bucket, 100, 0)
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("a", "b"):
        path = f"{folder}/{name}"
        cache.files[path] = CachedFile(cache, path, (ObjectRange(0, 100, "x", 0, ""),))
    old, new = cache.files.values()
    held = [old.open(), new.open()]
    held[0].need(0, 100)
    shutil.rmtree(folder)
    held[1].need(0, 100)
    assert bytes(held[1].map()) == b"x" * 100
    assert (cache.held_bytes, old.is_retired) == (200, False)
    cache.close()


def test_what_does_not_come_is_told(store: LogStore, log: Partition) -> None:
    """Ending shipping and truncating fail while bytes that are needed locally exist only in the object store."""
    store.fs.reach_by, before = None, store.fs.reach_by
    with pytest.raises(ObjectStoreError, match="could not be recalled"):
        log.truncate(15)
    with pytest.raises(ObjectStoreError, match="could not be recalled"):
        store.shipping.stop_permanently()
    store.fs.reach_by = before
    assert os.path.exists(f"{store.path}/@ship")
    assert values_by_offset(log) == ALL


def test_a_store_that_is_opened_by_its_url_brings_it_anew(tmp_path: Path, store: LogStore) -> None:
    """Segments of it that are cleared come once more: none is left out in silence."""
    there = tmp_path / "elsewhere"
    with segmentlog.open(url_of(tmp_path), cache_dir=there, background=False) as attached:
        log = attached.topic("a").partition(0)
        assert values_by_offset(log) == ALL
        close_lockable(log)
        clear(there, ".log")
        assert values_by_offset(log) == ALL
        clear(there, ".log")
        assert log.offset_for_timestamp(1_017) == 17


# ---------------------------------------------------------------- full, or broken


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [(errno.ENOSPC, DiskFull, "no room on the disk; free"), (errno.EIO, ObjectStoreError, "Input/output error")],
)
@pytest.mark.parametrize("call", ["write_all", "opened"])
def test_a_disk_for_the_cache_that_fails_is_named(
    store: LogStore, log: Partition, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int,
    kind: type[Exception], says: str,
) -> None:  # fmt: skip
    """The error and `health()` name its folder; records do not count as lost, appends succeed, and reads do later."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as broken:
        broken.setattr(f"segmentlog.objects.tier.block_cache.{call}", fail)
        for do in (lambda: values(log), lambda: recall_segment(log.handle, 0), lambda: log.truncate(15)):
            with pytest.raises(kind, match=says) as raised:
                do()
            assert f"{cache_dir}/segmentlog-" in str(raised.value)
            assert not isinstance(raised.value, SegmentGone)
        (why,) = store.health().values()
        assert f"{cache_dir}/segmentlog-" in why
        assert log.append([b"on"]) == 45
    assert values_by_offset(log) == ALL | {45: b"on"}
    assert store.health() == {}


# ---------------------------------------------------------------- with what is secret


def test_a_url_that_is_told_later_counts_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that succeeded or failed without the secret use it afterwards, and keep the downloaded bytes."""
    bucket = Memory()
    bucket.url = "s3://bucket/store"

    class Refusing(Memory):
        """An object store that refuses every read."""

        def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
            raise ObjectStoreError(bucket.url, key, "403 Forbidden", False)

    monkeypatch.setattr(tiered_module, "open_bucket", lambda url: bucket if "secret" in url else Refusing())
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 45)
        turn(store, bucket)
        path = f"{log.folder}/{0:020d}.log"
    tiered = RemoteReader()
    try:
        found = tiered.open_segment(FileSystem(), path)
        assert found is not None
        with pytest.raises(ObjectStoreError, match="403"):
            found.need(0, 1)
        tiered.add_url("s3://key:secret@bucket/store")
        found.need(0, 1)
        again = tiered.open_segment(FileSystem(), path)
        assert again is not None
        again.need(0, 1)
        assert tiered.downloaded_bytes == os.stat(path).st_size
    finally:
        tiered.close()
