"""Evict shipped segments from the local disk, and recall them, at the end of each upload cycle (tiered storage).

evict    segments that `policy.eviction_policy` selects. First the manifest must refer to the segment's objects, and a
         read of the end of the last object must succeed
recall   all segments of a topic whose configuration disables tiered storage, or that is excluded from shipping, one
         segment in each cycle
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Final

from segmentlog.errors import SegmentlogError, ShippingRefused, StoreClosed, UnknownTopic
from segmentlog.format.manifest import ShippedPartition, ShippedSegment
from segmentlog.format.stub import Stub
from segmentlog.log.segment_tiering import evict_segment, recall_segment
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.partition_snapshot import LocalPartition, SegmentReplaced
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import PartitionUploadState
from segmentlog.policy.eviction_policy import EvictionCandidate, evictable_segments, is_tiered
from segmentlog.policy.fair_share import Turns
from segmentlog.policy.retention import newest_ms
from segmentlog.policy.upload_policy import LocalLog, LocalSegment

_EVERY_MS: Final = 1_000
"""An unchanged partition is checked this often."""
_SEGMENTS_MAX: Final = 16
"""Maximum number of segments evicted in one cycle. Each takes milliseconds, and callers that wait for shipping wait."""
_PROBE_BYTES: Final = 4096


class Evictor:
    """Evicts and recalls segments of one shipper's store. Not thread-safe."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._turns: Turns[PartitionKey] = Turns()
        """Shares the limited number of evictions per cycle among the partitions."""
        self._checked: dict[PartitionKey, tuple[object, int]] = {}
        """(signature at the last check, its time in ms), by partition."""
        self.errors: dict[str, str] = {}
        """The reason why a segment could not be evicted or recalled, by name of the partition."""
        self.has_more = False
        """Whether the last run reached its limit, so that more can be evicted or recalled at once."""

    def run(
        self, states: Mapping[PartitionKey, PartitionUploadState], shipped: Mapping[PartitionKey, ShippedPartition],
        excluded: Set[str], now_ms: int,
    ) -> None:  # fmt: skip
        """Evict or recall segments of each partition that has changed, or was last checked `_EVERY_MS` ago.

        ``shipped`` are the manifest's entries; ``excluded`` are ids of topics that are no longer shipped. Errors are
        recorded in `errors`, and the next run tries again.
        """
        left = _SEGMENTS_MAX
        self.has_more = False
        for partition_key in self._turns.order(key for key in states if key in shipped):
            if left <= 0:
                break
            state, entry = states[partition_key], shipped[partition_key]
            partition = state.local.partition
            name = partition.handle.log_name
            try:
                is_excluded = partition_key[0] in excluded
                if is_excluded or self._is_due(partition_key, state.local, entry, now_ms):
                    is_enabled = partition.config.remote_storage_enable and not is_excluded
                    done = self._evict_due(state, entry, left, now_ms) if is_enabled else self._recall_one(state.local)
                    left -= done
                    if done:
                        self._turns.record_served(partition_key)
                        self._checked.pop(partition_key, None)  # check it again: more segments may follow
                        self.has_more |= left <= 0 or not is_enabled
                self.errors.pop(name, None)
            except (UnknownTopic, StoreClosed, SegmentReplaced, FileNotFoundError):
                self._checked.pop(partition_key, None)
            except (SegmentlogError, OSError) as error:
                self.errors[name] = str(error)

    def _is_due(self, partition_key: PartitionKey, local: LocalPartition, entry: ShippedPartition, now_ms: int) -> bool:
        handle = local.partition.handle
        handle.refresh_config()
        generation = handle.page.log.read().generation
        # Without tiered storage, evicted segments must be recalled. Every eviction changes the generation, so the
        # partition must be checked again only after the generation has changed.
        tiered = is_tiered(handle.config)
        signature = (handle.page.config_version, (local.signature(), entry.segments) if tiered else generation)
        before, checked_ms = self._checked.get(partition_key, (None, 0))
        if signature == before and not (tiered and not 0 <= now_ms - checked_ms < _EVERY_MS):
            return False
        self._checked[partition_key] = signature, now_ms
        return True

    def _recall_one(self, local: LocalPartition) -> int:
        """Recall one evicted segment, if there is any. Return the number of recalled segments."""
        log = local.snapshot()
        segments = () if log is None else log.segments
        return any(recall_segment(local.partition.handle, one.base_offset) for one in segments if one.remote)

    def _evict_due(self, state: PartitionUploadState, entry: ShippedPartition, limit: int, now_ms: int) -> int:
        """Evict up to ``limit`` segments that the policy selects. Return the number of evicted segments."""
        handle, log = state.local.partition.handle, state.local.snapshot()
        if log is None:
            return 0
        done = 0
        segments = {segment.base_offset: segment for segment in log.segments}
        shipped = {segment.base_offset: segment for segment in entry.segments}
        active_bytes = sum(segment.size_bytes for segment in log.segments if not segment.sealed)
        recovery_segment = handle.ledger.last_checkpoint().recovery_segment
        producers_segment = state.local.producers_segment(log)
        for candidate in evictable_segments(
            handle.config, list(_candidates(state, log, shipped)), active_bytes, now_ms
        ):
            base = candidate.base_offset
            if done >= limit:
                break
            if base >= producers_segment:
                # Until the next roll, a process that begins to append reads this segment, under the append lock.
                break
            if base >= recovery_segment:  # a recovery would have to download this segment
                recovery_segment = state.local.partition.advance_recovery_point()
            if not self._evict(state.local, log, segments[base], shipped[base], now_ms):
                break
            done += 1
        return done

    def _evict(
        self, local: LocalPartition, log: LocalLog, segment: LocalSegment, shipped: ShippedSegment, now_ms: int
    ) -> bool:
        *others, last = shipped.log.objects
        # The object becomes the only copy. Check that it was not deleted or overwritten in the object store.
        for part in others:
            self._bucket.get_range(part.key, part.size_bytes - 1, 1)
        size_bytes = min(last.size_bytes, _PROBE_BYTES)
        uploaded = self._bucket.get_range(last.key, last.size_bytes - size_bytes, size_bytes)
        if uploaded != local.read_from(segment, segment.size_bytes - size_bytes):
            why = f"{last.key} differs from what was uploaded; the segment stays local; see 'segmentlog objects verify'"
            raise ShippingRefused(self._bucket.url, why)
        local.complete_indexes(log, segment)  # before eviction: later it would require a download
        stub = Stub(self._bucket.url, shipped.log, now_ms)
        return evict_segment(local.partition.handle, segment.base_offset, segment.stamp, stub)


def _candidates(
    state: PartitionUploadState, log: LocalLog, shipped: Mapping[int, ShippedSegment]
) -> Iterator[EvictionCandidate]:
    """Yield what the eviction policy needs of each sealed segment: size, age, and whether it is evicted or shipped."""
    for segment in log.segments:
        if not segment.sealed:
            continue
        base, uploaded = segment.base_offset, state.objects.uploaded.get(segment.base_offset)
        entry = shipped.get(base)
        is_shipped = entry is not None and uploaded == (segment.stamp, entry)
        written_ms = segment.stamp[2] // 1_000_000
        age_ms = newest_ms(-1 if entry is None else entry.max_timestamp, written_ms)
        yield EvictionCandidate(base, segment.size_bytes, age_ms, bool(segment.remote), is_shipped)
