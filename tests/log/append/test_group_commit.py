"""Durable appends of producers share writes and fsyncs, while each keeps its own numbers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from logs import open_log, values

from segmentlog.errors import OutOfOrderSequence, ProducerFenced
from segmentlog.log.append.batch_encoding import CheckedColumns, encode_columns_as_batches
from segmentlog.log.append.group_commit import GroupCommit
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp

_FIRST_ID = 1 << 61


def stamp(number: int, sequence: int = 0, check: Callable[[], None] | None = None) -> ProducerStamp:
    """Return a stamp of the producer with that number."""
    return ProducerStamp(_FIRST_ID + number, 0, sequence, False, check)


class Together:
    """Appends that are all in the queue before one of them leads."""

    def __init__(self, log: Partition) -> None:
        self._log = log
        self._group = log._pipeline.group
        self.outcomes: dict[int, Any] = {}
        """The result or the exception of each append, by its number."""
        self.writes: list[tuple[int, int]] = []
        """For each write: the number of batches without producer numbers, and of appends with them."""

    def run(self, appends: list[tuple[list[bytes], ProducerStamp | None]]) -> None:
        """Append all of them at the same time, queued in this order."""
        place = self._group._appender.place

        def count(batches: Any, now_ms: int, stamp: Any = None, numbered: Any = ()) -> Any:
            self.writes.append((len(batches), len(numbered)))
            return place(batches, now_ms, stamp, numbered)

        def work(number: int, given: list[bytes], stamp: ProducerStamp | None) -> None:
            try:
                self.outcomes[number] = self._log.append(given, ack="durable", producer=stamp)
            except Exception as error:
                self.outcomes[number] = error

        self._group._appender.place = count  # type: ignore[method-assign]
        threads = []
        try:
            with self._group._leading:  # no thread leads meanwhile
                for number, (given, one) in enumerate(appends):
                    threads.append(threading.Thread(target=work, args=(number, given, one), daemon=True))
                    threads[-1].start()
                    ends_s = time.monotonic() + 30
                    while len(self._group._queue) <= number and time.monotonic() < ends_s:
                        time.sleep(0.001)
                assert len(self._group._queue) == len(appends)
            self._group._wake_next_leader()
            for thread in threads:
                thread.join(30)
                assert not thread.is_alive()
        finally:
            self._group._appender.place = place  # type: ignore[method-assign]


def test_producers_share_a_write(tmp_path: Path) -> None:
    """Each producer keeps its sequence numbers, appends without numbers come first, and all of it is one write."""
    log = open_log(tmp_path)
    together = Together(log)
    together.run([([b"%d-0" % number, b"%d-1" % number], stamp(number)) for number in range(5)] + [([b"plain"], None)])
    assert together.writes == [(1, 5)]
    assert together.outcomes == {5: 0, **{number: 1 + 2 * number for number in range(5)}}
    assert values(log) == [b"plain", *(b"%d-%d" % (number, row) for number in range(5) for row in range(2))]
    assert log.durable_offset == log.log_end_offset == 11
    assert {entry.producer_id - _FIRST_ID: entry.next_sequence for entry in log.producers()} == dict.fromkeys(
        range(5), 2
    )
    for number in range(5):  # and the log counts on from there
        log.append([b"more"], producer=stamp(number, 2))


def test_who_may_not_append_is_told_alone(tmp_path: Path) -> None:
    """Three refused appends (out of order, fenced, unreadable fence) get their own errors; the others continue."""
    log = open_log(tmp_path)
    log.append([b"first"] * 3, producer=stamp(1))

    def fenced() -> None:
        raise ProducerFenced("1", 0, 1)

    def unreadable() -> None:
        raise OSError(5, "Input/output error")

    together = Together(log)
    together.run(
        [
            ([b"a"], stamp(0)),
            ([b"gap"], stamp(1, 7)),
            ([b"fenced"], stamp(2, 0, fenced)),
            ([b"b"], stamp(3)),
            ([b"unreadable"], stamp(4, 0, unreadable)),
            ([b"c"], stamp(1, 3)),
        ]
    )
    assert isinstance(together.outcomes[1], OutOfOrderSequence)
    assert isinstance(together.outcomes[2], ProducerFenced)
    assert isinstance(together.outcomes[4], OSError)
    assert (together.outcomes[0], together.outcomes[3], together.outcomes[5]) == (3, 4, 5)
    assert values(log)[3:] == [b"a", b"b", b"c"]
    assert log.failed is None


def test_what_was_appended_before_is_known_again(tmp_path: Path) -> None:
    """A batch that is sent again, after an interrupt say, is not appended twice. It is on disk when acknowledged."""
    log = open_log(tmp_path, fsync="never")
    assert log.append([b"once", b"twice"], ack="written", producer=stamp(0)) == 0
    assert log.durable_offset == 0
    together = Together(log)
    together.run([([b"other"], stamp(1)), ([b"once", b"twice"], stamp(0))])
    assert together.outcomes == {0: 2, 1: 0}
    assert values(log) == [b"once", b"twice", b"other"]
    assert log.durable_offset == 3
    alone = Together(log)
    alone.run([([b"once", b"twice"], stamp(0)), ([b"other"], stamp(1))])
    assert alone.outcomes == {0: 0, 1: 2}
    assert len(values(log)) == 3


def test_two_appends_of_one_producer_go_one_after_another(tmp_path: Path) -> None:
    """The second is known to follow once the first is appended: it waits for the next group."""
    log = open_log(tmp_path)
    together = Together(log)
    together.run([([b"0"], stamp(0)), ([b"1"], stamp(0, 1)), ([b"2"], stamp(0, 2)), ([b"x"], stamp(1))])
    assert [together.outcomes[number] for number in range(4)] == [0, 2, 3, 1]
    assert values(log) == [b"0", b"x", b"1", b"2"]


def test_a_group_that_rolls_leaves_what_is_known_of_producers(tmp_path: Path) -> None:
    """With segments of three records, each new segment gets a snapshot, and a reopened log knows the producers."""
    log = open_log(tmp_path, segment_records=3)
    together = Together(log)
    together.run([([b"%d" % number] * 2, stamp(number)) for number in range(6)])
    assert len(log.segments()) > 3
    log.close()
    again = open_log(tmp_path, segment_records=3)
    entries = {entry.producer_id - _FIRST_ID: entry.next_sequence for entry in again.producers()}
    assert entries == dict.fromkeys(range(6), 2)
    assert again.append([b"0"] * 2, ack="durable", producer=stamp(0)) == together.outcomes[0]


@pytest.mark.parametrize("producer_count", [3, 12])
def test_producers_in_threads_append_each_record_once_in_order(tmp_path: Path, producer_count: int) -> None:
    """The promise holds however appends are grouped."""
    log = open_log(tmp_path)

    def work(number: int) -> None:
        for sequence in range(40):
            log.append([b"%d:%d" % (number, sequence)], ack="durable", producer=stamp(number, sequence))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(producer_count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: dict[int, list[int]] = {}
    for value in values(log):
        number, sequence = map(int, value.split(b":"))
        found.setdefault(number, []).append(sequence)
    assert found == {number: list(range(40)) for number in range(producer_count)}
    assert log.durable_offset == log.log_end_offset


class _Interrupt(BaseException):
    """The exception that a signal handler raises in the main thread."""


class _Storm:
    """Interrupts every call of one step of an append in the main thread, and counts the calls of all threads."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.interrupted = self.of_others = 0
        step = getattr(owner, name)

        def interrupted(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.interrupted += 1
                raise _Interrupt
            self.of_others += 1
            return step(*args, **options)

        patch.setattr(owner, name, interrupted)


def _queued(group: GroupCommit, append: Callable[[], object]) -> threading.Thread:
    """Return a thread whose append waits in the queue: another thread led when it came."""
    thread = threading.Thread(target=append, daemon=True)
    with group._leading:
        thread.start()
        ends_s = time.monotonic() + 30
        while not group._queue and time.monotonic() < ends_s:
            time.sleep(0.001)
        assert group._queue
    return thread


def test_a_main_thread_that_was_interrupted_lets_another_thread_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is interrupted whenever it leads. While another thread waits, it does not lead again, but gets its share."""
    log = open_log(tmp_path)
    group = log._pipeline.group
    storm = _Storm(monkeypatch, group._appender, "place")
    with pytest.raises(_Interrupt):
        log.append([b"main"], ack="durable")
    thread = _queued(group, lambda: log.append([b"other"], ack="durable"))
    offset = log.append([b"main again"], ack="durable")  # the other thread appends it
    thread.join(30)
    assert not thread.is_alive()
    assert (storm.interrupted, storm.of_others) == (1, 1)
    assert values(log) == [b"other", b"main again"]
    assert offset == 1


@pytest.mark.parametrize("count", [3, 40])
def test_records_of_an_interrupted_append_are_written_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Another thread writes them while the main thread is interrupted and appends other records."""
    log = open_log(tmp_path, compression_type="none")
    group = log._pipeline.group
    writes, goes_on, stop = threading.Event(), threading.Event(), threading.Event()
    real = group._appender.place

    def place(*args: Any, **options: Any) -> Any:
        writes.set()
        assert goes_on.wait(30)
        return real(*args, **options)

    def handle(signum: int, frame: object) -> None:
        if writes.is_set() and not stop.is_set():
            stop.set()
            raise _Interrupt

    def work() -> None:
        with group._leading:
            ends_s = time.monotonic() + 30
            while not group._queue and time.monotonic() < ends_s:  # the main thread is in the queue
                time.sleep(0.001)
        monkeypatch.setattr(group._appender, "place", place)
        log.append([b"other"], ack="durable")

    def interrupt() -> None:
        assert writes.wait(30)
        while not stop.is_set():
            signal.pthread_kill(main_thread, signal.SIGUSR1)
            time.sleep(0.001)

    main_thread = threading.get_ident()
    given: list[bytes] = [b"main %d" % number for number in range(count)]
    wanted = list(given)
    before = signal.signal(signal.SIGUSR1, handle)
    threads = [threading.Thread(target=target, daemon=True) for target in (work, interrupt)]
    try:
        threads[0].start()
        while not group._leading.locked():
            time.sleep(0.001)
        threads[1].start()
        with pytest.raises(_Interrupt):
            log.append(given, ack="durable")
        given[:] = [b"something else"] * count
        encode_columns_as_batches(CheckedColumns(given, None, None, None), log.handle.config, 0)
    finally:
        stop.set()
        goes_on.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        signal.signal(signal.SIGUSR1, before)
    assert sorted(values(log)) == sorted([*wanted, b"other"])


def test_an_append_whose_leader_was_interrupted_before_the_fsync_is_synced_by_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread wrote for two threads and was interrupted. It does not lead again before the other thread has."""
    log = open_log(tmp_path, fsync="never")
    group = log._pipeline.group
    storm = _Storm(monkeypatch, group._syncer, "sync")
    offsets: list[int] = []
    thread = _queued(group, lambda: offsets.append(log.append([b"other"], ack="durable")))
    with pytest.raises(_Interrupt):  # it leads for both
        log.append([b"main"], ack="durable")
    assert storm.of_others == 0
    with pytest.raises(_Interrupt):  # no other thread waits any more: it leads again
        log.append([b"main again"], ack="durable")
    assert (storm.interrupted, storm.of_others) == (2, 1)
    thread.join(30)
    assert not thread.is_alive()
    assert offsets == [0]
    assert values(log) == [b"other", b"main", b"main again"]
