"""Control records: how a transaction ended, written into each partition that it wrote to.

A control batch is a batch with the attributes CONTROL and TRANSACTIONAL, the id and epoch of
the producer, no sequence, and one record::

    key      version u16 (0), type u16 (0 abort, 1 commit), little-endian, as in Kafka
    value    version u16 (0), coordinator epoch u32 (always 0: here no broker is elected),
             first offset u64: of the first batch that the transaction wrote to this partition

The first offset is more than Kafka keeps there: with it the log alone says which batches an
abort takes back, whatever else is missing. Readers are never handed a control record.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from segmentlog.format.batch import CONTROL, TRANSACTIONAL, BatchHeader
from segmentlog.format.batch_codecs import UNCOMPRESSED
from segmentlog.format.encode import EncodedBatch, encode_batch
from segmentlog.format.record_batch import RecordBatch

_KEY = struct.Struct("<HH")
_VALUE = struct.Struct("<HIQ")
_VERSION: Final = 0
_ABORT: Final = 0
_COMMIT: Final = 1


class Marker(msgspec.Struct, frozen=True, gc=False):
    """The end of a transaction in one partition: its batches lie in ``[first_offset, offset)``."""

    producer_id: int
    producer_epoch: int
    committed: bool
    first_offset: int
    offset: int
    """Of the marker itself."""


def encode_marker(
    producer_id: int, producer_epoch: int, *, committed: bool, first_offset: int, now_ms: int
) -> EncodedBatch:
    """A control batch that has no offset yet."""
    return encode_batch(
        [_VALUE.pack(_VERSION, 0, first_offset)],
        [_KEY.pack(_VERSION, _COMMIT if committed else _ABORT)],
        now_ms=now_ms,
        compression=UNCOMPRESSED,
        attributes=CONTROL | TRANSACTIONAL,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )


def decode_marker(header: BatchHeader, payload: memoryview) -> Marker | None:
    """What a control batch says; None for one of another version or kind. Raises ValueError when it is malformed."""
    batch = RecordBatch(header, payload)
    keys, values = batch.keys, batch.values
    key, value = (keys[0], values[0]) if len(keys) == 1 else (None, None)
    if key is None or value is None or len(key) != _KEY.size or len(value) != _VALUE.size:
        raise ValueError(f"a control batch of {len(keys)} records that is no end of a transaction")
    version, kind = _KEY.unpack(key)
    if version != _VERSION or kind not in (_ABORT, _COMMIT):
        return None
    _, _, first_offset = _VALUE.unpack(value)
    return Marker(header.producer_id, header.producer_epoch, kind == _COMMIT, first_offset, header.base_offset)
