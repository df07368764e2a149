"""Where a restore ends: at a time, or at offsets; and what a manifest says of a partition that is cut there.

A cut partition holds what lies below the cut, in the epochs that it was written in. It goes on at the ceiling, like
one of which a crash took as much: the range in between is told as lost, and no offset of it is handed out again.
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
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.policy.lost_ranges import with_lost_range
from segmentlog.quantities import format_time, milliseconds_of
from segmentlog.records import EpochStart, LostRange, TopicPartition

Cuts = dict[Where, int]
"""The first offset that is left out, of each partition that is cut."""
Piece = ShippedSegment | Chunk

_REASON: Final = "left out by a restore"


class Target(msgspec.Struct, frozen=True):
    """Where a restore ends: before what is later than ``at_ms``, or at ``offsets``. One of them is given."""

    at_ms: int | None = None
    offsets: dict[TopicPartition, int] = {}

    @property
    def reason(self) -> str:
        """What the lost ranges say."""
        return f"{_REASON} to {format_time(self.at_ms)}" if self.at_ms is not None else f"{_REASON} to offsets"

    @property
    def mark(self) -> dict[str, Any]:
        """What tells it from others in what was begun of a restore."""
        if self.at_ms is not None:
            return {"at_ms": self.at_ms}
        return {"offsets": {str(tp): offset for tp, offset in sorted(self.offsets.items())}}


def target_of(at: int | datetime | None, offsets: Mapping[Any, int] | None) -> Target | None:
    """What is asked for; None for all there is. Raises `InvalidConfig`, `InvalidTopicName`."""
    if at is not None and offsets is not None:
        raise InvalidConfig("offsets", offsets, "None where a time is given: a restore ends at one or the other")
    if offsets is not None:
        return Target(offsets=as_positions("offsets", offsets))
    if isinstance(at, datetime):
        try:
            at = milliseconds_of(at)
        except ValueError:
            raise InvalidConfig("at", at, "a datetime, or milliseconds since 1970") from None
    return None if at is None else Target(as_time_ms("at", at))


def cuts_at_offsets(url: str, topics: Iterable[ShippedTopic], target: Target) -> Cuts:
    """The cuts that are asked for. Raises `ShippingRefused` for one that cannot be made."""
    by_name = {topic.name: topic for topic in topics}
    cuts: Cuts = {}
    for (name, number), offset in target.offsets.items():
        topic = by_name.get(name)
        if name in INTERNAL_TOPICS:
            raise ShippingRefused(url, f"{name} is not to be cut: what it says is made to fit the others")
        if topic is None:
            raise ShippingRefused(url, f"{name}/{number}: there is no such topic among those that are to be restored")
        if number >= topic.partition_count:
            raise ShippingRefused(url, f"{name}/{number}: there are partitions 0 to {topic.partition_count - 1}")
        part = next((part for part in topic.partitions if part.number == number), None)
        start, end = (0, 0) if part is None else (part.log_start_offset, part.end_offset)
        if not start <= offset <= end:
            there = f"what lies there ends at {end}" if offset > end else f"it begins at {start}"
            raise ShippingRefused(url, f"{name}/{number} cannot be cut at offset {offset}: {there}")
        if part is not None:
            cuts[topic.id, number] = offset
    return cuts


def cut_at_time(part: ShippedPartition, at_ms: int, read: Callable[[Piece], bytes]) -> int | None:
    """The first offset, in their order, whose record or marker is later; None without one.

    ``read`` is asked for the pieces that may hold it.
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
                except UnreadableBatch:  # its header alone says when its records were
                    return max(header.base_offset, part.log_start_offset)
                if len(late):
                    return int(batch.offsets[late[0]])
    return None


def settled(cuts: Cuts, parts: Mapping[Where, ShippedPartition]) -> Cuts:
    """The cuts that leave anything out, each in front of the lost ranges that it touches: the one they become."""
    found: Cuts = {}
    for where, offset in cuts.items():
        part = parts[where]
        for lost in reversed(part.lost_ranges):
            if lost.base_offset <= offset <= lost.end_offset:
                offset = lost.base_offset
        offset = max(offset, part.log_start_offset)
        if any(piece.end_offset > offset for piece in part.pieces):
            found[where] = offset
    return found


def cut_topics(topics: Iterable[ShippedTopic], cuts: Cuts, reason: str, now_ms: int) -> list[ShippedTopic]:
    """The topics with their partitions cut."""
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
    """What there is below an offset: the last piece may reach beyond it."""
    segments = tuple(segment for segment in part.segments if segment.base_offset < offset)
    chunks = tuple(chunk for chunk in part.chunks if chunk.base_offset < offset)
    bases = [segment.base_offset for segment in segments] + [chunk.segment for chunk in chunks]
    snapshots = tuple(snapshot for snapshot in part.snapshots if snapshot.segment in bases)
    if not bases:  # what was known of producers before all that is left out is known on
        known = [Snapshot(one.base_offset, one.snapshot) for one in part.segments if one.snapshot is not None]
        snapshots = tuple(one for one in (*known, *part.snapshots) if one.segment == offset)[:1]
    # As after a truncation: who has read everything stands in the range, too, and is told.
    ceiling = part.ceiling + 1
    return replace(
        part,
        ceiling=ceiling,
        end_offset=offset,
        lost_ranges=with_lost_range(part.lost_ranges, LostRange(offset, ceiling, part.epoch + 1, reason, now_ms)),
        active_base=bases[-1] if bases else offset,
        segments=segments,
        chunks=chunks,
        snapshots=snapshots,
        markers_end_offset=-1,
    )


def bytes_below(data: bytes, offset: int, path: str) -> bytes:
    """Of a segment's batches what lies below an offset; the one that it lies in is made anew."""
    view = memoryview(data)
    for position, header in scan_batches(view, 0, len(view), path):
        if header.next_offset > offset:
            if header.base_offset >= offset:
                return data[:position]
            return data[:position] + split_batch(part_below(view, position, header, offset, path), offset)
    return data


def epoch_below(epochs: Iterable[EpochStart], offset: int) -> int:
    """The epoch of the record in front of an offset."""
    history = list(epochs)
    at = bisect_right([started.start_offset for started in history], offset - 1)
    return history[max(at - 1, 0)].epoch
