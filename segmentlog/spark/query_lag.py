"""Measure the lag of a query: how many records of its topics it has not processed yet.

Spark's Python sources cannot report metrics, and Spark describes them only by the name of its class. But the progress
of a query contains the end of its last micro-batch, and the ends of the topics when that micro-batch was planned.
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
from segmentlog.spark.offset_ranges import Positions, decode_positions
from segmentlog.spark.store_opener import StoreLocation, open_store, resolve_location

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class QueryLag(msgspec.Struct, frozen=True):
    """Lag of one query: the number and size of the records that it has not processed yet."""

    path: str
    offsets: dict[TopicPartition, int]
    """Number of unprocessed offsets by partition, without lost ranges; 0 if the query has processed all."""
    size_bytes: int
    """Estimated stored size of the unprocessed records."""

    @property
    def total(self) -> int:
        """Unprocessed offsets of all partitions."""
        return sum(self.offsets.values())

    def metrics(self) -> dict[str, str]:
        """Return the lag under the metric names of Spark's Kafka source."""
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


def measure_lag(progress: Mapping[str, Any] | None, path: str) -> QueryLag:
    """Return the lag of a query, over all sources that read topics of the store at ``path``.

    Args:
        progress: `StreamingQuery.lastProgress`, or the `progress` of a `StreamingQueryListener` event.
        path: the store's folder, or the URL of the object store that the query reads it from.
    """
    offsets: dict[TopicPartition, int] = {}
    size_bytes = 0.0
    with open_store(StoreLocation(resolve_location(path))) as store:
        for source in (progress or {}).get("sources", []):
            ends = _decode_positions(source.get("endOffset")).offsets
            latest = _decode_positions(source.get("latestOffset"))
            for tp, end in latest.offsets.items():
                if tp in ends:
                    with contextlib.suppress(UnknownTopic):  # deleted since, or deleted and created again
                        log = store.open_partition(*tp, latest.topic_ids.get(tp.topic))
                        size_bytes += _estimate_bytes(log, ends[tp], end)
                        offsets[tp] = log.count_offsets(ends[tp], end)
    return QueryLag(without_secrets(path), dict(sorted(offsets.items())), round(size_bytes))


behind = measure_lag
"""Former name of `measure_lag`."""


def _decode_positions(text: str | None) -> Positions:
    try:
        return decode_positions(json.loads(text or "{}") or {})
    except (ValueError, SegmentlogError):  # the source is of another kind
        return Positions({}, {})


def _estimate_bytes(log: Partition, start: int, end: int) -> float:
    """Estimate the stored bytes in ``[start, end)``.

    Each segment counts in proportion to the share of its offsets in that range.
    """
    size = 0.0
    for segment in log.segments():
        inside = log.count_offsets(max(start, segment.base_offset), min(end, segment.end_offset))
        if inside:
            size += segment.size_bytes * inside / log.count_offsets(segment.base_offset, segment.end_offset)
    return size
