"""The cut of each partition in a restore to a time or to given offsets: the first offset that is not restored.

A partition that is cut keeps the records before the cut, in their epochs. Appends resume at the end of its offset
grant. The offsets from the cut to that end are reported as lost, as after a crash, and are never assigned again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from segmentlog.arguments import as_positions, as_time_ms
from segmentlog.errors import InvalidConfig, ShippingRefused, UnreadableBatch
from segmentlog.format.batch import check_payload
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.file_names import INTERNAL_TOPICS
from segmentlog.format.manifest import Chunk, ShippedPartition, ShippedSegment, ShippedTopic, Snapshot
from segmentlog.format.scan import scan_batches
from segmentlog.log.recovery.tail_scan import part_below
from segmentlog.log.recovery.truncate_tail import split_batch
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.policy.lost_ranges import with_lost_range
from segmentlog.quantities import format_time, milliseconds_of
from segmentlog.records import EpochStart, LostRange, TopicPartition

Cuts = dict[PartitionKey, int]
"""The first offset that is not restored, by partition."""
Piece = ShippedSegment | Chunk

_REASON: Final = "left out by a restore"


class RestoreTarget(msgspec.Struct, frozen=True):
    """Either ``at_ms``, the time of the last record to restore, or ``offsets``, the cuts of some partitions."""

    at_ms: int | None = None
    offsets: dict[TopicPartition, int] = {}

    @property
    def reason(self) -> str:
        """Reason for the lost ranges."""
        return f"{_REASON} to {format_time(self.at_ms)}" if self.at_ms is not None else f"{_REASON} to offsets"

    @property
    def mark(self) -> dict[str, Any]:
        """The target as JSON, for the file ``@restoring`` that marks an unfinished restore."""
        if self.at_ms is not None:
            return {"at_ms": self.at_ms}
        return {"offsets": {str(tp): offset for tp, offset in sorted(self.offsets.items())}}


def parse_target(at: int | datetime | None, offsets: Mapping[Any, int] | None) -> RestoreTarget | None:
    """Return the target; None to restore everything. Raise `InvalidConfig`, `InvalidTopicName`."""
    if at is not None and offsets is not None:
        raise InvalidConfig("offsets", offsets, "None if a time is given: a restore has either a time or offsets")
    if offsets is not None:
        return RestoreTarget(offsets=as_positions("offsets", offsets))
    if isinstance(at, datetime):
        try:
            at = milliseconds_of(at)
        except ValueError:
            raise InvalidConfig("at", at, "a datetime, or milliseconds since 1970") from None
    return None if at is None else RestoreTarget(as_time_ms("at", at))


def cuts_at_offsets(url: str, topics: Iterable[ShippedTopic], target: RestoreTarget) -> Cuts:
    """Return the cuts at the given offsets. Raise `ShippingRefused` for an offset that cannot be cut at."""
    by_name = {topic.name: topic for topic in topics}
    cuts: Cuts = {}
    for (name, number), offset in target.offsets.items():
        topic = by_name.get(name)
        if name in INTERNAL_TOPICS:
            raise ShippingRefused(url, f"{name} cannot be cut: the restore adjusts it to the cuts of the other topics")
        if topic is None:
            raise ShippingRefused(url, f"{name}/{number}: the topic is not among the topics to restore")
        if number >= topic.partition_count:
            raise ShippingRefused(url, f"{name}/{number}: the topic has partitions 0 to {topic.partition_count - 1}")
        part = next((part for part in topic.partitions if part.number == number), None)
        start, end = (0, 0) if part is None else (part.log_start_offset, part.end_offset)
        if not start <= offset <= end:
            limit = f"its log ends at {end}" if offset > end else f"its log begins at {start}"
            raise ShippingRefused(url, f"{name}/{number} cannot be cut at offset {offset}: {limit} in the object store")
        if part is not None:
            cuts[topic.id, number] = offset
    return cuts


def cut_at_time(part: ShippedPartition, at_ms: int, read: Callable[[Piece], bytes]) -> int | None:
    """Return the first offset with a record or marker later than ``at_ms``; None if there is none.

    ``read`` returns the bytes of a piece; it is called only for pieces that may contain such a record.
    """
    for piece in part.pieces:
        if 0 <= piece.max_timestamp <= at_ms or piece.end_offset <= part.log_start_offset:
            continue
        view = memoryview(read(piece))
        for position, header in scan_batches(view, 0, len(view)):
            if header.max_timestamp > at_ms and header.next_offset > part.log_start_offset:
                batch = record_batch(header, check_payload(view, position, header))
                try:
                    late = ((batch.timestamps > at_ms) & (batch.offsets >= part.log_start_offset)).nonzero()[0]
                except UnreadableBatch:  # only its header has the timestamps of its records
                    return max(header.base_offset, part.log_start_offset)
                if len(late):
                    return int(batch.offsets[late[0]])
    return None


def normalize_cuts(cuts: Cuts, parts: Mapping[PartitionKey, ShippedPartition]) -> Cuts:
    """Return the cuts that omit at least one record. Move a cut inside or next to lost ranges to their start.

    Then the range that the cut adds and these lost ranges are one range.
    """
    found: Cuts = {}
    for partition_key, offset in cuts.items():
        part = parts[partition_key]
        for lost in reversed(part.lost_ranges):
            if lost.base_offset <= offset <= lost.end_offset:
                offset = lost.base_offset
        offset = max(offset, part.log_start_offset)
        if any(piece.end_offset > offset for piece in part.pieces):
            found[partition_key] = offset
    return found


def cut_topics(topics: Iterable[ShippedTopic], cuts: Cuts, reason: str, now_ms: int) -> list[ShippedTopic]:
    """Return the topics with their partitions cut."""
    return [
        replace(
            topic,
            partitions=tuple(
                part
                if (offset := cuts.get((topic.id, part.number))) is None
                else cut_partition(part, offset, reason, now_ms)
                for part in topic.partitions
            ),
        )
        for topic in topics
    ]


def cut_partition(part: ShippedPartition, offset: int, reason: str, now_ms: int) -> ShippedPartition:
    """Return the manifest entry of a partition that is cut at ``offset``. Its last piece may end after the cut."""
    segments = tuple(segment for segment in part.segments if segment.base_offset < offset)
    chunks = tuple(chunk for chunk in part.chunks if chunk.base_offset < offset)
    bases = [segment.base_offset for segment in segments] + [chunk.segment for chunk in chunks]
    snapshots = tuple(snapshot for snapshot in part.snapshots if snapshot.segment in bases)
    if not bases:  # keep the producer snapshot at the cut
        known = [Snapshot(one.base_offset, one.snapshot) for one in part.segments if one.snapshot is not None]
        snapshots = tuple(one for one in (*known, *part.snapshots) if one.segment == offset)[:1]
    # Add an offset, as truncation does: a consumer at the old end is then inside the lost range, and gets an error.
    offset_grant = part.offset_grant + 1
    return replace(
        part,
        offset_grant=offset_grant,
        end_offset=offset,
        lost_ranges=with_lost_range(part.lost_ranges, LostRange(offset, offset_grant, part.epoch + 1, reason, now_ms)),
        active_base=bases[-1] if bases else offset,
        segments=segments,
        chunks=chunks,
        snapshots=snapshots,
        markers_end_offset=-1,
    )


def bytes_below(data: bytes, offset: int, path: str) -> bytes:
    """Return a segment's batches before ``offset``. The batch that contains the offset is split."""
    view = memoryview(data)
    for position, header in scan_batches(view, 0, len(view), path):
        if header.next_offset > offset:
            if header.base_offset >= offset:
                return data[:position]
            return data[:position] + split_batch(part_below(view, position, header, offset, path), offset)
    return data


def epoch_below(epochs: Iterable[EpochStart], offset: int) -> int:
    """Return the epoch of the record before ``offset``."""
    history = list(epochs)
    at = bisect_right([started.start_offset for started in history], offset - 1)
    return history[max(at - 1, 0)].epoch
