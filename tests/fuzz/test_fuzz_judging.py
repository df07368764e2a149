"""Mutated batches of Kafka's clients: whatever an append accepts, every reader reads to the end.

SEGMENTLOG_JUDGED_BATCHES is the number of batches, shared by the seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import pytest
from leftovers import opened
from logs import NOW_MS, FakeClock, NoSyncFileSystem
from raw_batches import PACKERS, batch, blob, record
from seeds import seeds, share
from wire import forged

from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.errors import InvalidRecord, InvalidWireBatch
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire import crc32c_of, parse_wire_batch
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.format.wire_records import varint
from segmentlog.http.rest.record_json import lines
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.store import LogStore

BATCHES: Final = int(os.environ.get("SEGMENTLOG_JUDGED_BATCHES", "6000"))
_NAME: Final = "judged batches"
_EDGES: Final = (0, 1, -1, 2, 63, 64, 127, 128, 255, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63))


def any_record(random: Random, index: int) -> bytes:
    """Return a record that is mostly valid."""
    blobs = (None, b"", b"k", random.randbytes(random.randrange(200)))
    count = random.choice((0, 0, 0, 1, 3))
    headers = [blob(random.choice((b"", b"h", b"\xff"))) + blob(random.choice(blobs)) for _ in range(count)]
    return record(
        index, random.choice(blobs), random.choice(blobs),
        timestamp_delta=random.choice((0, 0, index, -index, random.choice(_EDGES) if random.random() < 0.05 else 1)),
        headers=varint(count) + b"".join(headers),
    )  # fmt: skip


def mutated(random: Random, data: bytes) -> bytes:
    """Return the bytes with a few of them changed, removed, doubled, or a number in their place."""
    made = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at, to = sorted(random.randrange(len(made) + 1) for _ in range(2))
        kind = random.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = random.choice((0, 1, 2, 127, 128, 255))
        elif kind == 2:
            del made[at : at + random.randint(1, 3)]
        elif kind == 3:
            made[at:at] = random.randbytes(random.randint(1, 3))
        elif kind == 4:
            made[at:at] = made[at : min(to, at + 100)]
        else:
            made[at : at + random.randint(0, 2)] = varint(random.choice(_EDGES))
    return bytes(made)


def any_batch(random: Random) -> bytes:
    """Return a batch as a broken or hostile client could send it. Its CRC is right."""
    count = random.choice((1, 1, 2, 3, 10, 30, 100))
    payload = b"".join(any_record(random, index) for index in range(count))
    if random.random() < 0.6:
        payload = mutated(random, payload)
    codec, pack = random.choice(((0, bytes), *PACKERS.values()))
    packed = pack(payload)
    if random.random() < 0.2:
        packed = mutated(random, packed)
    made = batch(NOW_MS, packed, count, codec=codec)
    if random.random() < 0.3:
        names = ("attributes", "last_offset_delta", "base_timestamp", "max_timestamp", "record_count", "base_sequence")
        bits = {"attributes": 15, "last_offset_delta": 31, "record_count": 31, "base_sequence": 31}
        for name in random.sample(names, random.randint(1, 2)):
            most = 1 << bits.get(name, 63)
            near = getattr(parse_wire_batch(made), name) + random.choice((-1, 1, 2))
            said = random.choice((near, random.choice(_EDGES)))
            made = forged(made, **{name: max(-most, min(said, most - 1))})
    return made


def read(found: RecordBatch, as_arrow: Callable[[RecordBatch], object]) -> int:
    """Read a batch in every way that there is; how many records it holds."""
    count = len(list(found.records()))
    assert count == len(found.keys) == len(found.values) == len(found.headers) == len(found.timestamps)
    assert found.header.max_timestamp == int(found.timestamps.max())
    found.check()
    found.to_arrow()
    as_arrow(found)
    for value_encoding in ("text", "json", "base64"):
        assert lines(found, value_encoding).count(b"\n") == count  # type: ignore[arg-type]
    for wire in to_wire_batches(found):
        header = parse_wire_batch(wire)
        assert (header.crc, header.record_count) == (crc32c_of(memoryview(wire)[21:]), count)
    return count


@pytest.mark.parametrize("seed", seeds(_NAME))
@pytest.mark.parametrize("compacts", [False, True])
def test_what_is_accepted_is_read(
    tmp_path: Path, seed: int, compacts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library, Arrow, Spark, REST, commands, compaction and lookups by time read it; verify finds nothing."""
    from pyspark.sql.types import BinaryType, StructType, TimestampType

    from segmentlog.spark.arrow_batches import ArrowRows

    rows = ArrowRows(StructType().add("key", BinaryType()).add("value", BinaryType()).add("timestamp", TimestampType()))
    random, clock = Random(seed), FakeClock()
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem(), clock=clock))
    config = {"retention.ms": -1, "segment.bytes": 200_000, "message.timestamp.after.max.ms": "unlimited"}
    if compacts:
        config["cleanup.policy"] = "compact"
    log = store.create_topic("t", config=config).partition(0)
    accepted = records = 0
    total = share(BATCHES, _NAME) // 2
    for _ in range(total):
        made = any_batch(random)
        end = log.log_end_offset
        try:
            told = log.append_wire(made)
        except (InvalidWireBatch, InvalidRecord):
            assert log.log_end_offset == end, made.hex()
            continue
        accepted += 1
        records += told.next_offset - told.base_offset
        try:
            (found,) = log.read(told.base_offset)
            assert read(found, lambda one: list(rows.convert([one]))) == told.next_offset - told.base_offset
        except Exception as error:
            raise AssertionError(f"accepted, and not read: {made.hex()}") from error
    with capsys.disabled():
        print(f"{accepted:,} of {total:,} batches accepted")
    assert total // 50 < accepted < total - total // 50
    for stamp in (-5, 0, NOW_MS, NOW_MS + 1, 2**60):
        log.offset_for_timestamp(stamp)
    store.close()
    assert [one for one in inspect_store(str(tmp_path / "store")) if one.severity != "note"] == []
    capsys.readouterr()
    assert run(cli, ["--dir", str(tmp_path / "store"), "consume", "t", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == records
    with LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem(), clock=clock) as store:
        log = store.open_partition("t", 0)
        log.roll()
        if compacts:
            assert not log.compact().unreadable
        assert sum(len(found) for found in log.read(log.log_start_offset)) <= records
