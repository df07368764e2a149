"""Finished batches that are read back, of either layout, to be placed elsewhere."""

from __future__ import annotations

from segmentlog.format.batch import CODEC_MASK, HEADER_SIZE, KAFKA_LAYOUT, check_payload, decode_header
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.wire_batch import stored_wire


def read_encoded(view: memoryview, position: int, path: str = "") -> EncodedBatch:
    """The finished batch that lies at ``position``, checked, to be placed in another log. Raises `CorruptBatch`.

    Its payload is not copied: ``view`` must last until it is written.
    """
    header = decode_header(view, position, path)
    payload = check_payload(view, position, header, path)
    if header.attributes & KAFKA_LAYOUT:
        return stored_wire(header, payload)
    attributes = header.attributes & ~CODEC_MASK
    return EncodedBatch(
        bytearray(view[position : position + HEADER_SIZE]), payload, header.record_count, header.last_offset_delta,
        header.max_timestamp, attributes, header.producer_id,
    )  # fmt: skip
