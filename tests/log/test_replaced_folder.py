"""A process has a store open whose folder is deleted or replaced by another store.

SEGMENTLOG_MOVES_STEP=n: another process renames or deletes the topic before every n-th call (default 12); 1 takes ten
minutes.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import random
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logs import NoSyncFileSystem

import segmentlog
from segmentlog.errors import UnknownTopic
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.store import LogStore


def filled(path: Path, records: int = 3000) -> LogStore:
    """Return a store with a topic of several segments, in the background of which nothing happens."""
    store = segmentlog.open(path, background=False)
    config = {"fsync": "never", "segment.bytes": 1 << 20, "cleanup.policy": "delete,compact"}
    log = store.create_topic("t", config=config).partition(0)
    log.append([b"old %d" % number for number in range(records)], [b"key"] * records)
    return store


def replace(path: Path) -> None:
    """Delete the store, and create another store in its place that is closed cleanly."""
    shutil.rmtree(path)
    with segmentlog.open(path, background=False) as store:
        store.create_topic("t").partition(0).append([b"new"])


def check_new(path: Path) -> None:
    """Check that the new store is unchanged."""
    with segmentlog.open(path, background=False, read_only=True) as store:
        assert [record.value for record in store.consumer("t")] == [b"new"]
    assert list(inspect_store(str(path))) == []


def act(log: Partition, what: str) -> None:
    """Do one kind of work that changes files by their names."""
    if what == "trim":
        log.trim(1)
    elif what == "retain":
        log.apply_retention(now_ms=int(time.time() * 1000) + 30 * 86_400_000)
    elif what == "fill":
        for _ in range(200):
            log.append([bytes(range(256)) * 64] * 100, [b"key"] * 100)
    else:
        getattr(log, what)()


@pytest.mark.parametrize("what", ["roll", "trim", "retain", "compact", "flush", "append", "close", "fill"])
def test_what_stands_there_now_is_left_alone(tmp_path: Path, what: str) -> None:
    """The old process gets an error from each operation, and changes nothing in the new log."""
    path = tmp_path / "store"
    store = filled(path)
    log = store.topic("t").partition(0)
    replace(path)
    if what == "append":  # without a roll, it writes to the old files and is lost
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
        # A new request returns the new partition.
        assert [batch.values for batch in store.topic("t").partition(0).read(0)] == [[b"new"]]
    store.close()
    check_new(path)


def test_background_work_of_the_old_one(tmp_path: Path) -> None:
    """Background work of an unclosed store leaves the new store alone, and logs no error."""
    path = tmp_path / "store"
    store = filled(path)
    store.topic("t").partition(0)
    replace(path)
    now_ms = int(time.time() * 1000) + 30 * 86_400_000
    with segmentlog.open(path, background=False) as other:
        other.alter_topic("t", retention_ms=-1)
    store._topics.background._newly_sealed.add(("t", 0))  # type: ignore[arg-type]
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
    """A reader reports no damage for the replaced log: a repair would make things worse."""
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


STEP = int(os.environ.get("SEGMENTLOG_MOVES_STEP", "12"))


class Change:
    """A process that changes topics on request, as far as locks permit."""

    def __init__(self, path: Path, change: Callable[[LogStore], None]) -> None:
        theirs, self._orders = os.pipe()
        self._news, told = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(theirs)
            os.close(told)
            return
        code = 1
        try:
            os.close(self._orders)
            if os.read(theirs, 1):
                with LogStore(path, background=False, fs=Impatient(told)) as store:
                    change(store)
                os.write(told, b"done")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def begin(self) -> None:
        """Return once the change is done, or has to wait for a lock."""
        os.write(self._orders, b"go")
        assert os.read(self._news, 4) in (b"wait", b"done"), "it failed"

    def end(self) -> None:
        """End the process, and check that it succeeded."""
        os.close(self._orders)
        assert os.waitpid(self._pid, 0)[1] == 0
        os.close(self._news)


class Impatient(NoSyncFileSystem):
    """A file system that reports when it has to wait for a lock."""

    def __init__(self, told: int) -> None:
        self._told = told
        self.flock = self._flock  # type: ignore[method-assign]

    def _flock(self, fd: int, operation: int) -> None:
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            os.write(self._told, b"wait")
            raise


class AtTheWorstTime(NoSyncFileSystem):
    """A file system that lets another process act directly before its n-th call by name in the topic's folder."""

    def __init__(self) -> None:
        self.countdown = -1
        self.calls = 0
        self.act: Callable[[], None] = lambda: None
        for name in ("open", "listdir", "stat", "lstat", "mkdir", "unlink", "rename", "replace", "link", "sync_folder"):
            setattr(self, name, self._counting(getattr(self, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: str, *others: Any) -> Any:
            if f"{path}/".find("/t/") >= 0:
                self.calls += 1
                self.countdown -= 1
                if not self.countdown:
                    self.act()
            return call(path, *others)

        return counted


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
    return {bytes(value) for batch in log.read(log.log_start_offset) for value in batch.values if value is not None}


def _committed_values(log: Partition) -> set[bytes]:
    read = log.read(0, isolation="read_committed")
    return {bytes(value) for batch in read for value in batch.values if value is not None}


def _value_by_time(log: Partition) -> set[bytes]:
    offset = log.offset_for_timestamp(1)
    return _all_values(log) if offset is None else {bytes(next(log.read(offset)).values[0] or b"")}


def _values_of_more(log: Partition) -> set[bytes]:
    found = _all_values(log)
    for _ in range(3):  # within the mapped part of the segment, and beyond it
        log.append([b"old %0200000d" % 1])
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


def _at_every_call(
    tmp_path: Path,
    change: Callable[[LogStore], None],
    prepare: Callable[[Path], None],
    begin: Callable[[LogStore], Callable[[], object]],
) -> tuple[int, int]:
    """Run what ``begin`` returns, with the change before its first call by name, then before the second, and so on.

    Each run completes or raises `UnknownTopic`, and leaves the new log intact, with its own content only. Return the
    number of calls, and how many runs raised.
    """
    told = 0
    for countdown in itertools.chain(range(1, 4), itertools.count(random.randint(4, 3 + STEP), STEP)):
        path = tmp_path / str(countdown)
        prepare(path)
        changer = Change(path, change)
        fs = AtTheWorstTime()
        try:
            with LogStore(path, background=False, fs=fs) as store:
                work = begin(store)
                fs.act, fs.countdown, fs.calls = changer.begin, countdown, 0
                try:
                    work()
                except UnknownTopic:
                    told += 1
                is_over = fs.calls < countdown
                fs.countdown = -1
        finally:
            changer.end()
        assert list(inspect_store(str(path))) == [], f"at call {countdown}"
        with LogStore(path, background=False, read_only=True) as store:
            for name in store.topics():
                word = b"new" if name == "t" and not is_over else b"old"
                found = {value[:20] for value in _all_values(store.topic(name).partition(0))}
                strange = {value for value in found - {b"aborted"} if not value.startswith(word)}
                assert not strange, f"at call {countdown}: {strange} in {name}"
        shutil.rmtree(path)
        if is_over:
            return countdown, told
    raise AssertionError


@pytest.mark.long
@pytest.mark.parametrize("read", [_all_values, _committed_values, _value_by_time, _values_of_more])
@pytest.mark.parametrize("change", [_rename_and_replace, _delete, _delete_and_replace])
def test_a_reader_hears_of_a_change_at_any_call(
    tmp_path: Path, change: Callable[[LogStore], None], read: Callable[[Partition], set[bytes]]
) -> None:
    """If the topic is deleted, renamed or replaced before any call by name, the reader gets an error.

    It never reads another log.
    """

    def prepare(path: Path) -> None:
        with LogStore(path, background=False, fs=NoSyncFileSystem(), create=True) as store:
            _fill(store, "old")

    def begin(store: LogStore) -> Callable[[], object]:
        log = store.topic("t").partition(0)

        def work() -> None:
            assert not any(value.startswith(b"new") for value in read(log))

        return work

    tried, told = _at_every_call(tmp_path, change, prepare, begin)
    assert tried > 5
    assert told


def _fill_for_changes(path: Path) -> None:
    """Several segments of keyed records, which may be compacted and retained."""
    with LogStore(path, background=False, fs=NoSyncFileSystem(), create=True) as store:
        log = store.create_topic("t", config={**CONFIG, "cleanup.policy": "delete,compact"}).partition(0)
        for number in range(8):
            log.append([b"old %d" % number] * 5, [b"a", b"b", b"c", b"d", b"e"])


def _open(store: LogStore) -> Partition:
    return store.topic("t").partition(0)


def _behind(store: LogStore) -> Partition:
    """Open, and others have appended and rolled since."""
    log = _open(store)
    log.append([b"old more"], [b"f"])
    with LogStore(store.path, background=False, fs=NoSyncFileSystem()) as other:
        for _ in range(3):
            _open(other).append([b"old and more"] * 6, [b"g"] * 6)
    return log


def _use(what: str) -> Callable[[LogStore], Callable[[], object]]:
    return lambda store: functools.partial(act, _open(store), what)


def _flush(store: LogStore) -> Callable[[], object]:
    """Flush a log in which other processes have begun a segment."""
    log = _behind(store)
    log.append([b"old more"], [b"g"])
    return log.flush


def _append_to(log: Partition) -> Callable[[], object]:
    return lambda: [log.append([b"old appended"] * 6, [b"h"] * 6, ack="durable") for _ in range(3)]


def _append_idle(store: LogStore) -> Callable[[], object]:
    """Append with a log whose descriptors were closed since its last use."""
    log = _behind(store)
    assert log.handle.close_if_idle()
    return _append_to(log)


def _append_numbered(store: LogStore) -> Callable[[], object]:
    log, stamp = _behind(store), ProducerStamp(1 << 40, 0, 0)
    return lambda: [log.append([b"old"] * 6, [b"h"] * 6, producer=stamp.after(6 * number)) for number in range(3)]


def _close(store: LogStore) -> Callable[[], object]:
    _behind(store)
    return store.close


def _open_and_append(store: LogStore) -> Callable[[], object]:
    topic = store.topic("t")
    return lambda: _append_to(topic.partition(0))()


def _recover(store: LogStore) -> Callable[[], object]:
    """Return the machine died since."""
    os.unlink(f"{store.path}/t/0/state")
    return _open_and_append(store)


WORK: dict[str, Callable[[LogStore], Callable[[], object]]] = {
    "compact": _use("compact"),
    "retain": _use("retain"),
    "trim": lambda store: functools.partial(_behind(store).trim, 35),
    "roll": lambda store: _behind(store).roll,
    "flush": _flush,
    "truncate": lambda store: functools.partial(_behind(store).truncate, 30),
    "append": lambda store: _append_to(_behind(store)),
    "append idle": _append_idle,
    "append numbered": _append_numbered,
    "close": _close,
    "open": _open_and_append,
    "recover": _recover,
}


@pytest.mark.long
@pytest.mark.parametrize("what", WORK)
@pytest.mark.parametrize("change", [_rename_and_replace, _delete, _delete_and_replace])
def test_who_changes_the_log_hears_of_a_change_at_any_call(
    tmp_path: Path, change: Callable[[LogStore], None], what: str
) -> None:
    """The topic is deleted, renamed or replaced before any call by name: the writer gets an error, or the change waits.

    The writer never reports damage, and the log that has the name now is intact.
    """
    tried, told = _at_every_call(tmp_path, change, _fill_for_changes, WORK[what])
    assert tried > 5
    assert told or what == "close"
