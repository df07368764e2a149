"""How far a query is behind its topics.

Spark's Python sources have no metrics of their own, and no description but the name of Spark's class. What a query's
progress does tell is where its last micro-batch ended, and where the topics ended when it was planned.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.quantities import format_size
from segmentlog.records import TopicPartition
from segmentlog.spark.offset_ranges import Positions, from_json
from segmentlog.spark.store_opener import Place, open_store, place_of

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class Behind(msgspec.Struct, frozen=True):
    """What a query has not yet processed of what was there for it."""

    path: str
    offsets: dict[TopicPartition, int]
    """How many, by partition, without those in lost ranges; 0 for those that it is through with."""
    size_bytes: int
    """About so many, as they are stored."""

    @property
    def total(self) -> int:
        """Of all partitions."""
        return sum(self.offsets.values())

    def metrics(self) -> dict[str, str]:
        """The metrics of Spark's Kafka source, under their names there."""
        counts = list(self.offsets.values()) or [0]
        return {
            "minOffsetsBehindLatest": str(min(counts)),
            "maxOffsetsBehindLatest": str(max(counts)),
            "avgOffsetsBehindLatest": str(sum(counts) / len(counts)),
            "estimatedTotalBytesBehindLatest": str(self.size_bytes),
        }

    def __str__(self) -> str:
        topics = ", ".join(sorted({tp.topic for tp in self.offsets})) or "no topic"
        waiting = sum(map(bool, self.offsets.values()))
        where = f", in {waiting} of {len(self.offsets)} partitions" if waiting else ""
        return f"segmentlog {self.path}: {topics}: {self.total} offsets ({format_size(self.size_bytes)}) behind{where}"


def behind(progress: Mapping[str, Any] | None, path: str) -> Behind:
    """How far a query is behind the topics of the store at ``path``, of all its sources that read them.

    Args:
        progress: `StreamingQuery.lastProgress`, or `progress` of what a `StreamingQueryListener` is told.
        path: the store's folder, or the URL of the object store that the query reads it from.
    """
    offsets: dict[TopicPartition, int] = {}
    size_bytes = 0.0
    with open_store(Place(place_of(path))) as store:
        for source in (progress or {}).get("sources", []):
            ends, latest = _positions(source.get("endOffset")).offsets, _positions(source.get("latestOffset"))
            for tp, end in latest.offsets.items():
                if tp in ends:
                    with contextlib.suppress(UnknownTopic):  # it was deleted since, and made anew perhaps
                        log = store.open_partition(*tp, latest.topic_ids.get(tp.topic))
                        size_bytes += _bytes_between(log, ends[tp], end)
                        offsets[tp] = log.count_offsets(ends[tp], end)
    return Behind(without_secrets(path), dict(sorted(offsets.items())), round(size_bytes))


def _positions(text: str | None) -> Positions:
    try:
        return from_json(json.loads(text or "{}") or {})
    except (ValueError, SegmentlogError):  # of another kind of source
        return Positions({}, {})


def _bytes_between(log: Partition, start: int, end: int) -> float:
    """Estimate the stored bytes: of each segment the share that its offsets in the interval have of all its offsets."""
    size = 0.0
    for segment in log.segments():
        inside = log.count_offsets(max(start, segment.base_offset), min(end, segment.end_offset))
        if inside:
            size += segment.size_bytes * inside / log.count_offsets(segment.base_offset, segment.end_offset)
    return size
