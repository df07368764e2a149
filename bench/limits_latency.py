"""Times: durable appends, waking a follower, point reads, starting, opening."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import cramjam

import segmentlog
from bench.measure import Row, Side, open_store
from bench.workload import json_records
from segmentlog.format.columns import encode_columns

_VALUE = [b"v" * 100]


def _partition(folder: Path, **config: object) -> segmentlog.Partition:
    store = open_store(folder / "store")
    store.create_topic("t", config={"fsync": "never", **config})
    return store.topic("t").partition(0)


def _durable_append(folder: Path, scale: float) -> tuple[Side, Side]:
    partition = _partition(folder)
    count = int(1000 * scale)
    partition.append(_VALUE, ack="durable")
    size = 96 + 5 + 100
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 64 << 20)
    os.fsync(fd)
    data, position = b"d" * size, 0

    def ours() -> float:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            partition.append(_VALUE, ack="durable")
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6

    def limit() -> float:
        nonlocal position
        times = []
        for _ in range(count):
            started = time.perf_counter()
            os.pwrite(fd, data, position)
            os.fdatasync(fd)
            times.append(time.perf_counter() - started)
            position += size
        return statistics.median(times) * 1e6

    return ours, limit


def _durable_threads(folder: Path, scale: float) -> tuple[Side, Side]:
    partition = _partition(folder)
    seconds = max(0.6 * scale, 0.1)

    def rate(threads: int) -> float:
        counts = [0] * threads
        started = time.perf_counter()

        def run(index: int) -> None:
            while time.perf_counter() - started < seconds:
                partition.append(_VALUE, ack="durable")
                counts[index] += 1

        workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(counts) / (time.perf_counter() - started)

    return lambda: rate(32), lambda: rate(1)


def _follow(path: str, pipe: Connection) -> None:
    """In another process: follow the topic and note how long ago each record was appended."""
    with segmentlog.open(path) as store, store.consumer("t", start="latest", follow=True) as consumer:
        pipe.send("ready")
        latencies = []
        for record in consumer:
            assert record.value is not None
            if not record.value:
                break
            latencies.append(time.monotonic_ns() - int(record.value))
        pipe.send(latencies)


def _echo(pipe: Connection) -> None:
    while (message := pipe.recv_bytes()) != b"end":
        pipe.send_bytes(message)


def _wake(quantile: float, folder: Path, scale: float) -> tuple[Side, Side]:
    partition = _partition(folder)
    spawn = multiprocessing.get_context("spawn")
    count = max(1, int(300 * scale))

    def ours() -> float:
        here, there = spawn.Pipe()
        process = spawn.Process(target=_follow, args=(str(folder / "store"), there))
        process.start()
        assert here.recv() == "ready"
        time.sleep(0.2)
        for _ in range(count):
            partition.append([b"%d" % time.monotonic_ns()])
            time.sleep(0.002)
        partition.append([b""])
        latencies = sorted(here.recv())
        process.join()
        return float(latencies[int(len(latencies) * quantile)]) / 1e6

    def limit() -> float:
        here, there = spawn.Pipe()
        process = spawn.Process(target=_echo, args=(there,))
        process.start()
        latencies = []
        for number in range(count + 10):
            started = time.monotonic_ns()
            here.send_bytes(b"x")
            here.recv_bytes()
            if number >= 10:
                latencies.append(time.monotonic_ns() - started)
            time.sleep(0.002)
        here.send_bytes(b"end")
        process.join()
        latencies.sort()
        return latencies[int(len(latencies) * quantile)] / 1e6

    return ours, limit


def _point_reads(folder: Path, scale: float) -> tuple[Side, Side]:
    partition = _partition(folder, segment_bytes=4 << 20)
    work = json_records(max(1, int(1500 * scale)), 128)  # about 16 KiB a batch, uncompressed
    for values, keys in zip(work.values, work.keys, strict=True):
        partition.append(values, keys)
    rng = random.Random(7)
    end = partition.log_end_offset
    offsets = [rng.randrange(end) for _ in range(500)]
    blocks = []
    for values, keys in zip(work.values[:200], work.keys[:200], strict=True):
        scratch = bytearray()
        encode_columns(scratch, values, keys, None, None)
        blocks.append((cramjam.lz4.compress_block(scratch, store_size=False), len(scratch)))

    def ours() -> float:
        times = []
        for offset in offsets:
            started = time.perf_counter()
            batch = next(partition.read(offset, max_bytes=1))
            assert batch.values
            times.append(time.perf_counter() - started)
            assert batch.base_offset == offset
        return statistics.median(times) * 1e6

    def limit() -> float:
        times = []
        for block, size in blocks:
            started = time.perf_counter()
            cramjam.lz4.decompress_block(block, output_len=size)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e6

    return ours, limit


def _command(*arguments: str) -> float:
    started = time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    return seconds


def _start(arguments: tuple[str, ...], folder: Path, scale: float) -> tuple[Side, Side]:
    with segmentlog.open(folder / "store") as store:
        store.create_topic("t").partition(0).append([b"a line"])
    command = ("-m", "segmentlog", "--dir", str(folder / "store"), *arguments)
    times = max(3, int(5 * scale))
    return (
        lambda: statistics.median(_command(*command) for _ in range(times)) * 1e3,
        lambda: statistics.median(_command("-c", "import numpy") for _ in range(times)) * 1e3,
    )


def _open_thousand(folder: Path, scale: float) -> tuple[Side, Side]:
    count = int(1000 * scale)
    with segmentlog.open(folder / "store") as store:
        topic = store.create_topic("t", partitions=count)
        for partition in topic.partitions():
            partition.append([b"x"])

    def ours() -> float:
        started = time.perf_counter()
        store = segmentlog.open(folder / "store")
        assert all(partition.log_end_offset == 1 for partition in store.topic("t").partitions())
        seconds = time.perf_counter() - started
        store.close()
        return seconds

    def limit() -> float:
        started = time.perf_counter()
        for partition in os.scandir(folder / "store" / "t"):
            if partition.is_dir():
                for entry in os.scandir(partition.path):
                    entry.stat()
        return time.perf_counter() - started

    return ours, limit


def _reopen(machine_death: bool, folder: Path, scale: float) -> tuple[Side, None]:
    """Reopen a partition of 5 GB whose process was killed; or whose machine was (its state page is gone)."""
    script = (
        "import os, sys, signal, segmentlog\n"
        "partition = segmentlog.open(sys.argv[1]).topic('t').partition(0)\n"
        "block = [os.urandom(100) for _ in range(8192)]\n"
        "while partition.log_end_offset * 102 < float(sys.argv[2]):\n"
        "    partition.append(block)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with segmentlog.open(folder / "store") as store:
        store.create_topic("t", fsync="1000ms")
    size = 5e9 * scale
    subprocess.run([sys.executable, "-c", script, str(folder / "store"), str(size)], check=False)

    log = folder / "store" / "t" / "0"
    checkpoint = (log / "checkpoint").read_bytes()
    segments = {path.name for path in log.glob("*.log")}

    def ours() -> float:
        if machine_death:  # as it was found: what an earlier round's recovery wrote is taken back
            (log / "checkpoint").write_bytes(checkpoint)
            for path in log.glob("*.log"):
                if path.name not in segments:
                    path.unlink()
            (log / "state").unlink()
        started = time.perf_counter()
        store = segmentlog.open(folder / "store", background=False)
        partition = store.topic("t").partition(0)
        seconds = time.perf_counter() - started
        assert partition.log_end_offset * 102 >= size
        assert not machine_death or partition.recovery_report.scanned_bytes > 0
        partition.abandon()
        return seconds

    return ours, None


def _memory(consume: bool, folder: Path, scale: float) -> tuple[Side, None]:
    """Peak resident memory without the page cache, MB, of a process that produces or consumes 5 GB."""
    script = (
        "import os, sys, threading, time, segmentlog\n"
        "peak = 0\n"
        "def watch():\n"
        "    global peak\n"
        "    while True:\n"
        "        for line in open('/proc/self/status'):\n"
        "            if line.startswith('RssAnon'):\n"
        "                peak = max(peak, int(line.split()[1]))\n"
        "        time.sleep(0.02)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "store = segmentlog.open(sys.argv[1])\n"
        "if sys.argv[3] == 'consume':\n"
        "    for batch in store.consumer('t').batches():\n"
        "        batch.values\n"
        "else:\n"
        "    block = [os.urandom(100) for _ in range(8192)]\n"
        "    with store.producer() as producer:\n"
        "        for _ in range(int(float(sys.argv[2]) / 102 / 8192)):\n"
        "            producer.send_many('t', block)\n"
        "    store.close()\n"
        "time.sleep(0.05)\n"
        "print(peak / 1024)\n"
    )
    store = folder / "store"
    size = str(5e9 * scale)

    def run(what: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", script, str(store), size, what], check=True, capture_output=True, text=True
        )
        return float(done.stdout)

    def fill() -> None:
        shutil.rmtree(store, ignore_errors=True)
        with segmentlog.open(store) as opened:
            opened.create_topic("t", fsync="never")

    fill()
    if consume:
        run("produce")
        return (lambda: run("consume")), None

    def ours() -> float:
        fill()
        return run("produce")

    return ours, None


ROWS = (
    Row("append one record, durable", "us", 1.25, False, _durable_append),
    Row("32 threads, durable, against one", "records/s", 4.5, True, _durable_threads),
    Row("a follower in another process, p50", "ms", 0.5, False, partial(_wake, 0.50), absolute=True),
    Row("a follower in another process, p99", "ms", 3.0, False, partial(_wake, 0.99), absolute=True),
    Row("read at a random offset, 16 KiB batches", "us", 5.0, False, _point_reads),
    Row("segmentlog --help", "ms", 2.0, False, partial(_start, ("--help",))),
    Row("segmentlog tail", "ms", 2.0, False, partial(_start, ("tail", "t"))),
    Row("open 1,000 partitions", "s", 1.0, False, _open_thousand, absolute=True),
    Row("reopen 5 GB after kill -9", "s", 0.2, False, partial(_reopen, False)),
    Row("reopen 5 GB after a machine's death", "s", 3.0, False, partial(_reopen, True)),
    Row("memory while producing 5 GB", "MB", 150, False, partial(_memory, False)),
    Row("memory while consuming 5 GB", "MB", 150, False, partial(_memory, True)),
)
