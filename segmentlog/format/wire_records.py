"""Decompress the records of a Kafka batch, check them, and return their fields.

`segmentlog.speedups.records` describes the layout and defines which records are valid. If it is compiled, it checks all
records and finds their fields in one pass. If not, it does so only for small batches; numpy (`wire_numpy`) decodes
larger ones. Both refuse the same records.
"""

from __future__ import annotations

from segmentlog.format.batch import RECORD_SIZE_MIN, WIRE_HEADER_SIZE, wire_raw_max
from segmentlog.format.columns import MalformedColumn
from segmentlog.format.varints import varint
from segmentlog.format.wire_codecs import PADDING, decompress_records
from segmentlog.format.wire_numpy import NumpyRecords
from segmentlog.format.wire_scan import DELTA_MAX, MalformedRecord, ScannedRecords
from segmentlog.speedups import COMPILED

__all__ = ["MalformedRecord", "WireRecords", "decode_records", "varint"]

WireRecords = ScannedRecords | NumpyRecords
"""The checked records of one batch: `count`, `size_bytes`, and columns of their fields."""

_SCANNED_MAX = 16
"""Largest batch, in records, for the interpreted scan: it takes 4 us a record, numpy 40 us plus 1.5 us a record."""


def decode_records(
    payload: memoryview, codec: int, count: int, last_offset_delta: int | None = None, *,
    limit_bytes: int | None = None, wants_fields: bool = True,
) -> WireRecords:  # fmt: skip
    """Return the ``count`` records in the ``payload`` of a Kafka batch, which begins with Kafka's header.

    Their offset deltas must ascend and lie between 0 and ``last_offset_delta`` (None: 2^31 - 1). With ``wants_fields``
    false the compiled scan does not fill the table of fields, which is faster for a caller that only checks.

    Raise `MalformedRecord` for the first malformed record, `MalformedColumn` if the payload is too small for ``count``
    records, and ValueError for a payload that cannot be decompressed. Raise `TooManyBytes` if the records exceed
    ``limit_bytes``, or the limit of all readers (`wire_raw_max`).
    """
    limit = wire_raw_max(len(payload)) - WIRE_HEADER_SIZE
    if limit_bytes is not None:
        limit = min(limit, limit_bytes)
    data = decompress_records(codec, payload[WIRE_HEADER_SIZE:], limit)
    size = len(data) - PADDING
    if count * RECORD_SIZE_MIN > size:
        raise MalformedColumn(f"the batch claims {count} records in {size} bytes")
    last = DELTA_MAX if last_offset_delta is None else last_offset_delta
    if COMPILED or count <= _SCANNED_MAX:
        return ScannedRecords(data, size, count, last, wants_fields=wants_fields)
    return NumpyRecords(data, size, count, last)
