"""A store whose folder is deleted under a process that has it open, with or without another one in its place."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import segmentlog
from segmentlog.errors import UnknownTopic
from segmentlog.inspection.store import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.storage.fs import FileSystem
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
    store._topics.background._rolled.add(("t", 0))  # type: ignore[arg-type]
    store._topics.background.retention_tick(now_ms)
    store._topics.background.cleaner_tick(now_ms)
    store._topics.background.flush_tick()
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


class AtTheWorstTime(FileSystem):
    """Somebody else acts right before the so manieth call that goes by a name in the topic's folder."""

    def __init__(self) -> None:
        self.countdown = -1
        self.calls = 0
        self.act: Callable[[], None] = lambda: None

    def _count(self, path: str) -> None:
        if "/t/0" in path:
            self.calls += 1
            self.countdown -= 1
            if not self.countdown:
                self.act()

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._count(path)
        return super().open(path, flags, mode)

    def listdir(self, path: str) -> list[str]:
        self._count(path)
        return super().listdir(path)

    def stat(self, path: str) -> os.stat_result:
        self._count(path)
        return super().stat(path)


CONFIG = {"segment_records": 10, "fsync": "never"}


def _fill(store: LogStore, word: str) -> None:
    """Several segments, with a transaction that was aborted, and one batch in the middle of the active one."""
    log = store.create_topic("t", config=CONFIG).partition(0)
    for number in range(8):
        log.append([b"%s %d" % (word.encode(), index) for index in range(number * 5, number * 5 + 5)])
    with store.producer(linger_ms=0) as producer:
        producer.begin_transaction()
        producer.send_many("t", [b"aborted"])
        producer.abort_transaction()
    log.append([b"%s last" % word.encode()])


def _all_values(log: Partition) -> set[bytes]:
    return {bytes(value) for batch in log.read(0) for value in batch.values if value is not None}


def _committed_values(log: Partition) -> set[bytes]:
    read = log.read(0, isolation="read_committed")
    return {bytes(value) for batch in read for value in batch.values if value is not None}


def _value_by_time(log: Partition) -> set[bytes]:
    offset = log.offset_for_timestamp(1)
    return _all_values(log) if offset is None else {bytes(next(log.read(offset)).values[0] or b"")}


def _values_of_more(log: Partition) -> set[bytes]:
    found = _all_values(log)
    for _ in range(3):  # in the segment that is mapped, and beyond what was mapped of it
        log.append([b"%0200000d" % 1])
        found |= _all_values(log)
    return found


def _rename_and_replace(other: LogStore) -> None:
    other.rename_topic("t", "u")
    _fill(other, "new")


def _delete(other: LogStore) -> None:
    other.delete_topic("t")


def _delete_and_replace(other: LogStore) -> None:
    other.delete_topic("t")
    _fill(other, "new")


@pytest.mark.parametrize("read", [_all_values, _committed_values, _value_by_time, _values_of_more])
@pytest.mark.parametrize("change", [_rename_and_replace, _delete, _delete_and_replace])
def test_a_reader_hears_of_a_change_at_any_call(
    tmp_path: Path, change: Callable[[LogStore], None], read: Callable[[Partition], set[bytes]]
) -> None:
    """Deleted, renamed or replaced before any call that goes by a name: it is told, and reads no other log's."""
    told = tried = 0
    countdown = 1
    while True:
        path = tmp_path / str(countdown)
        with segmentlog.open(path, background=False) as other:
            _fill(other, "old")
        fs = AtTheWorstTime()
        with segmentlog.open(path, background=False) as other, LogStore(path, background=False, fs=fs) as store:
            log = store.topic("t").partition(0)
            fs.act, fs.countdown, fs.calls = lambda other=other: change(other), countdown, 0  # type: ignore[misc]
            try:
                found = read(log)
            except UnknownTopic:
                told += 1
                found = set()
            is_over = fs.calls < countdown
            assert not any(value.startswith(b"new") for value in found), f"at call {countdown}"
            fs.countdown = -1
        shutil.rmtree(path)
        tried += 1
        countdown += 1
        if is_over:
            break
    assert tried > 5
    assert told > 2
