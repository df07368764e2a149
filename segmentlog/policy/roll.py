"""When an active segment is sealed and the next one begun."""

from __future__ import annotations

from segmentlog.config import TopicConfig
from segmentlog.format.index import MAX_RELATIVE


def should_roll(
    config: TopicConfig,
    *,
    size_bytes: int,
    record_count: int,
    next_relative_offset: int,
    age_ms: int,
    batch_bytes: int,
    batch_records: int,
) -> bool:
    """Whether a batch must start a new segment. An empty segment takes any batch, however large.

    ``age_ms`` is the time since the segment's first append.
    """
    if size_bytes == 0:
        return False
    if size_bytes + batch_bytes > config.segment_bytes:
        return True
    if config.segment_records is not None and record_count + batch_records > config.segment_records:
        return True
    if next_relative_offset + batch_records > MAX_RELATIVE:
        return True
    return age_ms >= config.segment_ms
