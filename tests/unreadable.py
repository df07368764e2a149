"""Batches whose checksums are right and whose records do not decode, appended past every check of records."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import NamedTuple

from batches import NOW_MS, batch_bytes, forge
from wire import CODECS, Sent, encoded, foreign, forged

from segmentlog.format.batch import WIRE_HEADER_SIZE
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.stored_batch import read_stored_batch
from segmentlog.log.partition import Partition

COUNT = 3
"""The number of records that each batch announces."""
REMEDY = "segmentlog repair --drop-unreadable"
_RECORDS = [Sent(b"k%d" % n, b"lost %d" % n, NOW_MS + n) for n in range(COUNT)]


class Span(NamedTuple):
    """The offsets ``[base, end)`` of a batch."""

    base: int
    end: int


def _of_kafka(payload: bytes, codec: int = 0) -> bytes:
    made = foreign(_RECORDS)[:WIRE_HEADER_SIZE] + payload
    return forged(made, attributes=codec, batch_length=len(made) - 12)


def _cut_short() -> bytes:
    return _of_kafka(gzip.compress(foreign(_RECORDS)[WIRE_HEADER_SIZE:])[:-9], CODECS["gzip"])


def _columns(**fields: int) -> EncodedBatch:
    whole = batch_bytes([one.value for one in _RECORDS], now_ms=NOW_MS)
    if fields:
        return read_stored_batch(memoryview(forge(whole, **fields)), 0)
    payload = whole[96:]
    assert payload[0] == 0x90 | COUNT
    return read_stored_batch(memoryview(forge(whole, payload=bytes((0x90 | COUNT - 1,)) + payload[1:])), 0)


KINDS: dict[str, Callable[[], EncodedBatch]] = {
    "kafka, fewer records": lambda: encoded(
        forged(foreign(_RECORDS[:-1]), record_count=COUNT, last_offset_delta=COUNT - 1)
    ),
    "kafka, garbage": lambda: encoded(_of_kafka(b"\xff" * 30)),
    "kafka, gzip cut short": lambda: encoded(_cut_short()),
    "kafka, one offset for all": lambda: encoded(_of_kafka(foreign(_RECORDS[:1])[WIRE_HEADER_SIZE:] * COUNT)),
    "columns": lambda: _columns(),
}  # fmt: skip
ONE_OF_EACH = ["kafka, fewer records", "columns"]


def append_unreadable(log: Partition, kind: str = "kafka, fewer records") -> Span:
    """Append an unreadable batch, and return its offsets."""
    base = log.append_batches([KINDS[kind]()])
    return Span(base, log.log_end_offset)


def append_around(log: Partition, kind: str = "kafka, fewer records", *, keyed: bool = False) -> Span:
    """Append "before" and "after" with an unreadable batch between them, and return the offsets of that batch."""
    log.append([b"before"], keys=[b"a"] if keyed else None, timestamps=[NOW_MS - 1000])
    span = append_unreadable(log, kind)
    log.append([b"after"], keys=[b"b"] if keyed else None, timestamps=[NOW_MS + 1000])
    return span


def appended(log: Partition, *kinds: str) -> Iterator[Span]:
    """Append an unreadable batch of each kind, with a record after each."""
    for kind in kinds:
        yield append_unreadable(log, kind)
        log.append([kind.encode()])
