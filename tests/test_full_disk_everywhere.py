"""A disk without any room, under everything that a store does: `DiskFull`, and on again once there is some."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from segmentlog.errors import DiskFull, SegmentlogError
from segmentlog.storage.fs import Buffer, FileSystem
from segmentlog.store import LogStore


class FullDisk(FileSystem):
    """While ``is_full``, no file grows, none is made, and no name is added to a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.refused = 0
        real_open, real_mkdir, real_pwritev = os.open, os.mkdir, FileSystem.pwritev

        def open_file(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
            if flags & os.O_CREAT and not os.path.exists(path):
                self.check(path)
            return real_open(path, flags, mode, **options)

        def mkdir(path: Any, mode: int = 0o777, **options: Any) -> None:
            if not os.path.exists(path):
                self.check(path)
            real_mkdir(path, mode, **options)

        def pwritev(fd: int, buffers: Sequence[Buffer], position: int) -> int:
            if position + sum(map(len, buffers)) > os.fstat(fd).st_size:
                self.check(fd)
            return real_pwritev(fd, buffers, position)

        monkeypatch.setattr(os, "open", open_file)
        monkeypatch.setattr(os, "mkdir", mkdir)
        self.pwritev = pwritev

    def check(self, what: object) -> None:
        """Raise ENOSPC when the disk is full."""
        if self.is_full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(what))

    def fallocate(self, fd: int, position: int, size_bytes: int) -> None:
        if position + size_bytes > os.fstat(fd).st_size:
            self.check(fd)
        super().fallocate(fd, position, size_bytes)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """One with room, so far."""
    return FullDisk(monkeypatch)


@pytest.fixture
def store(tmp_path: Path, disk: FullDisk) -> Iterator[LogStore]:
    """A topic of two segments, and a compacted one of four."""
    with LogStore(tmp_path / "store", background=False, fs=disk) as opened:
        log = opened.create_topic("t", segment_records=50).partition(0)
        log.append([b"%d" % number for number in range(100)])
        opened.create_topic("c", cleanup_policy="compact", segment_records=10).partition(0).append(
            [b"v"] * 40, keys=[b"%d" % (number % 3) for number in range(40)]
        )
        yield opened
        disk.is_full = False


def _consume(store: LogStore) -> None:
    with store.consumer("t", group="g") as consumer:
        assert next(iter(consumer)).offset >= 0
        consumer.commit()


def _transact(store: LogStore) -> None:
    with store.producer(name="n") as producer, producer.transaction():
        producer.send("t", b"x" * 1000)


def _create(store: LogStore) -> None:
    store.create_topic("new")
    store.delete_topic("new")


def _rename(store: LogStore) -> None:
    store.rename_topic("t", "u")
    store.rename_topic("u", "t")


def _alter(store: LogStore) -> None:
    store.alter_topic("t", retention_ms=5_000_000, partitions=store.topic("t").partition_count + 1)


def _send(store: LogStore) -> None:
    with store.producer() as producer:
        producer.send("t", b"x" * 100_000)


WORK: dict[str, Callable[[LogStore], object]] = {
    "append": lambda store: store.topic("t").partition(0).append([b"x" * 100_000]),
    "append durably": lambda store: store.topic("t").partition(0).append([b"x" * 100_000], ack="durable"),
    "roll": lambda store: store.topic("t").partition(0).roll(),
    "trim": lambda store: store.topic("t").partition(0).trim(60),
    "truncate": lambda store: store.topic("t").partition(0).truncate(store.topic("t").partition(0).log_end_offset - 1),
    "compact": lambda store: store.topic("c").partition(0).compact(),
    "retain": lambda store: store.topic("t").partition(0).retain(),
    "flush": lambda store: store.topic("t").partition(0).flush(),
    "create": _create,
    "alter": _alter,
    "rename": _rename,
    "send": _send,
    "transact": _transact,
    "consume as a group": _consume,
    "reset a group": lambda store: store.groups.reset("other", {("t", 0): 5}),
    "open": lambda store: LogStore(store.path, background=False, fs=store._topics.fs).close(),
}


@pytest.mark.parametrize("what", WORK)
def test_no_room_is_told_as_that_and_passes(store: LogStore, disk: FullDisk, what: str) -> None:
    """Whatever meets it says `DiskFull`, or does without; nothing is lost; with room again it works, as it is."""
    disk.is_full = True
    told: SegmentlogError | None = None
    try:
        WORK[what](store)
    except SegmentlogError as error:
        told = error
    # That, or what it led to.
    assert told is None or isinstance(told, DiskFull) or isinstance(told.__cause__, DiskFull), repr(told)
    assert "for 0 more bytes" not in str(told)
    disk.is_full = False
    WORK[what](store)
    log = store.topic("t").partition(0)
    found = [value for batch in log.read(log.log_start_offset) for value in batch.values]
    assert found[:30] == [b"%d" % number for number in range(log.log_start_offset, log.log_start_offset + 30)]
    assert log.append([b"on"]) >= 99


def test_a_topic_can_be_deleted_to_make_room(store: LogStore, disk: FullDisk) -> None:
    """Also by a store that was opened on the full disk."""
    disk.is_full = True
    with LogStore(store.path, background=False, fs=disk) as other:
        other.delete_topic("c")
        assert other.topics() == ["t"]
