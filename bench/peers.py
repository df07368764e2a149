"""segmentlog against what people would pick instead, in one run: ``python -m bench.peers``.

Each system runs in a process of its own (`bench.systems.host`), the way its documentation recommends
from Python, on the same records of about 100 bytes of JSON. All are open at once and take turns, a
little each round, in an order that changes; a row is the median over the rounds, and its ratio the median of
ours / theirs within a round, with the range. Ratios are so that more than 1 is better for us.

append in batches     1,024 records a call, at the same durability: nothing synced, once a second, every batch
append singly         one record a call, the same three
16 threads            one record a call from 16 threads of one process, each on disk before the call returns
scan values           the whole log from its beginning, each value as bytes
scan records          each record's offset, timestamp, key and value
point reads           one value at a random offset
disk, memory          the same records; memory of its own of the process and its servers, beyond Python's
open after kill -9    until the next append would succeed; a server's start is part of it
compaction            to the last record of each key

A system that is not there is named with how to get it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from bench import machine, results
from bench.arguments import existing_folder, one_or_more
from bench.measure import quantity
from bench.systems.base import SYNCS, Sync, System, Unavailable, disk_bytes
from bench.systems.host import BATCH_RECORDS, HostDied, Hosted
from bench.systems.registry import NAMES, OURS, OURS_ALL, OURS_KAFKA, OURS_UNCOMPRESSED, system_class

PACKAGES = ("lmdb", "rocksdict", "persist-queue", "diskcache", "redis", "hiredis", "nats-py", "confluent-kafka")
"""Distributions whose versions belong to the figures."""

WORKLOADS = ("append", "singly", "threads", "scan", "point reads", "disk", "memory", "open", "records", "compaction")
_THREADS = 16
_POINT_READS = 300


class PeerRow(msgspec.Struct, frozen=True):
    """One system at one piece of work.

    ``ratio`` compares with ours of the same round, more than 1 being better for us; None in our own rows.
    ``against`` is the name of ours. Systems are compared with ours uncompressed, too, in a row of its own.
    """

    workload: str
    sync: str
    system: str
    against: str
    unit: str
    figure: float
    low: float
    high: float
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    target: float | None
    rounds: int

    @property
    def reached(self) -> bool | None:
        """None where nothing was promised."""
        return None if self.target is None or self.ratio is None else self.ratio >= self.target


class Absent(msgspec.Struct, frozen=True):
    """A system, or one of its figures, that there is not; and why."""

    system: str
    workload: str
    reason: str


class Peers(msgspec.Struct, frozen=True):
    """Everything of one run: what is saved as its settings and rows."""

    versions: dict[str, str]
    about: dict[str, str]
    compresses: dict[str, bool]
    absent: list[Absent]


# Promised ratios, which are better above 1: (workload, sync, system) -> ours / theirs. Against systems that do not
# compress, ours uncompressed has to reach twice as much.
_PROMISED: dict[tuple[str, str, str], float] = {
    ("append in batches", "never", "LMDB"): 1.2,
    ("append in batches", "never", "SQLite"): 8,
    ("append in batches", "never", "Redis pages"): 7,
    ("append in batches", "never", "NATS JetStream"): 20,
    ("append in batches", "never", "Kafka's log engine"): 1,
    ("append in batches", "never", "Kafka"): 3,
    ("scan values", "never", "LMDB"): 1.5,
    ("scan values", "never", "SQLite"): 4,
    ("scan values", "never", "Redis pages"): 4,
    ("scan values", "never", "Kafka"): 8,
    ("disk for the same records", "never", "LMDB"): 1 / 0.6,
    ("disk for the same records", "never", "Kafka"): 1 / 1.05,
}


def _target(workload: str, sync: str, system: str, against: str, compresses: bool) -> float | None:
    if against == OURS_KAFKA:
        return 1.0 if workload.startswith("scan") else None
    if workload == "open after kill -9" and against == OURS:
        return 1.0
    if workload == "16 threads" and sync == "batch" and against == OURS:
        return 1.0
    promised = _PROMISED.get((workload, sync, system))
    if promised is None or against == OURS:
        return promised
    return promised * 2 if workload == "append in batches" and not compresses else None


def rows_of(
    workload: str,
    sync: Sync,
    unit: str,
    better: Literal["more", "less"],
    rounds: dict[str, list[float]],
    compresses: dict[str, bool],
) -> list[PeerRow]:
    """Return the rows of one piece of work: ``rounds`` holds each system's figures, one a round, in the same order."""
    rows = []
    for system, figures in rounds.items():
        if not figures:
            continue
        if system in OURS_ALL:
            ours = [system]
        else:
            # Batches in Kafka's format are compared with Kafka alone.
            compared = OURS_ALL if system.startswith("Kafka") else (OURS, OURS_UNCOMPRESSED)
            ours = [against for against in compared if rounds.get(against)]
        for against in ours:
            pairs = zip(rounds[against], figures, strict=False)
            ratios = [mine / theirs if better == "more" else theirs / mine for mine, theirs in pairs if mine and theirs]
            compare = bool(ratios) and system != against
            rows.append(
                PeerRow(
                    workload=workload,
                    sync=sync,
                    system=system,
                    against=against,
                    unit=unit,
                    figure=statistics.median(figures),
                    low=min(figures),
                    high=max(figures),
                    ratio=statistics.median(ratios) if compare else None,
                    ratio_low=min(ratios) if compare else None,
                    ratio_high=max(ratios) if compare else None,
                    target=_target(workload, sync, system, against, compresses[system]) if compare else None,
                    rounds=len(figures),
                )
            )
    return rows


class Bench:
    """Runs the workloads over the systems that are there."""

    def __init__(self, folder: Path, systems: Sequence[str], rounds: int, seconds: float, records: int) -> None:
        self.folder = folder
        self.rounds = rounds
        self.seconds = seconds
        self.records = records
        self.rows: list[PeerRow] = []
        self.absent: list[Absent] = []
        self.classes: dict[str, type[System]] = {}
        self.versions: dict[str, str] = {}
        for name in systems:
            try:
                found = system_class(name)
                self.versions[name] = found.version()
                self.classes[name] = found
            except (Unavailable, ImportError) as error:
                self.absent.append(Absent(name, "all", str(error)))
        self.compresses = {name: found.compresses for name, found in self.classes.items()}

    def run(self, workloads: Sequence[str], syncs: Sequence[Sync], say: Callable[[str], None]) -> None:
        """Everything asked for; each system that fails in the middle is told of and left out from there on."""
        for sync in syncs:
            if "append" in workloads:
                say(f"appending in batches, {_SYNC_TEXT[sync]}")
                self._append(sync, singly=False)
            if "singly" in workloads:
                say(f"appending singly, {_SYNC_TEXT[sync]}")
                self._append(sync, singly=True)
        if "threads" in workloads:
            say("appending from 16 threads, each record synced")
            self._append_from_threads()
        if {"scan", "point reads", "disk", "memory", "open"} & set(workloads):
            say("filling logs of values")
            self._filled(workloads, say)
        if {"records", "compaction"} & set(workloads):
            say("filling logs of full records")
            self._full_records(workloads, say)

    # ------------------------------------------------------------ the workloads

    def _append(self, sync: Sync, *, singly: bool) -> None:
        rates: dict[str, list[float]] = {}
        slow: dict[str, list[float]] = {}
        work = "append singly" if singly else "append in batches"

        def step(name: str, log: Hosted) -> None:
            done = log.append_singly(self.seconds) if singly else log.append(self.seconds)
            rates.setdefault(name, []).append(done.rate)
            found = machine.latency(done.times_us)
            slow.setdefault(name, []).append(found.p99 if singly else found.p999 / 1e3)

        with self._open(sync, keyed=False) as logs:
            self._rounds(logs, step, f"{work}, {sync}")
        self._add(work, sync, "records/s", "more", rates)
        # Clients that send in the background return before anything is done: their calls have no latency to compare.
        waiting = {
            name: times for name, times in slow.items() if sync == "batch" or not self.classes[name].asynchronous
        }
        self._add(f"{work}, {'p99' if singly else 'p99.9'}", sync, "us" if singly else "ms", "less", waiting)

    def _append_from_threads(self) -> None:
        rates: dict[str, list[float]] = {}

        def step(name: str, log: Hosted) -> None:
            rates.setdefault(name, []).append(log.append_from_threads(_THREADS, self.seconds).rate)

        with self._open("batch", keyed=False) as logs:
            self._rounds(logs, step, "16 threads")
        self._add("16 threads", "batch", "records/s", "more", rates)

    def _filled(self, workloads: Sequence[str], say: Callable[[str], None]) -> None:
        rates: dict[str, list[float]] = {}
        reads: dict[str, list[float]] = {}
        disk: dict[str, list[float]] = {}
        memory: dict[str, list[float]] = {}

        def fill(name: str, log: Hosted) -> None:
            log.fill(self.records)

        def scan(name: str, log: Hosted) -> None:
            rates.setdefault(name, []).append(log.scan(full=False).rate)

        def read(name: str, log: Hosted) -> None:
            times = log.read_randomly(_POINT_READS, len(reads.get(name, ()))).times_us
            reads.setdefault(name, []).append(statistics.median(times))

        def look(name: str, log: Hosted) -> None:
            memory[name] = [max(log.peak_bytes() / 1e6, 0.1)]

        with self._open("never", keyed=False) as logs:
            self._once(logs, fill, "filling")
            if "scan" in workloads:
                say("scanning values")
                self._rounds(logs, scan, "scan values")
            if "point reads" in workloads:
                say("reading at random offsets")
                self._rounds(logs, read, "point reads")
            self._once(logs, look, "memory")
            names, opened = list(logs), {}
            if "open" in workloads:
                self._once(logs, lambda name, log: log.kill(), "kill")
                opened = self._open_killed(names, say)
            if "disk" in workloads:
                say("measuring what they take on disk")
                self._once(logs, lambda name, log: log.close(), "close")
                disk = self._sizes(names)
        self._add("scan values", "never", "records/s", "more", rates)
        self._add("read at a random offset", "never", "us", "less", reads)
        if "disk" in workloads:
            self._add("disk for the same records", "never", "bytes a record", "less", disk)
        if "memory" in workloads:
            self._add("memory", "never", "MB", "less", memory)
        self._add("open after kill -9", "never", "ms", "less", opened)

    def _open_killed(self, names: list[str], say: Callable[[str], None]) -> dict[str, list[float]]:
        """Open what a killed process left, append a little, and kill it again."""
        say("opening after kill -9")
        times: dict[str, list[float]] = {}
        for number in range(self.rounds):
            for name in _turned(names, number):
                if not self.classes[name].reopens:
                    continue
                place = self._place(name, "never", keyed=False)
                with (
                    self._guarded(name, "open after kill -9", names),
                    Hosted(name, place, "never", keyed=False) as log,
                ):
                    seconds = log.open()
                    if (end := log.end()) < self.records:
                        raise RuntimeError(f"only {end:,} of {self.records:,} records are there after kill -9")
                    times.setdefault(name, []).append(seconds * 1e3)
                    log.append(0.0)
                    log.kill()
        return times

    def _sizes(self, names: list[str]) -> dict[str, list[float]]:
        """Bytes a record, once it was closed cleanly: some preallocate, or keep a journal, while they are open."""
        sizes = {}
        for name in list(names):
            place = self._place(name, "never", keyed=False)
            with self._guarded(name, "disk", names):
                with Hosted(name, place, "never", keyed=False) as log:
                    log.open()
                    log.append(0.0)  # ours gives back what it has preallocated when one that appends closes it
                    end = log.end()
                sizes[name] = [disk_bytes(place) / end]
        return sizes

    def _full_records(self, workloads: Sequence[str], say: Callable[[str], None]) -> None:
        rates: dict[str, list[float]] = {}
        compacted: dict[str, list[float]] = {}

        def scan(name: str, log: Hosted) -> None:
            rates.setdefault(name, []).append(log.scan(full=True).rate)

        def compact(name: str, log: Hosted) -> None:
            compacted[name] = [self.records / log.compact()]

        with self._open("never", keyed=True) as logs:
            self._once(logs, lambda name, log: log.fill(self.records), "filling")
            if "records" in workloads:
                say("scanning records")
                self._rounds(logs, scan, "scan records")
            if "compaction" in workloads:
                say("compacting")
                self._once(logs, compact, "compaction")
        self._add("scan records", "never", "records/s", "more", rates)
        self._add("compaction", "never", "records/s", "more", compacted)

    # ------------------------------------------------------------ what they share

    def _add(
        self, workload: str, sync: Sync, unit: str, better: Literal["more", "less"], rounds: dict[str, list[float]]
    ) -> None:
        self.rows += rows_of(workload, sync, unit, better, rounds, self.compresses)

    def _place(self, name: str, sync: Sync, *, keyed: bool) -> Path:
        plain = "".join(c if c.isalnum() else "-" for c in name.lower())
        return self.folder / f"{plain}-{sync}-{'records' if keyed else 'values'}"

    @contextlib.contextmanager
    def _open(self, sync: Sync, *, keyed: bool) -> Iterator[dict[str, Hosted]]:
        """All systems with that policy, open and empty; closed and deleted at the end."""
        logs: dict[str, Hosted] = {}
        with contextlib.ExitStack() as stack:
            stack.callback(self._clear)
            for name, found in self.classes.items():
                if sync not in found.syncs:
                    self.absent.append(Absent(name, f"sync {sync}", "it has no such policy"))
                    continue
                with self._guarded(name, "open", logs):
                    log = stack.enter_context(Hosted(name, self._place(name, sync, keyed=keyed), sync, keyed=keyed))
                    log.open()
                    logs[name] = log
            yield logs

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        os.sync()  # else deleted data would be written during the next workload

    def _rounds(self, logs: dict[str, Hosted], step: Callable[[str, Hosted], None], workload: str) -> None:
        for number in range(self.rounds):
            self._once(logs, step, workload, number)

    def _once(
        self, logs: dict[str, Hosted], step: Callable[[str, Hosted], object], workload: str, number: int = 0
    ) -> None:
        for name in _turned(list(logs), number):
            with self._guarded(name, workload, logs):
                step(name, logs[name])

    @contextlib.contextmanager
    def _guarded(self, name: str, workload: str, among: dict[str, Hosted] | list[str]) -> Iterator[None]:
        """Note a system that cannot do this, and remove one that failed from ``among``."""
        try:
            yield
        except NotImplementedError as error:
            note = Absent(name, workload, str(error))
            if note not in self.absent:
                self.absent.append(note)
        except (HostDied, RuntimeError, OSError) as error:
            self.absent.append(Absent(name, workload, f"failed: {error}"))
            print(f"{name}: {workload} failed: {error}", file=sys.stderr)
            if isinstance(among, dict):
                among.pop(name, None)
            elif name in among:
                among.remove(name)


_SYNC_TEXT = {"never": "nothing synced", "second": "synced once a second", "batch": "each call synced"}


def _turned(names: list[str], number: int) -> list[str]:
    """Another system begins each round, because the first one has the disk's cache for itself."""
    at = number % len(names) if names else 0
    return [*names[at:], *names[:at]]


# ---------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=one_or_more, default=5, help="rounds of alternation (default 5)")
    parser.add_argument("--seconds", type=float, default=0.7, help="appending a round and system (default 0.7)")
    parser.add_argument(
        "--records", type=one_or_more, default=400 * BATCH_RECORDS, help="of a log that is read (default 409,600)"
    )
    parser.add_argument("--systems", default="", help="some of them, with commas between: " + ", ".join(NAMES[2:]))
    parser.add_argument("--syncs", default="", help="of the work that appends, some of: " + ", ".join(SYNCS))
    parser.add_argument("--workloads", default="", help="some of: " + ", ".join(WORKLOADS))
    parser.add_argument("--out", type=Path, help="folder for the results (default: today's below bench/results)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    systems = _chosen(parser, options.systems, NAMES, always=(OURS, OURS_UNCOMPRESSED))
    workloads = _chosen(parser, options.workloads, WORKLOADS)
    syncs = [sync for sync in SYNCS if sync in _chosen(parser, options.syncs, SYNCS)]
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-peers-", dir=options.dir))
    try:
        about = machine.describe(folder, PACKAGES)
        bench = Bench(folder, systems, options.rounds, options.seconds, options.records)
        for absent in bench.absent:
            print(f"missing: {absent.system}: {absent.reason}", file=sys.stderr)
        bench.run(workloads, syncs, lambda text: print(f"{time.monotonic() - started:6.0f} s  {text}", file=sys.stderr))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {"rounds": options.rounds, "seconds": options.seconds, "records": options.records}
    settings |= msgspec.to_builtins(
        Peers(
            versions=bench.versions,
            about={name: found.about for name, found in bench.classes.items()},
            compresses=bench.compresses,
            absent=bench.absent,
        )
    )
    out = options.out or results.default_folder()
    path = results.save(out, "peers", about, time.monotonic() - started, settings, bench.rows)
    print_table(bench.rows)
    print(f"written: {path}", file=sys.stderr)
    return 0


def _chosen(parser: argparse.ArgumentParser, given: str, known: Sequence[str], always: Sequence[str] = ()) -> list[str]:
    wanted = [name.strip() for name in given.split(",") if name.strip()] or list(known)
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"there is no {unknown[0]!r}; there are: {', '.join(known)}")
    return [name for name in known if name in wanted or name in always]


def print_table(rows: Sequence[PeerRow]) -> None:
    """Print the rows against our log with LZ4, for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="segmentlog against its peers; more than 1 is better for segmentlog")
    for column in ("work", "synced", "system", "figure", "ours / theirs", "range", "wanted"):
        table.add_column(column, justify="left" if column in ("work", "synced", "system") else "right")
    for row in rows:
        if row.against != OURS and row.system not in OURS_ALL and row.target is None:
            continue
        suffixes = {OURS_UNCOMPRESSED: " (uncompressed)", OURS_KAFKA: " (Kafka's batches)"}
        suffix = suffixes.get(row.against, "")
        table.add_row(
            row.workload,
            row.sync,
            row.system,
            quantity(row.figure, row.unit),
            "" if row.ratio is None else f"{row.ratio:.2f}{suffix}",
            "" if row.ratio_low is None else f"{row.ratio_low:.2f}-{row.ratio_high:.2f}",
            "" if row.target is None else f"{row.target:.3g}{'' if row.reached else ' MISSED'}",
        )
    Console(width=150 if not sys.stdout.isatty() else None).print(table)


if __name__ == "__main__":
    sys.exit(main())
