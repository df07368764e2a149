"""Which old segments go: sizes and times in, a log start offset and the reasons out.

    retention.ms         the segment's newest record is so old
    retention.bytes      without the segment the partition is still so large
    retention.segments   so many sealed segments stand behind it
    retention.closed.ms  it was sealed so long ago
    log start            all of it lies below the log start offset (a trim that a crash cut short)

Segments go from the oldest on, and the first that stays keeps all behind it, as in Kafka. A
segment is as old as its newest record, but never younger than the moment it was last written
to: a record stamped far in the future would keep it for ever. Where no record has a time, that moment counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from segmentlog.config import TopicConfig
from segmentlog.quantities import UNLIMITED, format_duration_ms, format_size
from segmentlog.records import SegmentInfo


class Candidate(NamedTuple):
    """A segment as retention looks at it. ``written_ms`` is when its file was last written to."""

    segment: SegmentInfo
    written_ms: int

    @property
    def newest_ms(self) -> int:
        """The time that `retention.ms` counts from."""
        return newest_ms(self.segment.max_timestamp, self.written_ms)


def newest_ms(max_timestamp: int, written_ms: int) -> int:
    """How old a segment is by its records; by when it was written where none is left, or none has a time.

    Kafka's clients may send records without a time (-1), and an index says 0 for the largest of those.
    """
    return min(max_timestamp, written_ms) if max_timestamp > 0 else written_ms


class Expired(NamedTuple):
    """A segment that retention removes, and why."""

    segment: SegmentInfo
    why: str


def is_bounded(config: TopicConfig) -> bool:
    """Whether retention may ever remove anything."""
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
    """The segments that go, oldest first. ``candidates`` is read no further than to the first that stays.

    ``size_bytes`` is that of the whole partition, asked for when there is a limit to it. The
    active segment, if it comes last, goes by age and by size as others do: its owner rolls first.
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
    """Which segments of a folder lie below the log start: their files wait to be deleted, or a crash brought them back.

    ``bases`` ascend. One below ``end_base`` ends there at the latest, whichever names are missing in between.
    """
    before = [base for base in bases if base < end_base]
    return [base for base, following in pairwise([*before, end_base]) if following <= log_start_offset]


def active_is_due(config: TopicConfig, age_ms: int) -> bool:
    """Whether an active segment that holds records, the first of them so old, is to be rolled though nobody appends.

    As Kafka does, no later than `max.compaction.lag.ms`, so that compaction can reach it.
    """
    limit_ms = config.segment_ms
    if config.compacts:
        limit_ms = min(limit_ms, config.max_compaction_lag_ms)
    return age_ms >= limit_ms
