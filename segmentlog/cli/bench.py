"""``segmentlog bench``: what each fsync policy gives on this disk, and what it puts at risk."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from segmentlog.cli.common import say, store_folder
from segmentlog.cli.options import FiniteRange, json_option
from segmentlog.cli.tables import show_json, show_table

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

POLICIES = ("always", "10ms", "1000ms", "1000records", "1MiB", "never")
_DISTINCT_BYTES = 256 << 10
"""So much differs before values repeat: four times as far back as LZ4 looks."""
IMPLAUSIBLE_FSYNC_US = 20.0
"""No disk is that fast: flash takes about as long to program one page."""


@click.command()
@click.option("--seconds", type=FiniteRange(0.05), default=1.0, show_default=True, help="Time for each policy.")
@click.option("--batch-size", type=click.IntRange(1), default=100, show_default=True, metavar="RECORDS",
              help="Records an append.")  # fmt: skip
@click.option("--record-size", type=click.IntRange(1), default=100, show_default=True, metavar="BYTES",
              help="Bytes a record.")  # fmt: skip
@json_option
@click.pass_context
def bench(ctx: click.Context, seconds: float, batch_size: int, record_size: int, as_json: bool) -> None:
    """Measure the disk that --dir lies on under each fsync policy, in a store of its own that is deleted after.

    At risk is what a power cut at that moment would have taken: the most, and the median, of
    the records that were acknowledged and not yet fsynced.
    """
    import segmentlog

    parent = Path(store_folder(ctx)).absolute().parent
    folder = Path(tempfile.mkdtemp(prefix=".segmentlog-bench-", dir=parent))
    try:
        disk = _raw_disk(folder / "raw")
        rows = []
        with segmentlog.open(folder / "store") as store:
            for policy in POLICIES:
                partition = store.create_topic(policy, fsync=policy).partition(0)
                rows.append(_measure(partition, policy, seconds, batch_size, record_size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        show_json({"disk": disk, "batch_size": batch_size, "record_size": record_size})
        for row in rows:
            show_json(row)
    else:
        click.echo(
            f"one write and fdatasync: median {disk['fdatasync_us_p50']:.0f} us,"
            f" 99 % within {disk['fdatasync_us_p99']:.0f} us; appends of {batch_size} records of {record_size} bytes"
        )
        columns = ("fsync", "records/s", "MB/s", "append p50 us", "append p99 us", "fsyncs", "at risk", "at most")
        show_table(columns, [tuple(_shown(value) for value in row.values()) for row in rows])
    if disk["fdatasync_us_p50"] < IMPLAUSIBLE_FSYNC_US:
        say(
            f"warning: a median of {disk['fdatasync_us_p50']:.0f} us is implausibly fast for an fsync: the disk, or the"
            " machine that pretends to be one, probably answers from a cache that a power cut empties"
        )


def _shown(value: Any) -> Any:
    return round(value) if isinstance(value, float) else value


def time_fdatasync(path: Path, count: int = 200, size: int = 512) -> list[float]:
    """Microseconds of each of ``count`` times one small write and `fdatasync`, on a preallocated file that is deleted.

    Without segmentlog: the floor of a durable append.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, count * size)
        os.fsync(fd)
        times = []
        for number in range(count):
            started = time.perf_counter()
            os.pwrite(fd, b"x" * size, number * size)
            os.fdatasync(fd)
            times.append((time.perf_counter() - started) * 1e6)
        return times
    finally:
        os.close(fd)
        path.unlink()


def _raw_disk(path: Path) -> dict[str, float]:
    times = sorted(time_fdatasync(path))
    return {"fdatasync_us_p50": times[len(times) // 2], "fdatasync_us_p99": times[len(times) * 99 // 100]}


def make_values(record_bytes: int) -> list[bytes]:
    """Distinct values, 256 KiB or 16 of them, that compress about two to one as text does: half noise, half dots."""
    noise = random.Random(record_bytes)
    half = record_bytes // 2
    count = max(_DISTINCT_BYTES // record_bytes, 16)
    return [noise.randbytes(record_bytes - half) + b"." * half for _ in range(count)]


def _measure(
    partition: Partition, policy: str, seconds: float, batch_size: int, record_size: int
) -> dict[str, str | float]:
    pool = make_values(record_size)
    pool *= -(-2 * batch_size // len(pool))
    batches = [pool[at : at + batch_size] for at in range(0, len(pool) - batch_size, batch_size)]
    times: list[float] = []
    risk: list[int] = []
    syncs = partition.sync_count
    started = time.perf_counter()
    while (now := time.perf_counter()) - started < seconds:
        partition.append(batches[len(times) % len(batches)])
        times.append((time.perf_counter() - now) * 1e6)
        risk.append(partition.log_end_offset - partition.durable_offset)
    elapsed = time.perf_counter() - started
    times.sort()
    records = len(times) * batch_size
    return {
        "fsync": policy,
        "records_per_s": records / elapsed,
        "mb_per_s": records * record_size / elapsed / 1e6,
        "append_us_p50": times[len(times) // 2],
        "append_us_p99": times[len(times) * 99 // 100],
        "fsyncs": partition.sync_count - syncs,
        "records_at_risk_p50": int(statistics.median(risk)),
        "records_at_risk_max": max(risk),
    }
