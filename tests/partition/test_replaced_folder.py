"""A store whose folder is deleted under a process that has it open, with or without another one in its place."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

import segmentlog
from segmentlog.errors import UnknownTopic
from segmentlog.partition.partition import Partition
from segmentlog.storage.inspect import inspect_store
from segmentlog.store import LogStore


def filled(path: Path, records: int = 3000) -> LogStore:
    """A store with a topic of several segments, in the background of which nothing happens."""
    store = segmentlog.open(path, background=False)
    config = {"fsync": "never", "segment.bytes": 1 << 20, "cleanup.policy": "delete,compact"}
    log = store.create_topic("t", config=config).partition(0)
    log.append([b"old %d" % number for number in range(records)], [b"key"] * records)
    return store


def replace(path: Path) -> None:
    """Delete the store, and make another one there that is closed cleanly."""
    shutil.rmtree(path)
    with segmentlog.open(path, background=False) as store:
        store.create_topic("t").partition(0).append([b"new"])


def check_new(path: Path) -> None:
    """The store that was made there is as it was left."""
    with segmentlog.open(path, background=False, read_only=True) as store:
        assert [record.value for record in store.consumer("t")] == [b"new"]
    assert list(inspect_store(str(path))) == []


def act(log: Partition, what: str) -> None:
    """Something that changes files by their names."""
    if what == "trim":
        log.trim(1)
    elif what == "retain":
        log.retain(now_ms=int(time.time() * 1000) + 30 * 86_400_000)
    elif what == "fill":
        for _ in range(200):
            log.append([bytes(range(256)) * 64] * 100, [b"key"] * 100)
    else:
        getattr(log, what)()


@pytest.mark.parametrize("what", ["roll", "trim", "retain", "compact", "flush", "append", "close", "fill"])
def test_what_stands_there_now_is_left_alone(tmp_path: Path, what: str) -> None:
    """Whatever the old process does next: it is told, and changes nothing of the log that has its place."""
    path = tmp_path / "store"
    store = filled(path)
    log = store.topic("t").partition(0)
    replace(path)
    if what == "append":  # stays within its segment, and goes where the old files went
        log.append([b"lost"], [b"key"])
    elif what == "close":
        store.close()
    else:
        with pytest.raises(UnknownTopic, match="was deleted or replaced while it was in use"):
            act(log, what)
    check_new(path)
    if what not in ("append", "close"):
        with pytest.raises(UnknownTopic, match="while it was in use"):
            log.append([b"no more"], [b"key"])
        # Asked for anew, it is the new one's.
        assert [batch.values for batch in store.topic("t").partition(0).read(0)] == [[b"new"]]
    store.close()
    check_new(path)


def test_background_work_of_the_old_one(tmp_path: Path) -> None:
    """A store that nobody closed goes on ticking: retention and cleaner stay off the new one, and say no error."""
    path = tmp_path / "store"
    store = filled(path)
    store.topic("t").partition(0)
    replace(path)
    now_ms = int(time.time() * 1000) + 30 * 86_400_000
    with segmentlog.open(path, background=False) as other:
        other.alter_topic("t", retention_ms=-1)
    store._background._rolled.add(("t", 0))  # type: ignore[arg-type]
    store._background.retention_tick(now_ms)
    store._background.cleaner_tick(now_ms)
    store._background.flush_tick()
    check_new(path)
    store.close()
    check_new(path)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Deleted and nothing in its place: the next roll or flush says so, and closing is quiet."""
    path = tmp_path / "store"
    store = filled(path)
    log = store.topic("t").partition(0)
    shutil.rmtree(path)
    with pytest.raises(UnknownTopic, match=r"store/t/0 was deleted or replaced"):
        log.flush()
    store.close()
    assert not path.exists()


def test_reading_another_log(tmp_path: Path) -> None:
    """A reader is not told of damage, which a repair would make worse."""
    path = tmp_path / "store"
    filled(path).close()
    for read_only in (False, True):
        store = segmentlog.open(path, background=False, read_only=read_only)
        log = store.topic("t").partition(0)
        replace(path)
        with pytest.raises(UnknownTopic, match="was deleted or replaced"):
            list(log.read(1))
        store.close()
        shutil.rmtree(path)
        filled(path).close()
