"""Disks that fail and fill up, processes that share a log, and when it is fsynced."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock, contents, log_files, open_log, values

import segmentlog
from segmentlog.errors import DiskFull, PartitionFailed
from segmentlog.format.checkpoint import decode_checkpoint
from segmentlog.log.partition import Partition
from segmentlog.testing.fault_injection import FaultyFileSystem

# ---------------------------------------------------------------- a failed fsync


def test_a_failed_fsync_is_never_tried_again(tmp_path: Path) -> None:
    """It fails appends and flushes of the partition in every process; written records can still be read."""
    fs, others_fs = FaultyFileSystem(), FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs)
    partition.append([b"durable"], ack="durable")
    other = open_log(tmp_path, fs=others_fs)
    partition.append([b"written"])
    fs.fail("fdatasync", errno.EIO)
    with pytest.raises(PartitionFailed, match="fsync failed"):
        partition.append([b"failed"], ack="durable")
    before = fs.count("fdatasync"), fs.count("fsync"), others_fs.count("fdatasync")
    for log in (partition, other):
        for call in (
            lambda log=log: log.append([b"no"]),
            lambda log=log: log.append([b"no"], ack="durable"),
            log.flush,
            lambda log=log: log.truncate(0),
        ):
            with pytest.raises(PartitionFailed):
                call()
        assert values(log) == [b"durable", b"written", b"failed"]
        assert log.durable_offset == 1
        assert log.failed
    partition.close()
    other.close()
    assert (fs.count("fdatasync"), fs.count("fsync"), others_fs.count("fdatasync")) == before


def test_reopening_after_a_failed_fsync_writes_the_tail_anew(tmp_path: Path) -> None:
    """The bytes that may never have reached the disk are written to another file and synced; none is lost."""
    fs = FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs)
    partition.append([b"durable"], ack="durable")
    fs.fail("fdatasync", errno.EIO)
    with pytest.raises(PartitionFailed):
        partition.append([b"failed"], ack="durable")
    inode = log_files(tmp_path)[0].stat().st_ino
    partition.close()
    again = open_log(tmp_path, fs=FaultyFileSystem())
    assert again.recovery_report.verdict == "failed fsync"
    assert again.recovery_report.lost is None
    assert log_files(tmp_path)[0].stat().st_ino != inode
    assert again.durable_offset == again.log_end_offset == 2
    assert again.epoch == 1
    assert again.append([b"next"], ack="durable") == 2
    assert values(again) == [b"durable", b"failed", b"next"]


def test_every_segment_that_an_fsync_may_have_failed_on_is_written_anew(tmp_path: Path) -> None:
    """An fsync covers all segments since the last one; when it fails, not only the newest of them is suspect."""
    fs = FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs, segment_records=1, background=True)
    partition.append([b"durable"], ack="durable")
    for value in (b"a", b"b", b"c"):
        partition.append([value])
    inodes = {file.name: file.stat().st_ino for file in log_files(tmp_path)}
    fs.fail("fdatasync", errno.EIO, call=2)
    with pytest.raises(PartitionFailed):
        partition.flush()
    partition.close()
    again = open_log(tmp_path, segment_records=1)
    assert values(again) == [b"durable", b"a", b"b", b"c"]
    unsynced = [file for file in log_files(tmp_path) if int(file.stem) >= 1]
    assert len(unsynced) == 3
    for file in unsynced:
        assert file.stat().st_ino != inodes[file.name], f"{file.name} was taken for durable"


# ---------------------------------------------------------------- a full disk, and a bad one


def _steps(tmp_path: Path, method: str, work: Callable[[Partition], object], **settings: Any) -> int:
    """Return how often ``work`` calls ``method``."""
    fs = FaultyFileSystem()
    partition = open_log(tmp_path / f"count-{method}", fs=fs, background=True, **settings)
    partition.append([b"before"])
    before = fs.count(method)
    work(partition)
    return fs.count(method) - before


@pytest.mark.parametrize("method", ["pwritev", "fallocate", "open"])
@pytest.mark.parametrize("records", [1, 50], ids=["one", "rolls"])
def test_a_full_disk_at_any_step_leaves_the_log_as_it_was(tmp_path: Path, method: str, records: int) -> None:
    """Without room at any write, allocation or new file, an append raises `DiskFull` or succeeds. The next works."""
    settings: dict[str, Any] = {"segment_records": 10, "index_interval_bytes": 1}
    sent: list[bytes | None] = [b"%d" % number * 50 for number in range(records)]
    steps = _steps(tmp_path, method, lambda log: log.append(sent), **settings)
    assert steps or (method, records) == ("fallocate", 1) or (method, records) == ("open", 1)
    raised = 0
    for step in range(1, steps + 1):
        fs = FaultyFileSystem()
        partition = open_log(tmp_path / f"{step}", fs=fs, background=True, **settings)
        partition.append([b"before"])
        fs.fail(method, errno.ENOSPC, call=step)
        try:
            assert partition.append(sent) == 1
        except OSError as error:
            raised += 1
            assert isinstance(error, DiskFull) or method == "open"  # noqa: PT017 either outcome is right
            assert partition.log_end_offset == 1
            assert values(partition) == [b"before"]
            assert partition.append(sent) == 1
        assert values(partition) == [b"before", *sent]
        assert partition.flush() == 1 + records
        partition.close()
        again = open_log(tmp_path / f"{step}", **settings)
        assert again.recovery_report.verdict == "clean"
        assert values(again) == [b"before", *sent]
        again.close()
    assert raised or method == "fallocate" or not steps


def test_a_disk_full_error_is_an_oserror_with_its_number(tmp_path: Path) -> None:
    """Programs that look for ENOSPC find it."""
    fs = FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs)
    partition.append([b"a"])
    fs.room_bytes = 0
    with pytest.raises(OSError, match="no room") as caught:
        partition.append([b"x" * 100_000], ack="durable")
    assert isinstance(caught.value, DiskFull)
    assert caught.value.errno == errno.ENOSPC


def test_a_disk_that_fills_up_slowly(tmp_path: Path) -> None:
    """Room for part of a batch: the part is cut off, and appending works once there is room."""
    for room in range(0, 400, 7):
        fs = FaultyFileSystem()
        partition = open_log(tmp_path / f"{room}", fs=fs, compression_type="none")
        partition.append([b"before"])
        size = partition.segments()[0].size_bytes
        fs.room_bytes = room
        with pytest.raises(DiskFull):
            partition.append([b"x" * 400])
        assert log_files(tmp_path / f"{room}")[0].stat().st_size == size
        fs.heal()
        assert partition.append([b"after"]) == 1
        assert values(partition) == [b"before", b"after"]


def test_a_checkpoint_without_room_hands_out_no_offset(tmp_path: Path) -> None:
    """The offset ceiling cannot be raised on a full disk: `DiskFull`, and nothing is appended."""
    fs = FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs)
    fs.fail("pwritev", errno.ENOSPC)
    with pytest.raises(DiskFull):
        partition.append([b"a"])
    assert partition.log_end_offset == 0
    assert partition.append([b"a"]) == 0


def test_short_writes_are_completed(tmp_path: Path) -> None:
    """A kernel that takes a few bytes at a time gets all of them, in order."""
    fs = FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs, segment_records=4)
    fs.short_writes(7)
    sent: list[bytes | None] = [b"value %d" % number for number in range(10)]
    partition.append(sent)
    assert values(partition) == sent
    fs.heal()
    partition.close()
    assert values(open_log(tmp_path, segment_records=4)) == sent


@pytest.mark.parametrize("cut_fails", [False, True])
def test_a_failing_disk_fails_the_partition(tmp_path: Path, cut_fails: bool) -> None:
    """EIO on a write differs from a full disk: appends are refused until the log is reopened.

    Partial writes never show.
    """
    fs = FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs)
    partition.append([b"a"], ack="durable")
    fs.fail("pwritev", errno.EIO)
    if cut_fails:
        fs.fail("ftruncate", errno.EIO, times=None)
    with pytest.raises(PartitionFailed):
        partition.append([b"b"])
    with pytest.raises(PartitionFailed):
        partition.append([b"c"])
    assert values(partition) == [b"a"]
    partition.close()
    again = open_log(tmp_path)
    assert again.append([b"d"]) == 1
    assert values(again) == [b"a", b"d"]


@pytest.mark.parametrize("method", ["pwritev", "fdatasync", "fallocate", "flock", "open"])
@pytest.mark.parametrize("ack", ["written", "durable"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_at_any_step_leaves_a_usable_log(tmp_path: Path, method: str, ack: Any, after: bool) -> None:
    """After Ctrl-C inside an append all of its records or none are in the log, and appends continue."""
    settings: dict[str, Any] = {"segment_records": 3}
    for step in range(1, 8):
        fs = FaultyFileSystem()
        partition = open_log(tmp_path / f"{step}", fs=fs, **settings)
        partition.append([b"before"])
        before = fs.count(method)
        fs.fail(method, KeyboardInterrupt(), call=step, after=after)
        try:
            partition.append([b"1", b"2", b"3"], ack=ack)
        except KeyboardInterrupt:
            interrupted = True
        else:
            interrupted = False
        fs.heal()
        if method == "flock" and interrupted and not after:
            # No interrupt comes before the call that gives a lock back; here one did: only a reopen helps.
            partition.abandon()
            partition = open_log(tmp_path / f"{step}", **settings)
        base_offset = partition.append([b"after"], ack=ack)
        found = values(partition)
        assert found in ([b"before", b"1", b"2", b"3", b"after"], [b"before", b"after"])
        assert contents(partition)[-1].offset == base_offset == len(found) - 1
        if not interrupted:
            assert len(found) == 5
        if fs.count(method) < before + step:
            break


# ---------------------------------------------------------------- when it is fsynced


def test_fsync_always(tmp_path: Path) -> None:
    """Every append returns durable."""
    partition = open_log(tmp_path, fsync="always")
    for number in range(1, 6):
        partition.append([b"a"])
        assert (partition.durable_offset, partition.sync_count) == (number, number)


def test_fsync_by_records(tmp_path: Path) -> None:
    """The append that reaches the policy's number of unsynced records syncs them."""
    partition = open_log(tmp_path, fsync="10records")
    durable = []
    for _ in range(7):
        partition.append([b"a"] * 4)
        durable.append(partition.durable_offset)
    assert durable == [0, 0, 12, 12, 12, 24, 24]
    assert partition.sync_count == 2


def test_fsync_by_bytes(tmp_path: Path) -> None:
    """The append that reaches the policy's number of unsynced bytes syncs them."""
    partition = open_log(tmp_path, fsync="1000bytes", compression_type="none")
    durable, unsynced, syncs = 0, 0, 0
    for number in range(1, 20):
        partition.append([b"x" * 150])
        size = partition.segments()[0].size_bytes // number
        unsynced += size
        if unsynced >= 1000:
            durable, unsynced, syncs = number, 0, syncs + 1
        assert (partition.durable_offset, partition.sync_count) == (durable, syncs)
    assert syncs > 2


def test_fsync_by_time_without_a_background_thread(tmp_path: Path) -> None:
    """Without a background thread, the first append after the policy's time syncs."""
    clock = FakeClock()
    partition = open_log(tmp_path, fsync="100ms", clock=clock)
    durable = []
    for _ in range(6):
        partition.append([b"a"])
        durable.append(partition.durable_offset)
        clock.advance(40)
    assert durable == [0, 0, 0, 4, 4, 4]


def test_fsync_by_time_in_the_background(tmp_path: Path) -> None:
    """If a background flush exists, appends leave the sync to it, and it knows when the sync is due."""
    clock = FakeClock()
    partition = open_log(tmp_path, fsync="100ms", clock=clock, background=True)
    assert not partition.sync_due()
    partition.append([b"a"])
    clock.advance(500)
    assert partition.sync_due()
    partition.append([b"b"])
    assert partition.durable_offset == 0
    partition.flush()
    assert not partition.sync_due()
    partition.append([b"c"])
    assert not partition.sync_due(slack_ms=99)
    assert partition.sync_due(slack_ms=100)


def test_fsync_never_leaves_it_to_the_system(tmp_path: Path) -> None:
    """Appends do not fsync; a flush, a close, and an append that asks for it do."""
    fs = FaultyFileSystem()
    clock = FakeClock()
    partition = open_log(tmp_path, fsync="never", fs=fs, clock=clock)
    partition.append([b"first"])  # raises the offset ceiling
    before = fs.count("fdatasync")
    for _ in range(20):
        partition.append([b"a"] * 100)
        clock.advance(10**6)
    assert fs.count("fdatasync") == before
    assert partition.durable_offset == 0
    assert partition.flush() == partition.durable_offset == 2001
    partition.append([b"a"], ack="durable")
    assert partition.durable_offset == 2002
    partition.append([b"a"])
    partition.close()
    assert open_log(tmp_path).durable_offset == 2003


def test_threads_that_wait_for_the_disk_share_its_fsyncs(tmp_path: Path) -> None:
    """Sixteen threads that append durably take far fewer fsyncs than appends, and each gets its own offsets."""
    fs: Any = FaultyFileSystem()
    fdatasync = fs.fdatasync
    # Long enough for others to come, however fast the disk is and however slow they are.
    fs.fdatasync = lambda fd: (time.sleep(0.005), fdatasync(fd))
    partition = open_log(tmp_path, fs=fs)
    threads_count, each = 16, 12
    got: dict[int, bytes] = {}
    failures: list[BaseException] = []
    begin = threading.Barrier(threads_count)

    def work(thread: int) -> None:
        try:
            begin.wait()
            for number in range(each):
                sent: list[bytes | None] = [b"%d:%d:%d" % (thread, number, index) for index in range(1 + number % 3)]
                if number % 5 == 4:
                    sent += [b"many"] * 30
                base_offset = partition.append(
                    sent,
                    keys=[b"k"] * len(sent) if thread % 2 else None,
                    timestamps=[thread] * len(sent) if thread % 4 == 1 else None,
                    headers=[[("h", b"1")]] * len(sent) if thread % 8 == 2 else None,
                    ack="durable",
                )
                assert partition.durable_offset >= base_offset + len(sent)
                for index, value in enumerate(sent):
                    assert value is not None
                    assert got.setdefault(base_offset + index, value) is value
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(threads_count)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures, failures
    assert partition.sync_count < threads_count * each * 0.6
    found = contents(partition)
    assert {record.offset: record.value for record in found} == got
    assert [record.offset for record in found] == list(range(len(found)))
    last: dict[bytes, int] = {}
    for record in found:
        if record.value == b"many":
            continue
        thread, number, _ = (record.value or b"").split(b":")
        assert int(number) >= last.get(thread, 0), "a thread's records are out of order"
        last[thread] = int(number)
        assert record.key == (b"k" if int(thread) % 2 else None)
        assert (record.timestamp == int(thread)) == (int(thread) % 4 == 1), "a record has another thread's timestamp"
        assert record.headers == ((("h", b"1"),) if int(thread) % 8 == 2 else ())


def test_one_threads_bad_record_is_not_anothers(tmp_path: Path) -> None:
    """Appends that share an fsync do not share their errors."""
    import array

    partition = open_log(tmp_path, fs=FaultyFileSystem())
    outcomes: list[object] = []

    def work(value: Any) -> None:
        for _ in range(20):
            try:
                outcomes.append((type(value), partition.append([value], ack="durable") >= 0))
            except segmentlog.InvalidRecord as error:
                outcomes.append((type(value), str(error)))

    bad = array.array("i", [1, 2])
    threads = [threading.Thread(target=work, args=(value,)) for value in (b"a", b"b", b"c", b"d", bad)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [outcome for outcome in outcomes if outcome[0] is bytes] == [(bytes, True)] * 80  # type: ignore[index]
    assert all(outcome[1] is not True for outcome in outcomes if outcome[0] is array.array)  # type: ignore[index]
    assert len(values(partition)) == 80


@pytest.mark.parametrize(("step", "raised_in_others"), [("encode", []), ("place", ["SegmentlogError"]), ("sync", [])])
def test_an_interrupt_of_the_leading_thread_is_not_raised_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, raised_in_others: list[str]
) -> None:
    """Ctrl-C reaches its own thread only; the others continue, or get an error if the outcome is unknown."""
    log = open_log(tmp_path / "t", fs=FaultyFileSystem())
    log.append([b"first"], ack="durable")
    entered, go_on = threading.Event(), threading.Event()
    group = log._pipeline.group
    append_group = group._append_group
    interrupts = [KeyboardInterrupt]

    def interrupted(*args: Any, **options: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return before(*args, **options)

    def append_when_told(waiting: Any) -> None:
        nonlocal before
        if len(waiting) == 1 and not entered.is_set():
            entered.set()
            assert go_on.wait(10)
        elif interrupts and step == "encode":
            raise interrupts.pop()
        elif interrupts:
            owner, name = (log._appender, "place") if step == "place" else (log._syncer, "sync")
            before = getattr(owner, name)
            monkeypatch.setattr(owner, name, interrupted)
        append_group(waiting)

    before: Any = None
    monkeypatch.setattr(group, "_append_group", append_when_told)
    group._last_group = 2  # so that the first one queues, too
    raised: list[BaseException] = []

    def append() -> None:
        try:
            log.append([b"x"], ack="durable")
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=append) for _ in range(3)]
    threads[0].start()
    assert entered.wait(10)
    for thread in threads[1:]:
        thread.start()
    while len(group._queue) < 3:
        time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(type(error).__name__ for error in raised) == ["KeyboardInterrupt", *raised_in_others]
    assert log.durable_offset == log.log_end_offset
    left = {"encode": 3, "place": 2, "sync": 4}[step]
    assert log.append([b"next"], ack="durable") == left


# ---------------------------------------------------------------- offsets are reserved


def test_offsets_are_reserved_before_they_are_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling on disk is never below an assigned offset, and is written once a step."""
    monkeypatch.setattr("segmentlog.log.append.appender.OFFSET_CEILING_STEP", 10)
    fs = FaultyFileSystem()
    partition = open_log(tmp_path, fs=fs)
    ceiling = raised = 0
    for count in (1, 5, 5, 1, 30, 9, 2):
        before = fs.count("fdatasync")
        partition.append([b"a"] * count)
        raised += fs.count("fdatasync") - before
        assert (fs.count("fdatasync") > before) == (partition.log_end_offset >= ceiling)
        _, checkpoint, damaged = decode_checkpoint((tmp_path / "checkpoint").read_bytes())
        assert checkpoint is not None
        assert not damaged
        assert checkpoint.offset_ceiling >= partition.log_end_offset
        assert not checkpoint.clean
        ceiling = checkpoint.offset_ceiling
    assert raised < 7


# ---------------------------------------------------------------- many processes


def _append_many(folder: str, name: bytes, count: int, done: Any) -> None:
    partition = open_log(Path(folder), segment_records=50, index_interval_bytes=64)
    offsets = [partition.append([b"%s:%d" % (name, number)], ack="durable" if number % 10 == 0 else None)
               for number in range(count)]  # fmt: skip
    partition.close()
    done.put((name, offsets))


def test_processes_interleave_without_loss(tmp_path: Path) -> None:
    """Several processes append at once: each record is in the log once, at its returned offset, in its order."""
    context = multiprocessing.get_context("spawn")
    done = context.Queue()
    names = [b"a", b"b", b"c"]
    workers = [context.Process(target=_append_many, args=(str(tmp_path), name, 100, done)) for name in names]
    for worker in workers:
        worker.start()
    told = dict(done.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = {record.offset: record.value for record in contents(open_log(tmp_path, segment_records=50))}
    assert sorted(found) == list(range(300))
    for name in names:
        assert told[name] == sorted(told[name])
        assert [found[offset] for offset in told[name]] == [b"%s:%d" % (name, number) for number in range(100)]


def test_a_forked_child_goes_on_with_the_same_objects(tmp_path: Path) -> None:
    """After a fork parent and child append through the same store object, and neither holds the other's locks."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", fsync="never")
        partition = store.topic("t").partition(0)
        partition.append([b"before"])
        read_end, write_end = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                for number in range(50):
                    partition.append([b"child %d" % number], ack="durable" if number % 9 == 0 else None)
                assert b"before" in values(partition)
                os.write(write_end, b"done")
                code = 0
            finally:
                os._exit(code)
        for number in range(50):
            partition.append([b"parent %d" % number], ack="durable" if number % 9 == 0 else None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.read(read_end, 10) == b"done"
        os.close(read_end)
        os.close(write_end)
        found = values(partition)
        assert found[0] == b"before"
        for who in (b"parent", b"child"):
            own = [value for value in found if value is not None and value.startswith(who)]
            assert own == [who + b" %d" % number for number in range(50)]
        assert len(found) == 101
    with segmentlog.open(tmp_path / "store") as store:
        assert store.topic("t").partition(0).recovery_report.verdict == "clean"
