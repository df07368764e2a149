"""``segmentlog bench``: measure throughput and records at risk of each fsync policy on this disk."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from segmentlog.cli.common import Progress, require_local_folder, say
from segmentlog.cli.option_types import FiniteRange, json_option
from segmentlog.cli.table_output import show_json, show_table

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

POLICIES = ("always", "10ms", "1000ms", "1000records", "1MiB", "never")
_DISTINCT_BYTES = 256 << 10
"""Values repeat after this many bytes: four times the distance over which LZ4 finds repetitions."""
IMPLAUSIBLE_FSYNC_US = 20.0
"""An fsync faster than this is implausible: flash memory takes about as long to program one page."""


RATE_RECORDS_PER_S: Final = 10_000
"""Append rate while records at risk are measured; the same for all policies, unless appends are too large for it."""
_INTERVALS: Final = 3
"""Risk is measured for this many fsync intervals of every policy that has one, the default policy included."""
_INTERVAL_S: Final = 1.0
"""The longest fsync interval of a measured policy: that of the default policy."""
_APPENDS_PER_S: Final = 20
"""Minimum number of appends per second while risk is measured."""
THREADS: Final = 16


@click.command()
@click.option("--seconds", type=FiniteRange(0.05), default=1.0, show_default=True,
              help="Seconds to measure each policy; records at risk are measured for at least 3 seconds.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), default=100, show_default=True, metavar="RECORDS",
              help="Records per append.")  # fmt: skip
@click.option("--record-size", type=click.IntRange(1), default=100, show_default=True, metavar="BYTES",
              help="Bytes per record.")  # fmt: skip
@json_option
@click.pass_context
def bench(ctx: click.Context, seconds: float, batch_size: int, record_size: int, as_json: bool) -> None:
    """Measure the disk that holds --dir with each fsync policy, in a temporary store that is deleted afterwards.

    First, each policy appends as fast as it can. Then all policies append at the same rate for three intervals of the
    default policy. Meanwhile "at risk" counts records that are acknowledged but not yet fsynced: a power cut would lose
    them. The columns show the median and the maximum. The last row imitates a web service: 16 threads each append one
    record and wait until it is on disk.
    """
    import segmentlog

    parent = Path(require_local_folder(ctx)).absolute().parent
    folder = Path(tempfile.mkdtemp(prefix=".segmentlog-bench-", dir=parent))
    risk_seconds = max(seconds, _INTERVALS * _INTERVAL_S)
    total_s = seconds * (len(POLICIES) + 1) + risk_seconds
    try:
        with Progress("seconds", round(total_s)) as progress:
            disk = _measure_disk(folder / "raw")
            rows = []
            with segmentlog.open(folder / "store") as store:
                for policy in POLICIES:
                    partition = store.create_topic(policy, fsync=policy).partition(0)
                    rows.append(_measure(partition, policy, seconds, batch_size, record_size))
                    progress.advance(round(seconds))
                partitions = [store.topic(policy).partition(0) for policy in POLICIES]
                risks = _measure_risks(partitions, risk_seconds, batch_size, record_size)
                for row, risk in zip(rows, risks, strict=True):
                    row.update(risk)
                progress.advance(round(risk_seconds))
                partition = store.create_topic("threads", fsync="always").partition(0)
                rows.append(_measure_threads(partition, seconds, record_size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        show_json({"disk": disk, "batch_size": batch_size, "record_size": record_size})
        for row in rows:
            show_json(row)
    else:
        rate = rows[0]["risk_records_per_s"]
        click.echo(
            f"one write and fdatasync: median {disk['fdatasync_us_p50']:.0f} us,"
            f" 99 % within {disk['fdatasync_us_p99']:.0f} us; records of {record_size} bytes;"
            f" at risk: records, while each policy appends {rate:,.0f} per second for {risk_seconds:g} s"
        )
        show_table(list(_COLUMNS.values()), [tuple(_format_row(name, row) for name in _COLUMNS) for row in rows])
    if disk["fdatasync_us_p50"] < IMPLAUSIBLE_FSYNC_US:
        say(
            f"warning: a median of {disk['fdatasync_us_p50']:.0f} us is implausibly fast for an fsync: the disk or the"
            " virtual machine probably answers from a cache that a power cut empties"
        )


_COLUMNS: Final = {
    "fsync": "fsync",
    "threads": "threads",
    "batch_size": "records per append",
    "records_per_s": "records/s",
    "mb_per_s": "MB/s",
    "append_us_p50": "append p50 us",
    "append_us_p99": "append p99 us",
    "fsyncs_per_s": "fsyncs/s at that rate",
    "records_at_risk_p50": "at risk",
    "records_at_risk_max": "at risk, max",
}


def _format_row(name: str, row: dict[str, Any]) -> Any:
    if row["fsync"] == "never" and name in ("records_at_risk_p50", "records_at_risk_max"):
        # The operating system decides when to write these records, so a figure would only show how long the run took.
        return "all"
    value = row.get(name, "")
    if name == "fsyncs_per_s" and value != "":
        return f"{value:,.1f}"
    return round(value) if isinstance(value, float) else value


def time_fdatasync(path: Path, count: int = 200, size: int = 512) -> list[float]:
    """Time one small write and `fdatasync`, ``count`` times, on a preallocated file; return microseconds for each.

    Does not use segmentlog: this is the lower bound for a durable append. The file is deleted afterwards.
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


def _measure_disk(path: Path) -> dict[str, float]:
    times = sorted(time_fdatasync(path))
    return {"fdatasync_us_p50": times[len(times) // 2], "fdatasync_us_p99": times[len(times) * 99 // 100]}


def make_values(record_bytes: int) -> list[bytes]:
    """Return distinct values of 256 KiB in total, at least 16, that compress about 2:1 as text does: half noise, half
    dots."""
    noise = random.Random(record_bytes)
    half = record_bytes // 2
    count = max(_DISTINCT_BYTES // record_bytes, 16)
    return [noise.randbytes(record_bytes - half) + b"." * half for _ in range(count)]


def _batches(batch_size: int, record_size: int) -> list[list[bytes]]:
    pool = make_values(record_size)
    pool *= -(-2 * batch_size // len(pool))
    return [pool[at : at + batch_size] for at in range(0, len(pool) - batch_size, batch_size)]


def _measure(
    partition: Partition, policy: str, seconds: float, batch_size: int, record_size: int
) -> dict[str, str | float]:
    """Append from one thread as fast as possible; return the row of the table."""
    batches = _batches(batch_size, record_size)
    times: list[float] = []
    syncs = partition.sync_count
    started = time.perf_counter()
    while (now := time.perf_counter()) - started < seconds:
        partition.append(batches[len(times) % len(batches)])
        times.append((time.perf_counter() - now) * 1e6)
    elapsed = time.perf_counter() - started
    return {
        "fsync": policy,
        "threads": 1,
        "batch_size": batch_size,
        **_compute_rates(times, elapsed, batch_size, record_size),
        "fsyncs": partition.sync_count - syncs,
    }


def _compute_rates(times: list[float], elapsed: float, batch_size: int, record_size: int) -> dict[str, float]:
    """Compute rates and percentiles from ``times``, the microseconds of each append."""
    times.sort()
    records = len(times) * batch_size
    return {
        "records_per_s": records / elapsed,
        "mb_per_s": records * record_size / elapsed / 1e6,
        "append_us_p50": times[len(times) // 2],
        "append_us_p99": times[len(times) * 99 // 100],
    }


def _measure_risks(
    partitions: list[Partition], seconds: float, batch_size: int, record_size: int
) -> list[dict[str, str | float]]:
    """Append to all partitions at the same rate, so that their figures are comparable; sample the records at risk."""
    batches = _batches(batch_size, record_size)
    pause_s = batch_size / max(RATE_RECORDS_PER_S, _APPENDS_PER_S * batch_size)
    for partition in partitions:
        partition.flush()  # sync what the first measurement appended
    syncs = [partition.sync_count for partition in partitions]
    risk: list[list[int]] = [[] for _ in partitions]
    rounds = 0
    started = time.perf_counter()
    while (now := time.perf_counter()) - started < seconds or not rounds:
        for partition in partitions:
            partition.append(batches[rounds % len(batches)])
        rounds += 1
        for samples, partition in zip(risk, partitions, strict=True):
            samples.append(partition.log_end_offset - partition.durable_offset)
        time.sleep(max(now + pause_s - time.perf_counter(), 0))
    elapsed = time.perf_counter() - started
    return [
        {
            "records_at_risk_p50": int(statistics.median(samples)),
            "records_at_risk_max": max(samples),
            "risk_records_per_s": rounds * batch_size / elapsed,
            "risk_seconds": elapsed,
            "fsyncs_per_s": (partition.sync_count - before) / elapsed,
        }
        for samples, partition, before in zip(risk, partitions, syncs, strict=True)
    ]


def _measure_threads(partition: Partition, seconds: float, record_size: int) -> dict[str, str | float]:
    """Append single records from several threads that wait for the disk; the threads share fsyncs."""
    values = make_values(record_size)
    times: list[list[float]] = [[] for _ in range(THREADS)]
    failures: list[BaseException] = []
    syncs = partition.sync_count
    started = time.perf_counter()

    def work(number: int) -> None:
        own = times[number]
        try:
            while (now := time.perf_counter()) - started < seconds or not own:
                partition.append([values[len(own) % len(values)]])
                own.append((time.perf_counter() - now) * 1e6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    if failures:
        raise failures[0]
    return {
        "fsync": "always",
        "threads": THREADS,
        "batch_size": 1,
        **_compute_rates([one for own in times for one in own], elapsed, 1, record_size),
        "fsyncs": partition.sync_count - syncs,
        "records_at_risk_p50": 0,  # acknowledged only once they are on disk
        "records_at_risk_max": 0,
    }
