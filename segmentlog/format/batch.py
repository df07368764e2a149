"""A record batch as it lies on disk, little-endian: the unit of write, compression, checksum and atomicity.

    magic               4s    "SLB" and the format version, 1
    attributes          u16   bits 0-2 codec (`codecs`), 3 timestamp type (1 LogAppendTime),
                              4 transactional, 5 control, 6 base_timestamp is a delete horizon
    producer_epoch      i16   -1 without a producer id
    base_offset         i64   offset of the first record
    partition_epoch     u32   epoch of the partition when it was appended
    last_offset_delta   u32   offset of the last record, relative to base_offset
    base_timestamp      i64   timestamp of the first record, milliseconds; or from when on
                              compaction may remove the tombstones of this batch
    max_timestamp       i64   largest timestamp of the batch
    producer_id         i64   -1 without one
    base_sequence       i32   -1 without one
    record_count        u32
    payload_size        u32   bytes that follow this header
    raw_size            u32   bytes of the payload once decompressed
    timestamps_size     u32   columns, see `segmentlog.format.columns`; the offset deltas
    keys_size           u32   take what the other four leave of raw_size
    values_size         u32
    headers_size        u32
    payload_checksum    u64   XXH3-64 of the payload as stored
    header_checksum     u64   XXH3-64 of the 88 bytes above
    ------------------- 96 bytes, then the payload

Nothing in the payload depends on where the batch lands: encoding, compressing and hashing
happen before the partition's lock, and under it only ``base_offset`` and
``partition_epoch`` (and the timestamps, under LogAppendTime) are filled in and the header
hashed again. The same makes a batch movable into another log.

A batch may end behind its last record, and may hold none: compaction leaves no hole between
the offsets of one batch and the next, so that a hole is always damage.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from segmentlog.errors import CorruptBatch, RecordTooLarge
from segmentlog.format.codecs import BY_NUMBER, CODEC_LZ4, CODEC_NONE
from segmentlog.format.columns import ColumnSizes, Int64Array, Values, encode_columns, encode_numbers
from segmentlog.records import Headers

MAGIC: Final = b"SLB\x01"
HEADER_SIZE: Final = 4 + 2 + 2 + 8 + 4 + 4 + 8 + 8 + 8 + 4 + 7 * 4 + 8 + 8
CHECKED_SIZE: Final = HEADER_SIZE - 8

CODEC_MASK: Final = 0b111
LOG_APPEND_TIME: Final = 1 << 3
TRANSACTIONAL: Final = 1 << 4
CONTROL: Final = 1 << 5
DELETE_HORIZON: Final = 1 << 6

MAX_RAW_SIZE: Final = 512 << 20
"""Largest payload, decompressed, that a header may claim. `max.message.bytes` cannot be set above it."""

_MAX_OFFSET: Final = 2**63 - 2
# So that the offset after it is an i64 as well.
_NO_VALUES: Final = b"\x90"
# An empty MessagePack array.
_COMPRESS_FROM_BYTES: Final = 256
# A smaller payload is stored raw: LZ4 takes 2 us to set up and finds next to nothing to share, and others more.

_HEADER = struct.Struct("<4sHhqIIqqqiIIIIIIIQQ")
_PLACE = struct.Struct("<qI")
_PLACE_POSITION = 8
_TIMES = struct.Struct("<qq")
_LAST_OFFSET_DELTA = struct.Struct("<I")
_LAST_OFFSET_DELTA_POSITION = 20
_TIMES_POSITION = 24
_ATTRIBUTES_AND_EPOCH = struct.Struct("<Hh")
_ATTRIBUTES_POSITION = 4
_PRODUCER_AND_SEQUENCE = struct.Struct("<qi")
_PRODUCER_POSITION = 40
_PAYLOAD_SIZE = struct.Struct("<I")
_PAYLOAD_SIZE_POSITION = 56
_PAYLOAD_CHECKSUM_POSITION = 80
_CHECKSUM = struct.Struct("<Q")
assert _HEADER.size == HEADER_SIZE == 96

_hash = xxhash.xxh3_64_intdigest


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The fields of a header, as the module's docstring lists them."""

    magic: bytes
    attributes: int
    producer_epoch: int
    base_offset: int
    partition_epoch: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    base_sequence: int
    record_count: int
    payload_size: int
    raw_size: int
    timestamps_size: int
    keys_size: int
    values_size: int
    headers_size: int
    payload_checksum: int
    header_checksum: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole batch, header included."""
        return HEADER_SIZE + self.payload_size

    @property
    def next_offset(self) -> int:
        """The offset after the last one of the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def delete_horizon_ms(self) -> int | None:
        """From when on compaction may remove the tombstones of this batch; None before it has set that."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON else None

    @property
    def offset_deltas_size(self) -> int:
        """What the other columns leave of the payload."""
        return self.raw_size - self.timestamps_size - self.keys_size - self.values_size - self.headers_size

    @property
    def column_sizes(self) -> ColumnSizes:
        """Sizes of the columns; those of the offset deltas follow from the others."""
        return ColumnSizes(
            self.offset_deltas_size, self.timestamps_size, self.keys_size, self.values_size, self.headers_size
        )


Payload = bytes | bytearray | memoryview


class EncodedBatch:
    """A finished batch that has no offset yet: encoded, compressed and hashed outside any lock."""

    __slots__ = (
        "_header", "attributes", "last_offset_delta", "max_timestamp", "payload", "producer_id", "record_count",
        "size_bytes",
    )  # fmt: skip

    def __init__(self, header: bytearray, payload: Payload, record_count: int, last_offset_delta: int,
                 max_timestamp: int, attributes: int = 0, producer_id: int = -1) -> None:  # fmt: skip
        self._header = header
        self.attributes = attributes
        self.producer_id = producer_id
        self.payload = payload
        self.record_count = record_count
        self.last_offset_delta = last_offset_delta
        self.max_timestamp = max_timestamp
        self.size_bytes = HEADER_SIZE + len(payload)

    def placed_at(self, base_offset: int, epoch: int, append_time_ms: int | None = None) -> bytearray:
        """The header for this place in a log; ``append_time_ms`` makes it the timestamp of every record."""
        header = self._header
        _PLACE.pack_into(header, _PLACE_POSITION, base_offset, epoch)
        if append_time_ms is not None:
            header[4] |= LOG_APPEND_TIME
            _TIMES.pack_into(header, _TIMES_POSITION, append_time_ms, append_time_ms)
            self.max_timestamp = append_time_ms
        _CHECKSUM.pack_into(header, CHECKED_SIZE, _hash(header[:CHECKED_SIZE]))
        return header

    def stamp(self, producer_id: int, producer_epoch: int, base_sequence: int, *, transactional: bool) -> None:
        """Make it a batch of this producer: it was encoded before anybody knew who would append it."""
        self.producer_id = producer_id
        self.attributes = (self.attributes & ~TRANSACTIONAL) | (TRANSACTIONAL if transactional else 0)
        codec = self._header[_ATTRIBUTES_POSITION] & CODEC_MASK
        _ATTRIBUTES_AND_EPOCH.pack_into(self._header, _ATTRIBUTES_POSITION, self.attributes | codec, producer_epoch)
        _PRODUCER_AND_SEQUENCE.pack_into(self._header, _PRODUCER_POSITION, producer_id, base_sequence)

    def extend_to(self, last_offset_delta: int) -> None:
        """Let the batch end behind its last record: what stood in between was compacted away."""
        self.last_offset_delta = last_offset_delta
        _LAST_OFFSET_DELTA.pack_into(self._header, _LAST_OFFSET_DELTA_POSITION, last_offset_delta)


def encode_batch(
    values: Values,
    keys: Values | None = None,
    timestamps: Int64Array | None = None,
    headers: Sequence[Headers] | None = None,
    *,
    now_ms: int,
    codec: int = CODEC_LZ4,
    limit_bytes: int = MAX_RAW_SIZE,
    scratch: bytearray | None = None,
    offset_deltas: npt.NDArray[np.uint32] | None = None,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    delete_horizon_ms: int | None = None,
) -> EncodedBatch:
    """Encode columns that were checked before. Not empty; ``timestamps`` default to ``now_ms`` for all.

    Raises `RecordTooLarge` when the columns take more than ``limit_bytes`` uncompressed, and
    `InvalidRecord` for a value that cannot be encoded.

    With ``delete_horizon_ms`` there must be ``timestamps``.

    With ``scratch`` the columns are built in that buffer, and an uncompressed batch goes on
    using it: write the batch before the buffer serves the next one.
    """
    if scratch is None:
        scratch = bytearray()
    count = len(values)
    base_timestamp = max_timestamp = now_ms
    if timestamps is not None:
        timestamps, base_timestamp, max_timestamp = _reduced(timestamps, delete_horizon_ms)
    if delete_horizon_ms is not None:
        attributes |= DELETE_HORIZON
    sizes = encode_columns(scratch, values, keys, timestamps, headers, offset_deltas, base_timestamp)
    if len(scratch) > limit_bytes:
        raise RecordTooLarge(len(scratch), limit_bytes)
    last_offset_delta = count - 1 if offset_deltas is None else int(offset_deltas[-1])
    return _finish(
        scratch, sizes, count, last_offset_delta, base_timestamp, max_timestamp, codec, attributes, producer_id,
        producer_epoch, base_sequence,
    )  # fmt: skip


def join_batch(
    keys: bytes,
    values: bytes,
    headers: bytes,
    timestamps: Int64Array,
    offset_deltas: npt.NDArray[np.uint32] | None,
    *,
    count: int,
    codec: int = CODEC_LZ4,
    limit_bytes: int = MAX_RAW_SIZE,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    delete_horizon_ms: int | None = None,
) -> EncodedBatch:
    """A batch of columns that are encoded already (empty: absent), for records cut out of others.

    Raises `RecordTooLarge` when it takes more than ``limit_bytes`` uncompressed.
    """
    column, base_timestamp, max_timestamp = _reduced(timestamps, delete_horizon_ms)
    if delete_horizon_ms is not None:
        attributes |= DELETE_HORIZON
    head, deltas_size, timestamps_size = encode_numbers(column, offset_deltas, base_timestamp)
    raw = b"".join((head, keys, values, headers))
    if len(raw) > limit_bytes:
        raise RecordTooLarge(len(raw), limit_bytes)
    sizes = ColumnSizes(deltas_size, timestamps_size, len(keys), len(values), len(headers))
    last_offset_delta = count - 1 if offset_deltas is None else int(offset_deltas[-1])
    return _finish(
        raw, sizes, count, last_offset_delta, base_timestamp, max_timestamp, codec, attributes, producer_id,
        producer_epoch, base_sequence,
    )  # fmt: skip


def _reduced(timestamps: Int64Array, delete_horizon_ms: int | None) -> tuple[Int64Array | None, int, int]:
    """(the column of timestamps, None where they all equal the base; the base timestamp; the largest)."""
    largest = int(timestamps.max())
    if delete_horizon_ms is not None:
        return timestamps, delete_horizon_ms, largest
    first = int(timestamps[0])
    return (None if first == largest == timestamps.min() else timestamps), first, largest


def _finish(
    raw: bytes | bytearray,
    sizes: ColumnSizes,
    count: int,
    last_offset_delta: int,
    base_timestamp: int,
    max_timestamp: int,
    codec: int,
    attributes: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
) -> EncodedBatch:
    """Compress and hash the columns, and put a header in front."""
    raw_size = len(raw)
    payload: bytes | bytearray = raw
    used_codec = CODEC_NONE
    if codec != CODEC_NONE and raw_size >= _COMPRESS_FROM_BYTES:
        compressed = BY_NUMBER[codec].compress(raw)
        if len(compressed) < raw_size:
            payload, used_codec = compressed, codec
    header = bytearray(
        _HEADER.pack(
            MAGIC,
            attributes | used_codec,
            producer_epoch,
            0,
            0,
            last_offset_delta,
            base_timestamp,
            max_timestamp,
            producer_id,
            base_sequence,
            count,
            len(payload),
            raw_size,
            sizes.timestamps,
            sizes.keys,
            sizes.values,
            sizes.headers,
            _hash(payload),
            0,
        )
    )
    return EncodedBatch(header, payload, count, last_offset_delta, max_timestamp, attributes, producer_id)


def read_encoded(view: memoryview, position: int, path: str = "") -> EncodedBatch:
    """The finished batch that lies at ``position``, checked, to be placed in another log. Raises `CorruptBatch`.

    Its payload is not copied: ``view`` must last until it is written.
    """
    header = decode_header(view, position, path)
    payload = check_payload(view, position, header, path)
    attributes = header.attributes & ~CODEC_MASK
    return EncodedBatch(
        bytearray(view[position : position + HEADER_SIZE]), payload, header.record_count, header.last_offset_delta,
        header.max_timestamp, attributes, header.producer_id,
    )  # fmt: skip


def encoded_gap(offset_count: int) -> EncodedBatch:
    """A batch of so many offsets, 1 to 2^32, and no record: what a log that is restored has no records for."""
    header = bytearray(gap_batch(0, offset_count, 0)[:HEADER_SIZE])
    return EncodedBatch(header, _NO_VALUES, 0, offset_count - 1, 0)


def gap_batch(base_offset: int, next_offset: int, epoch: int) -> bytes:
    """A batch without records: nothing is left of the offsets ``[base_offset, next_offset)``."""
    sizes = (0, 1, 1, 0, 0, 1, 0)
    header = bytearray(
        _HEADER.pack(MAGIC, 0, -1, base_offset, epoch, next_offset - base_offset - 1, 0, 0, -1, -1,
                     *sizes, _hash(_NO_VALUES), 0)
    )  # fmt: skip
    _CHECKSUM.pack_into(header, CHECKED_SIZE, _hash(header[:CHECKED_SIZE]))
    return bytes(header) + _NO_VALUES


def extended_header(header: BatchHeader, last_offset_delta: int) -> bytes:
    """The header of a batch that is copied as it is, but ends behind its last record."""
    fields = msgspec.structs.astuple(msgspec.structs.replace(header, last_offset_delta=last_offset_delta))
    packed = bytearray(_HEADER.pack(*fields))
    _CHECKSUM.pack_into(packed, CHECKED_SIZE, _hash(packed[:CHECKED_SIZE]))
    return bytes(packed)


def emptied(header: BatchHeader) -> tuple[BatchHeader, bytes]:
    """(header, payload) of the batch without its records: its offsets and its producer's numbers are left."""
    empty = msgspec.structs.replace(
        header,
        attributes=header.attributes & ~(CODEC_MASK | DELETE_HORIZON | LOG_APPEND_TIME),
        record_count=0,
        payload_size=1,
        raw_size=1,
        timestamps_size=0,
        keys_size=0,
        values_size=1,
        headers_size=0,
        payload_checksum=_hash(_NO_VALUES),
    )
    return empty, _NO_VALUES


def decode_header(view: memoryview, position: int, path: str = "") -> BatchHeader:
    """The header at ``position``, its checksum and its own claims checked. Raises `CorruptBatch`.

    That the payload lies within ``view`` is checked too: a batch cut short raises.
    """
    available = len(view) - position
    if available < HEADER_SIZE:
        raise CorruptBatch(path, position, f"a batch header of {HEADER_SIZE} bytes", f"{max(available, 0)} bytes")
    header = BatchHeader(*_HEADER.unpack_from(view, position))
    if header.magic != MAGIC:
        raise CorruptBatch(path, position, f"magic {MAGIC!r}", repr(header.magic))
    digest = _hash(view[position : position + CHECKED_SIZE])
    if digest != header.header_checksum:
        raise CorruptBatch(path, position, f"header checksum {header.header_checksum:#018x}", f"{digest:#018x}")
    if header.payload_size > available - HEADER_SIZE:
        raise CorruptBatch(
            path,
            position,
            f"a payload of {header.payload_size} bytes",
            f"{available - HEADER_SIZE} bytes before the end",
            header.base_offset,
        )
    if flaw := flaw_of(header):
        raise CorruptBatch(path, position, "a header that agrees with itself", flaw, header.base_offset)
    return header


def claimed_header(view: memoryview, position: int) -> BatchHeader | None:
    """What the bytes at ``position`` say as a header, right or wrong; None where there are too few."""
    if len(view) - position < HEADER_SIZE:
        return None
    return BatchHeader(*_HEADER.unpack_from(view, position))


def header_holds(header: BatchHeader) -> bool:
    """Whether the header's own checksum is right: it is what was written, wherever its payload ends."""
    packed = _HEADER.pack(*msgspec.structs.astuple(header))
    return header.magic == MAGIC and _hash(packed[:CHECKED_SIZE]) == header.header_checksum


def header_with_payload(view: memoryview, position: int, size_bytes: int, checksum: int) -> BatchHeader | None:
    """The damaged header at ``position`` as it was, if but its magic and what it says of its payload was damaged.

    That is: if its checksum holds with a payload of ``size_bytes`` that has this ``checksum``.
    """
    head = bytearray(view[position : position + HEADER_SIZE])
    head[: len(MAGIC)] = MAGIC
    _PAYLOAD_SIZE.pack_into(head, _PAYLOAD_SIZE_POSITION, size_bytes)
    _CHECKSUM.pack_into(head, _PAYLOAD_CHECKSUM_POSITION, checksum)
    if _hash(head[:CHECKED_SIZE]) != _CHECKSUM.unpack_from(head, CHECKED_SIZE)[0]:
        return None
    return BatchHeader(*_HEADER.unpack(head))


def flaw_of(header: BatchHeader) -> str | None:
    """What a header claims that cannot be, though its checksum is right; bounds what a reader allocates."""
    raw, stored, count = header.raw_size, header.payload_size, header.record_count
    base, last, codec = header.base_offset, header.last_offset_delta, BY_NUMBER.get(header.attributes & CODEC_MASK)
    deltas = raw - (header.timestamps_size + header.keys_size + header.values_size + header.headers_size)
    if codec is None or (codec.number == CODEC_NONE and raw != stored):
        return f"codec {header.codec} with {raw} bytes raw and {stored} stored"
    if raw > MAX_RAW_SIZE or raw > stored * codec.max_ratio:
        return f"{raw} bytes decompressed from {stored}"
    if count > header.values_size or (deltas and deltas != 4 * count) or not (count or raw == header.values_size == 1):
        return f"{count} records in {header.values_size} bytes of values and {deltas} bytes of offset deltas"
    if not 0 <= base <= _MAX_OFFSET - last or last + 1 < count:
        return f"{count} records from offset {base} on, the last at +{last}"
    return None


def check_payload(view: memoryview, position: int, header: BatchHeader, path: str = "") -> memoryview:
    """The stored payload of the batch at ``position``, its checksum checked. Raises `CorruptBatch`."""
    start = position + HEADER_SIZE
    payload = view[start : start + header.payload_size]
    digest = _hash(payload)
    if digest != header.payload_checksum:
        raise CorruptBatch(
            path,
            start,
            f"payload checksum {header.payload_checksum:#018x}",
            f"{digest:#018x}",
            header.base_offset,
        )
    return payload


def decompress(header: BatchHeader, payload: memoryview) -> memoryview:
    """The columns of a batch whose payload was checked. Raises ValueError for a forged one."""
    if header.codec == CODEC_NONE:
        return payload
    raw = BY_NUMBER[header.codec].decompress(payload, header.raw_size)
    if len(raw) != header.raw_size:
        raise ValueError(f"{len(raw)} bytes decompressed where the header says {header.raw_size}")
    return memoryview(raw)
