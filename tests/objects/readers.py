"""The content of an object store, read in each of the possible ways."""

from __future__ import annotations

from pathlib import Path

from logs import FakeClock, NoSyncFileSystem, values_by_offset

from segmentlog.format.manifest import MANIFEST_KEY, Manifest, decode_manifest
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.manifest.garbage_collection import verify
from segmentlog.objects.replica.remote_store import RemoteStore
from segmentlog.objects.replica.replica import Replica
from segmentlog.objects.restore.restore import restore
from segmentlog.store import LogStore


def open_store(path: Path, clock: FakeClock | None = None) -> LogStore:
    """Open a store as the next process does."""
    return LogStore(path, background=False, fs=NoSyncFileSystem(), clock=clock)


def contents(store: LogStore) -> dict[str, dict[int, bytes | None]]:
    """Return all values."""
    return {
        f"{topic}/{log.number}": values_by_offset(log)
        for topic in store.topics() for log in store.topic(topic).partitions()
    }  # fmt: skip


def check(bucket: Bucket, folder: Path, wanted: dict[str, dict[int, bytes | None]]) -> None:
    """Check that all ways of reading the object store return everything, and that it matches the manifest."""
    assert not verify(bucket).problems
    restore(bucket, str(folder / "restored"), parallel=0)
    with open_store(folder / "restored") as restored:
        assert contents(restored) == wanted
    assert not [found for found in inspect_store(str(folder / "restored")) if found.severity == "damage"]
    with Replica(bucket.url, folder / "replica", bucket=bucket, threads=False, fs=NoSyncFileSystem()) as replica:
        replica.refresh()
        with open_store(folder / "replica") as read:
            assert contents(read) == wanted
    attached = RemoteStore(
        bucket.url,
        bucket=bucket,
        cache_dir=str(folder),
        threads=False,
        cache_bytes=1 << 30,
        refresh_ms=1000,
        parallel=0,
    )
    try:
        with LogStore(attached.path, background=False, fs=attached.fs) as read:
            assert contents(read) == wanted
    finally:
        attached.close()


def decoded(bucket: Bucket) -> Manifest:
    """Return the manifest in the object store."""
    return decode_manifest(bucket.get(MANIFEST_KEY)[0])
