"""The record batch on disk, little-endian: the unit of writes, compression, checksums and atomicity.

    magic               4s    "SLB" and the format version, 1
    attributes          u16   bits 0-2 codec (`codecs`), 3 timestamp type (1 LogAppendTime),
                              4 transactional, 5 control, 6 base_timestamp is a delete horizon,
                              7 the payload is a Kafka batch (`wire`) instead of columns
    producer_epoch      i16   -1 without a producer id
    base_offset         i64   offset of the first record
    partition_epoch     u32   epoch of the partition when it was appended
    last_offset_delta   u32   offset of the last record, relative to base_offset
    base_timestamp      i64   timestamp of the first record, milliseconds; or the time from
                              which compaction may remove the tombstones of this batch
    max_timestamp       i64   largest timestamp of the batch
    producer_id         i64   -1 without one
    base_sequence       i32   -1 without one
    record_count        u32
    payload_size        u32   bytes that follow this header
    raw_size            u32   bytes of the payload once decompressed
    timestamps_size     u32   columns, see `segmentlog.format.columns`; the size of the offset
    keys_size           u32   deltas is raw_size minus these four sizes
    values_size         u32
    headers_size        u32
    payload_checksum    u64   XXH3-64 of the stored payload; of a Kafka batch only from byte 16 on
    header_checksum     u64   XXH3-64 of the 88 bytes above
    ------------------- 96 bytes, then the payload

The payload does not depend on the offset of the batch. An appender encodes, compresses and hashes it
before it takes the partition's lock. Under the lock it only fills in ``base_offset`` and
``partition_epoch`` (and the timestamps, under LogAppendTime) and hashes the header again. For the same
reason a batch can be moved into another log.

A Kafka batch as the payload is an exception: its first 16 bytes contain its base offset, length and epoch.
They are derived from this header, excluded from the payload checksum, and compared with this header.
``raw_size`` and ``values_size`` equal ``payload_size``, and the other column sizes are 0.

A batch may cover offsets after its last record, and may have no records. Compaction leaves no hole
between the offsets of one batch and the next: a hole is always damage.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import xxhash

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch_codecs import BY_NUMBER, CODEC_NONE

MAGIC: Final = b"SLB\x01"
HEADER_SIZE: Final = 4 + 2 + 2 + 8 + 4 + 4 + 8 + 8 + 8 + 4 + 7 * 4 + 8 + 8
CHECKED_SIZE: Final = HEADER_SIZE - 8

CODEC_MASK: Final = 0b111
LOG_APPEND_TIME: Final = 1 << 3
TRANSACTIONAL: Final = 1 << 4
CONTROL: Final = 1 << 5
DELETE_HORIZON: Final = 1 << 6
KAFKA_LAYOUT: Final = 1 << 7
MIRRORED: Final = CODEC_MASK | LOG_APPEND_TIME | TRANSACTIONAL | DELETE_HORIZON
"""The attributes that mean the same in Kafka batches, and are repeated in both headers. The library writes control
batches in its own layout."""

MAX_RAW_SIZE: Final = 512 << 20
"""Largest payload, decompressed, that a header may claim. `max.message.bytes` cannot be set above it."""

_MAX_OFFSET: Final = 2**63 - 2
# The offset after this one must fit in an i64, too: it is the next offset of the last batch.
NO_VALUES: Final = b"\x90"
"""The payload of a batch without records: an empty MessagePack array."""

PLACE_SIZE: Final = 16
"""Bytes at the start of a Kafka batch: base offset i64, bytes that follow this field i32, leader epoch i32."""
_PLACE = struct.Struct(">qiI")
WIRE_HEADER_SIZE: Final = 61
LEADER_EPOCH_MASK: Final = 2**31 - 1
"""Bits of the partition epoch that a Kafka batch contains: Kafka's epochs are signed."""
_WIRE_CODECS: Final = 5
_WIRE_DELTA_MAX: Final = 2**31 - 1
_WIRE_RAW_MAX: Final = 128 << 20
_WIRE_RAW_FACTOR: Final = 4
RECORD_SIZE_MIN: Final = 7
"""Bytes of the smallest record of a Kafka batch: its length, attributes, two deltas, two sizes, a count."""

HEADER: Final = struct.Struct("<4sHhqIIqqqiIIIIIIIQQ")
_PAYLOAD_SIZE = struct.Struct("<I")
_PAYLOAD_SIZE_POSITION = 56
_PAYLOAD_CHECKSUM_POSITION = 80
CHECKSUM: Final = struct.Struct("<Q")
assert HEADER.size == HEADER_SIZE == 96

hash_of: Final = xxhash.xxh3_64_intdigest


class BatchHeader(msgspec.Struct, frozen=True, gc=False):
    """The fields of a batch header, in the order of the module's docstring."""

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
        """Bytes of the whole batch, including the header."""
        return HEADER_SIZE + self.payload_size

    @property
    def next_offset(self) -> int:
        """The offset after the last offset of the batch."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_kafka(self) -> bool:
        """Whether the payload is a Kafka batch."""
        return bool(self.attributes & KAFKA_LAYOUT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    @property
    def delete_horizon_ms(self) -> int | None:
        """Time from which compaction may remove the tombstones of this batch; None until compaction has set it."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON else None

    @property
    def offset_deltas_size(self) -> int:
        """Bytes of the offset deltas: the decompressed payload without the other columns."""
        return self.raw_size - self.timestamps_size - self.keys_size - self.values_size - self.headers_size


def pack_header(header: BatchHeader) -> bytes:
    """Return the bytes of a header, with a new checksum."""
    packed = HEADER.pack(*msgspec.structs.astuple(header))[:CHECKED_SIZE]
    return packed + CHECKSUM.pack(hash_of(packed))


def decode_header(view: memoryview, position: int, path: str = "") -> BatchHeader:
    """Return the header at ``position`` after checking its checksum and its fields. Raise `CorruptBatch`.

    A payload that extends beyond ``view`` (a truncated batch) raises `CorruptBatch`, too.
    """
    available = len(view) - position
    if available < HEADER_SIZE:
        raise CorruptBatch(path, position, f"a batch header of {HEADER_SIZE} bytes", f"{max(available, 0)} bytes")
    header = BatchHeader(*HEADER.unpack_from(view, position))
    if header.magic != MAGIC:
        raise CorruptBatch(path, position, f"magic {MAGIC!r}", repr(header.magic))
    digest = hash_of(view[position : position + CHECKED_SIZE])
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
    if flaw := header_flaw(header):
        raise CorruptBatch(path, position, "a header without contradictions", flaw, header.base_offset)
    return header


def claimed_header(view: memoryview, position: int) -> BatchHeader | None:
    """Return the bytes at ``position`` as a header, unchecked, or None if there are too few."""
    if len(view) - position < HEADER_SIZE:
        return None
    return BatchHeader(*HEADER.unpack_from(view, position))


def has_valid_checksum(header: BatchHeader) -> bool:
    """Return whether the header's own checksum is right. It does not cover the payload."""
    packed = HEADER.pack(*msgspec.structs.astuple(header))
    return header.magic == MAGIC and hash_of(packed[:CHECKED_SIZE]) == header.header_checksum


def header_with_payload(view: memoryview, position: int, size_bytes: int, checksum: int) -> BatchHeader | None:
    """Return the damaged header at ``position`` as it was before the damage, or None.

    The repair succeeds if only the magic, the payload size and the payload checksum were damaged: the header checksum
    must be right for a payload of ``size_bytes`` with this ``checksum``.
    """
    head = bytearray(view[position : position + HEADER_SIZE])
    head[: len(MAGIC)] = MAGIC
    _PAYLOAD_SIZE.pack_into(head, _PAYLOAD_SIZE_POSITION, size_bytes)
    CHECKSUM.pack_into(head, _PAYLOAD_CHECKSUM_POSITION, checksum)
    if hash_of(head[:CHECKED_SIZE]) != CHECKSUM.unpack_from(head, CHECKED_SIZE)[0]:
        return None
    return BatchHeader(*HEADER.unpack(head))


def header_flaw(header: BatchHeader) -> str | None:
    """Return an impossible claim of a header whose checksum is right, or None. This bounds what a reader allocates."""
    if header.attributes & KAFKA_LAYOUT:
        return _wire_header_flaw(header)
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


def _wire_header_flaw(header: BatchHeader) -> str | None:
    """Return an impossible claim of a header that precedes a Kafka batch, or None."""
    stored, count, last = header.payload_size, header.record_count, header.last_offset_delta
    if header.codec >= _WIRE_CODECS or header.attributes & CONTROL:
        return f"attributes {header.attributes:#06x} of a Kafka batch"
    if not (header.raw_size == header.values_size == stored >= WIRE_HEADER_SIZE) or stored > MAX_RAW_SIZE:
        return f"a Kafka batch of {stored} bytes with {header.raw_size} bytes raw and {header.values_size} of values"
    if header.timestamps_size or header.keys_size or header.headers_size:
        return "sizes of columns, and a Kafka batch as the payload"
    if count * RECORD_SIZE_MIN > wire_raw_max(stored):
        return f"{count} records in a Kafka batch of {stored} bytes"
    if not 0 <= header.base_offset <= _MAX_OFFSET - last or not count <= last + 1 <= _WIRE_DELTA_MAX + 1:
        return f"{count} records from offset {header.base_offset} on, the last at +{last}"
    return None


def wire_raw_max(stored: int) -> int:
    """Return how many bytes the header and the decompressed records of a Kafka batch of ``stored`` bytes may take.

    A Kafka batch does not contain its decompressed size. A reader needs all records in memory, and a client can
    compress gigabytes into a megabyte.
    """
    return min(MAX_RAW_SIZE, max(_WIRE_RAW_MAX, _WIRE_RAW_FACTOR * stored))


def check_payload(view: memoryview, position: int, header: BatchHeader, path: str = "") -> memoryview:
    """Return the stored payload of the batch at ``position`` after checking its checksum. Raise `CorruptBatch`."""
    start = position + HEADER_SIZE
    payload = view[start : start + header.payload_size]
    is_kafka = header.attributes & KAFKA_LAYOUT
    digest = hash_of(payload[PLACE_SIZE:] if is_kafka else payload)
    if digest != header.payload_checksum:
        raise CorruptBatch(
            path,
            start,
            f"payload checksum {header.payload_checksum:#018x}",
            f"{digest:#018x}",
            header.base_offset,
        )
    if is_kafka:
        place = _PLACE.unpack_from(payload)
        said = header.base_offset, header.payload_size - 12, header.partition_epoch & LEADER_EPOCH_MASK
        if place != said:
            wanted, found = (f"base offset {at[0]}, length {at[1]} and epoch {at[2]}" for at in (said, place))
            raise CorruptBatch(path, start, wanted, found, header.base_offset)
    return payload


def decompress(header: BatchHeader, payload: memoryview) -> memoryview:
    """Return the columns of a batch whose payload was checked. Raise ValueError for a forged payload."""
    if header.codec == CODEC_NONE:
        return payload
    raw = BY_NUMBER[header.codec].decompress(payload, header.raw_size)
    if len(raw) != header.raw_size:
        raise ValueError(f"{len(raw)} bytes decompressed where the header says {header.raw_size}")
    return memoryview(raw)
