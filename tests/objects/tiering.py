"""Stores with tiered storage, for tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock

from segmentlog.log.partition import Partition
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore

TIERED: dict[str, Any] = {
    "segment_records": 10, "remote_storage_enable": True, "local_retention_ms": 0, "fsync": "always",
    "file_delete_delay_ms": 0, "retention_ms": -1, "compression_type": "none", "index_interval_bytes": 64,
}  # fmt: skip
"""Settings of a topic whose sealed segments are evicted as soon as they are shipped."""


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync and fdatasync: these tests do not simulate a power cut."""
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(FileSystem, call, staticmethod(lambda fd: None))


def url_of(folder: Path) -> str:
    """Return the URL that the store is shipped to."""
    return f"file://{folder}/bucket"


def value(number: int) -> bytes:
    """Return the value of the record with this number."""
    return b"%d/" % number + b"v" * 50


def fill(log: Partition, count: int) -> None:
    """Append ``count`` records, a millisecond apart."""
    for number in range(log.log_end_offset, log.log_end_offset + count):
        log.append([value(number)], timestamps=[1_000 + number])


def tiered_store(folder: Path, *, count: int = 45, **options: Any) -> LogStore:
    """Create a store with one topic and ship it. Its sealed segments are then stored only in the object store."""
    store = LogStore(folder / "store", background=False, **options)
    fill(store.create_topic("a", **TIERED).partition(0), count)
    store.ship(url_of(folder))
    return store


def turn(store: LogStore, bucket: Any, clock: FakeClock | None = None) -> Shipper:
    """Ship all of it to a bucket, with the eviction that comes of it; the shipper is closed."""
    shipper = Shipper(store._topics, bucket, parallel=0)
    try:
        shipper.ship()
        if clock is not None:
            clock.advance(2_000)
            shipper.ship()
    finally:
        shipper.close()
    return shipper


def remote(log: Partition) -> list[int]:
    """Return the base offsets of the segments that are stored only in the object store."""
    return [segment.base_offset for segment in log.segments() if segment.remote]


def taken(log: Partition) -> int:
    """Bytes that the sealed segments of a partition take on this disk."""
    return sum(os.stat(segment.path).st_blocks * 512 for segment in log.segments() if not segment.active)
