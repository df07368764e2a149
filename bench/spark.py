"""Spark over the log, against what Spark does without it: ``python -m bench.spark``.

read     `count` and `sum(length(value))` of 100-byte values; against `mapInArrow` over the same segments decoded
         the same way (what of the time is the data source's own), and against `spark.read.parquet` of the rows
write    the same rows to a topic, in one transaction and durable, against Spark's own Parquet writer, which
         syncs nothing
trigger  micro-batches from a topic to a topic, exactly once: the median of small ones, and how many rows a second
         large ones move
memory   ``--stream-gb N`` moves so much from topic to topic, with the driver's default heap, and tells the
         largest resident sizes over the first and the last quarter: of Java, and of the largest Python worker

Sides alternate within one session, and figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import segmentlog
from bench.arguments import existing_folder
from bench.delivery import alternate

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_VALUE_BYTES = 100
_LIST = 20_000
_SMALL = 100
_LARGE = 200_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows to read and write (default 2 million)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each comparison (default 5)")
    parser.add_argument("--only", choices=["read", "write", "trigger"], action="append", help="these alone")
    parser.add_argument("--stream-gb", type=float, help="only this: move so many GB as a stream, and watch memory")
    parser.add_argument("--master", default="local[2]", help="where Spark runs (default local[2])")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-spark-", dir=options.dir))
    from segmentlog.spark.session import session

    spark = session("bench", options.master)
    found: dict[str, float] = {}
    try:
        if options.stream_gb:
            found |= memory(spark, folder, options.stream_gb)
        else:
            fill(folder / "store", options.rows)
            for name, measure in (("read", read), ("write", write), ("trigger", trigger)):
                if not options.only or name in options.only:
                    found |= measure(spark, folder, options.rows, options.rounds)
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found))
    else:
        for name, figure in found.items():
            print(f"{name:56} {figure:>14,.3f}")
    return 0


def values(start: int, count: int) -> list[bytes]:
    """Distinct values of 100 bytes, half of them noise: they compress to two thirds or so."""
    noise = np.random.default_rng(start).bytes(25 * count).hex().encode()
    tail = b"the quick brown fox jumps over the lazy dog"[: _VALUE_BYTES - 50 - 12]
    return [b"%012d" % (start + row) + noise[50 * row : 50 * row + 50] + tail for row in range(count)]


def fill(path: Path, rows: int) -> None:
    """Create a topic of ``rows`` records with keys, in four partitions."""
    with segmentlog.open(path) as store:
        store.create_topic("rows", partitions=4)
        with store.producer() as producer:
            for start in range(0, rows, _LIST):
                count = min(_LIST, rows - start)
                keys = [b"user-%05d" % (row * 7919 % 100_000) for row in range(start, start + count)]
                producer.send_many("rows", values(start, count), keys)


def topic(spark: SparkSession, path: Path, schema: str | None = None) -> DataFrame:
    """Return the topic, with all of its columns or those of a schema."""
    reader = spark.read.format("segmentlog").option("path", str(path / "store")).option("subscribe", "rows")
    return (reader.schema(schema) if schema else reader).load()


# ---------------------------------------------------------------- read


def read(spark: SparkSession, folder: Path, rows: int, rounds: int) -> dict[str, float]:
    """Rows a second of each way to read, and the ratios."""
    parquet = str(folder / "rows.parquet")
    topic(spark, folder).write.mode("overwrite").parquet(parquet)
    sides: dict[str, Callable[[], Any]] = {
        "count": lambda: topic(spark, folder).count(),
        "count, no value": lambda: topic(spark, folder, "offset bigint").count(),
        "count, mapInArrow": lambda: by_map_in_arrow(spark, folder, None).count(),
        "count, Parquet": lambda: spark.read.parquet(parquet).count(),
        "sum(length(value))": lambda: total_length(topic(spark, folder, "value binary")),
        "sum(length(value)), all columns": lambda: total_length(topic(spark, folder)),
        "sum(length(value)), mapInArrow": lambda: total_length(by_map_in_arrow(spark, folder, "value binary")),
        "sum(length(value)), Parquet": lambda: total_length(spark.read.parquet(parquet)),
    }
    medians = alternate({name: _rate(side, rows) for name, side in sides.items()}, rounds)
    found = {f"read: {name}, rows/s": rate for name, rate in medians.items()}
    for what in ("count", "sum(length(value))"):
        found[f"read: {what}, of mapInArrow"] = medians[what] / medians[f"{what}, mapInArrow"]
        found[f"read: {what}, of Parquet"] = medians[what] / medians[f"{what}, Parquet"]
    return found


def _rate(side: Callable[[], Any], rows: int) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        side()
        return rows / (time.perf_counter() - started)

    return run


def total_length(frame: DataFrame) -> int:
    """Bytes of all values."""
    from pyspark.sql import functions

    row = frame.select(functions.sum(functions.length("value"))).first()
    assert row is not None
    return int(row[0])


def by_map_in_arrow(spark: SparkSession, folder: Path, schema: str | None) -> DataFrame:
    """Return the same ranges, read and decoded by the same functions, without the data source around them."""
    from pyspark.sql.types import StructType

    from segmentlog.spark.batch_reader import BatchReader, read_task
    from segmentlog.spark.schema import source_schema
    from segmentlog.spark.source_options import parse_read_options

    options = parse_read_options({"path": str(folder / "store"), "subscribe": "rows"}, streaming=False)
    wanted = source_schema(include_headers=False) if schema is None else StructType.fromDDL(schema)
    tasks = BatchReader(options, wanted).partitions()

    def rows(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from read_task(options, wanted, tasks[number])

    return spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(rows, wanted)


# ---------------------------------------------------------------- write


def write(spark: SparkSession, folder: Path, rows: int, rounds: int) -> dict[str, float]:
    """Rows a second into a topic and into Parquet files, from Parquet files both."""
    source = str(folder / "source.parquet")
    topic(spark, folder, "key binary, value binary").write.mode("overwrite").parquet(source)
    number = 0

    def to_topic() -> None:
        nonlocal number
        number += 1
        with segmentlog.open(folder / "store") as store:
            store.create_topic(f"written-{number}", partitions=4)
        writer = spark.read.parquet(source).write.format("segmentlog").mode("append")
        writer.option("path", str(folder / "store")).option("topic", f"written-{number}").save()
        with segmentlog.open(folder / "store") as store:
            store.delete_topic(f"written-{number}")

    def to_parquet() -> None:
        spark.read.parquet(source).write.mode("overwrite").parquet(str(folder / "written.parquet"))

    medians = alternate({"a topic": _rate(to_topic, rows), "Parquet": _rate(to_parquet, rows)}, rounds)
    found = {f"write: to {name}, rows/s": rate for name, rate in medians.items()}
    found["write: of Parquet"] = medians["a topic"] / medians["Parquet"]
    return found


# ---------------------------------------------------------------- micro-batches


def trigger(spark: SparkSession, folder: Path, rows: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a small micro-batch, rows a second of large ones; the first ones of a query do not count."""
    small = run_query(spark, folder, _SMALL, 10 + 4 * rounds)
    large = run_query(spark, folder, _LARGE, max(3, rows // _LARGE))
    parts = {
        key: statistics.median(one[key] for one in small[10:]) for key in sorted(set.intersection(*map(set, small)))
    }
    return {
        "trigger: small, ms": parts.pop("triggerExecution"),
        **{f"trigger: small, of these {key}": value for key, value in parts.items()},
        "trigger: large, rows/s": _LARGE / statistics.median(one["triggerExecution"] for one in large[2:]) * 1000,
    }


def run_query(spark: SparkSession, folder: Path, rows_each: int, batches: int) -> list[dict[str, float]]:
    """Run a query, and return Spark's durations of each micro-batch, in ms."""
    name = f"moved-{rows_each}"
    with segmentlog.open(folder / "store") as store:
        store.create_topic(name, partitions=4)
    source = spark.readStream.format("segmentlog").option("path", str(folder / "store")).option("subscribe", "rows")
    rows = source.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", rows_each)
    frame = rows.schema("key binary, value binary").load()
    sink = frame.writeStream.format("segmentlog").option("path", str(folder / "store")).option("topic", name)
    query = sink.option("checkpointLocation", str(folder / f"checkpoint-{rows_each}")).start()
    try:
        while query.exception() is None:
            progress = [one for one in query.recentProgress if one.numInputRows == rows_each]
            if len(progress) >= batches or not query.isActive:
                break
            time.sleep(0.05)
    finally:
        query.stop()
    return [dict(one.durationMs) for one in progress][:batches]


# ---------------------------------------------------------------- memory


def memory(spark: SparkSession, folder: Path, gb: float) -> dict[str, float]:
    """Resident sizes while a stream moves so many GB; a record is 1,000 bytes."""
    total = int(gb * 1e6)
    written, stop = 0, threading.Event()
    with segmentlog.open(folder / "store") as store:
        # The log does not keep all of it: what was moved may go.
        store.create_topic("rows", partitions=4, segment_bytes=64 << 20)
        store.create_topic("moved", partitions=4, segment_bytes=64 << 20, retention_bytes=256 << 20)
    samples: list[tuple[float, int, int]] = []
    watcher = threading.Thread(target=_watch, args=(samples, stop), daemon=True)
    source = spark.readStream.format("segmentlog").option("path", str(folder / "store")).option("subscribe", "rows")
    frame = source.option("startingOffsets", "earliest").option("maxBytesPerTrigger", "256MiB").load()
    sink = frame.drop("partition").writeStream.format("segmentlog").option("path", str(folder / "store"))
    query = sink.option("topic", "moved").option("checkpointLocation", str(folder / "checkpoint")).start()
    watcher.start()
    moved = 0
    value = values(0, 40_000)
    try:
        with segmentlog.open(folder / "store") as store, store.producer(linger_ms=0) as producer:
            log = [store.topic("rows").partition(number) for number in range(4)]
            while moved < total and query.exception() is None:
                if written < total and written - moved < 1_000_000:
                    rows = [b"".join(value[row : row + 10]) for row in range(0, 40_000, 10)]
                    producer.send_many("rows", rows, partition=(written // 4000) % 4)
                    written += len(rows)
                else:
                    time.sleep(0.05)
                moved = sum(store.topic("moved").partition(number).last_stable_offset for number in range(4))
                for one in log:
                    if one.log_end_offset - one.log_start_offset > 600_000:
                        one.trim(one.log_end_offset - 500_000)
                for one in store.topic("moved").partitions():
                    one.retain()
    finally:
        stop.set()
        watcher.join()
        query.stop()
    quarter = max(1, len(samples) // 4)
    found = {"stream: GB moved": moved / 1e6, "stream: seconds": samples[-1][0] - samples[0][0]}
    for side, part in (("first", samples[:quarter]), ("last", samples[-quarter:])):
        found[f"stream: {side} quarter, Java's largest MB"] = max(one[1] for one in part) / 1e3
        found[f"stream: {side} quarter, largest worker's MB"] = max(one[2] for one in part) / 1e3
    return found


def _watch(samples: list[tuple[float, int, int]], stop: threading.Event) -> None:
    """Every half second: the time, the resident kB of Java, those of the largest Python worker."""
    while not stop.wait(0.5):
        out = subprocess.run(["ps", "-eo", "rss=,args="], capture_output=True, text=True, check=False).stdout
        java = worker = 0
        for line in out.splitlines():
            size, _, command = line.strip().partition(" ")
            if "SparkSubmit" in command:
                java = max(java, int(size))
            elif "segmentlog.spark.daemon" in command or "pyspark.daemon" in command:
                worker = max(worker, int(size))
        samples.append((time.monotonic(), java, worker))


if __name__ == "__main__":
    sys.exit(main())
