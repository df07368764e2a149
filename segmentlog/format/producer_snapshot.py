"""Files with the state of a log's producers, and with the aborted transactions of a segment.

    magic          4s    "SLP" and the version, 1: a snapshot; "SLT": aborted transactions
    body_size      u32
    checksum       u64   XXH3-64 of the 8 bytes above and the body
    -------------- 16 bytes, then the body: MessagePack

Snapshot (``<base>.snapshot``): an array of `ProducerEntry`, fields in order: the state at the
beginning of the segment. Aborted transactions (``<base>.txnindex``): the size in bytes of the
segment when the file was built, and an array of (producer id, first offset, offset of the marker).

State at the end of the log (``producers``, magic "SLE"): the partition epoch, base offset and inode
of the active segment, the position in it up to which it was read, and an array of `ProducerEntry`.

A file whose checksum is wrong is treated as missing: all of them are rebuilt from the log.
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
"""Sequences wrap to 0 at this number, as in Kafka."""
NAMED_ID_END: Final = 1 << 61
"""The library's named producers have ids below this number. A log retains such an id for as long as the name uses it:
a job that runs once a year continues its sequence."""
OLD_IDS: Final = range(1 << 61, 1 << 62)
"""Ids that earlier versions assigned to all other producers."""
CLIENT_IDS: Final = range(1 << 62, 3 << 61)
"""Ids that a server assigns to clients without a transactional id; see `segmentlog.transactions.assigned_ids`."""
STORE_IDS: Final = range(3 << 61, 1 << 63)
"""Ids of the library's producers without a name, and of the server's clients with a transactional id."""
KEPT_RUNS: Final = 5
"""Number of runs retained per producer. Duplicates of batches in these runs are detected. (Kafka retains 5 batches.)"""


class SequenceRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Records of a producer with consecutive sequences and offsets."""

    sequence: int
    offset: int
    count: int


class ProducerEntry(msgspec.Struct, frozen=True, array_like=True):
    """The state of one producer in a log."""

    producer_id: int
    epoch: int
    runs: tuple[SequenceRun, ...] = ()
    """The latest runs, oldest first."""
    wraps: int = 0
    """How often the sequence has wrapped at 2^31."""
    transaction_offset: int = -1
    """Offset of the first batch of its open transaction; -1 without an open transaction."""
    next_offset: int = 0
    """The offset after its last batch or marker."""
    appended_ms: int = 0
    """Wall clock at its last append, or later. The expiry of the producer's state counts from it."""
    restarts_sequence: bool = False
    """Whether the next sequence must be 0: a marker has started a new epoch, and the producer counts from 0 in each
    epoch."""

    @property
    def last_sequence(self) -> int:
        """The sequence of the producer's last record; -1 before its first record."""
        if not self.runs:
            return -1
        last = self.runs[-1]
        return (last.sequence + last.count - 1) % SEQUENCE_END

    @property
    def next_sequence(self) -> int:
        """The sequence that the producer's next record must have."""
        return (self.last_sequence + 1) % SEQUENCE_END

    @property
    def last_number(self) -> int:
        """`last_sequence` as if sequences did not wrap: the number of records that the producer has appended, minus
        one.
        """
        return self.wraps * SEQUENCE_END + self.last_sequence


class AbortedTransaction(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An aborted transaction.

    Its batches are the transactional batches of the producer in ``[first_offset, last_offset]``.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    """Offset of the abort marker."""


class MalformedProducerFile(ValueError):
    """The bytes are not a file of the expected kind: truncated, or damaged."""


class _AbortedFile(msgspec.Struct, array_like=True):
    segment_bytes: int
    aborted: list[AbortedTransaction]


class EndSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """State of all producers of a log that ended at byte ``position`` of the segment ``base_offset``."""

    epoch: int
    base_offset: int
    inode: int
    """Inode of the segment's file: a copy of the file has a different inode."""
    position: int
    entries: list[ProducerEntry]


_end_decoder = msgspec.msgpack.Decoder(EndSnapshot)
_entries_decoder = msgspec.msgpack.Decoder(list[ProducerEntry])
_aborted_decoder = msgspec.msgpack.Decoder(_AbortedFile)


def encode_snapshot(entries: list[ProducerEntry]) -> bytes:
    """Return the bytes of a snapshot."""
    return _sealed(_SNAPSHOT_MAGIC, msgspec.msgpack.encode(entries))


def decode_snapshot(data: bytes) -> list[ProducerEntry]:
    """Return the entries of a snapshot. Raise `MalformedProducerFile`."""
    try:
        return _entries_decoder.decode(_opened(_SNAPSHOT_MAGIC, data))
    except msgspec.DecodeError as error:
        raise MalformedProducerFile(str(error)) from None


def encode_end(snapshot: EndSnapshot) -> bytes:
    """Return the bytes of a ``producers`` file."""
    return _sealed(_END_MAGIC, msgspec.msgpack.encode(snapshot))


def decode_end(data: bytes) -> EndSnapshot:
    """Return the contents of a ``producers`` file. Raise `MalformedProducerFile`."""
    try:
        return _end_decoder.decode(_opened(_END_MAGIC, data))
    except msgspec.DecodeError as error:
        raise MalformedProducerFile(str(error)) from None


def encode_aborted(segment_bytes: int, aborted: list[AbortedTransaction]) -> bytes:
    """Return the bytes of a ``.txnindex`` file."""
    return _sealed(_ABORTED_MAGIC, msgspec.msgpack.encode(_AbortedFile(segment_bytes, aborted)))


def decode_aborted(data: bytes) -> tuple[int, list[AbortedTransaction]]:
    """Return (size of the segment when the file was built, the aborted transactions). Raise `MalformedProducerFile`."""
    try:
        found = _aborted_decoder.decode(_opened(_ABORTED_MAGIC, data))
    except msgspec.DecodeError as error:
        raise MalformedProducerFile(str(error)) from None
    return found.segment_bytes, found.aborted


def _sealed(magic: bytes, body: bytes) -> bytes:
    prefix = _PREFIX.pack(magic, len(body))
    return prefix + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prefix + body)) + body


def _opened(magic: bytes, data: bytes) -> bytes:
    if len(data) < _BODY_POSITION or data[:4] != magic:
        raise MalformedProducerFile(f"magic {data[:4]!r}, expected {magic!r}")
    size = _PREFIX.unpack_from(data)[1]
    body = data[_BODY_POSITION:]
    digest = xxhash.xxh3_64_intdigest(data[: _PREFIX.size] + body)
    if len(body) != size or _CHECKSUM.unpack_from(data, _PREFIX.size)[0] != digest:
        raise MalformedProducerFile("the checksum does not match")
    return body
