"""What a log knows of its producers, as files: snapshots of it, and the aborted transactions of a segment.

    magic          4s    "SLP" and the version, 1: a snapshot; "SLT": aborted transactions
    body_size      u32
    checksum       u64   XXH3-64 of the 8 bytes above and the body
    -------------- 16 bytes, then the body: MessagePack

Snapshot (``<base>.snapshot``): an array of `ProducerEntry`, fields in order: what is known where
the segment begins. Aborted transactions (``<base>.txnindex``): the size in bytes of the segment
that it was made from, and an array of (producer id, first offset, offset of the marker).

At the end of the log (``producers``, magic "SLE"): the partition epoch, base offset and inode of
the active segment, the byte in it up to which it was read, and an array of `ProducerEntry`.

A file that does not check is not there: all are made from the log again.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import xxhash

_SNAPSHOT_MAGIC: Final = b"SLP\x01"
_ABORTED_MAGIC: Final = b"SLT\x01"
_END_MAGIC: Final = b"SLE\x01"
_PREFIX = struct.Struct("<4sI")
_CHECKSUM = struct.Struct("<Q")
_BODY_POSITION: Final = _PREFIX.size + _CHECKSUM.size

SEQUENCE_END: Final = 1 << 31
"""Sequences wrap to 0 here, as Kafka's do."""
NAMED_ID_END: Final = 1 << 61
"""The library's named producers have ids below. A log keeps such an id for as long as a name holds it: a job that runs
once a year continues where it ended."""
OLD_IDS: Final = range(1 << 61, 1 << 62)
"""Ids of all other producers, as earlier versions drew them."""
CLIENT_IDS: Final = range(1 << 62, 3 << 61)
"""Ids that a server assigns to clients without a transactional id; see `segmentlog.transactions.assigned_ids`."""
STORE_IDS: Final = range(3 << 61, 1 << 63)
"""Ids of the library's producers without a name, and of the server's clients with a transactional id."""
KEPT_RUNS: Final = 5
"""How many runs of a producer are remembered: a batch in one of them that comes again is known (Kafka: 5 batches)."""


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records of a producer that follow one another in sequence and in offset."""

    sequence: int
    offset: int
    count: int


class ProducerEntry(msgspec.Struct, frozen=True, array_like=True):
    """What a log knows of one producer."""

    producer_id: int
    epoch: int
    runs: tuple[Run, ...] = ()
    """The last ones, oldest first."""
    wraps: int = 0
    """How often the sequence went past 2^31 - 1."""
    transaction_offset: int = -1
    """Of the first batch of its open transaction; -1 without one."""
    next_offset: int = 0
    """The offset after its last batch, or marker."""
    appended_ms: int = 0
    """Wall clock at its last append, or later: from when on it may be forgotten."""
    begins_anew: bool = False
    """A marker has begun the epoch of a producer that counts from 0 in each: its next sequence is 0, and no other."""

    @property
    def last_sequence(self) -> int:
        """Of its last record; -1 before the first."""
        if not self.runs:
            return -1
        last = self.runs[-1]
        return (last.sequence + last.count - 1) % SEQUENCE_END

    @property
    def next_sequence(self) -> int:
        """What the next record's has to be."""
        return (self.last_sequence + 1) % SEQUENCE_END

    @property
    def last_number(self) -> int:
        """`last_sequence` as if it never wrapped: with one less than how many records it has appended."""
        return self.wraps * SEQUENCE_END + self.last_sequence


class AbortedTransaction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Batches of this producer in ``[first_offset, last_offset]`` were taken back."""

    producer_id: int
    first_offset: int
    last_offset: int
    """Of the marker that says so."""


class Malformed(ValueError):
    """Bytes that are no file of this kind: cut short, or damaged."""


class _AbortedFile(msgspec.Struct, array_like=True):
    segment_bytes: int
    aborted: list[AbortedTransaction]


class EndSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """What was known when the log ended at byte ``position`` of the segment ``base_offset``."""

    epoch: int
    base_offset: int
    inode: int
    """Of the segment's file: that of a copy is another one."""
    position: int
    entries: list[ProducerEntry]


_end_decoder = msgspec.msgpack.Decoder(EndSnapshot)
_entries_decoder = msgspec.msgpack.Decoder(list[ProducerEntry])
_aborted_decoder = msgspec.msgpack.Decoder(_AbortedFile)


def encode_snapshot(entries: list[ProducerEntry]) -> bytes:
    """The bytes of a snapshot."""
    return _sealed(_SNAPSHOT_MAGIC, msgspec.msgpack.encode(entries))


def decode_snapshot(data: bytes) -> list[ProducerEntry]:
    """The entries. Raises `Malformed`."""
    try:
        return _entries_decoder.decode(_opened(_SNAPSHOT_MAGIC, data))
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from None


def encode_end(snapshot: EndSnapshot) -> bytes:
    """The bytes of a ``producers`` file."""
    return _sealed(_END_MAGIC, msgspec.msgpack.encode(snapshot))


def decode_end(data: bytes) -> EndSnapshot:
    """What such a file says. Raises `Malformed`."""
    try:
        return _end_decoder.decode(_opened(_END_MAGIC, data))
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from None


def encode_aborted(segment_bytes: int, aborted: list[AbortedTransaction]) -> bytes:
    """The bytes of a ``.txnindex`` file."""
    return _sealed(_ABORTED_MAGIC, msgspec.msgpack.encode(_AbortedFile(segment_bytes, aborted)))


def decode_aborted(data: bytes) -> tuple[int, list[AbortedTransaction]]:
    """(size of the segment that it was made from, the transactions). Raises `Malformed`."""
    try:
        found = _aborted_decoder.decode(_opened(_ABORTED_MAGIC, data))
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from None
    return found.segment_bytes, found.aborted


def _sealed(magic: bytes, body: bytes) -> bytes:
    prefix = _PREFIX.pack(magic, len(body))
    return prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix + body)) + body


def _opened(magic: bytes, data: bytes) -> bytes:
    if len(data) < _BODY_POSITION or data[:4] != magic:
        raise Malformed(f"magic {data[:4]!r} where {magic!r} should be")
    size = _PREFIX.unpack_from(data)[1]
    body = data[_BODY_POSITION:]
    digest = xxhash.xxh3_64_intdigest(data[: _PREFIX.size] + body)
    if len(body) != size or _CHECKSUM.unpack_from(data, _PREFIX.size)[0] != digest:
        raise Malformed("the checksum does not match")
    return body
