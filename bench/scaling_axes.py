"""What is measured along each axis: the log's size, partitions, the record's size, processes.

Rounds follow one that warms up and is not counted. Everything is written with ``fsync=never``, LZ4 and batches of
1,024 JSON records of about 100 bytes, where nothing else is said.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from bench.scaling_curves import LOG_SIZE, ONE_A_CALL, PARTITIONS, PROCESSES, RECORD_SIZE, ScalingRow
from bench.scaling_worker import Call, Crew, Work

_T = TypeVar("_T")

LISTS: Final = Work(batch_records=1024)
SHORT_LISTS: Final = Work(batch_records=100)
"""For many partitions: so that each can have its turn several times a round."""

_BATCH_BYTES: Final = 128 << 10
"""A batch on the axis of the record's size, so that what a batch costs is the same for all but the largest."""
_LARGEST_BATCH: Final = {"max_message_bytes": 4 << 20}

_FASTEST_BYTES_PER_S: Final = 2e9
"""No disk that this was run on takes more: what to reckon with where time is given and not an amount."""
_RESERVE_BYTES: Final = 2e9


class Plan(msgspec.Struct, frozen=True):
    """How far along each axis, and how long at each point. ``seconds``: of one rate in one round."""

    log_bytes: tuple[float, ...]
    partitions: tuple[int, ...]
    record_bytes: tuple[int, ...]
    processes: tuple[int, ...]
    rounds: int
    seconds: float
    scan_records: int
    reads: int
    filled_bytes: float


QUICK = Plan((1e6, 2e6), (1, 4), (100, 10_000), (1, 2), 2, 0.01, 5_000, 50, 1e6)
DEFAULT = Plan(
    log_bytes=(0.5e9, 1e9, 2e9),
    partitions=(1, 10, 100, 1_000),
    record_bytes=(10, 100, 1_000, 10_000, 100_000, 1 << 20),
    processes=(1, 2, 4, 8),
    rounds=3,
    seconds=0.3,
    scan_records=200_000,
    reads=1_000,
    filled_bytes=50e6,
)
FULL = msgspec.structs.replace(
    DEFAULT,
    log_bytes=(1e9, 10e9, 50e9),
    partitions=(*DEFAULT.partitions, 10_000),
    rounds=5,
    seconds=1.0,
    scan_records=500_000,
    reads=3_000,
    filled_bytes=200e6,
)


class NoRoom(RuntimeError):
    """The disk has too little free space for what is to be written."""


def check_room(folder: Path, size_bytes: float) -> None:
    """Raise `NoRoom` unless ``size_bytes`` fit, with a reserve."""
    free, needed = shutil.disk_usage(folder).free, size_bytes + _RESERVE_BYTES
    if free < needed:
        raise NoRoom(
            f"{folder} has {free / 1e9:.1f} GB free, and this needs {needed / 1e9:.1f} GB, 2 GB of them to spare;"
            " choose another disk with --dir, or some axes with --only"
        )


def log_size(folder: Path, plan: Plan) -> Iterator[ScalingRow]:
    """One log that grows. Reads near its start, middle and end are of records that were read once before."""
    check_room(folder, max(plan.log_bytes) * 1.05 + len(plan.log_bytes) * (plan.rounds + 2) * plan.seconds * 0.5e9)
    path = str(folder / "log")
    with Crew(1) as crew:
        crew.call("create", path, 1, {})
    for size in plan.log_bytes:

        def row(figure: str, unit: str, rounds: Iterable[float], at: float = size) -> ScalingRow:
            return ScalingRow.of(LOG_SIZE, at, figure, unit, list(rounds))

        with Crew(1) as crew:
            crew.call("open", path)
            crew.call("grow", LISTS, size)
            appended = _rounds(plan, partial(crew.run, [_write(plan)], watch=True))
            crew.call("close")
        yield row("append rate", "records/s", (answer.value for (answer,) in appended))
        yield row("peak memory while appending", "MB", (answer.peak_bytes / 1e6 for (answer,) in appended))
        yield from _reading(path, plan, row)
        opened, memory = _open_after_kill(path, folder, plan)
        yield row("open after kill -9", "ms", opened)
        yield row("memory after open", "MB", memory)


def _reading(path: str, plan: Plan, row: Callable[[str, str, Iterable[float]], ScalingRow]) -> Iterator[ScalingRow]:
    rng = random.Random(7)
    with Crew(1) as crew:
        yield row("open after close", "ms", _milliseconds(_rounds(plan, partial(crew.call, "open", path))))
        end = crew.call("end")
        records = min(plan.scan_records, end)
        peaks: list[list[int]] = []
        for place, offset in (("start", 0), ("middle", (end - records) // 2), ("end", end - records)):
            call = ("scan_from", offset, records)
            answers = _rounds(plan, partial(crew.run, [call], watch=True))
            yield row(f"scan rate near the {place}", "records/s", (answer.value for (answer,) in answers))
            peaks.append([answer.peak_bytes for (answer,) in answers])
        yield row("peak memory while scanning", "MB", (max(each) / 1e6 for each in zip(*peaks, strict=True)))
        reads = _rounds(plan, lambda: crew.call("read_points", [rng.randrange(end) for _ in range(plan.reads)]))
        yield row("read at a random offset, p50", "us", (p50 for p50, _ in reads))
        yield row("read at a random offset, p99", "us", (p99 for _, p99 in reads))


def _open_after_kill(path: str, folder: Path, plan: Plan) -> tuple[list[float], list[float]]:
    """Milliseconds, and the memory of the process afterwards in MB, each round."""
    opened, memory = [], []
    for number in range(plan.rounds):
        with Crew(1) as victim:
            victim.call("open", path)
            victim.call("append", LISTS, 0, min(plan.seconds, 0.1))
            victim.kill()
        with Crew(1) as crew:
            crew.call("create", str(folder / f"other{number}"), 1, {})  # so that importing is not part of the time
            opened.append(crew.call("open", path) * 1e3)
            memory.append(crew.call("memory") / 1e6)
        shutil.rmtree(folder / f"other{number}")
    return opened, memory


def partitions(folder: Path, plan: Plan) -> Iterator[ScalingRow]:
    """One topic with more and more partitions; short lists to each in turn, and keyed records through a `Producer`."""
    for count in plan.partitions:
        check_room(folder, count * 1e6 + plan.seconds * (plan.rounds + 1) * 0.5e9)

        def row(figure: str, unit: str, rounds: Iterable[float], at: int = count) -> ScalingRow:
            return ScalingRow.of(PARTITIONS, at, figure, unit, list(rounds))

        path = str(folder / f"partitions{count}")
        with Crew(1) as crew:
            yield row("create, for each partition", "ms", [crew.call("create", path, count, {}) * 1e3 / count])
            in_turn = partial(crew.call, "append", SHORT_LISTS, None, plan.seconds)
            yield row("append rate, each in turn", "records/s", _rounds(plan, in_turn))
            sending = partial(crew.call, "produce", LISTS, plan.seconds)
            yield row("producer.send with keys", "records/s", _rounds(plan, sending))
            crew.call("close")
        with Crew(1) as crew:
            before = crew.call("descriptors")
            yield row("open", "ms", _milliseconds(_rounds(plan, partial(crew.call, "open", path))))
            yield row("memory after open", "MB", [crew.call("memory") / 1e6])
            yield row("file descriptors after open", "files", [crew.call("descriptors") - before])
        shutil.rmtree(path)


def record_size(folder: Path, plan: Plan) -> Iterator[ScalingRow]:
    """Measure records of the same text from ten bytes on, in batches of 128 KiB, or of one larger record."""
    check_room(folder, plan.seconds * (plan.rounds + 1) * _FASTEST_BYTES_PER_S)
    with Crew(1) as crew:
        for size in plan.record_bytes:
            batches = Work(max(1, _BATCH_BYTES // size), size)
            for compression, name in (("lz4", "LZ4"), ("none", "uncompressed")):
                path = folder / f"{compression}{size}"
                crew.call("create", str(path), 1, {"compression_type": compression, **_LARGEST_BATCH})
                calls: list[tuple[str, Call]] = [
                    (f"append, {name}", ("append", batches, 0, plan.seconds)),
                    (f"scan, {name}", ("scan", 0, plan.seconds)),
                ]
                if compression == "lz4":
                    calls.append((ONE_A_CALL, ("append", Work(1, size), 0, plan.seconds)))
                for what, call in calls:
                    rates = _rounds(plan, partial(crew.call, *call))
                    yield ScalingRow.of(RECORD_SIZE, size, what, "records/s", rates)
                    speeds = [rate * size / 1e6 for rate in rates]
                    yield ScalingRow.of(RECORD_SIZE, size, what, "MB/s", speeds)
                crew.call("close")
                shutil.rmtree(path)


def processes(folder: Path, plan: Plan) -> Iterator[ScalingRow]:
    """Writers and readers, each a process: rates of all of them together, or of the one beside the others."""
    most = max(plan.processes)
    check_room(folder, plan.filled_bytes + 5 * (plan.rounds + 1) * plan.seconds * 0.5e9)
    write: Call = _write(plan)
    read: Call = ("scan", 0, plan.seconds)
    with Crew(most + 1) as crew:
        for count in plan.processes:
            each: list[Call] = [("append", LISTS, number, plan.seconds) for number in range(count)]
            for figure, calls, counted in (
                ("writers, one partition", [write] * count, count),
                ("writers, a partition each", each, count),
                ("readers, one partition", [read] * count, count),
                ("a reader beside so many writers", [read] + [write] * count, 1),
                ("a writer beside so many readers", [write] + [read] * count, 1),
            ):
                path = folder / "processes"
                crew.call("create", str(path), count, {})
                crew.call("grow", LISTS, plan.filled_bytes)
                crew.run([("open", str(path))] * (most + 1))

                rounds = [
                    float(sum(answer.value for answer in answers[:counted]))
                    for answers in _rounds(plan, partial(crew.run, calls))
                ]
                yield ScalingRow.of(PROCESSES, count, figure, "records/s", rounds)
                crew.run([("close",)] * (most + 1))
                shutil.rmtree(path)


def _write(plan: Plan) -> Call:
    return ("append", LISTS, 0, plan.seconds)


def _milliseconds(seconds: Iterable[float]) -> list[float]:
    return [each * 1e3 for each in seconds]


def _rounds(plan: Plan, measure: Callable[[], _T]) -> list[_T]:
    measure()
    return [measure() for _ in range(plan.rounds)]


MEASURE: dict[str, Callable[[Path, Plan], Iterator[ScalingRow]]] = {
    LOG_SIZE: log_size,
    PARTITIONS: partitions,
    RECORD_SIZE: record_size,
    PROCESSES: processes,
}
