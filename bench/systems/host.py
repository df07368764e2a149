"""A system in a process of its own, so that its memory is its own and killing it kills nothing else.

    with Hosted("lmdb", folder, "never", keyed=False) as log:
        seconds = log.append(batches=100)

Calls are timed in that process, around the system's own methods; what goes over the pipe are a few numbers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from bench.machine import own_bytes
from bench.systems.base import Sync, System, TimesItself
from bench.workload import Workload, json_records

BATCH_RECORDS = 1024
_POOL = 16
"""Different batches that appends go round in: as warm in the cache as records that were just made."""


class Timed(msgspec.Struct, frozen=True):
    """``records`` were handled in ``seconds``; ``times_us`` of the single calls where they were asked for."""

    records: int
    seconds: float
    times_us: list[float] = []

    @property
    def rate(self) -> float:
        return self.records / self.seconds


class HostDied(RuntimeError):
    """The process that ran the system ended; says what it had said."""


class Hosted:
    """Drives a `System` in a process of its own. Use it in a ``with``."""

    def __init__(self, name: str, folder: Path, sync: Sync, *, keyed: bool) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, name, str(folder), sync, keyed), daemon=False)
        self._process.start()
        theirs.close()
        self._call("ready")

    def __enter__(self) -> Hosted:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(HostDied, RuntimeError):
            self.close()
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def close(self) -> None:
        """Close the log, if the process still lives, and end it."""
        if self._process.is_alive():
            self._call("close")
            self._process.join(20)

    def open(self) -> float:
        """Open the log; the seconds that it took, without starting Python and importing."""
        return float(self._call("open"))

    def append(self, seconds: float, batch_records: int = BATCH_RECORDS, *, most: int = 1 << 62) -> Timed:
        """Append batches for so long (at least one; at most ``most`` records), and wait until all are acknowledged."""
        return _timed(self._call("append", seconds, batch_records, most))

    def append_singly(self, seconds: float) -> Timed:
        """Append one record after the other, with the time of each."""
        return _timed(self._call("append_singly", seconds))

    def append_from_threads(self, threads: int, seconds: float) -> Timed:
        """Append one record after the other from so many threads at once, with the time of each."""
        return _timed(self._call("append_from_threads", threads, seconds))

    def fill(self, records: int) -> Timed:
        """Append so many records in batches."""
        return _timed(self._call("append", float("inf"), BATCH_RECORDS, records))

    def scan(self, *, full: bool) -> Timed:
        """Read all of it."""
        return _timed(self._call("scan", full))

    def read_randomly(self, count: int, seed: int) -> Timed:
        """Read at random offsets, with the time of each."""
        return _timed(self._call("read_randomly", count, seed))

    def compact(self) -> float:
        """Seconds that a compaction took. Raises `NotImplementedError` where there is none."""
        return float(self._call("compact"))

    def end(self) -> int:
        """How many records it holds."""
        return int(self._call("end"))

    def peak_bytes(self) -> int:
        """Return the largest private memory (no page cache) of the process and its servers, without that of Python."""
        return int(self._call("peak_bytes"))

    def kill(self) -> None:
        """SIGKILL it and its servers, with whatever they were at."""
        self._call("kill_servers")
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((method, arguments))
            kind, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            raise HostDied(f"{self.name}: its process ended with {self._process.exitcode} in {method}") from None
        if kind == "absent":
            raise NotImplementedError(answer)
        if kind == "error":
            raise RuntimeError(f"{self.name}: {method} failed: {answer}")
        return answer


def _timed(answer: tuple[int, float, list[float]]) -> Timed:
    return Timed(*answer)


# ---------------------------------------------------------------- in the process


class _Host:
    """What the process does with its system."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._work: Workload = json_records(_POOL, BATCH_RECORDS)
        self._before_bytes = own_bytes(os.getpid())
        self._peak_bytes = 0

    def ready(self) -> None:
        """Answers, once everything is imported."""

    def open(self) -> float:
        started = time.perf_counter()
        self._system.open()
        return time.perf_counter() - started

    def close(self) -> None:
        self._system.close()

    def append(self, seconds: float, batch_records: int, most: int) -> tuple[int, float, list[float]]:
        if isinstance(self._system, TimesItself):
            itself = self._system.timed_append(seconds, batch_records, most)
            self._look_at_memory()
            return itself
        batches = self._batches(batch_records)
        system, keyed, done, number = self._system, self._system.keyed, 0, 0
        times: list[float] = []
        started = now = time.perf_counter()
        while done < most and (not done or now - started < seconds):
            values, keys = batches[number % len(batches)]
            if len(values) > most - done:
                values, keys = values[: most - done], keys[: most - done]
            before = now
            system.append(values, keys if keyed else None)
            now = time.perf_counter()
            times.append((now - before) * 1e6)
            done += len(values)
            number += 1
        system.flush()
        elapsed = time.perf_counter() - started
        self._look_at_memory()
        return done, elapsed, times

    def append_singly(self, seconds: float) -> tuple[int, float, list[float]]:
        if isinstance(self._system, TimesItself):
            return self._system.timed_append(seconds, 1, 1 << 62)
        values = [value for batch in self._work.values for value in batch]
        append_one = self._system.append_one
        times: list[float] = []
        started = now = time.perf_counter()
        while not times or now - started < seconds:
            before = now
            append_one(values[len(times) % len(values)])
            now = time.perf_counter()
            times.append((now - before) * 1e6)
        self._system.flush()
        return len(times), time.perf_counter() - started, times

    def append_from_threads(self, threads: int, seconds: float) -> tuple[int, float, list[float]]:
        if isinstance(self._system, TimesItself):
            return self._system.timed_append_from_threads(threads, seconds)
        value = self._work.values[0][0]
        times: list[float] = []
        writers = [self._system.writer() for _ in range(threads)]
        barrier = threading.Barrier(threads + 1)
        failures: list[BaseException] = []

        def run(write: Callable[[bytes], object]) -> None:
            own = []
            barrier.wait()
            try:
                while (before := time.perf_counter()) - started < seconds:
                    write(value)
                    own.append((time.perf_counter() - before) * 1e6)
            except Exception as error:
                failures.append(error)
            times.extend(own)

        workers = [threading.Thread(target=run, args=(write,)) for write in writers]
        for worker in workers:
            worker.start()
        started = time.perf_counter()
        barrier.wait()
        for worker in workers:
            worker.join()
        elapsed = time.perf_counter() - started
        if failures:
            raise failures[0]
        return len(times), elapsed, times

    def scan(self, full: bool) -> tuple[int, float, list[float]]:
        if isinstance(self._system, TimesItself):
            count, seconds = self._system.timed_scan(full=full)
        else:
            scan = self._system.scan_records if full else self._system.scan_values
            started = time.perf_counter()
            count = scan()
            seconds = time.perf_counter() - started
        if count != (end := self._system.end()):
            raise AssertionError(f"{count:,} records were read of a log of {end:,}")
        self._look_at_memory()
        return count, seconds, []

    def read_randomly(self, count: int, seed: int) -> tuple[int, float, list[float]]:
        if isinstance(self._system, TimesItself):
            own = self._system.timed_reads(count, seed)
            return count, sum(own) / 1e6, own
        end, rng, times = self._system.end(), random.Random(seed), []
        offsets = [rng.randrange(end) for _ in range(count)]
        for offset in offsets:
            started = time.perf_counter()
            value = self._system.read(offset)
            times.append((time.perf_counter() - started) * 1e6)
            if value != self._value(offset):
                raise AssertionError(f"offset {offset} holds {value[:200]!r}")
        return count, sum(times) / 1e6, times

    def compact(self) -> float:
        started = time.perf_counter()
        self._system.compact()
        return time.perf_counter() - started

    def end(self) -> int:
        return self._system.end()

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def kill_servers(self) -> None:
        self._system.kill()

    def _batches(self, batch_records: int) -> list[tuple[list[bytes], list[bytes]]]:
        """Return the pool cut into, or joined to, batches of that size."""
        values = [value for batch in self._work.values for value in batch]
        keys = [key for batch in self._work.keys for key in batch]
        while len(values) < batch_records:
            values, keys = values * 2, keys * 2
        last = len(values) - batch_records + 1
        return [
            (values[at : at + batch_records], keys[at : at + batch_records]) for at in range(0, last, batch_records)
        ]

    def _value(self, offset: int) -> bytes:
        """Return the value that `fill` stored at the offset: batches of the pool repeat."""
        batch, index = divmod(offset, BATCH_RECORDS)
        return self._work.values[batch % _POOL][index]

    def _look_at_memory(self) -> None:
        own = own_bytes(os.getpid()) - self._before_bytes
        self._peak_bytes = max(self._peak_bytes, own + sum(map(own_bytes, self._system.server_ids())))


def _serve(pipe: Connection, name: str, folder: str, sync: Sync, keyed: bool) -> None:
    from bench.systems.registry import system_class

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller closes what is open here
    host = _Host(system_class(name)(Path(folder), sync, keyed=keyed))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # the caller is gone
            method, arguments = "close", ()
        call: Callable[..., Any] = getattr(host, method)
        try:
            answer: tuple[str, Any] = ("done", call(*arguments))
        except NotImplementedError as error:
            answer = ("absent", str(error))
        except Exception as error:
            answer = ("error", f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except BrokenPipeError:
            pass
        if method == "close":
            return
