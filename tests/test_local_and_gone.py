"""One partition's error is its own; what is gone is not acknowledged; clocks that jump end nothing of who lives."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from leftovers import files_open_below
from logs import FakeClock, open_log, values

import segmentlog
from segmentlog.errors import CorruptBatch, LogTruncated, PartitionFailed, ProcessLimitError, ProducerFenced
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem

DAY_MS = 86_400_000

# ---------------------------------------------------------------- each partition's error is its own


def _three(path: Path, clock: FakeClock, **options: Any) -> LogStore:
    store = LogStore(path, background=False, clock=clock, fs=FaultyFileSystem(), **options)
    for name in "abc":
        store.create_topic(name, fsync="100ms").partition(0).append([b"1"])
    return store


def test_a_failed_partition_does_not_keep_others_from_being_flushed(tmp_path: Path) -> None:
    """If the first partition fails, the same tick syncs the later ones, and `health()` reports only the failed one."""
    clock = FakeClock()
    with _three(tmp_path, clock) as store:
        logs = [store.topic(name).partition(0) for name in "abc"]
        logs[0].handle.page.failed = 1
        clock.advance(100)
        with pytest.raises(PartitionFailed, match="a/0"):
            store.flush_tick()
        assert [log.durable_offset for log in logs] == [0, 1, 1]
        assert list(store.health()) == ["a/0"]
        logs[0].handle.page.failed, logs[0].handle.failed = 0, None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_a_local_error_in_the_background_is_told_once_and_tried_again(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is logged once and cleared once its cause is gone: the next tick flushes with the open files."""
    clock = FakeClock()
    with _three(tmp_path, clock) as store:
        logs = [store.topic(name).partition(0) for name in "abc"]
        fs: Any = store._topics.fs
        clock.advance(100)
        for _ in range(3):
            fs.fail("open", number)
            with caplog.at_level(logging.WARNING), pytest.raises(ProcessLimitError):
                store.flush_tick()
        assert [log.durable_offset for log in logs] == [0, 1, 1]
        assert len(caplog.records) == 1
        assert "cannot be flushed" in store.health()["a/0"]
        store.flush_tick()
        assert logs[0].durable_offset == 1
        assert store.health() == {}


def test_threads_go_on_at_their_pace_beside_a_failed_partition(tmp_path: Path) -> None:
    """A tick that raises is slowed down; one partition's error does not slow down the flush of others."""
    with segmentlog.open(tmp_path) as store:
        bad = store.create_topic("bad", fsync="50ms").partition(0)
        good = store.create_topic("good", fsync="50ms").partition(0)
        bad.append([b"1"])
        bad.handle.page.failed = 1
        for number in range(1, 6):
            good.append([b"1"])
            for _ in range(400):
                if good.durable_offset == number:
                    break
                threading.Event().wait(0.01)
            assert good.durable_offset == number
        assert "bad/0" in store.health()
        bad.handle.page.failed = 0


def test_a_topic_that_cannot_be_read_does_not_keep_others_from_retention(tmp_path: Path) -> None:
    """For example, its file belongs to another user."""
    with LogStore(tmp_path, background=False, clock=FakeClock(), fs=FaultyFileSystem()) as store:
        for name in ("a", "b"):
            log = store.create_topic(name, config={"segment.records": 1, "retention.segments": 1}).partition(0)
            for _ in range(4):
                log.append([b"x"])
        real = store._topics.read_topic_file

        def refuse(name: str) -> Any:
            if name == "a":
                raise PermissionError(errno.EACCES, "Permission denied", name)
            return real(name)

        with mock.patch.object(store._topics, "read_topic_file", refuse), pytest.raises(PermissionError):
            store.retention_tick()
        assert store.topic("b").partition(0).log_start_offset == 2


# ---------------------------------------------------------------- what was dropped is not acknowledged


def _two(tmp_path: Path) -> tuple[Any, Any]:
    """(log, another process's), with one durable record."""
    log = open_log(tmp_path)
    log.append([b"kept"], ack="durable")
    return log, open_log(tmp_path)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_record_that_another_process_dropped_is_not_acknowledged_as_durable(tmp_path: Path, threads: int) -> None:
    """Its offset is below the durable one, but in another epoch: the waiting process gets an error."""
    log, other = _two(tmp_path)
    place = log._appender.place
    dropped = threading.Event()

    def place_and_lose(*args: Any, **options: Any) -> Any:
        placed = place(*args, **options)
        if not dropped.is_set():
            dropped.set()
            other.truncate(1)
            other.append([b"another"], ack="durable")
        return placed

    log._appender.place = place_and_lose
    if threads == 1:
        with pytest.raises(LogTruncated, match=r"offset 1 is inside the lost range \[1, "):
            log.append([b"gone"], ack="durable")
    else:
        outcomes: list[object] = []

        def run(number: int) -> None:
            try:
                outcomes.append((number, log.append([b"%d" % number], ack="durable")))
            except LogTruncated as error:
                outcomes.append(error)

        workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(20)
        assert len(outcomes) == threads
        assert any(isinstance(one, LogTruncated) for one in outcomes)
        for one in outcomes:
            if isinstance(one, tuple):
                assert [batch.values[0] for batch in log.read(one[1], max_bytes=1)] == [b"%d" % one[0]]
    assert b"another" in values(log)


def test_a_recovery_by_another_process_drops_what_was_not_whole(tmp_path: Path) -> None:
    """After a failed fsync, the log was reopened and ended before this process's record: the append raises."""
    log, other = _two(tmp_path)
    place = log._appender.place

    def place_and_lose(*args: Any, **options: Any) -> Any:
        placed = place(*args, **options)
        path = next(tmp_path.glob("*.log"))
        with open(path, "r+b") as file:  # damages the record as the failed writeback may have
            data = path.read_bytes()
            file.seek(data.rindex(b"gone"))
            file.write(b"????")
        other.handle.page.failed = 1
        open_log(tmp_path).append([b"x"] * 5, ack="durable")
        return placed

    log._appender.place = place_and_lose
    with pytest.raises(LogTruncated):
        log.append([b"gone"], ack="durable")
    del log._appender.place
    assert log.append([b"next"], ack="durable") == log.log_end_offset - 1


def test_deliveries_and_transactions_tell_what_was_dropped(tmp_path: Path) -> None:
    """`Delivery.durable`, `Deliveries.durable` and a commit look whether what they speak of is there."""
    with segmentlog.open(tmp_path, background=False) as store, segmentlog.open(tmp_path, background=False) as other:
        store.create_topic("t", fsync="never")
        theirs = other.topic("t").partition(0)
        with store.producer(linger_ms=0) as producer:
            one, some = producer.send("t", b"1"), producer.send_many("t", [b"2", b"3"])
            producer.flush()
            theirs.truncate(2)
            theirs.append([b"other"] * 3, ack="durable")
            assert one.durable().offset == 0
            with pytest.raises(LogTruncated):
                some.durable()
            with pytest.raises(LogTruncated):
                some[1].durable()
            assert some[0].durable().offset == 1
        with store.producer(linger_ms=0) as producer:
            producer.begin_transaction()
            producer.send("t", b"gone")
            producer.flush()
            theirs.truncate(theirs.log_end_offset - 1)
            with pytest.raises(segmentlog.TransactionAborted, match="lost range"):
                producer.commit_transaction()


# ---------------------------------------------------------------- the checkpoint


def test_a_checkpoint_that_is_lost_while_live_is_written_from_memory(tmp_path: Path) -> None:
    """Both slots go bad while a process runs: its next change of the checkpoint keeps losses, epochs and ceiling."""
    log = open_log(tmp_path)
    log.append([b"%d" % number for number in range(10)], ack="durable")
    log.truncate(5)
    log.append([b"more"], ack="durable")
    ranges, epochs = log.lost_ranges(), log.epochs()
    path = tmp_path / "checkpoint"
    for spoil in (lambda: path.write_bytes(b"?" * path.stat().st_size), path.unlink):
        spoil()
        assert log.trim(log.log_start_offset + 1)
        again, damaged = log.handle.ledger.read_checkpoint()
        assert again is not None
        assert not damaged
        assert (list(again.lost_ranges), list(again.epochs)) == (ranges, epochs)
        assert again.offset_ceiling >= log.log_end_offset
        assert again.log_start_offset == log.log_start_offset
        assert not again.clean
    expected = values(log)
    log.abandon()
    os.unlink(tmp_path / "state")
    after = open_log(tmp_path)  # as after a machine's death
    assert values(after) == expected
    assert after.lost_ranges()[: len(ranges)] == ranges
    assert after.append([b"x"]) > 11


def test_a_lost_checkpoint_that_nobody_knows_is_told(tmp_path: Path) -> None:
    """A process that never read the checkpoint does not replace it by an empty one; it appends below the ceiling."""
    log = open_log(tmp_path)
    log.append([b"1"] * 5, ack="durable")
    log.truncate(3)
    log.append([b"1"])
    other = open_log(tmp_path)
    (tmp_path / "checkpoint").write_bytes(b"?" * 4096)
    with pytest.raises(CorruptBatch, match="checkpoint"):
        other.truncate(2)
    other.append([b"2"])
    assert (tmp_path / "checkpoint").read_bytes() == b"?" * 4096
    log.truncate(2)
    assert other.lost_ranges()


@pytest.mark.parametrize("change", ["announce_compaction", "record_compaction"])
def test_a_lost_checkpoint_forgets_no_compaction_of_another_process(tmp_path: Path, change: str) -> None:
    """Both slots go bad after another process compacted: the end of the compacted offsets does not move back."""
    log = open_log(tmp_path, cleanup_policy="compact")
    log.append([b"1"] * 9, [b"k"] * 9, ack="durable")
    other = open_log(tmp_path, cleanup_policy="compact")
    with log.handle.sync_locked():
        log.handle.ledger.announce_compaction(2)
    with other.handle.sync_locked():
        other.handle.ledger.announce_compaction(8)
    (tmp_path / "checkpoint").write_bytes(b"?" * 4096)
    with log.handle.sync_locked():
        if change == "announce_compaction":
            log.handle.ledger.announce_compaction(3)
        else:
            log.handle.ledger.record_compaction(2, 1, 0)
    again, _ = log.handle.ledger.read_checkpoint()
    assert again is not None
    assert again.compacted.begun_offset >= 8


def test_a_checkpoint_that_was_not_synced_does_not_pass_for_the_newest(tmp_path: Path) -> None:
    """Its fsync found no room: the slot keeps its content, so the next write does not overwrite the durable slot."""
    fs = FaultyFileSystem()
    log = open_log(tmp_path, fs=fs)
    before = (tmp_path / "checkpoint").read_bytes()
    fs.fail("fdatasync", errno.ENOSPC)
    with pytest.raises(segmentlog.DiskFull):
        log.append([b"1"])
    assert (tmp_path / "checkpoint").read_bytes() == before
    log.append([b"1"])


# ---------------------------------------------------------------- sealed segments


def test_a_sealed_segment_is_synced_through_the_descriptor_it_was_written_with(tmp_path: Path) -> None:
    """The kernel tells that of a failed writeback; one that is opened later may hear of nothing."""
    fs = FaultyFileSystem()
    log = open_log(tmp_path, fs=fs, segment_records=2, background=True)
    opened: dict[int, str] = {}
    real = fs.open

    def note(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags, mode)
        opened[fd] = path
        return fd

    fs.open = note
    written: dict[str, int] = {}
    for _ in range(3):
        log.append([b"1", b"2"])
        active = log._appender._writer._segment
        written[active.path] = active.fd
    synced = [args[0] for name, args in fs.calls if name == "fdatasync"]
    log.flush()
    synced = [args[0] for name, args in fs.calls if name == "fdatasync"][len(synced) :]
    sealed = list(written.values())[:2]
    assert synced[:2] == sealed
    assert log.handle.sealed == {}
    for fd in sealed:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    log.close()


def test_segments_that_are_sealed_faster_than_they_are_synced_take_few_descriptors(tmp_path: Path) -> None:
    """This holds for one append, and for many."""
    log = open_log(tmp_path, segment_records=1, background=True)
    log.append([b"x"] * 50)
    for _ in range(50):
        log.append([b"x"])
    assert len(files_open_below(tmp_path)) < 20
    log.flush()
    assert len(files_open_below(tmp_path)) <= 4
    assert len(values(log)) == 100
    log.close()
    assert files_open_below(tmp_path) == []


def test_a_failed_fsync_while_a_write_is_taken_back_fails_the_partition(tmp_path: Path) -> None:
    """The failure concerns earlier appends, too, and the next append does not retry the fsync."""
    fs = FaultyFileSystem()
    log = open_log(tmp_path, fs=fs)
    log.append([b"1"])
    fs.fail("pwritev", errno.ENOSPC)
    fs.fail("fsync", errno.EIO)
    with pytest.raises(PartitionFailed):
        log.append([b"2"])
    with pytest.raises(PartitionFailed):
        log.append([b"3"])


def test_a_failed_fsync_while_a_dead_processs_write_is_cut_off_fails_the_partition(tmp_path: Path) -> None:
    """If a process died during an append, the same holds for the process that truncates its bytes."""
    fs = FaultyFileSystem()
    log = open_log(tmp_path, fs=fs)
    log.append([b"1"])
    log.handle.page.writing = 1
    fs.fail("fsync", errno.EIO)
    with pytest.raises(PartitionFailed):
        log.append([b"2"])
    assert log.failed


# ---------------------------------------------------------------- who lives, and clocks


def test_a_wall_clock_that_jumps_ends_no_transaction(tmp_path: Path) -> None:
    """The monotonic clock measures the timeout of a transaction."""
    clock = FakeClock()
    with LogStore(tmp_path, background=False, clock=clock) as store:
        store.create_topic("t")
        producer = store.producer(name="p", transaction_timeout_ms=1000)
        producer.begin_transaction()
        producer.send_many("t", [b"1"])
        producer.flush()
        clock.wall_ms += 365 * DAY_MS
        store.finish_transactions()
        producer.commit_transaction()
        producer.begin_transaction()
        producer.send_many("t", [b"2"])
        producer.flush()
        clock.wall_ms -= 700 * DAY_MS
        clock.up_ms += 1001
        store.finish_transactions()
        with pytest.raises(ProducerFenced):
            producer.commit_transaction()
        producer.close()


def test_a_wall_clock_that_jumps_makes_no_producer_forgotten(tmp_path: Path) -> None:
    """A batch that is sent again is still known: it is not appended twice. Time that passes on both clocks counts."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, producer_id_expiration_ms=DAY_MS)
    clock.steady_ms()
    stamp = ProducerStamp(2**62, 0, 0)
    assert log.append([b"once"], producer=stamp) == 0
    clock.wall_ms += 10 * DAY_MS
    assert log.append([b"once"], producer=stamp) == 0
    assert log.producer(2**62) is not None
    clock.wall_ms -= 10 * DAY_MS
    clock.advance(DAY_MS + 1)
    assert log.producer(2**62) is None


def test_a_wall_clock_that_jumps_makes_no_position_forgotten(tmp_path: Path) -> None:
    """A group without members keeps its offsets when the clock jumps, and retention runs when it jumps back."""
    clock = FakeClock()
    with LogStore(tmp_path, background=False, clock=clock) as store:
        store.create_topic("t").partition(0).append([b"1"] * 5)
        log = store.create_topic("r", config={"segment.records": 1, "retention.segments": 1}).partition(0)
        consumer = store.consumer("t", group="g")
        list(consumer)
        consumer.commit()
        consumer.close()
        folder = next((tmp_path / "@groups").iterdir())
        os.utime(folder / "assignment", ns=(clock.wall_ms * 10**6,) * 2)
        clock.wall_ms += 8 * DAY_MS
        store.retention_tick()
        assert store.groups.names() == ["g"]
        clock.wall_ms -= 8 * DAY_MS
        for _ in range(4):
            log.append([b"x"])
        for _ in range(100):  # a tick ends where its slice of time does
            store.retention_tick()
            if log.log_start_offset == 2:
                break
        assert log.log_start_offset == 2
        clock.advance(8 * DAY_MS)
        store.retention_tick()
        assert store.groups.names() == []


def test_whether_an_instance_lives_is_seen_without_a_right_to_write(tmp_path: Path) -> None:
    """This holds in the read-only store of another user, and for two processes that check at once."""
    with segmentlog.open(tmp_path, background=False) as store:
        store.create_topic("t")
        producer = store.producer(name="p")
        producer.begin_transaction()
        producer.send_many("t", [b"1"])
        producer.flush()
        fs = FaultyFileSystem()
        with LogStore(tmp_path, background=False, read_only=True, fs=fs) as looking:
            state = looking.transactions.states()["p"]
            fs.calls.clear()
            assert looking.transactions.is_alive("p", state)
            flags = [args[1] for name, args in fs.calls if name == "open"]
            assert all(not flag & (os.O_RDWR | os.O_WRONLY) for flag in flags)
            fs.fail("open", errno.EACCES)
            assert looking.transactions.is_alive("p", state), "what nobody can tell is taken for alive"
        producer.abort_transaction()
        producer.close()
        assert not store.transactions.is_alive("p", state)


def test_one_producers_trouble_does_not_keep_others_transactions_from_their_end(tmp_path: Path) -> None:
    """If a producer's fence cannot be opened, the other transactions are ended, and `health()` reports the error."""
    clock = FakeClock()
    with LogStore(tmp_path, background=False, clock=clock) as store:
        store.create_topic("t")
        producers = [store.producer(name=name, transaction_timeout_ms=1000) for name in ("a", "b")]
        for producer in producers:
            producer.begin_transaction()
            producer.send_many("t", [b"1"])
            producer.flush()
        clock.advance(1001)
        finish_one = store.transactions._abandoned._finish_name

        def refuse(name: str, now_ms: int) -> None:
            if name == "a":
                raise PermissionError(errno.EACCES, "Permission denied", "fence")
            finish_one(name, now_ms)

        with mock.patch.object(store.transactions._abandoned, "_finish_name", refuse):
            store.finish_transactions()
        assert store.transactions.states()["b"].status == "CompleteAbort"
        assert list(store.health()) == ["transaction of a"]
        store.finish_transactions()
        assert store.health() == {}
        for producer in producers:
            producer.close()
