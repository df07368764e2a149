"""The batch that a header and its payload are, of whichever layout."""

from __future__ import annotations

from segmentlog.format.batch import KAFKA_LAYOUT, BatchHeader
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire_record_batch import WireRecordBatch


def record_batch(
    header: BatchHeader, payload: memoryview, topic: str = "", partition: int = 0, path: str = "", position: int = 0
) -> RecordBatch:
    """A batch whose checksums were checked, for a reader: nothing of its payload is looked at yet."""
    kind = WireRecordBatch if header.attributes & KAFKA_LAYOUT else RecordBatch
    return kind(header, payload, topic=topic, partition=partition, path=path, position=position)
