"""Damage in a log whose values hold batches: reads return only appended records, and report what they skip.

A client that knows which offsets its values get can put batches with fitting offsets into them. The tests ask every
caller that skips damage: readers, with and without an index; the state of producers and of aborted transactions;
`dump`, `verify` and `repair`.

SEGMENTLOG_EMBEDDED_ROUNDS   logs with random damage; a failure names the seed that shows it again
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from batches import batch_bytes, unpack_header
from damage.rotten import is_inside
from logs import FakeClock, NoSyncFileSystem, contents, delete_indexes, log_files

from segmentlog.config import TopicConfig
from segmentlog.format.batch import CONTROL, HEADER_SIZE
from segmentlog.format.control import encode_marker
from segmentlog.inspection.file_dump import segment_lines
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.scrubber import Scrubber, ScrubTarget
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.log.repair.partition_repair import repair_partition

ROUNDS = int(os.environ.get("SEGMENTLOG_EMBEDDED_ROUNDS", "90"))
SEED = int(os.environ.get("SEGMENTLOG_SEED", "1"))

FORGER, VICTIM = 77, 5
FORGED = b"forged"
Truth = dict[int, bytes | None]


class Placed(NamedTuple):
    """Where a batch lies, and the batches in its values: positions in the file."""

    path: Path
    position: int
    size_bytes: int
    base_offset: int
    next_offset: int
    inner: list[int]


# ---------------------------------------------------------------- batches in values


def forged_at(base_offset: int, count: int, **fields: Any) -> bytes:
    """Return a batch that was never appended."""
    return batch_bytes([FORGED] * count, base_offset, producer_epoch=0, producer_id=FORGER,
                       base_sequence=0, **fields)  # fmt: skip


def forged_marker(base_offset: int) -> bytes:
    """Return the abort of a transaction of the victim's that began with the log."""
    marker = encode_marker(VICTIM, 0, committed=False, first_offset=0, now_ms=0)
    return bytes(marker.placed_at(base_offset, 0)) + bytes(marker.payload)


def batch_of_batches(base_offset: int, count: int) -> bytes:
    """Return a batch that was never appended, with others in its values."""
    inner = forged_at(base_offset + 1, count - 1)
    values = [FORGED + inner] * (count - 1)
    return batch_bytes(values, base_offset + 1, producer_epoch=0, producer_id=FORGER, base_sequence=0)


KINDS: dict[str, Callable[[int, int], bytes]] = {
    "its own offsets": lambda base, count: forged_at(base, count),
    "the rest of its offsets": lambda base, count: forged_at(base + 1, count - 1),
    "the last of its offsets": lambda base, count: forged_at(base + count - 1, 1),
    "one after the other": lambda base, count: b"".join(forged_at(base + at, 1) for at in range(count)),
    "offsets behind it": lambda base, count: forged_at(base + count, 2),
    "high offsets": lambda base, count: forged_at(base + 100_000, 3),
    "low offsets": lambda base, count: forged_at(0, 1),
    "a higher epoch": lambda base, count: forged_at(base + 1, count - 1, epoch=9),
    "an abort": lambda base, count: forged_marker(base + count - 1),
    "batches in a batch": lambda base, count: batch_of_batches(base, count),
}


def values_with(inner: list[bytes], count: int, filler: bytes) -> list[bytes | None]:
    """Return ``count`` values, the last of which ends with the inner batches, and so does the payload."""
    values: list[bytes | None] = [filler + b"%d" % number for number in range(count)]
    values[-1] = filler + b"holds " + b"".join(inner)
    return values


# ---------------------------------------------------------------- logs


class Log:
    """A partition, closed, with batches in values of some of its batches."""

    def __init__(self, folder: Path, choose: random.Random, **settings: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.settings = {"fsync": "never", "index_interval_bytes": 1, "segment_records": 40, **settings}
        self.truth: Truth = {}
        self.aborted: set[int] = set()
        log = self.open()
        sequence = 0
        for _ in range(choose.randint(6, 24)):
            count, base = choose.randint(2, 5), log.log_end_offset
            values = values_with([], count, b"plain %d " % base)
            if choose.random() < 0.6:
                chosen = [choose.choice(list(KINDS.values()))(base, count) for _ in range(choose.randint(1, 3))]
                values = values_with(chosen, count, b"A" * choose.choice([3, 3000]))
            stamp = ProducerStamp(VICTIM, 0, sequence, True) if choose.random() < 0.5 else None
            sequence += count if stamp else 0
            assert log.append(values, producer=stamp, timestamps=[1000] * count) == base
            self.truth.update(zip(range(base, base + count), values, strict=True))
            if stamp is not None:
                committed = choose.random() < 0.7
                if not committed:
                    self.aborted.update(range(base, base + count))
                log.end_transaction(VICTIM, 0, committed=committed)
        self.end_offset = log.log_end_offset
        self.placed = [self._placed(batch) for batch in log.read(0, control=True)]
        log.close()

    def _placed(self, batch: Any) -> Placed:
        path, position, size = Path(batch._path), batch._position, batch.size_bytes
        data = path.read_bytes()[position : position + size]
        inner = [at for at in range(1, size) if data.startswith(b"SLB\x01", at)]
        return Placed(path, position, size, batch.base_offset, batch.next_offset, inner)

    def config(self) -> TopicConfig:
        return TopicConfig.from_mapping(self.settings)

    def open(self, recovery: str = "tail") -> Partition:
        limit = int(self.settings.get("max_message_bytes", 1 << 29))
        return Partition(
            str(self.folder), "t", 0, self.config, fs=NoSyncFileSystem(), clock=FakeClock(), background=False,
            recovery=recovery, load_batch_limit=lambda: limit,
        )  # type: ignore[arg-type]  # fmt: skip


def overwrite(path: Path, position: int, data: bytes) -> None:
    """Overwrite bytes in place: the inode stays the same, as with a fault of the disk."""
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(hit: Placed, start: int, end: int, choose: random.Random) -> None:
    """Flip one bit in the bytes ``[start, end)`` of the batch."""
    at = hit.position + choose.randrange(start, end)
    overwrite(hit.path, at, bytes([hit.path.read_bytes()[at] ^ (1 << choose.randrange(8))]))


def hostile_size(hit: Placed, choose: random.Random) -> int:
    """Return a size that leads to nothing, to the batch itself, to a batch in a value, or past the end."""
    file_size = hit.path.stat().st_size
    sizes = [
        0, 1, 2**32 - HEADER_SIZE, 2**32 - 1, 2**31, file_size - hit.position - HEADER_SIZE, file_size,
        *(max(at - HEADER_SIZE, 0) for at in hit.inner), hit.size_bytes, 2 * hit.size_bytes,
    ]  # fmt: skip
    return choose.choice([size for size in sizes if size != hit.size_bytes - HEADER_SIZE])


def damage_size(hit: Placed, choose: random.Random) -> None:
    """Change the header's size of its payload."""
    overwrite(hit.path, hit.position + 56, struct.pack("<I", hostile_size(hit, choose)))


def damage_sizes(hit: Placed, choose: random.Random) -> None:
    """Change all sizes of a header consistently, and a byte of the payload."""
    size = hostile_size(hit, choose)
    header = unpack_header(hit.path.read_bytes()[hit.position : hit.position + HEADER_SIZE])
    values_size = max(size - header["timestamps_size"], 1) % (1 << 32)
    overwrite(hit.path, hit.position + 56, struct.pack("<II", size, size))
    overwrite(hit.path, hit.position + 72, struct.pack("<I", values_size))
    flip(hit, HEADER_SIZE, hit.size_bytes, choose)


def damage_both(hit: Placed, choose: random.Random) -> None:
    """Flip a bit of the header and one of the payload."""
    flip(hit, 0, HEADER_SIZE, choose)
    flip(hit, HEADER_SIZE, hit.size_bytes, choose)


def damage_size_and_payload(hit: Placed, choose: random.Random) -> None:
    """Change the size of the payload and a bit of it, so that its checksum proves nothing."""
    damage_size(hit, choose)
    flip(hit, HEADER_SIZE, hit.size_bytes, choose)


DAMAGE: dict[str, Callable[[Placed, random.Random], None]] = {
    "header": lambda hit, choose: flip(hit, 0, HEADER_SIZE, choose),
    "payload": lambda hit, choose: flip(hit, HEADER_SIZE, hit.size_bytes, choose),
    "both": damage_both,
    "size": damage_size,
    "size and payload": damage_size_and_payload,
    "sizes and payload": damage_sizes,
    "header gone": lambda hit, choose: overwrite(hit.path, hit.position, bytes(HEADER_SIZE)),
    "header of ones": lambda hit, choose: overwrite(hit.path, hit.position, b"\xff" * HEADER_SIZE),
    "half of a header gone": lambda hit, choose: overwrite(hit.path, hit.position + 48, bytes(48)),
    "front gone": lambda hit, choose: overwrite(
        hit.path, hit.position, bytes(choose.randint(1, hit.inner[0] if hit.inner else hit.size_bytes))
    ),
    "garbage": lambda hit, choose: overwrite(
        hit.path, hit.position, choose.randbytes(choose.randint(8, min(400, hit.size_bytes)))
    ),
}


# ---------------------------------------------------------------- what is promised


def check_reads(log: Log, hits: list[Placed]) -> None:
    """Check that every returned record was appended at its offset, and that all others are reported."""
    partition = log.open()
    told: list[tuple[int, int]] = []
    found = {
        one.offset: one.value for one in contents(partition, 0, on_skip=lambda base, end, why: told.append((base, end)))
    }
    assert found.items() <= log.truth.items(), "a record that was never appended"
    missing = [offset for offset in log.truth if offset not in found]
    assert all(is_inside(offset, told) for offset in missing), "skipped, and not told"
    assert all(is_inside(hit.base_offset, told) for hit in hits), "damage was not told"
    for hit in hits:
        later = {one.offset: one.value for one in contents(partition, hit.next_offset, on_skip=lambda *_: None)}
        assert later == {offset: value for offset, value in found.items() if offset >= hit.next_offset}
    committed = {one.offset for one in contents(partition, 0, on_skip=lambda *_: None, isolation="read_committed")}
    undamaged = partition.end_offset(isolation="read_committed")
    forged = [offset for offset in found if offset not in committed and offset not in log.aborted]
    assert not [offset for offset in forged if offset < undamaged], "taken back by an abort that nobody appended"
    assert FORGER not in {one.producer_id for one in partition.producers()}, "a producer that never was"
    partition.close()
    salvaged = log.open(recovery="salvage")
    assert {one.offset: one.value for one in contents(salvaged, 0)} == found
    salvaged.close()


def check_dump(log: Log) -> None:
    """Check that `dump` shows only records that were appended."""
    for path in log_files(log.folder):
        for document, _ in segment_lines(str(path), path.read_bytes(), 0, records=True, report=lambda _: None):
            if document["type"] == "record" and document["offset"] in log.truth:
                value = document["value"]
                assert not (isinstance(value, str) and value.startswith(FORGED.decode())), document
            elif document["type"] == "batch":
                assert document["base_offset"] in {one.base_offset for one in log.placed}, document
                assert document["producer_id"] != FORGER, document


def check_scrubber(log: Log, hits: list[Placed]) -> None:
    """Check that the scrubber reports damage of sealed segments at the start of a batch, and never within a value."""
    scrubber = Scrubber(NoSyncFileSystem(), lambda: [ScrubTarget("t", 0, str(log.folder))], 1 << 40)
    for now_ms in (0, 1000, 2000):
        scrubber.scrub(now_ms)
    findings = scrubber.report().findings
    scrubber.close()
    begins = {(str(one.path), one.position): one.base_offset for one in log.placed}
    for one in findings:
        assert begins.get((one.path, one.position)) == one.base_offset, one
    for hit in hits:
        told = [(one.base_offset, one.end_offset) for one in findings if one.path == str(hit.path)]
        assert is_inside(hit.base_offset, told) or hit.path == log_files(log.folder)[-1]


def check_verify_and_repair(log: Log, hits: list[Placed]) -> None:
    """Check that `verify` reports the damage at its place, and that after `repair` only appended records exist."""
    found = inspect_partition(NoSyncFileSystem(), str(log.folder), "t", 0, log.config(), Tally())
    bases = {(one.path, one.position): one.base_offset for one in log.placed}
    for segment in found.segments:
        for position, base in zip(segment.positions, segment.base_offsets, strict=True):
            assert bases.get((Path(segment.path), position)) == base, "a batch that was never appended"
    cuts = [(Path(cut.path), cut.position, cut.end_position) for cut in found.cuts]
    for hit in hits:
        assert any(path == hit.path and begin <= hit.position < end for path, begin, end in cuts), (
            "damage was not found"
        )
    repair_partition(NoSyncFileSystem(), str(log.folder), "t", 0, log.config, clock=FakeClock())
    again = inspect_partition(NoSyncFileSystem(), str(log.folder), "t", 0, log.config(), Tally())
    assert not again.is_damaged, again.findings
    partition = log.open()
    left = {one.offset: one.value for one in contents(partition, 0)}
    lost = [(one.base_offset, one.end_offset) for one in partition.lost_ranges()]
    assert left.items() <= log.truth.items()
    assert all(offset in left or is_inside(offset, lost) for offset in log.truth)
    partition.close()


def check_everything(log: Log, hits: list[Placed], *, indexes: bool) -> None:
    """Check the guarantees of every caller; ``repair`` comes last."""
    if not indexes:
        delete_indexes(log.folder)
    check_dump(log)
    check_scrubber(log, hits)
    check_reads(log, hits)
    check_verify_and_repair(log, hits)


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("indexes", [True, False], ids=["indexes", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_batch_that_holds_batches(tmp_path: Path, damage: str, kind: str, indexes: bool) -> None:
    """Its values are not read as batches: in the first or the last batch, in a sealed or the active segment."""
    choose = random.Random(f"{damage} {kind} {indexes}")
    for place in choose.sample(("first", "middle", "last", "active", "end"), 2):
        log = _log_of(tmp_path / place, kind, choose.choice((3, 3000)))
        sealed = [one for one in log.placed if one.path == log_files(log.folder)[0]]
        active = [one for one in log.placed if one.path == log_files(log.folder)[-1]]
        hit = {"first": sealed[0], "middle": sealed[1], "last": sealed[-1], "active": active[0], "end": active[-1]}[
            place
        ]
        DAMAGE[damage](hit, choose)
        check_everything(log, [hit], indexes=indexes)


def _log_of(folder: Path, kind: str, filler: int) -> Log:
    """Create two segments of four batches each, all with batches in their values."""
    log = Log.__new__(Log)
    log.folder, log.truth, log.aborted = folder, {}, set()
    folder.mkdir()
    log.settings = {"fsync": "never", "index_interval_bytes": 1, "segment_records": 12, "compression_type": "none"}
    partition = log.open()
    for _ in range(8):
        base = partition.log_end_offset
        values = values_with([KINDS[kind](base, 3)], 3, b"A" * filler)
        partition.append(values, timestamps=[1000] * 3)
        log.truth.update(zip(range(base, base + 3), values, strict=True))
    log.end_offset = partition.log_end_offset
    log.placed = [log._placed(batch) for batch in partition.read(0)]
    partition.close()
    return log


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_random_logs_and_random_damage(memory_path: Path, seed: int) -> None:
    """One to three batches are damaged, some in a row; segments, codecs, indexes and limits are random."""
    for number in range(ROUNDS // 3):
        check_one(memory_path / str(number), f"{seed}/{number}")


def check_one(folder: Path, seed: str) -> None:
    """Create, damage and check one log."""
    choose = random.Random(seed)
    settings = {
        "compression_type": choose.choice(["none", "lz4"]),
        "index_interval_bytes": choose.choice([1, 200, 4096]),
        "segment_records": choose.choice([9, 40, 200]),
        "max_message_bytes": choose.choice([12_000, 30_000, 1 << 20]),
    }
    log = Log(folder, choose, **settings)
    first = choose.randrange(len(log.placed))
    hits = log.placed[first : first + choose.randint(1, 3)]
    names = [choose.choice(list(DAMAGE)) for _ in hits]
    for hit, name in zip(hits, names, strict=True):
        if not unpack_header(hit.path.read_bytes()[hit.position : hit.position + HEADER_SIZE])["attributes"] & CONTROL:
            DAMAGE[name](hit, choose)
    whole = {(hit.path, hit.position) for hit in hits if _is_whole(hit)}
    hits = [hit for hit in hits if (hit.path, hit.position) not in whole]
    try:
        check_everything(log, hits, indexes=choose.random() < 0.7)
    except AssertionError as error:
        pytest.fail(f"SEGMENTLOG_SEED={seed.partition('/')[0]}: log {seed}, {settings}, {names}: {error}")


def _is_whole(hit: Placed) -> bool:
    """Return whether the batch is unchanged after all, for example zeros written over zeros."""
    from segmentlog.errors import CorruptBatch
    from segmentlog.format.batch import check_payload, decode_header

    view = memoryview(hit.path.read_bytes())
    try:
        check_payload(view, hit.position, decode_header(view, hit.position))
    except CorruptBatch:
        return False
    return True
