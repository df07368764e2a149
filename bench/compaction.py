"""Compaction and retention, measured: ``python -m bench.compaction``.

pass       a compaction of a log of 100-byte records with 10-byte keys, 10 % and 90 % of them
           superseded, against the limit in the same run: LZ4 decompressing every batch of the
           log, compressing every batch that is left, writing that and an fsync a file
memory     what the process grew by in a pass whose offset map is full, against the buffer
appends    latency of another thread's appends while a pass runs, and while none does
retention  a tick over a partition of 10,000 segments in which nothing expires
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cramjam

import segmentlog
from bench.arguments import existing_folder
from segmentlog.format.batch import decompress
from segmentlog.log.partition import Partition

_BATCH = 2048
_TOPIC = "t"


def fill(folder: Path, records: int, duplicates: float, *, varied: bool = False, **config: object) -> int:
    """Return a store with one topic of so many records, that part of them superseded by a later one of their key.

    Values are JSON, of 100 bytes each, or with ``varied`` of 92 to 103. Returns the bytes of keys and values.
    """
    rng = random.Random(records)
    keys = max(round(records * (1 - duplicates)), 1)
    order = [*range(keys), *(rng.randrange(keys) for _ in range(records - keys))]
    rng.shuffle(order)
    raw_bytes = 0
    with segmentlog.open(folder, background=False) as store:
        topic = store.create_topic(_TOPIC, config={"cleanup.policy": "compact", "fsync": "never", **config})
        partition = topic.partition(0)
        for start in range(0, records, _BATCH):
            count = min(_BATCH, records - start)
            numbers = order[start : start + count]
            values = [
                b'{"id":%d,"name":"user-%d","amount":%d.%02d,"city":"berlin","state":"active","paid":true,"note":"%06x"}'
                % (number, number % 999_983, rng.randrange(10**6), rng.randrange(100), rng.randrange(1 << 24))
                for number in numbers
            ]
            if not varied:
                values = [value[:100].ljust(100) for value in values]
            raw_bytes += sum(map(len, values)) + 10 * count
            partition.append(values, keys=[b"k%09d" % number for number in numbers])
        partition.roll()
    return raw_bytes


def payloads(partition: Partition) -> list[tuple[bytes, int]]:
    """Return (stored bytes, decompressed size in bytes) of every compressed batch."""
    found = []
    for batch in partition.read(partition.log_start_offset):
        found.append((bytes(batch._payload), batch.header.raw_size))
    return found


def limit(before: list[tuple[bytes, int]], after: list[bytes], path: Path) -> float:
    """Seconds that LZ4 and the disk take for the same bytes, and nothing else."""
    started = time.perf_counter()
    for stored, raw_size in before:
        cramjam.lz4.decompress_block(stored, output_len=raw_size)
    with path.open("wb") as file:
        for raw in after:
            file.write(cramjam.lz4.compress_block(raw, store_size=False))
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def measure_pass(folder: Path, records: int, duplicates: float, rounds: int, *, varied: bool) -> dict[str, object]:
    """Return the pass and its limit in turn, on copies of one log."""
    raw_bytes = fill(folder / "source", records, duplicates, varied=varied)
    before: list[tuple[bytes, int]] = []
    after: list[bytes] = []
    ours, limits = [], []
    report = None
    for number in range(rounds):
        copy = folder / f"copy{number}"
        shutil.copytree(folder / "source", copy)
        with segmentlog.open(copy, background=False) as store:
            partition = store.topic(_TOPIC).partition(0)
            if not before:
                before = payloads(partition)
            started = time.perf_counter()
            report = partition.compact()
            ours.append(time.perf_counter() - started)
            if not after:
                after = [bytes(decompress(batch.header, batch._payload)) for batch in partition.read(0)]
        shutil.rmtree(copy)
        limits.append(limit(before, after, folder / "plain"))
    shutil.rmtree(folder / "source")
    assert report is not None
    ratios = sorted(b / a for a, b in zip(ours, limits, strict=True))
    seconds = statistics.median(ours)
    return {
        "duplicates": duplicates,
        "records": records,
        "left": report.records_after,
        "passes": report.passes,
        "mb_per_s": raw_bytes / seconds / 1e6,
        "records_per_s": records / seconds,
        "limit_records_per_s": records / statistics.median(limits),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
    }


def measure_memory(folder: Path, records: int, buffer_bytes: int) -> dict[str, object]:
    """In a process of its own: the peak of anonymous memory in a pass over distinct keys, above what it had before."""
    fill(folder / "store", records, 0.0, **{"segment.bytes": "16MiB"})
    done = subprocess.run(
        [sys.executable, "-m", "bench.compaction", "--memory-of", str(folder / "store"), str(buffer_bytes)],
        check=True,
        capture_output=True,
        text=True,
    )
    grown, passes = map(int, done.stdout.split())
    shutil.rmtree(folder / "store")
    return {
        "buffer_mb": buffer_bytes / 1e6,
        "grown_mb": grown / 1e6,
        "passes": passes,
        "over_mb": (grown - buffer_bytes) / 1e6,
    }


def _memory_of(store_path: str, buffer_bytes: int) -> None:
    def anonymous() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    with segmentlog.open(store_path, background=False) as store:
        partition = store.topic(_TOPIC).partition(0)
        for _ in partition.read(0, 1):
            pass
        start = anonymous()
        thread = threading.Thread(target=watch)
        thread.start()
        report = partition.compact(buffer_bytes=buffer_bytes)
        done.set()
        thread.join()
    print(max(peak - start, 0), report.passes)


class _Compacting(threading.Thread):
    """One pass in a thread, which says when it is done."""

    def __init__(self, partition: Partition, done: threading.Event) -> None:
        super().__init__()
        self._partition = partition
        self._is_done = done

    def run(self) -> None:
        self._partition.compact()
        self._is_done.set()


def measure_appends(folder: Path, records: int, seconds: float) -> dict[str, object]:
    """Measure appends of 100 records to another topic, alone and during a pass of the same process."""
    fill(folder / "store", records, 0.5)
    result: dict[str, object] = {}
    values = [b"x" * 100] * 100
    with segmentlog.open(folder / "store", background=False) as store:
        other = store.create_topic("other", fsync="never").partition(0)
        busy = store.topic(_TOPIC).partition(0)

        def latencies(until: threading.Event) -> list[float]:
            found = []
            while not until.is_set():
                started = time.perf_counter()
                other.append(values)
                found.append((time.perf_counter() - started) * 1e6)
                time.sleep(0.0005)
            return found

        for name in ("quiet", "beside a pass"):
            until = threading.Event()
            worker = threading.Timer(seconds, until.set) if name == "quiet" else _Compacting(busy, until)
            worker.start()
            found = sorted(latencies(until))
            worker.join()
            result[f"{name}_p50_us"] = found[len(found) // 2]
            result[f"{name}_p99_us"] = found[len(found) * 99 // 100]
    shutil.rmtree(folder / "store")
    return result


def measure_retention(folder: Path, segments: int) -> dict[str, object]:
    """Return a tick over one partition of so many segments."""
    with segmentlog.open(folder / "store", background=False) as store:
        topic = store.create_topic(
            "many", fsync="never", segment_records=1, retention_bytes="1TiB", retention_segments=10**6
        )
        partition = topic.partition(0)
        for _ in range(segments + 1):
            partition.append([b"x"])
        now_ms = time.time_ns() // 1_000_000
        times = []
        for number in range(21):
            started = time.perf_counter()
            store.retention_tick(now_ms + 60_000 * number)
            times.append((time.perf_counter() - started) * 1e3)
        assert len(partition.segments()) > segments
    shutil.rmtree(folder / "store")
    return {
        "segments": segments,
        "first_tick_ms": times[0],
        "tick_ms": statistics.median(times[1:]),
        "worst_ms": max(times[1:]),
    }


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--segments", type=int, default=10_000)
    parser.add_argument("--only", default="", help="pass, memory, appends or retention")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        _memory_of(options.memory_of[0], int(options.memory_of[1]))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-compaction-", dir=options.dir))

    def wanted(name: str) -> bool:
        return options.only in ("", name)

    try:
        for varied, duplicates in ((False, 0.1), (False, 0.9), (True, 0.1), (True, 0.9)) if wanted("pass") else ():
            row = measure_pass(folder, options.records, duplicates, options.rounds, varied=varied)
            sizes = "92 to 103" if varied else "100"
            print(
                f"pass, {sizes} bytes, {duplicates:.0%} duplicates: {row['mb_per_s']:.0f} MB/s of input,"
                f" {row['records_per_s'] / 1e6:.2f} M records/s; limit {row['limit_records_per_s'] / 1e6:.2f} M/s;"
                f" ratio {row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f}), wanted 0.4;"
                f" {row['left']:,} records left",
                flush=True,
            )
        if wanted("memory"):
            row = measure_memory(folder, options.records, 32 << 20)
            print(
                f"memory: {row['grown_mb']:.0f} MB above the process, with a buffer of {row['buffer_mb']:.0f} MB:"
                f" {row['over_mb']:.0f} MB over, wanted at most 64; {row['passes']} maps"
            )
        if wanted("appends"):
            row = measure_appends(folder, options.records, 3.0)
            print(
                f"appends of 100 records: quiet p50 {row['quiet_p50_us']:.0f} us, p99 {row['quiet_p99_us']:.0f} us;"
                f" beside a pass p50 {row['beside a pass_p50_us']:.0f} us, p99 {row['beside a pass_p99_us']:.0f} us"
            )
        if wanted("retention"):
            row = measure_retention(folder, options.segments)
            print(
                f"retention tick, {row['segments']:,} segments: {row['tick_ms']:.2f} ms (worst {row['worst_ms']:.2f},"
                f" the first {row['first_tick_ms']:.1f}), wanted under 5"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
