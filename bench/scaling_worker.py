"""Processes that use a store at the same time, each told over a pipe what to do.

    with Crew(2) as crew:
        crew.run([("open", path), ("open", path)])
        (appended, _), (read, _) = crew.run([("append", Work(1024), 0, 0.5), ("scan", 0, 0.5)])

Work is timed where it is done; what goes over the pipe are a few numbers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NamedTuple

import msgspec

import segmentlog
from bench.machine import latency, own_bytes
from bench.workload import json_records
from segmentlog.log.partition import Partition
from segmentlog.store import LogStore

TOPIC: Final = "t"

_POOL_BATCHES: Final = 16
_LOOK_S: Final = 0.01
"""How often memory is looked at: from outside, so that it costs the one that is measured nothing."""
_LEAVE_S: Final = 30.0


class Work(msgspec.Struct, frozen=True):
    """What to append: batches of ``batch_records``, of so many bytes each, or of keyed JSON records of about 100."""

    batch_records: int
    record_bytes: int | None = None


class Answer(NamedTuple):
    """What a process answered, and the most memory of its own (RssAnon) that it was seen to have meanwhile."""

    value: Any
    peak_bytes: int


class WorkerFailed(RuntimeError):
    """A process ended, or raised what is told here."""


Call = tuple[Any, ...]
"""A method of `Worker` and its arguments."""


class Worker:
    """What one of the processes can do. Everything is in the topic ``t`` of the store that it has open."""

    def __init__(self) -> None:
        self._store: LogStore | None = None
        self._logs: list[Partition] = []
        self._pools: dict[Work, list[tuple[list[bytes], list[bytes] | None]]] = {}

    def create(self, path: str, partitions: int, config: dict[str, object]) -> float:
        """Make a store with the topic; seconds to make it and to open all partitions for the first time."""
        self.close()
        started = time.perf_counter()
        self._store = segmentlog.open(path)
        self._store.create_topic(TOPIC, partitions=partitions, config={"fsync": "never", **config})
        self._logs = self._store.topic(TOPIC).partitions()
        return time.perf_counter() - started

    def open(self, path: str) -> float:
        """Seconds to open a store with all its partitions."""
        self.close()
        started = time.perf_counter()
        self._store = segmentlog.open(path, create=False)
        self._logs = self._store.topic(TOPIC).partitions()
        return time.perf_counter() - started

    def close(self) -> None:
        store, self._store, self._logs = self._store, None, []
        if store is not None:
            store.close()

    def end(self) -> int:
        """Return the log end offset of the first partition."""
        return self._logs[0].log_end_offset

    def memory(self) -> int:
        """Bytes of its own memory (RssAnon)."""
        return own_bytes(os.getpid())

    def descriptors(self) -> int:
        """How many files it has open."""
        return len(os.listdir("/proc/self/fd"))

    def grow(self, work: Work, size_bytes: int) -> int:
        """Append until the first partition takes so much disk, and sync it; its size."""
        log, pool = self._logs[0], self._pool(work)
        size, rounds, grown = self._size(), 1, 0
        while size < size_bytes:
            for _ in range(rounds):
                for values, keys in pool:
                    log.append(values, keys)
            before, size = size, self._size()
            grown = grown or size - before
            # Seldom: each look is one at every segment.
            rounds = max(1, int((size_bytes - size) / grown))
        log.flush()
        return size

    def _size(self) -> int:
        return sum(segment.size_bytes for segment in self._logs[0].segments())

    def append(self, work: Work, partition: int | None, seconds: float) -> float:
        """Return the records a second that are appended to a partition, or in turn to all, once each at least."""
        logs = self._logs if partition is None else [self._logs[partition]]
        pool = self._pool(work)
        number, records = 0, 0
        started = now = time.perf_counter()
        while now - started < seconds or number < len(logs):
            values, keys = pool[number % len(pool)]
            logs[number % len(logs)].append(values, keys)
            records += len(values)
            number += 1
            now = time.perf_counter()
        return records / (now - started)

    def produce(self, work: Work, seconds: float) -> float:
        """Return the records a second that are sent one at a time through a `Producer`, until all are appended."""
        assert self._store is not None
        pool = self._pool(work)
        number, records = 0, 0
        with self._store.producer() as producer:
            started = time.perf_counter()
            while not records or time.perf_counter() - started < seconds:
                values, keys = pool[number % len(pool)]
                assert keys is not None
                for value, key in zip(values, keys, strict=True):
                    producer.send(TOPIC, value, key=key)
                records += len(values)
                number += 1
            producer.flush()
            return records / (time.perf_counter() - started)

    def scan(self, partition: int, seconds: float) -> float:
        """Return the records a second, each as bytes, of reading the partition from its beginning, again and again."""
        log, records = self._logs[partition], 0
        started = now = time.perf_counter()
        while now - started < seconds:
            for batch in log.read(0):
                records += len(batch.values)
                now = time.perf_counter()
                if now - started >= seconds:
                    break
        return records / (now - started)

    def scan_from(self, offset: int, records: int) -> float:
        """Return the records a second of reading ``records`` records from ``offset`` on, or to the end."""
        count = 0
        started = time.perf_counter()
        for batch in self._logs[0].read(offset):
            count += len(batch.values)
            if count >= records:
                break
        return count / (time.perf_counter() - started)

    def read_points(self, offsets: Sequence[int]) -> tuple[float, float]:
        """p50 and p99 of the microseconds to read the batch at each offset."""
        log, times = self._logs[0], []
        for offset in offsets:
            started = time.perf_counter()
            batch = next(log.read(offset, max_bytes=1))
            assert batch.values
            times.append((time.perf_counter() - started) * 1e6)
            assert batch.base_offset == offset
        found = latency(times)
        return found.p50, found.p99

    def _pool(self, work: Work) -> list[tuple[list[bytes], list[bytes] | None]]:
        """Return a few batches that appends repeat, so that the bench's memory does not grow with the log."""
        pool = self._pools.get(work)
        if pool is None:
            pool = self._pools[work] = list(_batches(work))
        return pool


def _batches(work: Work) -> Iterable[tuple[list[bytes], list[bytes] | None]]:
    if work.record_bytes is None:
        made = json_records(_POOL_BATCHES, work.batch_records)
        yield from zip(made.values, made.keys, strict=True)
        return
    # Pieces of the same text whatever the size, each begun elsewhere, so that LZ4 finds as much to do in all.
    text = b"\n".join(value for batch in json_records(8, 2_000).values for value in batch)
    size = work.record_bytes
    room = len(text) - size
    for number in range(_POOL_BATCHES):
        starts = (((number * work.batch_records + index) * (size + 7)) % room for index in range(work.batch_records))
        yield [text[start : start + size] for start in starts], None


class Crew:
    """So many processes with a `Worker` each. Use it in a ``with``: an exception inside kills them."""

    def __init__(self, count: int) -> None:
        # From a server that has imported everything, and nothing else: quicker than anew, and each begins the same.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.scaling_worker", "segmentlog.producing.producer"])
        self._members = []
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, failed: object, *rest: object) -> None:
        if failed is not None:
            self.kill()
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            process.join(_LEAVE_S)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, calls: Sequence[Call], *, watch: bool = False) -> list[Answer]:
        """Let each process make one of the calls (a method and its arguments), all at the same time.

        With ``watch``, their memory is measured meanwhile.
        """
        busy: dict[Any, int] = {}
        for index, (_, pipe) in enumerate(self._members[: len(calls)]):
            with contextlib.suppress(BrokenPipeError):  # the answer will not come, which says more
                pipe.send(calls[index])
            busy[pipe] = index
        answers: list[Any] = [None] * len(calls)
        peaks = [0] * len(calls)
        while busy:
            ready = wait(list(busy), timeout=_LOOK_S if watch else None)
            if watch:
                for index in busy.values():
                    peaks[index] = max(peaks[index], own_bytes(self._members[index][0].pid or 0))
            for done in ready:
                index = busy.pop(done)
                answers[index] = _received(done, str(calls[index][0]))
        return [Answer(value, peak) for value, peak in zip(answers, peaks, strict=True)]

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the first process alone; what it returned."""
        return self.run([(method, *arguments)])[0].value

    def kill(self) -> None:
        """SIGKILL all of them, with whatever they were at."""
        for process, _ in self._members:
            process.kill()
            process.join()


def _received(pipe: Any, method: str) -> Any:
    try:
        failure, value = pipe.recv()
    except (EOFError, ConnectionResetError):
        raise WorkerFailed(f"the process that was to {method} ended") from None
    if failure:
        raise WorkerFailed(f"{method} failed in another process:\n{failure}")
    return value


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the one that started this ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker = Worker()
    while True:
        try:
            method, *arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.close()
            return
        call: Callable[..., Any] = getattr(worker, method)
        try:
            answer = ("", call(*arguments))
        except Exception:
            answer = (traceback.format_exc(), None)
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)
