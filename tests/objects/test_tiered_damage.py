"""Faults of tiered storage: in the object store, in its objects, and deaths or power cuts during the work."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import NoSyncFileSystem, values, values_by_offset
from objects.buckets import Memory
from objects.tiering import TIERED, fill, hurried, remote, tiered_store, turn, url_of, value

from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, DiskFull, LogTruncated, ObjectStoreError, SegmentGone
from segmentlog.format.manifest import Stored, StoredPart
from segmentlog.format.stub import MalformedStub, Stub, decode_stub, encode_stub
from segmentlog.inspection.finding import Finding
from segmentlog.inspection.segment_inspection import read_segment
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.log.repair.partition_repair import repair_partition
from segmentlog.log.segment_tiering import evict_segment, recall_segment
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.bucket.upload_pool import describe_object
from segmentlog.objects.tier import remote_reader as tiered_module
from segmentlog.objects.tier.remote_reader import RemoteReader, remote_segments_readable
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem, Ranges
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died, FaultyFileSystem
from segmentlog.testing.simulated_disk import SimulatedDisk

__all__ = ["hurried"]
ALL = {number: value(number) for number in range(45)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield a store of 45 records in five segments, of which four exist only in the object store."""
    with tiered_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def log(store: LogStore) -> Partition:
    """Return the only partition."""
    return store.topic("a").partition(0)


def object_of(log: Partition, base: int) -> Path:
    """Return the object of a segment, as a file in the folder that is the object store."""
    stub = decode_stub(Path(f"{log.folder}/{base:020d}.remote").read_bytes())
    return Path(stub.url.removeprefix("file://")) / stub.key


def findings(store: LogStore) -> list[Finding]:
    """Return the findings of verify that are worse than a note."""
    with remote_segments_readable(FileSystem()) as fs:
        return [one for one in inspect_store(store.path, fs=fs) if one.severity != "note"]


# ---------------------------------------------------------------- the stub


STUB = Stub("s3://bucket/store", Stored("segments/x", 123, "0" * 16, "0" * 64), 1)


def test_a_stub_is_what_was_written_or_none() -> None:
    """Every byte of it is checked."""
    data = encode_stub(STUB)
    assert decode_stub(data) == STUB
    for at in range(len(data)):
        with pytest.raises(MalformedStub):
            decode_stub(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(MalformedStub):
            decode_stub(data[:at])


def test_a_stub_names_parts_that_make_the_segment() -> None:
    """The sizes of the parts must sum up to the size of the segment."""
    parts = (StoredPart(100, "0" * 16, "0" * 64), StoredPart(23, "1" * 16, "1" * 64))
    stub = Stub("s3://bucket/store", Stored("segments/x", 123, parts=parts), 1)
    assert decode_stub(encode_stub(stub)) == stub
    with pytest.raises(MalformedStub, match="parts"):
        decode_stub(encode_stub(Stub("s3://bucket/store", Stored("segments/x", 124, parts=parts), 1)))


def test_a_stub_alone_is_not_believed(tmp_path: Path) -> None:
    """A stub next to a complete log, or one with another size, is ignored."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 15)
        for size_bytes in (os.stat(log.segments()[0].path).st_size, 7):
            stub = Stub("file:///nowhere", Stored("segments/x", size_bytes, "0" * 16, "0" * 64), 1)
            Path(log.segments()[0].path.replace(".log", ".remote")).write_bytes(encode_stub(stub))
            assert remote(log) == []
            assert len(values(log)) == 15
            with LogStore(tmp_path / "store", background=False) as again:
                assert len(values(again.topic("a").partition(0))) == 15


def test_a_damaged_stub_is_told_and_made_anew(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """Verify says which, and repair cuts nothing out: the manifest knows what it said, and the shipper writes it."""
    path = Path(f"{log.folder}/{10:020d}.remote")
    path.write_bytes(path.read_bytes().replace(b"segments", b"segmentz"))
    (found,) = findings(store)
    assert (found.severity, found.path) == ("damage", str(path))
    assert "segmentlog ship" in found.what
    with remote_segments_readable(FileSystem()) as fs:
        report = repair_partition(fs, log.folder, "a", 0, lambda: store.topic("a").config)
    assert not report.does_anything
    with LogStore(store.path, background=False) as again, pytest.raises(CorruptBatch, match=r"\.remote"):
        values(again.topic("a").partition(0))
    store.ship(url_of(tmp_path))
    assert findings(store) == []
    assert values_by_offset(log) == ALL


def test_files_looked_at_without_a_way_to_it(log: Partition) -> None:
    """Zeros are not mistaken for records: without the object store, the read raises."""
    bare = Partition(log.folder, "a", 0, lambda: TopicConfig(), fs=NoSyncFileSystem(), read_only=True)
    try:
        with pytest.raises(ObjectStoreError, match="segments/"):
            values(bare)
        assert values(bare, start=40) == [value(number) for number in range(40, 45)]
    finally:
        bare.close()


def test_a_segment_that_leaves_while_it_is_looked_at_is_no_damage(
    tmp_path: Path, store: LogStore, log: Partition
) -> None:
    """The segment leaves between the lookup of its place and the read: the read is repeated."""
    assert recall_segment(log.handle, 10)

    class Leaving(FileSystem):
        def ranged(self, path: str) -> Ranges | None:
            found = super().ranged(path)
            if found is None and path.endswith(f"{10:020d}.log"):
                store.ship(url_of(tmp_path))
            return found

    path = next(segment.path for segment in log.segments() if segment.base_offset == 10)
    whole = Path(path).read_bytes()
    with remote_segments_readable(Leaving()) as fs:
        assert read_segment(fs, path) == (len(whole), whole, [])
    assert remote(log) == [0, 10, 20, 30]


# ---------------------------------------------------------------- the object store


def test_the_object_store_cannot_be_reached(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """Reads of remote segments raise with URL and object; local work continues, and later everything works."""
    os.rename(tmp_path / "bucket", tmp_path / "away")
    with pytest.raises(ObjectStoreError, match=r"bucket: segments/.*mounted") as raised:
        values(log)
    assert raised.value.retriable
    assert not isinstance(raised.value, SegmentGone)
    assert "mounted" in store.health()[f"segments at {url_of(tmp_path)}"]
    assert values(log, start=40) == [value(number) for number in range(40, 45)]
    assert log.append([b"on"]) == 45
    assert [one.severity for one in findings(store)] == ["warning"] * 4
    with store.consumer("a", start="earliest") as consumer:
        for _ in range(2):
            with pytest.raises(ObjectStoreError):
                next(iter(consumer))
        os.rename(tmp_path / "away", tmp_path / "bucket")
        assert [record.offset for record in consumer] == list(range(46))
    assert values_by_offset(log) == ALL | {45: b"on"}
    assert store.health() == {}


def test_an_object_that_is_gone_is_told_and_repaired(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """The error has its name; a repair records a lost range for it, and all other records are read."""
    object_of(log, 10).unlink()
    assert values(log, start=20) == [value(number) for number in range(20, 45)]
    with pytest.raises(SegmentGone, match="gone"):
        values(log)
    damage = findings(store)
    assert damage
    assert "damage" in {one.severity for one in damage}
    with remote_segments_readable(FileSystem()) as fs:
        report = repair_partition(fs, log.folder, "a", 0, lambda: store.topic("a").config)
    assert [(lost.base_offset, lost.end_offset) for lost in report.lost] == [(10, 20)]
    assert list(values_by_offset(log)) == [*range(10), *range(20, 45)]
    with pytest.raises(LogTruncated):
        values(log, start=12)
    assert findings(store) == []


def test_an_object_that_was_changed_is_no_record(store: LogStore, log: Partition) -> None:
    """Each batch is checked as in a file, and a recalled segment is checked as a whole."""
    path = object_of(log, 10)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatch):
        values(log)
    with pytest.raises(SegmentGone, match="damaged"):
        log.truncate(15)
    assert remote(log) == [0, 10, 20, 30]
    assert len(values(log, start=20)) == 25


class Losing(Memory):
    """An object store whose segments are deleted right after each put."""

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        self.delete([one.key for one in self.list("segments/")])
        return super().get_range(key, start, size_bytes)


def test_what_is_not_there_is_not_relied_on(tmp_path: Path) -> None:
    """An eviction first checks the object: without it, the segment stays, and `health()` has the reason."""
    bucket = Losing()
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 45)
        shipper = Shipper(store._topics, bucket, parallel=0)
        shipper.ship()
        assert "no such object" in shipper.eviction_errors["a/0"]
        shipper.close()
        assert remote(log) == []
        assert values_by_offset(log) == ALL


def test_a_disk_without_room_keeps_it_as_it_is(tmp_path: Path) -> None:
    """No segment is evicted or recalled, and no record is lost; with room, the work continues."""
    fs = FaultyFileSystem()
    with tiered_store(tmp_path, fs=fs) as store:
        log = store.topic("a").partition(0)
        fs.room_bytes = 0
        with pytest.raises(DiskFull):
            log.truncate(15)
        with pytest.raises(DiskFull):
            store.shipping.stop_permanently()
        assert remote(log) == [0, 10, 20, 30]
        fs.heal()
        assert values_by_offset(log) == ALL
        assert store.shipping.stop_permanently() == url_of(tmp_path)
        assert remote(log) == []
        fs.room_bytes = 0
        bucket = LocalBucket(str(tmp_path / "other"))
        fs.heal()
        fs.fail("set_modified", errno.ENOSPC, times=None)
        shipper = Shipper(store._topics, bucket, parallel=0)
        shipper.ship()
        assert list(shipper.eviction_errors) == ["a/0"]
        shipper.close()
        fs.heal()
        assert (remote(log), values_by_offset(log)) == ([], ALL)
        turn(store, bucket)
        assert remote(log) == [0, 10, 20, 30]
        assert values_by_offset(log) == ALL


# ---------------------------------------------------------------- killed, and the power


class Hurried(FaultyFileSystem):
    """A file system without syncs: the death of a process does not need them."""

    fdatasync = staticmethod(lambda fd: None)
    fsync = staticmethod(lambda fd: None)


def one_segment(folder: Path, fs: FileSystem) -> tuple[LogStore, Partition, Stub, tuple[int, int, int]]:
    """Return a store whose segment has a copy in a folder: (store, log, stub, stamp of the file)."""
    store = LogStore(folder / "store", background=False, fs=fs)
    log = store.create_topic("a", **TIERED).partition(0)
    fill(log, 15)
    log.advance_recovery_point()
    data = Path(log.segments()[0].path).read_bytes()
    bucket = LocalBucket(str(folder / "bucket"))
    bucket.put("manifest.json", b"{}")
    bucket.put("segments/x", data)
    stub = Stub(bucket.url, describe_object("segments/x", data), 1)
    found = os.stat(log.segments()[0].path)
    return store, log, stub, (found.st_ino, found.st_size, found.st_mtime_ns)


def test_one_that_leaves_again_while_it_comes_back_keeps_its_stub(tmp_path: Path) -> None:
    """A recall stops before it deletes the stub: by then the stub may belong to another eviction."""
    fs = Hurried()
    store, log, stub, stamp = one_segment(tmp_path, fs)
    assert evict_segment(log.handle, 0, stamp, stub)
    other = Partition(log.folder, "a", 0, lambda: log.config, fs=NoSyncFileSystem())
    left: list[bool] = []

    def leave() -> None:
        there = os.stat(log.segments()[0].path)
        left.append(evict_segment(other.handle, 0, (there.st_ino, there.st_size, there.st_mtime_ns), stub))

    fs.before("sync_folder", leave)
    assert recall_segment(log.handle, 0)
    other.abandon()
    assert left == [True]
    assert remote(log) == [0]
    assert len(values(log)) == 15
    assert [one for one in findings(store) if one.severity == "damage"] == []
    store.close()


@pytest.mark.long
@pytest.mark.parametrize("what", ["evict", "bring back"])
def test_killed_at_any_call_it_is_here_or_there(tmp_path: Path, what: str) -> None:
    """A process dies at any call: the next one reads all records, and completes the work."""
    call, done = 0, False
    while not done:
        call += 1
        folder = tmp_path / str(call)
        folder.mkdir()
        fs = Hurried()
        store, log, stub, stamp = one_segment(folder, fs)
        if what == "bring back":
            assert evict_segment(log.handle, 0, stamp, stub)
        fs.die_at(call)
        try:
            assert evict_segment(log.handle, 0, stamp, stub) if what == "evict" else recall_segment(log.handle, 0)
            done = True
        except Died:
            pass
        fs.heal()
        log.abandon()
        with LogStore(folder / "store", background=False, fs=NoSyncFileSystem()) as again:
            log = again.topic("a").partition(0)
            assert len(values(log)) == 15, call
            there = os.stat(log.segments()[0].path)
            if what == "evict":
                evict_segment(log.handle, 0, (there.st_ino, there.st_size, there.st_mtime_ns), stub)
            else:
                recall_segment(log.handle, 0)
            assert remote(log) == ([0] if what == "evict" else [])
            assert len(values(log)) == 15
            assert [one for one in findings(again) if one.severity == "damage"] == []
        store.close()
    assert call > 15


@pytest.mark.long
def test_the_power_fails_at_any_moment(monkeypatch: Any) -> None:
    """With any of the writes on disk: the bytes are local, or the stub says where they are."""
    rng = random.Random(7)
    disk = SimulatedDisk()
    disk.make_folders("/t/0")
    fs = disk.process()
    config = TopicConfig.from_mapping(TIERED)
    bucket = Memory()
    bucket.put("manifest.json", b"{}")
    monkeypatch.setattr(tiered_module, "open_bucket", lambda url: bucket)
    monkeypatch.setattr(tiered_module, "PARALLEL", 0)
    log = Partition("/t/0", "t", 0, lambda: config, fs=fs)
    fill(log, 15)
    log.advance_recovery_point()
    path = log.segments()[0].path
    data = read_file(fs, path)
    bucket.put("segments/x", data)
    stub = Stub(bucket.url, describe_object("segments/x", data), 1)
    points: list[Any] = []
    monkeypatch.setattr(disk, "changed", lambda: points.append(disk.point()))
    tiered = RemoteReader()
    try:
        with remote_segments_readable(fs, tiered):
            for _ in range(2):
                found = fs.stat(path)
                assert evict_segment(log.handle, 0, (found.st_ino, found.st_size, found.st_mtime_ns), stub)
                assert recall_segment(log.handle, 0)
            log.abandon()
        seen = set()
        for point in points:
            for survivor in point.crashes(rng, 12):
                after = survivor.process()
                with remote_segments_readable(after, tiered):
                    again = Partition("/t/0", "t", 0, lambda: config, fs=after)
                    try:
                        assert values(again) == [value(number) for number in range(15)]
                        seen.add(tuple(remote(again)))
                    finally:
                        again.abandon()
        assert seen == {(), (0,)}
    finally:
        tiered.close()
