"""Rates: appending, producing, reading, iterating, and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cramjam
import msgspec
import numpy as np

import segmentlog
from bench.measure import Row, Side, open_store
from bench.server.batches import CLIENT_RECORDS
from bench.workload import Workload, json_records
from segmentlog.format.columns import array_of, encode_columns
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.format.wire_encode import encode_wire_batch

_BATCH = 1024
_POOL = 16
"""Different batches that appends go round in: two megabytes, as warm in the cache as records just made."""


def _store(folder: Path, **config: object) -> segmentlog.LogStore:
    store = open_store(folder / "store")
    store.create_topic("t", config={"fsync": "never", **config})
    return store


def _raw_chunks(work: Workload) -> list[bytes]:
    """Return the uncompressed bytes of each batch's columns, which both sides must write to the disk."""
    chunks = []
    for values, keys in zip(work.values, work.keys, strict=True):
        scratch = bytearray()
        encode_columns(scratch, values, keys, None, None)
        chunks.append(bytes(scratch))
    return chunks


def _rate(records: int, started: float) -> float:
    return records / (time.perf_counter() - started)


def _append(compression: str) -> Callable[[Path, float], tuple[Side, Side]]:
    def prepare(folder: Path, scale: float) -> tuple[Side, Side]:
        work = json_records(_POOL, _BATCH)
        chunks = _raw_chunks(work)
        cycles = max(1, int(25 * scale))
        number = 0

        def ours() -> float:
            nonlocal number
            number += 1
            with segmentlog.open(folder / f"store{number}") as store:
                store.create_topic("t", fsync="never", compression_type=compression)
                append = store.topic("t").partition(0).append
                started = time.perf_counter()
                for _ in range(cycles):
                    for values, keys in zip(work.values, work.keys, strict=True):
                        append(values, keys)
                rate = _rate(work.record_count * cycles, started)
            subprocess.run(["rm", "-rf", folder / f"store{number}"], check=True)
            return rate

        def limit() -> float:
            path = folder / "plain"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            started = time.perf_counter()
            if compression == "lz4":
                compress = cramjam.lz4.compress_block
                for chunk in chunks * cycles:
                    os.write(fd, compress(chunk, store_size=False))
            else:
                for chunk in chunks * cycles:
                    os.write(fd, chunk)
            rate = _rate(work.record_count * cycles, started)
            os.close(fd)
            path.unlink()
            return rate

        return ours, limit

    return prepare


def _send(folder: Path, scale: float) -> tuple[Side, Side]:
    work = json_records(_POOL, _BATCH)
    chunks = _raw_chunks(work)
    values = [value for batch in work.values for value in batch]
    keys = [key for batch in work.keys for key in batch]
    cycles = max(1, int(20 * scale))
    number = 0

    def ours() -> float:
        nonlocal number
        number += 1
        with segmentlog.open(folder / f"store{number}") as store:
            store.create_topic("t", fsync="never")
            producer = store.producer(linger_ms=5)
            send = producer.send
            started = time.perf_counter()
            for _ in range(cycles):
                for value, key in zip(values, keys, strict=True):
                    send("t", value, key=key)
            producer.flush()
            rate = _rate(len(values) * cycles, started)
            producer.close()
        subprocess.run(["rm", "-rf", folder / f"store{number}"], check=True)
        return rate

    def limit() -> float:
        path = folder / "plain"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        started = time.perf_counter()
        for chunk in chunks * cycles:
            os.write(fd, cramjam.lz4.compress_block(chunk, store_size=False))
        rate = _rate(work.record_count * cycles, started)
        os.close(fd)
        path.unlink()
        return rate

    return ours, limit


def _filled(folder: Path, work: Workload) -> segmentlog.Partition:
    store = _store(folder)
    partition = store.topic("t").partition(0)
    for values, keys in zip(work.values, work.keys, strict=True):
        partition.append(values, keys)
    return partition


def _decompression(work: Workload) -> Side:
    """Decompressing the blocks that a reader of the whole log decompresses."""
    blocks = [(cramjam.lz4.compress_block(chunk, store_size=False), len(chunk)) for chunk in _raw_chunks(work)]

    def limit() -> float:
        started = time.perf_counter()
        for block, size in blocks:
            cramjam.lz4.decompress_block(block, output_len=size)
        return _rate(work.record_count, started)

    return limit


def _read_values(folder: Path, scale: float) -> tuple[Side, Side]:
    work = json_records(max(1, int(400 * scale)), _BATCH)
    partition = _filled(folder, work)

    def ours() -> float:
        started = time.perf_counter()
        count = 0
        for batch in partition.read(0):
            count += len(batch.values)
        rate = _rate(count, started)
        assert count == work.record_count
        return rate

    return ours, _decompression(work)


def _iterate_records(folder: Path, scale: float) -> tuple[Side, Side]:
    work = json_records(max(1, int(300 * scale)), _BATCH)
    partition = _filled(folder, work)

    def ours() -> float:
        started = time.perf_counter()
        count = 0
        for batch in partition.read(0):
            for _record in batch:
                count += 1
        return _rate(count, started)

    return ours, _decompression(work)


def _consume_records(folder: Path, scale: float) -> tuple[Side, Side]:
    work = json_records(max(1, int(300 * scale)), _BATCH)
    _filled(folder, work)
    store = open_store(folder / "store")

    def ours() -> float:
        started = time.perf_counter()
        count = 0
        for _record in store.consumer("t"):
            count += 1
        return _rate(count, started)

    return ours, _decompression(work)


def _from_a_client(folder: Path, scale: float) -> tuple[segmentlog.Partition, Workload, Side]:
    """Prepare a log of uncompressed batches as Kafka's producers send them.

    The limit is making lists of their fields.
    """
    work = json_records(max(1, int(2500 * scale)), CLIENT_RECORDS)
    partition = _store(folder).topic("t").partition(0)
    for at, (values, keys) in enumerate(zip(work.values, work.keys, strict=True)):
        now_ms = 1_800_000_000_000 + at
        timestamps = np.arange(now_ms, now_ms + CLIENT_RECORDS) // 3
        partition.append_wire(encode_wire_batch(keys, values, None, timestamps, base_offset=0, epoch=0))
    columns = [array_of(column) for both in zip(work.keys, work.values, strict=True) for column in both]
    decode = msgspec.msgpack.Decoder(list[bytes | None]).decode

    def limit() -> float:
        started = time.perf_counter()
        for column in columns:
            decode(column)
        return _rate(work.record_count, started)

    return partition, work, limit


def _read_from_a_client(folder: Path, scale: float) -> tuple[Side, Side]:
    partition, work, limit = _from_a_client(folder, scale)

    def ours() -> float:
        started = time.perf_counter()
        count = 0
        for batch in partition.read(0):
            assert len(batch.keys) == len(batch.values)
            count += len(batch.values)
        rate = _rate(count, started)
        assert count == work.record_count
        return rate

    return ours, limit


def _iterate_from_a_client(folder: Path, scale: float) -> tuple[Side, Side]:
    partition, work, limit = _from_a_client(folder, scale)

    def ours() -> float:
        started = time.perf_counter()
        count = 0
        for batch in partition.read(0):
            for _record in batch:
                count += 1
        rate = _rate(count, started)
        assert count == work.record_count
        return rate

    return ours, limit


def _for_a_client(folder: Path, scale: float) -> tuple[Side, Side]:
    work = json_records(max(1, int(400 * scale)), _BATCH)
    store = _store(folder, compression_type="none")
    partition = store.topic("t").partition(0)
    for values, keys in zip(work.values, work.keys, strict=True):
        partition.append(values, keys)

    def ours() -> float:
        started = time.perf_counter()
        for batch in partition.read(0):
            to_wire_batches(batch)
        return _rate(work.record_count, started)

    def limit() -> float:
        started = time.perf_counter()
        for values, keys in zip(work.values, work.keys, strict=True):
            array_of(keys)
            array_of(values)
        return _rate(work.record_count, started)

    return ours, limit


def _cli(folder: Path, *arguments: str, **streams: object) -> float:
    """Seconds that a command of ours takes, start-up included."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "segmentlog", "--dir", str(folder / "cli"), *arguments]
    # As installed programs run: with their bytecode kept from one start to the next.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=environment, **streams)  # type: ignore[call-overload]
    return time.perf_counter() - started


def _lines(folder: Path, scale: float) -> tuple[Path, int, list[list[bytes]]]:
    """Return a file of 100-byte lines, how many, and the same as lists."""
    work = json_records(int(2500 * scale), _BATCH)
    lists = [[value[:100].ljust(100, b" ") for value in batch] for batch in work.values]
    path = folder / "lines"
    path.write_bytes(b"".join(b"\n".join(batch) + b"\n" for batch in lists))
    return path, work.record_count, lists


def _produce_file(folder: Path, scale: float) -> tuple[Side, Side]:
    path, count, lists = _lines(folder, scale)

    def ours() -> float:
        _cli(folder, "create", "t", "--fsync", "never")
        seconds = _cli(folder, "produce", "t", str(path))
        subprocess.run(["rm", "-rf", folder / "cli"], check=True)
        return count / seconds

    def limit() -> float:
        with segmentlog.open(folder / "api") as store:
            store.create_topic("t", fsync="never")
            append = store.topic("t").partition(0).append
            started = time.perf_counter()
            for values in lists:
                append(values)
            rate = _rate(count, started)
        subprocess.run(["rm", "-rf", folder / "api"], check=True)
        return rate

    return ours, limit


def _consume_file(folder: Path, scale: float) -> tuple[Side, Side]:
    path, count, lists = _lines(folder, scale)
    with segmentlog.open(folder / "cli") as store:
        store.create_topic("t", fsync="never")
        partition = store.topic("t").partition(0)
        for values in lists:
            partition.append(values)
    reading = open_store(folder / "cli").topic("t").partition(0)

    def ours() -> float:
        with open(folder / "out", "wb") as out:
            seconds = _cli(folder, "consume", "--values", "t", stdout=out)
        assert (folder / "out").stat().st_size == path.stat().st_size
        return count / seconds

    def limit() -> float:
        started = time.perf_counter()
        assert sum(len(batch.values) for batch in reading.read(0)) == count
        return _rate(count, started)

    return ours, limit


ROWS = (
    Row("append lists, keyed, lz4", "records/s", 0.80, True, _append("lz4")),
    Row("append lists, keyed, uncompressed", "records/s", 0.75, True, _append("none")),
    Row("producer.send, one at a time", "records/s", 0.25, True, _send),
    Row("read values of the whole log", "records/s", 0.50, True, _read_values),
    Row("iterate records of batches", "records/s", 0.15, True, _iterate_records),
    Row("iterate records of a consumer", "records/s", 0.15, True, _consume_records),
    Row("keys and values that Kafka clients sent", "records/s", 0.20, True, _read_from_a_client),
    Row("iterate records that Kafka clients sent", "records/s", 0.10, True, _iterate_from_a_client),
    Row("make records for Kafka's clients", "records/s", 0.20, True, _for_a_client),
    Row("segmentlog produce FILE", "records/s", 0.50, True, _produce_file),
    Row("segmentlog consume --values", "records/s", 0.40, True, _consume_file),
)
