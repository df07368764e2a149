"""Convert any stored batch to the Kafka batches that a server sends to clients.

    a Kafka batch       sent as it is stored
    columns             converted, uncompressed
    a marker            Kafka's control batch: key version i16 (0), type i16 (0 abort, 1 commit);
                        value version i16 (0), coordinator epoch i32
    no records          an empty batch, like those that Kafka's compaction leaves

Kafka's offset deltas have 31 bits, ours 32: a batch with larger deltas becomes two batches.
"""

from __future__ import annotations

import contextlib
import struct
from typing import Final

import numpy as np

from segmentlog.format.batch import LOG_APPEND_TIME, TRANSACTIONAL, BatchHeader
from segmentlog.format.batch_codecs import CODEC_NONE
from segmentlog.format.columns import MalformedColumn, Values
from segmentlog.format.control import Marker, decode_marker
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.splice import Table, as_table
from segmentlog.format.wire import Buffer
from segmentlog.format.wire_encode import Columns, empty_wire_batch, encode_wire_batch
from segmentlog.format.wire_pieces import Blobs, find_blobs
from segmentlog.records import Headers
from segmentlog.speedups import COMPILED

_REACH: Final = 2**31
"""Largest number of offsets that a Kafka batch can cover."""
_BLOBS_MIN: Final = 256
"""Smallest number of records for which finding all items at once is faster than creating objects."""
_CONTROL_KEY = struct.Struct(">hh")
_CONTROL_VALUE = struct.Struct(">hi")
_CONTROL: Final = 1 << 5
_KEPT_ATTRIBUTES: Final = LOG_APPEND_TIME | TRANSACTIONAL


def to_wire_batches(batch: RecordBatch, codec: int = CODEC_NONE) -> list[Buffer]:
    """Return Kafka batches with the records, offsets, epoch and producer fields of ``batch``.

    For a slice of a batch, the result contains all records of the slice, may contain earlier records, and contains no
    later record. A stored Kafka batch is returned as a view of the memory map. Raise `UnreadableBatch` for columns that
    do not decode.
    """
    header = batch.header
    if header.is_kafka and not batch.is_cut:
        return [batch.payload]
    if header.is_control:
        marker = _marker_of(batch)
        if marker is not None:
            return [control_wire_batch(marker, header.partition_epoch, int(batch.timestamps[0]))]
    if header.is_control or not len(batch):
        return _without_records(header, header.base_offset, batch.next_offset)
    return _convert_columns(batch, header.base_offset, batch.next_offset, codec)


def control_wire_batch(marker: Marker, epoch: int, timestamp: int, coordinator_epoch: int = 0) -> bytes:
    """Return the control batch that Kafka would write for a marker. ``epoch`` is the partition epoch."""
    return encode_wire_batch(
        [_CONTROL_KEY.pack(0, int(marker.committed))],
        [_CONTROL_VALUE.pack(0, coordinator_epoch)],
        None,
        np.array([timestamp], np.int64),
        base_offset=marker.offset,
        epoch=epoch,
        attributes=TRANSACTIONAL | _CONTROL,
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
    )


def _marker_of(batch: RecordBatch) -> Marker | None:
    """Return the marker of a control batch, or None if it is malformed or of an unknown kind."""
    try:
        return decode_marker(batch.header, batch.payload)
    except ValueError:
        return None


def _convert_columns(batch: RecordBatch, base_offset: int, end_offset: int, codec: int) -> list[Buffer]:
    """Convert a batch of columns to Kafka batches that together cover the offsets ``[base_offset, end_offset)``.

    A batch that covers more offsets than a Kafka batch can is split, and its parts are converted separately.
    """
    header = batch.header
    offsets = batch.offsets
    if end_offset - base_offset > _REACH:
        middle = base_offset + _REACH
        at = int(np.searchsorted(offsets, np.int64(middle)))
        first, second = batch.slice(0, at), batch.slice(at)
        rest = (
            _convert_columns(second, middle, end_offset, codec)
            if len(second)
            else _without_records(header, middle, end_offset)
        )
        if not len(first):
            return [*_without_records(header, base_offset, middle), *rest]
        return [*_convert_columns(first, base_offset, middle, codec), *rest]
    try:
        encoded = encode_wire_batch(
            *_columns_of(batch),
            batch.timestamps,
            offsets - np.int64(base_offset),
            base_offset=base_offset,
            epoch=header.partition_epoch,
            attributes=header.attributes & _KEPT_ATTRIBUTES,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            last_offset_delta=end_offset - base_offset - 1,
            codec=codec,
        )
    except MalformedColumn:
        _ = batch.keys, batch.values, batch.headers  # raises CorruptBatch, which names the file and the position
        raise
    return [encoded]


def _columns_of(
    batch: RecordBatch,
) -> tuple[Values | Table | None, Values | Table | Blobs | Columns, list[Headers] | None]:
    """Return keys, values and headers as `encode_wire_batch` takes them. Raise `CorruptBatch`."""
    count = batch.header.record_count
    if COMPILED and not batch.header.is_kafka and len(batch) == count:
        return None, Columns(batch.keys_column, batch.values_column, batch.headers_column, count), None
    return *_keys_and_values(batch), batch.headers if batch.has_headers else None


def _keys_and_values(batch: RecordBatch) -> tuple[Values | Table | None, Values | Table | Blobs]:
    """Return keys and values without a Python object per item if possible: for a whole batch of byte strings."""
    header = batch.header
    if not header.is_kafka and len(batch) == header.record_count:
        with contextlib.suppress(MalformedColumn):  # the properties below raise an error that names file and position
            values = as_table(batch.values_column, header.record_count)
            keys = as_table(batch.keys_column, header.record_count) if values is not None and header.keys_size else None
            if values is not None and (keys is not None or not header.keys_size):
                return keys, values
            if not header.headers_size and header.record_count >= _BLOBS_MIN:
                blobs = find_blobs(batch.blobs_columns, header.keys_size, header.record_count)
                if blobs is not None:
                    return None, blobs
    return (batch.keys if batch.has_keys else None), batch.values


def _without_records(header: BatchHeader, base_offset: int, end_offset: int) -> list[Buffer]:
    return [
        empty_wire_batch(
            start,
            min(end_offset - start, _REACH) - 1,
            header.partition_epoch,
            attributes=header.attributes & TRANSACTIONAL,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
        )
        for start in range(base_offset, end_offset, _REACH)
    ]
