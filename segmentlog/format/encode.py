"""Encode batches: build, compress and hash them outside any lock, before they have an offset.

`format.batch` describes header and payload. An append fills in the fields that depend on the offset later, in place, at
their positions in the header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from segmentlog.errors import RecordTooLarge
from segmentlog.format.batch import (
    CHECKED_SIZE,
    CHECKSUM,
    CODEC_MASK,
    DELETE_HORIZON,
    HEADER,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    MAGIC,
    MAX_RAW_SIZE,
    NO_VALUES,
    TRANSACTIONAL,
    hash_of,
)
from segmentlog.format.batch_codecs import CODEC_NONE, LZ4, Compression
from segmentlog.format.columns import ColumnSizes, Int64Array, Values, encode_columns, encode_numbers
from segmentlog.format.header_edit import gap_batch
from segmentlog.records import Headers

_COMPRESS_FROM_BYTES: Final = 256
# A smaller payload is stored raw: LZ4 takes 2 us to set up, other codecs more, and they save almost nothing.

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

Payload = bytes | bytearray | memoryview


class EncodedBatch:
    """A batch that is encoded, compressed and hashed, and has no offset yet."""

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
        """Return the header for this offset and epoch. ``append_time_ms`` becomes the timestamp of every record."""
        header = self._header
        _PLACE.pack_into(header, _PLACE_POSITION, base_offset, epoch)
        if append_time_ms is not None:
            header[4] |= LOG_APPEND_TIME
            _TIMES.pack_into(header, _TIMES_POSITION, append_time_ms, append_time_ms)
            self.max_timestamp = append_time_ms
        CHECKSUM.pack_into(header, CHECKED_SIZE, hash_of(header[:CHECKED_SIZE]))
        return header

    def set_producer(self, producer_id: int, producer_epoch: int, base_sequence: int, *, transactional: bool) -> None:
        """Set the producer's fields, which were not known when the batch was encoded."""
        self.producer_id = producer_id
        self.attributes = (self.attributes & ~TRANSACTIONAL) | (TRANSACTIONAL if transactional else 0)
        codec = self._header[_ATTRIBUTES_POSITION] & CODEC_MASK
        _ATTRIBUTES_AND_EPOCH.pack_into(self._header, _ATTRIBUTES_POSITION, self.attributes | codec, producer_epoch)
        _PRODUCER_AND_SEQUENCE.pack_into(self._header, _PRODUCER_POSITION, producer_id, base_sequence)

    def extend_to(self, last_offset_delta: int) -> None:
        """Extend the batch to offsets after its last record, whose records compaction removed."""
        self.last_offset_delta = last_offset_delta
        _LAST_OFFSET_DELTA.pack_into(self._header, _LAST_OFFSET_DELTA_POSITION, last_offset_delta)


def encode_batch(
    values: Values,
    keys: Values | None = None,
    timestamps: Int64Array | None = None,
    headers: Sequence[Headers] | None = None,
    *,
    now_ms: int,
    compression: Compression = LZ4,
    limit_bytes: int = MAX_RAW_SIZE,
    scratch: bytearray | None = None,
    offset_deltas: npt.NDArray[np.uint32] | None = None,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    delete_horizon_ms: int | None = None,
) -> EncodedBatch:
    """Encode at least one record as a batch. The caller has checked the columns.

    ``timestamps`` default to ``now_ms`` for all records; with ``delete_horizon_ms`` they must be given.
    ``scratch`` is a buffer to build the columns in. An uncompressed batch continues to use that buffer:
    write the batch before the next call that uses the buffer.

    Raise `RecordTooLarge` when the columns take more than ``limit_bytes`` uncompressed, and
    `InvalidRecord` for a value that cannot be encoded.
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
        scratch, sizes, count, last_offset_delta, base_timestamp, max_timestamp, compression, attributes, producer_id,
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
    compression: Compression = LZ4,
    limit_bytes: int = MAX_RAW_SIZE,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    delete_horizon_ms: int | None = None,
) -> EncodedBatch:
    """Return a batch of encoded columns, taken from other batches. An empty column is absent.

    Raise `RecordTooLarge` when the columns take more than ``limit_bytes`` uncompressed.
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
        raw, sizes, count, last_offset_delta, base_timestamp, max_timestamp, compression, attributes, producer_id,
        producer_epoch, base_sequence,
    )  # fmt: skip


def _reduced(timestamps: Int64Array, delete_horizon_ms: int | None) -> tuple[Int64Array | None, int, int]:
    """Return (timestamps, or None if all equal the base timestamp; the base timestamp; the largest timestamp)."""
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
    compression: Compression,
    attributes: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
) -> EncodedBatch:
    """Compress and hash the columns, and return the batch with its header."""
    raw_size = len(raw)
    payload: bytes | bytearray = raw
    used_codec = CODEC_NONE
    if compression.codec.number != CODEC_NONE and raw_size >= _COMPRESS_FROM_BYTES:
        compressed = compression.compress(raw)
        if len(compressed) < raw_size:
            payload, used_codec = compressed, compression.codec.number
    header = bytearray(
        HEADER.pack(
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
            hash_of(payload),
            0,
        )
    )
    return EncodedBatch(header, payload, count, last_offset_delta, max_timestamp, attributes, producer_id)


def encode_gap(offset_count: int) -> EncodedBatch:
    """Return a batch without records that covers ``offset_count`` offsets, 1 to 2^32.

    A restore writes it for offsets whose records are missing.
    """
    header = bytearray(gap_batch(0, offset_count, 0)[:HEADER_SIZE])
    return EncodedBatch(header, NO_VALUES, 0, offset_count - 1, 0)
