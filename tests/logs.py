"""Partitions for tests: opened, read whole, and left the ways that processes and machines die."""

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
    """Clocks that stand still until they are moved."""

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
    """The real one in a hurry: what a test does not take the power from need not be on the disk."""

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
    """The partition in ``folder``, which is made if need be; ``settings`` are keys of the topic's configuration.

    The end of the test closes it, as the death of a process would.
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
    """Every record from ``start`` (default: the first) on."""
    first = partition.log_start_offset if start is None else start
    return [
        Kept(record.offset, record.key, record.value, record.timestamp, record.headers)
        for batch in partition.read(first, **options)
        for record in batch.records()
    ]


def values_by_offset(log: Partition) -> dict[int, bytes | None]:
    """Every value that there is, read from the log start."""
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
    """The partition is left as it is, and what all processes share about it is gone."""
    partition.abandon()
    os.unlink(f"{partition.folder}/state")


def delete_indexes(folder: Path) -> int:
    """How many index files there were."""
    files = [*folder.glob("*.index"), *folder.glob("*.timeindex")]
    for file in files:
        file.unlink()
    return len(files)


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` with its bytes; folders end with a slash."""
    return {
        str(path.relative_to(folder)) + ("/" if path.is_dir() else ""): b"" if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }
