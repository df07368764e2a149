"""What the fsync bench measures: its cells, the row that each of them gives, and the values that are written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import cramjam
import msgspec

from bench.machine import Latency
from segmentlog.cli.bench_command import make_values
from segmentlog.config import FsyncPolicy

POLICIES = ("always", "10ms", "1000ms", "1000records", "1MiB", "never")
BATCHES = (1, 100, 1_000, 10_000)
RECORD_SIZES = (100, 1 << 10, 10 << 10)

WriterKind = Literal["threads", "processes"]
WRITERS: tuple[tuple[int, WriterKind], ...] = ((1, "threads"), (4, "threads"), (16, "threads"), (4, "processes"))
"""One process is the same as one thread."""

ORDER_SEED = 20
BATCH_LISTS = 16


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
        return self.seconds * 1000 >= interval_ms(self.policy)


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


def interval_ms(policy: str) -> int:
    """Of a policy that syncs by time; 0 for others."""
    parsed = FsyncPolicy.parse(policy)
    return parsed.amount if parsed.kind == "ms" else 0


def compression_ratio(record_bytes: int, batch_records: int) -> float:
    """Bytes before LZ4 over bytes after it, for one batch."""
    pool = make_values(record_bytes)
    raw = b"".join((pool * -(-batch_records // len(pool)))[:batch_records])
    return len(raw) / len(cramjam.lz4.compress_block(raw, store_size=False))


# ---------------------------------------------------------------- which cells


def all_cells() -> list[Cell]:
    """Return the whole grid, in its order."""
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
    random.Random(ORDER_SEED).shuffle(fit)
    return fit, left_out
