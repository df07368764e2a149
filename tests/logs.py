"""Partitions for tests: opened, read completely, and abandoned in the ways that processes and machines die."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from leftovers import opened

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.log.partition import Partition
from segmentlog.records import Headers
from segmentlog.storage.fs import FileSystem

NOW_MS = 1_700_000_000_000


class FakeClock(Clock):
    """A clock that advances only when the test moves it."""

    def __init__(self) -> None:
        self.wall_ms = NOW_MS
        self.up_ms = 1_000_000

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_ms(self) -> int:
        return self.up_ms

    def advance(self, ms: int) -> None:
        self.wall_ms += ms
        self.up_ms += ms


class NoSyncFileSystem(FileSystem):
    """The real file system without syncs: faster for a test that simulates no power cut."""

    fdatasync: Callable[[int], None] = staticmethod(lambda fd: None)
    fsync: Callable[[int], None] = staticmethod(lambda fd: None)


class Kept(NamedTuple):
    """One record as a test remembers it."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: Headers = ()


def open_log(
    folder: Path,
    *,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    read_only: bool = False,
    background: bool = False,
    **settings: Any,
) -> Partition:
    """Open the partition in ``folder``, and create it if it does not exist.

    ``settings`` are keys of the topic's configuration. The end of the test closes the partition like the death of its
    process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = TopicConfig.from_mapping({"fsync": "never", **settings})
    return opened(
        Partition(
            str(folder), "t", 0, lambda: config, fs=fs or NoSyncFileSystem(), clock=clock or FakeClock(),
            read_only=read_only, background=background,
        )
    )  # fmt: skip


def contents(partition: Partition, start: int | None = None, **options: Any) -> list[Kept]:
    """Return every record from ``start`` (default: the first) on."""
    first = partition.log_start_offset if start is None else start
    return [
        Kept(record.offset, record.key, record.value, record.timestamp, record.headers)
        for batch in partition.read(first, **options)
        for record in batch.records()
    ]


def values_by_offset(log: Partition) -> dict[int, bytes | None]:
    """Return every value from the log start on, by offset."""
    return {
        offset: value
        for batch in log.read(log.log_start_offset)
        for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
    }


def values(partition: Partition, start: int | None = None, **options: Any) -> list[bytes | None]:
    """Return the values of every record from ``start`` (default: the first) on."""
    return [record.value for record in contents(partition, start, **options)]


def log_files(folder: Path) -> list[Path]:
    """Return the segment files, oldest first."""
    return sorted(folder.glob("*.log"))


def machine_dies(partition: Partition) -> None:
    """Leave the partition as it is, and remove the state that all processes share: the machine died."""
    partition.abandon()
    os.unlink(f"{partition.folder}/state")


def delete_indexes(folder: Path) -> int:
    """Delete the index files, and return how many there were."""
    files = [*folder.glob("*.index"), *folder.glob("*.timeindex")]
    for file in files:
        file.unlink()
    return len(files)


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Return every file below ``folder`` with its bytes; names of folders end with a slash."""
    return {
        str(path.relative_to(folder)) + ("/" if path.is_dir() else ""): b"" if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }
