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
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

import segmentlog
from bench import machine, results
from bench.arguments import existing_folder
from bench.fsync_cells import (
    ORDER_SEED,
    POLICIES,
    RECORD_SIZES,
    Cell,
    FsyncRow,
    Risk,
    Task,
    all_cells,
    choose,
    compression_ratio,
    interval_ms,
    quick_cells,
)
from bench.fsync_processes import TOPIC, BenchProcess, BenchProcessFailed, Board
from bench.machine import Latency

_RAW_ROUNDS = 12


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
            log = store.create_topic(TOPIC, fsync=cell.policy).partition(0)
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
            store.delete_topic(TOPIC)
        shutil.rmtree(path)
        return _row(cell, written, risk, cut_short=self._board.is_stopped)

    def _task(self, cell: Cell, base_offset: int) -> Task:
        seconds = self._seconds
        if self._stretch:
            seconds = max(seconds, 1.5 * interval_ms(cell.policy) / 1e3)
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


# ---------------------------------------------------------------- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="of each cell (default 0.4; 0.05 with --quick)")
    parser.add_argument("--only", default="", help='cells whose name has all these words: "always, 4 threads"')
    parser.add_argument("--quick", action="store_true", help="few cells, whatever an interval lasts")
    parser.add_argument("--most-mb", type=int, default=1024, help="values that a cell writes at most (default 1024)")
    parser.add_argument("--interval-ms", type=float, default=1.0, help="between samples of the risk (default 1)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: today's below bench/results)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
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
        "order_seed": ORDER_SEED,
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


_LINE_EVERY_S = 10.0


def _with_lines(rows: Iterator[FsyncRow], cells: Sequence[Cell]) -> Iterator[FsyncRow]:
    """Print a line now and then if there is no terminal for a bar, so that a run of minutes does not seem to hang."""
    started_s = due_s = time.monotonic()
    for number, row in enumerate(rows, 1):
        yield row
        if (now_s := time.monotonic()) >= due_s or number == len(cells):
            print(f"{now_s - started_s:6.0f} s  {number} of {len(cells)} cells", file=sys.stderr, flush=True)
            due_s = now_s + _LINE_EVERY_S


def _with_progress(rows: Iterator[FsyncRow], cells: Sequence[Cell]) -> Iterator[FsyncRow]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield from _with_lines(rows, cells)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(cells[0].name, total=len(cells))
        for number, row in enumerate(rows, 1):
            yield row
            progress.update(bar, advance=1, description=cells[min(number, len(cells) - 1)].name)


def _is_web_service(row: FsyncRow) -> bool:
    """Whether many threads append single records and wait for each: what a web service does."""
    return row.policy == "always" and row.batch_records == 1 and row.writers == 16


def print_table(rows: Sequence[FsyncRow]) -> None:
    """For people: records of 100 bytes by one writer, or by 16 threads one at a time; the file has all."""
    from rich.console import Console
    from rich.table import Table

    shown = [row for row in rows if row.record_bytes == 100 and (row.writers == 1 or _is_web_service(row))] or list(
        rows
    )
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
    sys.exit(main())
