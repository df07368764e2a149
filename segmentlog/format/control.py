"""Control batches: transaction markers, written into each partition of a transaction when it ends.

A control batch has the attributes CONTROL and TRANSACTIONAL, the id and epoch of the producer,
no sequence, and one record::

    key      version u16 (0), type u16 (0 abort, 1 commit), little-endian, as in Kafka
    value    version u16 (0), coordinator epoch u32 (always 0: no broker is elected),
             first offset u64: of the first batch that the transaction wrote to this partition

Kafka's markers have no first offset. With it the log alone determines which batches an abort removes,
even if all other files are lost. Readers never receive a control record.
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
    """The end of a transaction in one partition. Its batches have offsets in ``[first_offset, offset)``."""

    producer_id: int
    producer_epoch: int
    committed: bool
    first_offset: int
    offset: int
    """Offset of the marker itself."""


def encode_marker(
    producer_id: int, producer_epoch: int, *, committed: bool, first_offset: int, now_ms: int
) -> EncodedBatch:
    """Return a control batch that has no offset yet."""
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
    """Return the marker of a control batch; None for an unknown version or kind. Raise ValueError if malformed."""
    batch = RecordBatch(header, payload)
    keys, values = batch.keys, batch.values
    key, value = (keys[0], values[0]) if len(keys) == 1 else (None, None)
    if key is None or value is None or len(key) != _KEY.size or len(value) != _VALUE.size:
        raise ValueError("a control batch that is not a transaction marker")
    version, kind = _KEY.unpack(key)
    if version != _VERSION or kind not in (_ABORT, _COMMIT):
        return None
    _, _, first_offset = _VALUE.unpack(value)
    return Marker(header.producer_id, header.producer_epoch, kind == _COMMIT, first_offset, header.base_offset)
