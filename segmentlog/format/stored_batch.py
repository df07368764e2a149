"""Read a stored batch (columns or a Kafka batch), so that it can be appended to another log."""

from __future__ import annotations

from segmentlog.format.batch import CODEC_MASK, HEADER_SIZE, KAFKA_LAYOUT, check_payload, decode_header
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.wire_batch import stored_wire_batch


def read_stored_batch(view: memoryview, position: int, path: str = "") -> EncodedBatch:
    """Return the batch at ``position``, checked, for an append to another log. Raise `CorruptBatch`.

    The payload is not copied: ``view`` must stay valid until the batch is written.
    """
    header = decode_header(view, position, path)
    payload = check_payload(view, position, header, path)
    if header.attributes & KAFKA_LAYOUT:
        return stored_wire_batch(header, payload)
    attributes = header.attributes & ~CODEC_MASK
    return EncodedBatch(
        bytearray(view[position : position + HEADER_SIZE]), payload, header.record_count, header.last_offset_delta,
        header.max_timestamp, attributes, header.producer_id,
    )  # fmt: skip
