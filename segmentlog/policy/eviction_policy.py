"""Decide which segments are evicted from the local disk. Pure: sizes and times in, segments out.

    local.retention.ms     evict a segment when its newest record is older than this
    local.retention.bytes  evict a segment if at least this many bytes stay local without it

The oldest segments are evicted first. The first segment that stays keeps all later ones, as in Kafka. Evicted segments
are skipped and do not count as local bytes. A segment whose current content is not uploaded stays, whatever its age,
and keeps all later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from segmentlog.config import TopicConfig
from segmentlog.quantities import UNLIMITED


class EvictionCandidate(NamedTuple):
    """A sealed segment as the eviction policy sees it.

    ``newest_ms`` is as in `retention.Candidate`; ``is_shipped`` means that the object store has exactly its bytes.
    """

    base_offset: int
    size_bytes: int
    newest_ms: int
    is_remote: bool
    is_shipped: bool


def is_tiered(config: TopicConfig) -> bool:
    """Return whether the topic's configuration can ever cause an eviction."""
    return (
        config.remote_storage_enable
        and not config.effective_local_retention_ms == config.effective_local_retention_bytes == UNLIMITED
    )


def evictable_segments(
    config: TopicConfig, sealed: Sequence[EvictionCandidate], active_bytes: int, now_ms: int
) -> Iterator[EvictionCandidate]:
    """Yield the segments to evict, oldest first. ``active_bytes`` is the size of the active segment."""
    if not is_tiered(config):
        return
    left_bytes = active_bytes + sum(segment.size_bytes for segment in sealed if not segment.is_remote)
    for segment in sealed:
        if segment.is_remote or not segment.size_bytes:
            continue
        left_bytes -= segment.size_bytes
        is_old = (
            config.effective_local_retention_ms != UNLIMITED
            and now_ms - segment.newest_ms > config.effective_local_retention_ms
        )
        is_much = (
            config.effective_local_retention_bytes != UNLIMITED and left_bytes >= config.effective_local_retention_bytes
        )
        if not segment.is_shipped or not (is_old or is_much):
            return
        yield segment
