"""What shipping costs, and how fast it is, against the object store itself: ``python -m bench.ship``.

appends        of a store that is shipped meanwhile, against one that is not
cold store     shipped whole, against putting the same bytes with the same client, as many at a time
restore        against getting the same objects with the same client and writing them to files
read there     all records, partition after partition, of a store that is opened by its URL, against getting the same
               objects with the same client, as many at a time
tiered topic   all records of a store whose sealed segments lie there alone (`remote.storage.enable`), against getting
               the same objects with the same client, as many at a time
acknowledged   `append(ack="shipped")`, against a put and a conditional put, one after the other
lag            from an append until its offset is told as shipped, at a steady rate, against the interval and two puts

``--url`` is an empty place in an object store, with its credentials in the environment (docs/replicate.md); without it
a folder on the same disk. All that was put there is deleted at the end. The two sides of a row are alternated; a row
shows medians, the ratio with its range over the rounds, and what it should reach.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import segmentlog
from bench import machine
from bench.arguments import existing_folder, one_or_more
from bench.measure import Row, RowResult, Side, open_store, print_table
from bench.results import save
from bench.workload import json_records
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.upload_pool import PARALLEL
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.restore.restore import PARALLEL as RESTORE_PARALLEL
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.tier.block_cache import PARALLEL as READ_PARALLEL

_BATCH = 1000
_SLICE_S = 2.0
_INTERVAL_MS = 200
_APPENDS_PER_S = 5000
_SEGMENT_BYTES = 64 << 20


class Places:
    """Empty places below one URL, each its own."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._numbers = itertools.count()

    def new(self) -> str:
        """Return the URL of the next one."""
        return f"{self._url}/{next(self._numbers)}"

    def clear(self) -> None:
        """Delete all that lies in any of them."""
        for number in range(next(self._numbers)):
            bucket = open_bucket(f"{self._url}/{number}")
            bucket.delete([one.key for one in bucket.list()])


# ---------------------------------------------------------------- appends


def _appends(places: Places, folder: Path, scale: float) -> tuple[Side, Side]:
    alone = open_store(folder / "alone")
    shipped = open_store(folder / "shipped", ship=places.new())
    batches = json_records(8, _BATCH).values

    def rate(store: segmentlog.LogStore) -> float:
        log = store.topic("t").partition(0) if store.topics() else store.create_topic("t").partition(0)
        started, records = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - started) < _SLICE_S * scale:
            log.append(batches[records // _BATCH % len(batches)])
            records += _BATCH
        return records / elapsed_s

    return partial(rate, shipped), partial(rate, alone)


# ---------------------------------------------------------------- all of a store


def _fill(folder: Path, size_bytes: int) -> None:
    """Create a store of about ``size_bytes`` on disk: values that do not compress, in segments of 64 MiB."""
    rng = random.Random(1)
    with segmentlog.open(folder, background=False) as store:
        logs = store.create_topic("t", 4, segment_bytes=_SEGMENT_BYTES, fsync="never", compression_type="none")
        values = [rng.randbytes(1000) for _ in range(_BATCH)]
        for number in range(max(size_bytes // (1000 * _BATCH), 1)):
            logs.partition(number % 4).append(values)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.log") if path.stat().st_size)


def _cold_store(size_bytes: int, places: Places, folder: Path, scale: float) -> tuple[Side, Side]:
    source = folder / "source"
    _fill(source, int(size_bytes * scale))
    megabytes = sum(path.stat().st_size for path in _files(source)) / 1e6

    def ours() -> float:
        copy = folder / "copy"
        shutil.copytree(source, copy)
        os.sync()  # or what is measured waits for that
        try:
            with segmentlog.open(copy, background=False) as store:
                started = time.perf_counter()
                store.ship(places.new())
                return megabytes / (time.perf_counter() - started)
        finally:
            shutil.rmtree(copy)

    def limit() -> float:
        bucket = open_bucket(places.new())
        os.sync()
        started = time.perf_counter()
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(lambda path: bucket.put(path.name + path.parent.name, path.read_bytes()), _files(source)))
        return megabytes / (time.perf_counter() - started)

    return ours, limit


def _shipped(size_bytes: int, places: Places, folder: Path) -> tuple[Bucket, list[str], float]:
    """Ship a store of about ``size_bytes``; return (bucket, keys of its segments and tails, their megabytes)."""
    _fill(folder / "source", size_bytes)
    bucket = open_bucket(places.new())
    with segmentlog.open(folder / "source", background=False) as store:
        store.ship(bucket.url)
    shutil.rmtree(folder / "source")
    listed = [one for one in bucket.list() if one.key.startswith(("segments/", "tails/"))]
    return bucket, [one.key for one in listed], sum(one.size_bytes for one in listed) / 1e6


def _restore(size_bytes: int, places: Places, folder: Path, scale: float) -> tuple[Side, Side]:
    bucket, keys, megabytes = _shipped(int(size_bytes * scale), places, folder)

    def timed(work: Callable[[Path], object]) -> float:
        target = folder / "target"
        target.mkdir()
        try:
            started = time.perf_counter()
            work(target)
            return megabytes / (time.perf_counter() - started)
        finally:
            shutil.rmtree(target)

    def plain(target: Path) -> None:
        def bring(key: str) -> None:
            with open(target / key.replace("/", "-"), "wb") as file:
                file.write(bucket.get(key)[0])
                file.flush()
                os.fsync(file.fileno())

        with ThreadPoolExecutor(RESTORE_PARALLEL) as pool:
            list(pool.map(bring, keys))

    return lambda: timed(lambda target: restore(bucket, str(target / "store"))), lambda: timed(plain)


def _read_there(size_bytes: int, places: Places, folder: Path, scale: float) -> tuple[Side, Side]:
    bucket, keys, megabytes = _shipped(int(size_bytes * scale), places, folder)

    def ours() -> float:
        started = time.perf_counter()
        with segmentlog.open(bucket.url, cache_dir=folder, background=False) as store:
            for log in store.topic("t").partitions():
                for _ in log.read(0):
                    pass
            return megabytes / (time.perf_counter() - started)

    return ours, partial(_got, bucket, keys, megabytes)


def _got(bucket: Bucket, keys: list[str], megabytes: float) -> float:
    """MB/s of getting objects, as many at a time as a reader does."""
    started = time.perf_counter()
    with ThreadPoolExecutor(READ_PARALLEL) as pool:
        for _ in pool.map(lambda key: len(bucket.get(key)[0]), keys):
            pass
    return megabytes / (time.perf_counter() - started)


def _read_tiered(size_bytes: int, places: Places, folder: Path, scale: float) -> tuple[Side, Side]:
    source, bucket = folder / "source", open_bucket(places.new())
    _fill(source, int(size_bytes * scale))
    with segmentlog.open(source, background=False) as store:
        store.alter_topic("t", remote_storage_enable=True, local_retention_ms=0)
        for log in store.topic("t").partitions():
            log.roll()
        store.ship(bucket.url)
        logs = store.topic("t").partitions()
        megabytes = sum(one.size_bytes for log in logs for one in log.segments() if one.remote) / 1e6
    keys = [one.key for one in bucket.list("segments/") if not one.key.endswith((".index", ".snapshot"))]

    def ours() -> float:
        started = time.perf_counter()
        with segmentlog.open(source, cache_dir=folder, background=False) as store:
            for log in store.topic("t").partitions():
                for _ in log.read(0):
                    pass
            return megabytes / (time.perf_counter() - started)

    return ours, partial(_got, bucket, keys, megabytes)


# ---------------------------------------------------------------- one record at a time


def _put_times(bucket: Bucket, count: int) -> tuple[list[float], list[float]]:
    """Seconds of puts of small objects, and of conditional puts of what a small manifest has."""
    puts, swaps, tag = [], [], None
    for number in range(count):
        started = time.perf_counter()
        bucket.put(f"plain/{number}", b"x" * 1000)
        put = time.perf_counter()
        tag = bucket.compare_and_swap("plain.json", b"x" * 1500, tag)
        puts.append(put - started)
        swaps.append(time.perf_counter() - put)
    return puts[1:], swaps[1:]  # the first of them also asks whether conditions count


def _acknowledged(places: Places, folder: Path, scale: float) -> tuple[Side, Side]:
    store = open_store(folder / "store", ship=places.new())
    log = store.create_topic("t").partition(0)
    count = max(int(200 * scale), 5)

    def ours() -> float:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            log.append([b"x" * 100], ack="shipped")
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3

    def limit() -> float:
        puts, swaps = _put_times(open_bucket(places.new()), count)
        return (statistics.median(puts) + statistics.median(swaps)) * 1e3

    return ours, limit


def _lag(places: Places, folder: Path, scale: float) -> tuple[Side, Side]:
    store = open_store(folder / "store", ship=places.new(), ship_interval_ms=_INTERVAL_MS)
    log = store.create_topic("t", fsync="1ms").partition(0)
    values = json_records(1, _APPENDS_PER_S // 100).values[0]  # every 10 ms

    def ours() -> float:
        waiting: list[tuple[int, float]] = []
        worst_s, started = 0.0, time.perf_counter()
        due_s = 0.0
        while (now_s := time.perf_counter() - started) < 5 * scale + 3 * _INTERVAL_MS / 1000:
            if now_s >= due_s:
                waiting.append((log.append(values) + len(values), now_s))
                due_s += len(values) / _APPENDS_PER_S
            shipped = log.shipped_offset
            while waiting and waiting[0][0] <= shipped:
                worst_s = max(worst_s, now_s - waiting.pop(0)[1])
            time.sleep(0.001)
        return max(worst_s, *(now_s - since_s for _, since_s in waiting), 0.0) * 1e3

    def limit() -> float:
        puts, swaps = _put_times(open_bucket(places.new()), max(int(50 * scale), 5))
        return _INTERVAL_MS + (max(puts) + max(swaps)) * 1e3

    return ours, limit


def rows(places: Places, size_bytes: int) -> list[Row]:
    """All of them, in the order of the table."""
    return [
        Row("appends while shipped", "records/s", 0.9, True, partial(_appends, places)),
        Row("cold store shipped", "MB/s", 0.8, True, partial(_cold_store, size_bytes, places)),
        Row("restore", "MB/s", 0.8, True, partial(_restore, size_bytes, places)),
        Row("read there", "MB/s", 0.7, True, partial(_read_there, size_bytes, places)),
        Row("tiered topic read", "MB/s", 0.7, True, partial(_read_tiered, size_bytes, places)),
        Row("acknowledged as shipped, p50", "ms", 1.25, False, partial(_acknowledged, places)),
        Row("worst lag, interval 200 ms", "ms", 1.0, False, partial(_lag, places)),
    ]


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an empty place in an object store (default: a folder on the same disk)")
    parser.add_argument("--mb", type=one_or_more, default=2000, help="size of the store that is shipped and restored")
    parser.add_argument("--rounds", type=one_or_more, default=5, help="rounds of alternation (default 5)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="more or less work a round (default 1.0)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder to write ship.json to (default: none is written)")
    options = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-ship-", dir=options.dir))
    places = Places(options.url or f"file://{folder}/objects")
    results: list[RowResult] = []
    try:
        about = machine.describe(folder) if options.out else None
        for row in rows(places, options.mb * 1_000_000):
            if options.only in row.name:
                print(f"{row.name} ...", file=sys.stderr, end="\r", flush=True)
                results.append(row.measure(folder / "row", options.rounds, options.scale))
                shutil.rmtree(folder / "row", ignore_errors=True)
                places.clear()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if about is not None:
        settings = {
            "rounds": options.rounds,
            "mb": options.mb,
            "scale": options.scale,
            "url": options.url or "a folder",
        }
        save(options.out, "ship", about, time.monotonic() - started, settings, results)
    print_table(results, "shipping against the object store itself")
    return 0


if __name__ == "__main__":
    sys.exit(main())
