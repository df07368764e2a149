"""Decide which old segments retention deletes, and why.

    retention.ms         the segment's newest record is older than this
    retention.bytes      without the segment, the partition still has at least this size
    retention.segments   at least this many sealed segments follow it
    retention.closed.ms  the segment was sealed longer ago than this
    log start            all its offsets are below the log start offset (a crash interrupted a trim)

Retention deletes segments from the oldest on and stops at the first that it keeps, as in Kafka. The age of a segment is
the age of its newest record. If that record has no timestamp, or its timestamp is after the last write to the segment,
the time of the last write counts instead: a timestamp far in the future would otherwise keep the segment forever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from segmentlog.config import TopicConfig
from segmentlog.quantities import UNLIMITED, format_duration_ms, format_size
from segmentlog.records import SegmentInfo


class Candidate(NamedTuple):
    """A segment that retention considers. ``written_ms`` is the time of the last write to its file."""

    segment: SegmentInfo
    written_ms: int

    @property
    def newest_ms(self) -> int:
        """The time from which `retention.ms` counts."""
        return newest_ms(self.segment.max_timestamp, self.written_ms)


def newest_ms(max_timestamp: int, written_ms: int) -> int:
    """Return the largest timestamp of a segment, or the time of its last write if that is earlier.

    A segment without records, or without timestamps, also has the time of its last write. Kafka clients may send
    records without a timestamp (-1), for which the index has 0.
    """
    return min(max_timestamp, written_ms) if max_timestamp > 0 else written_ms


class Expired(NamedTuple):
    """A segment that retention deletes, and the reason."""

    segment: SegmentInfo
    why: str


def is_bounded(config: TopicConfig) -> bool:
    """Return whether the config sets any limit at which retention deletes segments."""
    limits = (config.retention_segments, config.retention_closed_ms)
    no_limit = config.retention_ms == config.retention_bytes == UNLIMITED and limits == (None, None)
    return config.deletes and not no_limit


def expired_segments(
    config: TopicConfig,
    candidates: Iterator[Candidate],
    now_ms: int,
    *,
    size_bytes: Callable[[], int],
    sealed_count: int,
) -> Iterator[Expired]:
    """Yield the segments to delete, oldest first. Reads ``candidates`` only up to the first segment to keep.

    ``size_bytes`` returns the size of the whole partition, and is called only if `retention.bytes` is set. If the
    active segment is the last candidate, it can expire by age and size, too: the caller then rolls it before the
    deletion.
    """
    if not config.deletes:
        return
    surplus = sealed_count - config.retention_segments if config.retention_segments is not None else 0
    left_bytes = size_bytes() if config.retention_bytes != UNLIMITED else 0
    for number, candidate in enumerate(candidates):
        segment = candidate.segment
        if segment.active and not segment.size_bytes:
            return
        left_bytes -= segment.size_bytes
        if number < surplus and not segment.active:
            why = f"more than {config.retention_segments} sealed segments (retention.segments)"
        elif config.retention_ms != UNLIMITED and now_ms - candidate.newest_ms > config.retention_ms:
            why = f"newest record older than {format_duration_ms(config.retention_ms)} (retention.ms)"
        elif config.retention_bytes != UNLIMITED and left_bytes >= config.retention_bytes:
            why = f"partition larger than {format_size(config.retention_bytes)} (retention.bytes)"
        elif (
            config.retention_closed_ms is not None
            and not segment.active
            and now_ms - candidate.written_ms > config.retention_closed_ms
        ):
            closed = format_duration_ms(config.retention_closed_ms)
            why = f"sealed more than {closed} ago (retention.closed.ms)"
        else:
            return
        yield Expired(segment, why)


def deleted_segments(bases: Sequence[int], log_start_offset: int, end_base: int) -> list[int]:
    """Return the base offsets of the segments in a folder that are completely below the log start offset.

    Their files are marked for deletion, or a crash has undone their deletion. ``bases`` must ascend. The last segment
    below ``end_base`` ends at ``end_base`` at the latest.
    """
    before = [base for base in bases if base < end_base]
    return [base for base, following in pairwise([*before, end_base]) if following <= log_start_offset]


def active_is_due(config: TopicConfig, age_ms: int) -> bool:
    """Return whether an active segment must be rolled even without an append.

    ``age_ms`` is the age of its first record; the limit is `segment.ms`. In a compacted topic, as in Kafka, it is at
    most `max.compaction.lag.ms`, so that compaction can clean the segment.
    """
    limit_ms = config.segment_ms
    if config.compacts:
        limit_ms = min(limit_ms, config.max_compaction_lag_ms)
    return age_ms >= limit_ms
