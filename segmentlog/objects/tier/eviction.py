"""Tiered storage: segments that were shipped leave this machine, at the end of a shipper's turn, and come back.

evict    what `policy.eviction_policy` says, once the manifest refers to the object, and the object is looked at
recall   the configuration wants no tiered storage any more, or nobody wants the topic there: back, a segment in a turn
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Final

from segmentlog.errors import SegmentlogError, ShippingRefused, StoreClosed, UnknownTopic
from segmentlog.format.manifest import ShippedPartition, ShippedSegment
from segmentlog.format.stub import Stub
from segmentlog.log.segment_tiering import bring_back, evict
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.partition_snapshot import LocalPartition, Replaced
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.upload_state import Part
from segmentlog.policy.eviction_policy import Sealed, evictable_segments, is_tiered
from segmentlog.policy.fair_share import Turns
from segmentlog.policy.retention import newest_ms
from segmentlog.policy.upload_policy import LocalLog, LocalSegment

_EVERY_MS: Final = 1_000
"""A partition in which nothing happens is looked at so often."""
_SEGMENTS_MAX: Final = 16
"""Of all partitions in a turn: each takes some milliseconds, and who waits for what is shipped waits for it."""
_PROBE_BYTES: Final = 4096


class Evicting:
    """Of one shipper. For one thread at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._turns: Turns[Where] = Turns()
        """By how many segments of each left, as a turn ends with `_SEGMENTS_MAX`."""
        self._looked: dict[Where, tuple[object, int]] = {}
        """By partition, what it looked like when it was looked at last, and when that was."""
        self.troubles: dict[str, str] = {}
        """By the name of a partition."""
        self.is_behind = False
        """The last turn did as much as one may do: there may be more to do at once."""

    def turn(
        self, parts: Mapping[Where, Part], shipped: Mapping[Where, ShippedPartition], leaving: Set[str], now_ms: int
    ) -> None:  # fmt: skip
        """``shipped`` is what the manifest says that lies there; ``leaving`` are topics that are wanted there no more.

        What keeps a segment from leaving or coming back is in `troubles`, and is tried again.
        """
        left = _SEGMENTS_MAX
        self.is_behind = False
        for where in self._turns.order(where for where in parts if where in shipped):
            if left <= 0:
                break
            part, there = parts[where], shipped[where]
            name = part.local.partition.handle.log_name
            try:
                is_leaving = where[0] in leaving
                if is_leaving or self._is_due(where, part.local, there, now_ms):
                    stays = part.local.partition.config.remote_storage_enable and not is_leaving
                    done = self._turn(part, there, left, now_ms) if stays else self._recall(part.local)
                    left -= done
                    if done:
                        self._turns.record_served(where)
                        self._looked.pop(where, None)  # there may be more
                        self.is_behind |= left <= 0 or not stays
                self.troubles.pop(name, None)
            except (UnknownTopic, StoreClosed, Replaced, FileNotFoundError):
                self._looked.pop(where, None)
            except (SegmentlogError, OSError) as error:
                self.troubles[name] = str(error)

    def _is_due(self, where: Where, local: LocalPartition, there: ShippedPartition, now_ms: int) -> bool:
        handle = local.partition.handle
        handle.refresh_config()
        generation = handle.page.log.read().generation
        # Where nothing leaves something may have to come back; that is there by another generation.
        tiered = is_tiered(handle.config)
        looks = (handle.page.config_version, (local.signature(), there.segments) if tiered else generation)
        before, looked_ms = self._looked.get(where, (None, 0))
        if looks == before and not (tiered and not 0 <= now_ms - looked_ms < _EVERY_MS):
            return False
        self._looked[where] = looks, now_ms
        return True

    def _recall(self, local: LocalPartition) -> int:
        """How many segments came back: one, or none."""
        log = local.look()
        segments = () if log is None else log.segments
        return any(bring_back(local.partition.handle, one.base_offset) for one in segments if one.remote)

    def _turn(self, part: Part, there: ShippedPartition, most: int, now_ms: int) -> int:
        """How many segments left."""
        handle, log = part.local.partition.handle, part.local.look()
        if log is None:
            return 0
        done = 0
        segments = {segment.base_offset: segment for segment in log.segments}
        known = {segment.base_offset: segment for segment in there.segments}
        active_bytes = sum(segment.size_bytes for segment in log.segments if not segment.sealed)
        recovery_segment = handle.ledger.last_checkpoint().recovery_segment
        producers_segment = part.local.producers_segment(log)
        for one in evictable_segments(handle.config, list(_sealed(part, log, known)), active_bytes, now_ms):
            base = one.base_offset
            if done >= most:
                break
            if base >= producers_segment:
                break  # whoever appends next reads it for its producers, under the lock; until the next roll
            if base >= recovery_segment:  # else a recovery would have to bring it
                recovery_segment = part.local.partition.advance_recovery_point()
            if not self._evict(part.local, log, segments[base], known[base], now_ms):
                break
            done += 1
        return done

    def _evict(
        self, local: LocalPartition, log: LocalLog, segment: LocalSegment, shipped: ShippedSegment, now_ms: int
    ) -> bool:
        *others, last = shipped.log.objects
        # It is about to be the only copy: what somebody has deleted or overwritten there is not to be taken for it.
        for one in others:
            self._bucket.get_range(one.key, one.size_bytes - 1, 1)
        size_bytes = min(last.size_bytes, _PROBE_BYTES)
        there = self._bucket.get_range(last.key, last.size_bytes - size_bytes, size_bytes)
        if there != local.at(segment, segment.size_bytes - size_bytes):
            why = f"{last.key} is not what was put there; see 'segmentlog objects verify'"
            raise ShippingRefused(self._bucket.url, why)
        local.complete_indexes(log, segment)  # afterwards it would have to be brought for that
        stub = Stub(self._bucket.url, shipped.log, now_ms)
        return evict(local.partition.handle, segment.base_offset, segment.stamp, stub)


def _sealed(part: Part, log: LocalLog, known: Mapping[int, ShippedSegment]) -> Iterator[Sealed]:
    """The sealed segments, as tiering looks at them."""
    for segment in log.segments:
        if not segment.sealed:
            continue
        base, uploaded = segment.base_offset, part.standing.uploaded.get(segment.base_offset)
        there = known.get(base)
        is_shipped = there is not None and uploaded == (segment.stamp, there)
        written_ms = segment.stamp[2] // 1_000_000
        age_ms = newest_ms(-1 if there is None else there.max_timestamp, written_ms)
        yield Sealed(base, segment.size_bytes, age_ms, bool(segment.remote), is_shipped)
