"""Decide when a log is compacted, which segments a pass cleans, and when tombstones are removed.

The parts of a log in the order of offsets, and what a pass does with each::

    log start          cleaned offset           map end          cleanable end      log end
        |  clean section     |   dirty, in the map  |  dirty, next map  |  never cleaned yet |
        |  drop what has a   |   keep the last of   |      (next        |  active segment,   |
        |  newer version in  |   each key           |       pass)       |  too young, open   |
        |  the map           |                      |                   |  transactions      |

A tombstone that a pass keeps gets a *delete horizon*, `delete.retention.ms` after the pass. A consumer that
starts to read the log before the horizon sees the tombstone. The first pass after the horizon removes it (KIP-534).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from segmentlog.config import TopicConfig
from segmentlog.format.index_file import MAX_RELATIVE
from segmentlog.quantities import UNLIMITED_MS
from segmentlog.records import LostRange, SegmentInfo


class Dirt(NamedTuple):
    """The clean and dirty parts of a log in stored bytes, and the age of the oldest dirty segment."""

    clean_bytes: int
    dirty_bytes: int
    oldest_ms: int | None
    """Largest timestamp of the first dirty segment; None if no segment is dirty."""

    @property
    def ratio(self) -> float:
        """The dirty ratio, which a pass compares with `min.cleanable.dirty.ratio`."""
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0


def cleanable_end(
    config: TopicConfig, segments: Iterable[SegmentInfo], dirty_offset: int, stable_offset: int, now_ms: int
) -> int:
    """Return the offset before which a pass may clean.

    This is the base offset of the first segment that is active, is too young or ends after ``stable_offset``; or
    ``stable_offset`` if that is lower. ``segments`` must be the segments that end after ``dirty_offset``, ascending,
    the active segment last.
    """
    end = dirty_offset
    for segment in segments:
        too_young = segment.max_timestamp > now_ms - config.min_compaction_lag_ms if config.min_compaction_lag_ms else 0
        if segment.active or too_young or segment.end_offset > stable_offset:
            return max(end, min(segment.base_offset, stable_offset))
        end = segment.end_offset
    return end


def measure_dirt(segments: Iterable[SegmentInfo], dirty_offset: int, end_offset: int) -> Dirt:
    """Return clean and dirty bytes below ``end_offset``. A partly dirty segment counts as dirty."""
    clean = dirty = 0
    oldest_ms = None
    for segment in segments:
        if segment.end_offset <= dirty_offset:
            clean += segment.size_bytes
        elif segment.base_offset < end_offset:
            dirty += segment.size_bytes
            oldest_ms = segment.max_timestamp if oldest_ms is None else oldest_ms
    return Dirt(clean, dirty, oldest_ms)


def why_due(config: TopicConfig, dirt: Dirt, due_ms: int, now_ms: int) -> str | None:
    """Return the reason to run a compaction pass now, or None.

    From ``due_ms`` on, a pass removes records even if nothing was appended since the last one; 0 for never.
    """
    if dirt.dirty_bytes and dirt.ratio >= config.min_cleanable_dirty_ratio:
        return f"{dirt.ratio:.0%} is dirty (min.cleanable.dirty.ratio)"
    lag_ms = config.max_compaction_lag_ms
    if dirt.oldest_ms is not None and lag_ms != UNLIMITED_MS and now_ms - dirt.oldest_ms > lag_ms:
        return "a record is older than max.compaction.lag.ms"
    if due_ms and now_ms >= due_ms:
        return "tombstones or records have passed their time"
    return None


def group_segments(
    segments: Sequence[SegmentInfo], segment_bytes: int, lost: Sequence[LostRange]
) -> Iterator[list[SegmentInfo]]:
    """Yield groups of adjacent segments. Each group fits into one segment of ``segment_bytes`` even if no record is
    removed.

    A lost range ends a group, because a segment cannot contain its offsets.
    """
    ends = {lost_range.end_offset for lost_range in lost}
    run: list[SegmentInfo] = []
    size = 0
    for segment in segments:
        too_large = size + segment.size_bytes > segment_bytes
        too_long = run and segment.end_offset - run[0].base_offset > MAX_RELATIVE
        if run and (too_large or too_long or segment.base_offset in ends):
            yield run
            run, size = [], 0
        run.append(segment)
        size += segment.size_bytes
    if run:
        yield run


def delete_horizon(config: TopicConfig, now_ms: int) -> int:
    """Return the time from which a later pass may remove a tombstone that the pass at ``now_ms`` keeps."""
    return min(now_ms + config.delete_retention_ms, UNLIMITED_MS)
