"""The processes of the fsync bench: writers, and the sampler that looks from outside at what is at risk."""

from __future__ import annotations

import array
import contextlib
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import segmentlog
from bench.fsync_cells import BATCH_LISTS, Cell, Risk, Task
from segmentlog.cli.bench_command import make_values
from segmentlog.log.partition import Partition
from segmentlog.store import LogStore

TOPIC = "t"

_LATE_S = 60.0
"""Longer than any append takes; whoever has waited so long is left alone."""


class BenchProcessFailed(RuntimeError):
    """A process of the bench raised this."""


# ---------------------------------------------------------------- what the processes share


class Board:
    """A page that all processes of the bench have mapped: how much each writer has had acknowledged, and who is done.

    One writer a word, stored whole, so it needs no lock.
    """

    _STOP, _DONE, _WORDS = 16, 17, 33

    def __init__(self, path: Path) -> None:
        with contextlib.closing(_Descriptor(path)) as file:
            os.ftruncate(file.fd, mmap.PAGESIZE)
            self._map = mmap.mmap(file.fd, mmap.PAGESIZE)
        self.words = memoryview(self._map).cast("Q")

    def clear(self) -> None:
        for index in range(self._WORDS):
            self.words[index] = 0

    def acknowledged(self) -> int:
        return sum(self.words[: self._STOP])

    def done(self, writer: int) -> None:
        self.words[self._DONE + writer] = 1

    def done_count(self) -> int:
        return sum(self.words[self._DONE : self._WORDS])

    def stop(self) -> None:
        """Whoever has written their share, or failed, stops the others too: fewer writers would be another cell."""
        self.words[self._STOP] = 1

    @property
    def is_stopped(self) -> bool:
        return bool(self.words[self._STOP])


class _Descriptor:
    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        os.close(self.fd)


class BenchProcess:
    """A process that opens each cell's store, does its part in it and answers; started once for all cells."""

    def __init__(self, role: str, board: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._role = role
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, role, str(board)), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        try:
            failure, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise BenchProcessFailed(f"the {self._role} ended with {self._process.exitcode}") from None
        if failure:
            raise BenchProcessFailed(f"the {self._role}: {failure}")
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def end(self) -> None:
        """Kill it: what it has open is deleted anyway, and it may be in the middle of something."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, role: str, board: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    part = (_Sampler if role == "sampler" else _Writer)(Board(Path(board)))
    while True:
        try:
            method, arguments = pipe.recv()
            try:
                pipe.send(("", getattr(part, method)(*arguments)))
            except Exception as error:
                pipe.send((f"{type(error).__name__}: {error}", None))
        except (EOFError, BrokenPipeError):  # who started it is gone
            return


class _Part:
    """What writers and the sampler do alike: have the cell's log open."""

    background: bool

    def __init__(self, board: Board) -> None:
        self._board = board
        self._store: LogStore | None = None

    def open(self, folder: str) -> None:
        self._store = segmentlog.open(folder, create=False, background=self.background)
        self._log: Partition = self._store.topic(TOPIC).partition(0)

    def close(self) -> None:
        if self._store is not None:
            self._log.abandon()  # what is to be deleted is not fsynced first, neither by us nor by the flusher
            self._store.close()
            self._store = None


# ---------------------------------------------------------------- the writers


class _Writer(_Part):
    background = True  # under <n>ms it is the writers' own threads that fsync

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._batches: dict[tuple[int, int], list[list[bytes]]] = {}

    def warm_up(self, cell: Cell) -> None:
        """Open files and reserve offsets before the clock runs."""
        self._lists(cell)
        self._log.append([b"x"])

    def write(self, task: Task, first_writer: int, threads: int) -> tuple[bytes, float, float, int]:
        """Append from so many threads: (times of the calls in us, begin and end of all of them, how many)."""
        lists = self._lists(task.cell)
        found: list[tuple[array.array[float], float, float]] = []
        failures: list[Exception] = []

        def run(writer: int) -> None:
            try:
                found.append(self._write(task, writer, lists))
            except Exception as error:
                failures.append(error)
                self._board.stop()
            finally:
                self._board.done(writer)

        others = [threading.Thread(target=run, args=(first_writer + number,)) for number in range(1, threads)]
        for thread in others:
            thread.start()
        run(first_writer)
        for thread in others:
            thread.join()
        if failures:
            raise failures[0]
        times = b"".join(part.tobytes() for part, _, _ in found)
        return times, min(one[1] for one in found), max(one[2] for one in found), sum(len(one[0]) for one in found)

    def _write(self, task: Task, writer: int, lists: list[list[bytes]]) -> tuple[array.array[float], float, float]:
        append, words, board, clock = self._log.append, self._board.words, self._board, time.perf_counter
        batch_records, count = task.cell.batch_records, len(lists)
        most_appends = max(task.most_records // task.cell.writers // batch_records, 1)
        times = array.array("d")
        time.sleep(max(task.start_s - clock(), 0))
        started = now = clock()
        while not times or (now < task.stop_s and not board.is_stopped):
            before = now
            append(lists[(writer + len(times)) % count])
            now = clock()
            words[writer] += batch_records
            times.append((now - before) * 1e6)
            if len(times) >= most_appends:
                board.stop()
        return times, started, now

    def _lists(self, cell: Cell) -> list[list[bytes]]:
        """Batches to go round in, made once."""
        key = cell.batch_records, cell.record_bytes
        if key not in self._batches:
            pool = make_values(cell.record_bytes)
            wanted = cell.batch_records
            pool *= -(-2 * wanted // len(pool))
            step = max((len(pool) - wanted) // BATCH_LISTS, 1)
            self._batches[key] = [pool[at : at + wanted] for at in range(0, len(pool) - wanted, step)][:BATCH_LISTS]
        return self._batches[key]


# ---------------------------------------------------------------- the sampler


class _Sampler(_Part):
    background = False

    def watch(self, task: Task) -> Risk:
        """Look at the log until all writers are done, and once more."""
        board, clock, log = self._board, time.perf_counter, self._log
        seen: deque[tuple[float, int]] = deque()  # when so many were first seen acknowledged; those at risk only
        records: list[int] = []
        ms: list[float] = []
        unsynced_max, gap_s_max = 0, 0.0
        fsyncs_before = log.sync_count
        time.sleep(max(task.start_s - clock(), 0))
        late_s = task.stop_s + _LATE_S
        now = task.start_s
        while True:
            is_last = board.done_count() >= task.cell.writers or now > late_s
            durable = log.durable_offset
            while True:
                acknowledged = task.base_offset + board.acknowledged()
                end = log.log_end_offset
                again = log.durable_offset
                if again == durable:  # it was so at the moment when the other two were read
                    break
                durable = again
            before, now = now, clock()
            gap_s_max = max(gap_s_max, now - before)
            while seen and seen[0][1] <= durable:
                seen.popleft()
            if acknowledged > durable and (not seen or seen[-1][1] < acknowledged):
                seen.append((now, acknowledged))
            records.append(max(acknowledged - durable, 0))
            ms.append((now - seen[0][0]) * 1e3 if seen else 0.0)
            unsynced_max = max(unsynced_max, end - durable)
            if is_last:
                break
            time.sleep(task.interval_s)
        return Risk(records, ms, unsynced_max, gap_s_max * 1e3, log.sync_count - fsyncs_before)
