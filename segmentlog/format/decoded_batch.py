"""Construct the `RecordBatch` for a header and its payload: columns, or a Kafka batch."""

from __future__ import annotations

from segmentlog.format.batch import KAFKA_LAYOUT, BatchHeader
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire_record_batch import WireRecordBatch


def record_batch(
    header: BatchHeader, payload: memoryview, topic: str = "", partition: int = 0, path: str = "", position: int = 0
) -> RecordBatch:
    """Return a batch whose checksums were checked, for a reader. Its payload is decoded later, on first use."""
    kind = WireRecordBatch if header.attributes & KAFKA_LAYOUT else RecordBatch
    return kind(header, payload, topic=topic, partition=partition, path=path, position=position)
