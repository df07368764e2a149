"""Decide when an active segment is sealed and the next segment created."""

from __future__ import annotations

from segmentlog.config import TopicConfig
from segmentlog.format.index_file import MAX_RELATIVE


def should_roll(
    config: TopicConfig, size_bytes: int, offset_span: int, age_ms: int, batch_bytes: int, batch_records: int
) -> bool:
    """Return whether a batch must start a new segment. An empty segment accepts a batch of any size.

    size_bytes, offset_span  bytes and offsets in the active segment
    age_ms                   time since the first append to it
    """
    if size_bytes == 0:
        return False
    if size_bytes + batch_bytes > config.segment_bytes:
        return True
    if config.segment_records is not None and offset_span + batch_records > config.segment_records:
        return True
    if offset_span + batch_records > MAX_RELATIVE:
        return True
    return age_ms >= config.segment_ms
