"""What each fsync policy gives, and what a power cut would have taken: ``python -m bench.fsync``.

Cells of policy x batch size x record size x writers, in a shuffled order that is always the same, so that a
machine that slows down over the run does not look like an effect of a setting. Each cell is a store of its own,
deleted right after. Values compress about two to one.

Risk is measured from outside: a process of its own has the store open too, and about every millisecond reads the
page that all processes share about a partition. What counts is what had been *acknowledged* (`append` had
returned) and lay above the durable offset: that is what a power cut takes though the program believes it safe.

- Records at risk are exact at the moment of each sample with one writer, except while its append is returning; with
  more they may be too few by the appends that are under way, one a writer.
- Milliseconds at risk are the age of the oldest such record, counted from the sample that first saw it. So they
  are too few by up to one interval, and what lives shorter than an interval may not be seen at all.
- The sampler competes for the cores, and comes late where there are too few: a worse moment may pass unseen in a
  gap between two samples. Each row has the longest one (`FsyncRow.sample_gap_ms_max`).

A cell lasts ``--seconds``, under ``<n>ms`` at least one interval and a half, so that a whole one is seen; it ends
earlier once it has written ``--most-mb``. Under ``never`` all of a cell is at risk, except segments that were sealed.
So its figures say how long the cell was, and not what the operating system would have left unwritten later.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import mmap
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import lz4.block
import msgspec

import segmentlog
from bench import machine, results
from bench.machine import Latency
from segmentlog.config import FsyncPolicy
from segmentlog.partition.partition import Partition
from segmentlog.store import LogStore

POLICIES = ("always", "10ms", "1000ms", "1000records", "1MiB", "never")
BATCHES = (1, 100, 1_000, 10_000)
RECORD_SIZES = (100, 1 << 10, 10 << 10)

WriterKind = Literal["threads", "processes"]
WRITERS: tuple[tuple[int, WriterKind], ...] = ((1, "threads"), (4, "threads"), (16, "threads"), (4, "processes"))
"""One process is the same as one thread."""

_TOPIC = "t"
_SEED = 20
_RAW_ROUNDS = 12
_DISTINCT_BYTES = 256 << 10
"""So much differs before values repeat: four times as far back as LZ4 looks."""
_BATCH_LISTS = 16
_LATE_S = 60.0
"""Longer than any append takes; whoever has waited so long is left alone."""


class FsyncRow(msgspec.Struct, frozen=True):
    """One cell. ``record_bytes`` and MB are those of values before compression; times of ``append_us`` are of one call.

    ``records_at_risk`` and ``ms_at_risk``: acknowledged and not yet fsynced, over all samples of the cell.
    ``records_unsynced_max`` has those in it too that were written and not yet acknowledged.
    """

    policy: str
    batch_records: int
    record_bytes: int
    writers: int
    writer_kind: WriterKind
    appends: int
    records: int
    seconds: float
    records_per_s: float
    mb_per_s: float
    append_us: Latency
    fsyncs: int
    records_at_risk_p50: int
    records_at_risk_max: int
    ms_at_risk_p50: float
    ms_at_risk_max: float
    records_unsynced_max: int
    samples: int
    sample_gap_ms_max: float
    cut_short: bool
    """It ended because it had written as much as a cell may."""

    @property
    def is_whole_interval_seen(self) -> bool:
        """Whether the cell outlasted the policy's interval, if it has one: else it may not have seen the worst."""
        return self.seconds * 1000 >= _interval_ms(self.policy)


class Cell(msgspec.Struct, frozen=True):
    """What is set in one measurement."""

    policy: str
    batch_records: int
    record_bytes: int
    writers: int
    writer_kind: WriterKind

    @property
    def name(self) -> str:
        kind = self.writer_kind[: None if self.writers > 1 else -1]
        return f"{self.policy}, {self.batch_records} x {self.record_bytes} B, {self.writers} {kind}"

    @property
    def round_bytes(self) -> int:
        """One append of each writer."""
        return self.batch_records * self.record_bytes * self.writers


class Task(msgspec.Struct, frozen=True):
    """A cell, as its processes get it. Times are those of `time.perf_counter`, which all processes share."""

    cell: Cell
    start_s: float
    stop_s: float
    most_records: int
    base_offset: int
    interval_s: float


class Risk(msgspec.Struct, frozen=True):
    """What the sampler saw of one cell."""

    records: list[int]
    ms: list[float]
    unsynced_max: int
    gap_ms_max: float
    fsyncs: int


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
        self._log: Partition = self._store.topic(_TOPIC).partition(0)

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
            step = max((len(pool) - wanted) // _BATCH_LISTS, 1)
            self._batches[key] = [pool[at : at + wanted] for at in range(0, len(pool) - wanted, step)][:_BATCH_LISTS]
        return self._batches[key]


def make_values(record_bytes: int) -> list[bytes]:
    """Distinct values of which one half compresses to nothing and the other not at all, always the same."""
    noise = random.Random(record_bytes)
    count = max(_DISTINCT_BYTES // record_bytes, _BATCH_LISTS)
    half = record_bytes // 2
    return [noise.randbytes(record_bytes - half) + b"." * half for _ in range(count)]


def compression_ratio(record_bytes: int, batch_records: int) -> float:
    """Bytes before LZ4 over bytes after it, for one batch."""
    pool = make_values(record_bytes)
    raw = b"".join((pool * -(-batch_records // len(pool)))[:batch_records])
    return len(raw) / len(lz4.block.compress(raw, store_size=False))


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


# ---------------------------------------------------------------- the bench


class Bench:
    """Runs cells in ``folder``. Use it in a ``with``: its processes are killed and the stores deleted at the end."""

    def __init__(self, folder: Path, seconds: float, most_bytes: int, interval_ms: float, *, stretch: bool) -> None:
        self.folder = folder
        self.raw: list[Latency] = []
        """The disk's own latency, measured now and then over the run."""
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._interval_s = interval_ms / 1e3
        self._stretch = stretch
        self._board = Board(folder / "board")
        self._sampler = BenchProcess("sampler", folder / "board")
        self._writers: list[BenchProcess] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in (self._sampler, *self._writers):
            process.end()

    def run(self, cells: Sequence[Cell]) -> Iterator[FsyncRow]:
        """Each cell in turn. Raises `BenchProcessFailed`, with what the log said, when it cannot go on."""
        every = max(len(cells) // _RAW_ROUNDS, 1)
        for number, cell in enumerate(cells):
            if number % every == 0:
                self.raw.append(machine.raw_fdatasync(self.folder, 100))
            yield self.measure(cell)
        self.raw.append(machine.raw_fdatasync(self.folder, 100))

    def measure(self, cell: Cell) -> FsyncRow:
        """One cell, in a store that is there for no longer."""
        processes = cell.writers if cell.writer_kind == "processes" else 1
        while len(self._writers) < processes:
            self._writers.append(BenchProcess(f"writer {len(self._writers) + 1}", self.folder / "board"))
        writers = self._writers[:processes]
        path = self.folder / "store"
        shutil.rmtree(path, ignore_errors=True)
        self._board.clear()
        with segmentlog.open(path, background=False) as store:
            log = store.create_topic(_TOPIC, fsync=cell.policy).partition(0)
            self._all([*writers, self._sampler], "open", str(path))
            self._all(writers, "warm_up", cell)
            log.flush()
            task = self._task(cell, log.log_end_offset)
            for number, process in enumerate(writers):
                process.ask("write", task, number, cell.writers // processes)
            self._sampler.ask("watch", task)
            written = [process.answer() for process in writers]
            risk: Risk = self._sampler.answer()
            self._all([*writers, self._sampler], "close")
            store.delete_topic(_TOPIC)
        shutil.rmtree(path)
        return _row(cell, written, risk, cut_short=self._board.is_stopped)

    def _task(self, cell: Cell, base_offset: int) -> Task:
        seconds = self._seconds
        if self._stretch:
            seconds = max(seconds, 1.5 * _interval_ms(cell.policy) / 1e3)
        start_s = time.perf_counter() + 0.01  # all of them have the message by then
        most_records = self._most_bytes // cell.record_bytes
        return Task(cell, start_s, start_s + seconds, most_records, base_offset, self._interval_s)

    @staticmethod
    def _all(processes: Sequence[BenchProcess], method: str, *arguments: Any) -> None:
        for process in processes:
            process.ask(method, *arguments)
        for process in processes:
            process.answer()


def _row(cell: Cell, written: list[tuple[bytes, float, float, int]], risk: Risk, *, cut_short: bool) -> FsyncRow:
    times = array.array("d", b"".join(part[0] for part in written))
    seconds = max(part[2] for part in written) - min(part[1] for part in written)
    records = len(times) * cell.batch_records
    return FsyncRow(
        policy=cell.policy,
        batch_records=cell.batch_records,
        record_bytes=cell.record_bytes,
        writers=cell.writers,
        writer_kind=cell.writer_kind,
        appends=len(times),
        records=records,
        seconds=round(seconds, 4),
        records_per_s=round(records / seconds, 1),
        mb_per_s=round(records * cell.record_bytes / seconds / 1e6, 3),
        append_us=machine.latency(times.tolist()),
        fsyncs=risk.fsyncs,
        records_at_risk_p50=int(statistics.median(risk.records)),
        records_at_risk_max=max(risk.records),
        ms_at_risk_p50=round(statistics.median(risk.ms), 2),
        ms_at_risk_max=round(max(risk.ms), 2),
        records_unsynced_max=risk.unsynced_max,
        samples=len(risk.records),
        sample_gap_ms_max=round(risk.gap_ms_max, 2),
        cut_short=cut_short,
    )


def _interval_ms(policy: str) -> int:
    parsed = FsyncPolicy.parse(policy)
    return parsed.amount if parsed.kind == "ms" else 0


# ---------------------------------------------------------------- which cells


def all_cells() -> list[Cell]:
    """The whole grid, in its order."""
    return [
        Cell(policy, batch, size, writers, kind)
        for policy in POLICIES
        for batch in BATCHES
        for size in RECORD_SIZES
        for writers, kind in WRITERS
    ]


def quick_cells() -> list[Cell]:
    """As few as every plot needs."""
    one_writer = [Cell(policy, batch, 100, 1, "threads") for policy in POLICIES for batch in (1, 100)]
    return one_writer + [Cell("always", 1, 100, writers, kind) for writers, kind in WRITERS[1:]]


def choose(cells: Sequence[Cell], only: str, most_bytes: int) -> tuple[list[Cell], list[str]]:
    """(Cells in the order to run them, names of those that do not fit). ``only``: words that the name must have."""
    words = [word.strip() for word in only.split(",") if word.strip()]
    wanted = [cell for cell in cells if all(word in cell.name for word in words)]
    left_out = [cell.name for cell in wanted if cell.round_bytes > most_bytes]
    fit = [cell for cell in wanted if cell.round_bytes <= most_bytes]
    random.Random(_SEED).shuffle(fit)
    return fit, left_out


# ---------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="of each cell (default 0.4; 0.05 with --quick)")
    parser.add_argument("--only", default="", help='cells whose name has all these words: "always, 4 threads"')
    parser.add_argument("--quick", action="store_true", help="few cells, whatever an interval lasts")
    parser.add_argument("--most-mb", type=int, default=1024, help="values that a cell writes at most (default 1024)")
    parser.add_argument("--interval-ms", type=float, default=1.0, help="between samples of the risk (default 1)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: today's below bench/results)")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args(arguments)
    seconds = options.seconds or (0.05 if options.quick else 0.4)
    most_bytes = options.most_mb << 20
    cells, left_out = choose(quick_cells() if options.quick else all_cells(), options.only, most_bytes)
    if not cells:
        parser.error(f"no cell has {options.only!r} in its name and fits; they are named like {all_cells()[0].name!r}")
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-fsync-", dir=options.dir))
    rows: list[FsyncRow] = []
    try:
        about = machine.describe(folder)
        with Bench(folder, seconds, most_bytes, options.interval_ms, stretch=not options.quick) as bench:
            for row in _with_progress(bench.run(cells), cells):
                rows.append(row)
    except (KeyboardInterrupt, BenchProcessFailed, segmentlog.SegmentlogError, OSError) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
        done = f"after {len(rows)} of {len(cells)} cells; nothing was saved, and {folder} is deleted"
        print(f"bench.fsync: {why}, {done}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    warnings = _warnings(about, bench.raw)
    settings = {
        "seconds": seconds,
        "quick": options.quick,
        "only": options.only,
        "most_mb": options.most_mb,
        "sample_interval_ms": options.interval_ms,
        "order_seed": _SEED,
        "compression": {str(size): round(compression_ratio(size, 100), 2) for size in RECORD_SIZES},
        "left_out": left_out,
        "raw_fdatasync_us": [msgspec.to_builtins(one) for one in bench.raw],
        "warnings": warnings,
    }
    out = options.out or results.default_folder()
    path = results.save(out, "fsync", about, time.monotonic() - started, settings, rows)
    if options.json:
        for row in rows:
            print(msgspec.json.encode(row).decode())
    else:
        print_table(rows)
    for name in left_out:
        print(f"left out, as one append of each writer is more than {options.most_mb} MB: {name}", file=sys.stderr)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"written: {path}", file=sys.stderr)
    return 0


def _warnings(about: machine.Machine, raw: Sequence[Latency]) -> list[str]:
    found = [about.fsync_warning] if about.fsync_warning else []
    medians = [one.p50 for one in raw]
    if max(medians) > 2 * min(medians):
        found.append(
            f"The disk changed over the run: the median of an fdatasync was between {min(medians):.0f}"
            f" and {max(medians):.0f} us."
        )
    return found


def _with_progress(rows: Iterator[FsyncRow], cells: Sequence[Cell]) -> Iterator[FsyncRow]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(cells[0].name, total=len(cells))
        for number, row in enumerate(rows, 1):
            yield row
            progress.update(bar, advance=1, description=cells[min(number, len(cells) - 1)].name)


def print_table(rows: Sequence[FsyncRow]) -> None:
    """For people: one writer with records of 100 bytes where there are such rows; the file has all."""
    from rich.console import Console
    from rich.table import Table

    shown = [row for row in rows if row.writers == 1 and row.record_bytes == 100] or list(rows)
    shown.sort(key=lambda row: (POLICIES.index(row.policy), row.batch_records, row.record_bytes, row.writers))
    table = Table(title=f"{len(shown)} of {len(rows)} cells; at risk is what was acknowledged and not yet fsynced")
    for column in ("fsync", "batch", "record", "writers", "records/s", "MB/s", "p50 us", "p99 us", "fsyncs",
                   "records at risk p50", "max", "ms at risk p50", "max"):  # fmt: skip
        table.add_column(column, justify="left" if column == "fsync" else "right")
    for row in shown:
        table.add_row(
            row.policy,
            f"{row.batch_records:,}",
            f"{row.record_bytes:,} B",
            f"{row.writers} {row.writer_kind}" if row.writers > 1 else "1",
            f"{row.records_per_s:,.0f}",
            f"{row.mb_per_s:,.1f}",
            f"{row.append_us.p50:,.0f}",
            f"{row.append_us.p99:,.0f}",
            f"{row.fsyncs:,}",
            f"{row.records_at_risk_p50:,}",
            f"{row.records_at_risk_max:,}",
            f"{row.ms_at_risk_p50:,.1f}",
            f"{row.ms_at_risk_max:,.1f}",
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    # As the processes know it: what they send over their pipes is of the module that has a name.
    from bench import fsync

    sys.exit(fsync.main())
