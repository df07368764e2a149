"""Stores, partitions, producers and consumers that are dropped without being closed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logs import open_log, values

import segmentlog
from segmentlog import closing
from segmentlog.format.file_names import CHECKPOINT_FILE
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.topics.background_threads import BackgroundThread, BackgroundThreads


def _descriptors(below: Path) -> list[str]:
    """Return the files below a folder that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return [path for path in found if path.startswith(f"{below}/")]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("segmentlog-")}


def _soon(is_so: Callable[[], bool]) -> bool:
    ends_s = time.monotonic() + 60
    while time.monotonic() < ends_s:
        if is_so():
            return True
        time.sleep(0.002)
    return False


def _is_closed(folder: Path) -> bool:
    """Return whether no file of the store is open, and no thread is about to close one."""
    return not closing.closing_stores and not _descriptors(folder)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Disable the collector, so that it collects only objects that the test drops."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _checkpoint_is_clean(folder: Path) -> bool:
    checkpoint, _ = CheckpointFile(FileSystem(), f"{folder}/{CHECKPOINT_FILE}").read()
    return checkpoint is not None and checkpoint.clean


@pytest.mark.parametrize("background", [True, False], ids=["threads", "no threads"])
def test_dropped_stores_are_closed_cleanly(tmp_path: Path, background: bool) -> None:
    """All descriptors and threads of dropped stores end, appended records are on disk, and a warning names each."""
    before = _threads()
    stores = [segmentlog.open(tmp_path / str(number), background=background) for number in range(5)]
    for store in stores:
        partition = store.create_topic("t", fsync="never").partition(0)
        partition.append([b"kept"])
    assert _soon(lambda: len(_threads() - before) == (20 if background else 0))
    del store, partition
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        stores.clear()
        assert _soon(lambda: gc.collect() >= 0 and len(warned) == 5)  # one may be at a tick of its own just now
    assert {str(one.message) for one in warned} == {f"store {tmp_path}/{number} was not closed" for number in range(5)}
    assert {one.category for one in warned} == {ResourceWarning}
    warned.clear()
    folders = [tmp_path / str(number) / "t" / "0" for number in range(5)]
    assert _soon(lambda: all(map(_checkpoint_is_clean, folders)) and _is_closed(tmp_path) and _threads() <= before)
    for number in range(5):
        with segmentlog.open(tmp_path / str(number)) as store:
            partition = store.topic("t").partition(0)
            assert partition.recovery_report.verdict == "clean"
            assert partition.durable_offset == 1
            assert values(partition) == [b"kept"]


def _work_on(store: LogStore | None) -> None:
    assert store is not None
    partition = store.topic("t").partition(0)
    partition.append([b"second"], keys=[b"k"])
    assert _soon(lambda: partition.durable_offset == 2)


@pytest.mark.parametrize("kept", ["partition", "topic", "producer", "consumer", "iterator", "table", "groups"])
def test_a_store_lives_as_long_as_anything_that_was_got_from_it(tmp_path: Path, kept: str) -> None:
    """A part of a store keeps working while the program holds it, with background flushes."""
    store = segmentlog.open(tmp_path / "store")
    topic = store.create_topic("t", fsync="20ms", cleanup_policy="compact")
    topic.partition(0).append([b"first"], keys=[b"k"])
    consumer = store.consumer("t")
    held: object = {
        "partition": topic.partition(0),
        "topic": topic,
        "producer": store.producer(),
        "consumer": consumer,
        "iterator": iter(consumer),
        "table": store.table("t"),
        "groups": store.groups,
    }[kept]
    alive = weakref.ref(store)
    partition = topic.partition(0)
    assert partition.log_end_offset == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del store, topic, consumer, partition
        gc.collect()
        _work_on(alive())
        gc.collect()
    still = alive()
    assert still is not None
    still.close()
    del held


def test_a_dropped_store_that_cannot_be_closed_is_let_go_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If an fsync fails in the thread that closes a dropped store, the error is logged and all files are closed."""

    class Failing(FileSystem):
        failing = False

        @staticmethod
        def fdatasync(fd: int) -> None:
            if Failing.failing:
                raise OSError(5, "no good")
            os.fdatasync(fd)

    store = segmentlog.LogStore(tmp_path / "store", fs=Failing(), background=False)
    partition = store.create_topic("t", fsync="never").partition(0)
    partition.append([b"lost"])
    Failing.failing = True
    del store, partition
    with pytest.warns(ResourceWarning, match="was not closed"):
        gc.collect()
    assert _soon(lambda: "could not be closed cleanly" in caplog.text and _is_closed(tmp_path))


def test_a_dropped_partition_closes_its_descriptors(tmp_path: Path) -> None:
    """A dropped partition closes its descriptors, and the next process finds all appended records."""
    log = open_log(tmp_path / "log", segment_records=2)
    for number in range(5):
        log.append([b"%d" % number])
    log.append([b"synced"], ack="durable")
    assert len(_descriptors(tmp_path)) >= 4
    del log
    gc.collect()
    assert not _descriptors(tmp_path)
    log = open_log(tmp_path / "log")
    assert values(log) == [b"0", b"1", b"2", b"3", b"4", b"synced"]
    log.close()
    assert not _descriptors(tmp_path)


def test_a_partition_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    """A program that keeps the error does not keep the files open."""
    (tmp_path / "log" / "state").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught:
        open_log(tmp_path / "log")
    assert not _descriptors(tmp_path)
    del caught


def test_a_dropped_named_producer_frees_its_name(tmp_path: Path) -> None:
    """Its lease and fence are closed, and other processes can abort its transaction."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t")
        producer = store.producer(name="one", linger_ms=0)
        producer.begin_transaction()
        producer.send("t", b"undecided")
        assert [path for path in _descriptors(tmp_path) if "@producers" in path]
        del producer
        gc.collect()
        assert not [path for path in _descriptors(tmp_path) if "@producers" in path]
        store.finish_transactions()
        partition = store.topic("t").partition(0)
        assert partition.last_stable_offset == partition.log_end_offset
        assert not list(partition.read(0, isolation="read_committed"))


def test_a_dropped_producer_sends_what_lingers_and_its_thread_ends(tmp_path: Path) -> None:
    """While records wait to be sent, the sending thread keeps the producer."""
    before = _threads()
    with segmentlog.open(tmp_path / "store", background=True) as store:
        partition = store.create_topic("t").partition(0)
        assert _soon(lambda: len(_threads() - before) == 4)
        workers = _threads()
        sent = []
        for linger_s in (1.5, 6, 24):  # a machine may be so busy that the first is over before
            producer = store.producer(linger_ms=int(linger_s * 1000))
            producer.send("t", b"early")
            producer.flush()
            began_s = time.monotonic()
            producer.send("t", b"late")
            sent += [b"early", b"late"]
            dropped = weakref.ref(producer)
            del producer
            gc.collect()
            if dropped() is not None:
                break
            assert time.monotonic() - began_s >= linger_s
        assert dropped() is not None
        assert _soon(lambda: partition.log_end_offset == len(sent))
        assert values(partition) == sent

        def is_gone() -> bool:
            gc.collect()
            return dropped() is None and _threads() <= workers

        assert _soon(is_gone)


def test_a_dropped_consumer_closes_what_it_watches_with(tmp_path: Path) -> None:
    """The pipe and the inotify descriptor of a follower, and a member's locks."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t").partition(0).append([b"a"])
        before = len(os.listdir("/proc/self/fd"))
        for group in (None, "g"):
            consumer = store.consumer("t", follow=True, group=group)
            records = iter(consumer)
            assert next(records).value == b"a"
            threading.Timer(0.05, consumer.wakeup).start()
            assert next(records, None) is None
            if group:
                assert [path for path in _descriptors(tmp_path) if "@groups" in path]
        assert len(os.listdir("/proc/self/fd")) > before + 3
        del consumer, records
        assert _soon(lambda: gc.collect() >= 0 and not [path for path in _descriptors(tmp_path) if "@groups" in path])
        opened = len([path for path in _descriptors(tmp_path) if "__consumer_offsets" in path])
        assert len(os.listdir("/proc/self/fd")) == before + opened


def test_a_worker_that_is_dropped_ends(tmp_path: Path) -> None:
    """A dropped worker ends at once, although its next tick is an hour away; during a tick, it ends after the tick."""
    turns: list[int] = []
    began, may_end = threading.Event(), threading.Event()

    def tick() -> float:
        turns.append(1)
        began.set()
        may_end.wait(10)
        return 3600.0

    before = _threads()
    workers = BackgroundThreads()
    workers.add("slow", tick)
    workers.add("idle", lambda: 3600.0, 3600.0)
    for worker in workers:
        worker.ensure_running()
    assert began.wait(10)
    del workers, worker
    gc.collect()
    assert _soon(lambda: {thread.name for thread in _threads() - before} == {"segmentlog-slow"})
    may_end.set()
    assert _soon(lambda: _threads() <= before)
    assert turns == [1]


def test_a_finalizer_may_wake_the_thread_it_runs_in() -> None:
    """The collector comes by anywhere, also in the middle of another worker's waiting and waking."""
    done = threading.Event()
    rounds = 0

    def tick() -> float:
        nonlocal rounds
        BackgroundThread("dropped", lambda: 0.0).ensure_running()
        rounds += 1
        if rounds == 200:
            done.set()
        return 0.0

    before = _threads()
    gc.enable()
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    worker = BackgroundThread("test", tick)
    try:
        worker.ensure_running()
        assert done.wait(30)
    finally:
        gc.set_threshold(*thresholds)
        worker.stop(10)
    assert _soon(lambda: _threads() <= before)


_SCRIPT = """
import gc, sys, warnings
import segmentlog
store = segmentlog.open(sys.argv[1], background={background})
partition = store.create_topic("t", fsync="never").partition(0)
partition.append([b"kept"])
{how}
"""


@pytest.mark.parametrize("background", [True, False], ids=["threads", "no threads"])
@pytest.mark.parametrize(
    "how",
    ["pass", "del store, partition", "del store, partition; gc.collect()", "import builtins; builtins.kept = store"],
    ids=["never dropped", "not collected", "collected", "outlives its module"],
)
def test_a_program_that_ends_leaves_a_clean_store_however_it_dropped_it(
    tmp_path: Path, how: str, background: bool
) -> None:
    """It prints nothing, in whatever order the interpreter deletes objects."""
    code = _SCRIPT.format(how=how, background=background)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert _checkpoint_is_clean(tmp_path / "s" / "t" / "0")


def test_the_warning_is_shown_to_those_who_ask_for_it(tmp_path: Path) -> None:
    """``python -W default`` and ``-X dev`` show it."""
    code = _SCRIPT.format(how="del store, partition; gc.collect()", background=False)
    command = [sys.executable, "-W", "default", "-c", code, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert f"ResourceWarning: store {tmp_path}/s was not closed" in done.stderr


def test_a_forked_child_may_drop_the_store_of_its_parent(tmp_path: Path) -> None:
    """The child closes its own descriptors, and the parent keeps working."""
    store = segmentlog.open(tmp_path / "store", background=False)
    partition = store.create_topic("t", fsync="never").partition(0)
    partition.append([b"parent's"])
    child = os.fork()
    if child == 0:
        try:
            partition.append([b"child's"])
            del store, partition
            gc.collect()
            is_good = _soon(lambda: _is_closed(tmp_path))
        except BaseException:
            is_good = False
        os._exit(0 if is_good else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    partition.append([b"parent's again"])
    assert values(partition) == [b"parent's", b"child's", b"parent's again"]
    store.close()
