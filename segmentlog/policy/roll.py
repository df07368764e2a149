"""When an active segment is sealed and the next one begun."""

from __future__ import annotations

from segmentlog.config import TopicConfig
from segmentlog.format.index_file import MAX_RELATIVE


def should_roll(
    config: TopicConfig, size_bytes: int, offset_span: int, age_ms: int, batch_bytes: int, batch_records: int
) -> bool:
    """Whether a batch must start a new segment. An empty segment takes any batch, however large.

    ``size_bytes``, ``offset_span`` and ``age_ms`` are the segment's: its bytes, the offsets
    from its base to its end, the time since its first append.
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
