"""A disk without any room, under everything that a store does: `DiskFull`, and on again once there is some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from full_disk import FullDisk

from segmentlog.errors import DiskFull, SegmentlogError
from segmentlog.store import LogStore


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    """Return a disk that has room until the test fills it."""
    return FullDisk(monkeypatch.setattr)


@pytest.fixture
def store(tmp_path: Path, disk: FullDisk) -> Iterator[LogStore]:
    """Provide a topic of two segments, and a compacted one of four."""
    with LogStore(tmp_path / "store", background=False) as opened:
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
    """Each operation raises `DiskFull` or succeeds without room.

    All records survive, and with room again the operation works.
    """
    disk.is_full = True
    told: SegmentlogError | None = None
    try:
        WORK[what](store)
    except SegmentlogError as error:
        told = error
    # The error is a full disk, or was caused by one.
    assert told is None or isinstance(told, DiskFull) or isinstance(told.__cause__, DiskFull), repr(told)
    assert "for 0 more bytes" not in str(told)
    disk.is_full = False
    WORK[what](store)
    log = store.topic("t").partition(0)
    found = [value for batch in log.read(log.log_start_offset) for value in batch.values]
    assert found[:30] == [b"%d" % number for number in range(log.log_start_offset, log.log_start_offset + 30)]
    assert log.append([b"on"]) >= 99


def test_a_topic_can_be_deleted_to_make_room(store: LogStore, disk: FullDisk) -> None:
    """A store that was opened on the full disk can do so, too."""
    disk.is_full = True
    with LogStore(store.path, background=False) as other:
        other.delete_topic("c")
        assert other.topics() == ["t"]
