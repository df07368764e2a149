"""Upload state of each partition of a store, kept between cycles."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import Final

from segmentlog.errors import StoreClosed, UnknownTopic
from segmentlog.format.manifest import ShippedPartition
from segmentlog.log import offset_grants
from segmentlog.objects.local.divergence import find_divergence
from segmentlog.objects.local.partition_snapshot import LocalPartition, Signature
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.uploaded_objects import UploadedObjects
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.policy.upload_policy import extend_grant, is_untouched
from segmentlog.topics.topic_registry import Topics

_RATE_MS: Final = 1_000
"""Shortest time over which the growth of a log is measured."""


class PartitionUploadState:
    """Upload state of one partition, kept between cycles."""

    def __init__(
        self, local: LocalPartition, objects: UploadedObjects, offset_grant: int, *, grants_on_request: bool = False
    ) -> None:
        self.local = local
        self._grants_on_request = grants_on_request
        self.objects = objects
        self.scanned: Signature = ()
        """Signature of the log at the last scan; empty if the next cycle must scan it in any case."""
        self.appended_bytes = 0
        """`LocalPartition.appended_bytes` at the last scan."""
        self.offset_grant = offset_grant
        """End of the local offset grant: processes on this machine may assign the offsets below it."""
        self._end_offset = 0
        """`LocalPartition.requested_offset` when the growth was last measured, at ``_measured_ms``."""
        self._measured_ms = 0

    def mark_dirty(self) -> None:
        """Scan the partition in the next cycle, even if it does not change until then."""
        self.scanned = ()

    def next_offset_grant(self, entry: ShippedPartition | None, now_ms: int) -> int:
        """Return the offset grant for the next manifest. ``entry`` is the partition's entry in the current one."""
        end_offset = self.local.requested_offset
        elapsed_ms = now_ms - self._measured_ms
        # Cycles may be 1 ms apart: one record in that time does not mean a thousand per second.
        rate = max(end_offset - self._end_offset, 0) * 1000 / max(elapsed_ms, _RATE_MS) if self._measured_ms else 0.0
        if not self._measured_ms or not 0 <= elapsed_ms < _RATE_MS:
            self._end_offset, self._measured_ms = end_offset, now_ms
        offset_grant = max(self.offset_grant, entry.offset_grant if entry else 0)
        if self._grants_on_request and is_untouched(self.local.log_end_offset, end_offset, offset_grant):
            return offset_grant
        return extend_grant(end_offset, offset_grant, rate)

    def publish_shipped(self, entry: ShippedPartition) -> None:
        """Pass the published end offset and offset grant on to local readers and appenders, and wake them."""
        handle = self.local.partition.handle
        with contextlib.suppress(UnknownTopic):
            handle.ledger.record_shipped(entry.end_offset)
            handle.wake_followers()
            if entry.offset_grant > self.offset_grant:
                offset_grants.extend(handle, entry.offset_grant)
                self.offset_grant = entry.offset_grant


class UploadStates:
    """The upload states of all partitions of one store. Not thread-safe, except `unshipped_bytes`."""

    def __init__(self, topics: Topics, orphans: Orphans, *, grants_on_request: bool = False) -> None:
        self._topics = topics
        self._grants_on_request = grants_on_request
        self._orphans = orphans
        self.by_key: dict[PartitionKey, PartitionUploadState] = {}
        self.uncompared: set[PartitionKey] = set()
        """Partitions that could not be opened when this store was compared with the manifest."""

    def open_state(self, name: str, partition_key: PartitionKey) -> PartitionUploadState | None:
        """Return the state of a partition, and open the partition again if the store has closed it meanwhile.

        Return None if it was deleted. Raise the error that prevents opening it.
        """
        try:
            partition = self._topics.open_partition(name, partition_key[1], partition_key[0])
            state = before = self.by_key.get(partition_key)
            if state is None or state.local.partition is not partition:
                local = LocalPartition(partition)
                objects = UploadedObjects(local, self._orphans, before.objects if before is not None else None)
                state = PartitionUploadState(
                    local, objects, before.offset_grant if before is not None else 0,
                    grants_on_request=self._grants_on_request,
                )  # fmt: skip
                self.by_key[partition_key] = state
            if not state.offset_grant:
                state.offset_grant = offset_grants.start_limiting(state.local.partition.handle)
            return state
        except (UnknownTopic, StoreClosed):
            return None

    def divergence(self, partition_key: PartitionKey, entry: ShippedPartition) -> str:
        """Compare a partition with its manifest entry if it could not be opened for an earlier comparison.

        Return a description of the difference; "" if there is none, or if the earlier comparison succeeded.
        """
        if partition_key not in self.uncompared:
            return ""
        why = find_divergence(self.by_key[partition_key].local, entry)
        if not why:
            self.uncompared.discard(partition_key)
        return why

    @property
    def unshipped_bytes(self) -> int:
        """Bytes appended since the last scan, whether on disk or not."""
        return sum(state.local.appended_bytes - state.appended_bytes for state in self.by_key.copy().values())

    def keys_in_use(self) -> set[str]:
        """Return the keys of uploaded segments and snapshots that match the local files.

        Later manifests may refer to these keys, even if no manifest does now.
        """
        uploads = (segment for state in self.by_key.values() for _, segment in state.objects.uploaded.values())
        keys = {stored.key for segment in uploads for stored in segment.objects}
        return keys | {one.object.key for state in self.by_key.values() for one in state.objects.snapshots.values()}

    def staged_tails(self) -> set[int]:
        """Return the numbers of the tails that contain withheld chunks."""
        return {chunk.tail for state in self.by_key.values() for chunk in state.objects.staged or ()}

    # ------------------------------------------------------------ invalidation

    def drop_deleted_topics(self, existing: Set[str]) -> None:
        """Drop the states of all topics except those with the ids ``existing``."""
        for partition_key in [key for key in self.by_key if key[0] not in existing]:
            self.by_key.pop(partition_key).objects.discard_all_segments()

    def drop_keys(self, deleted: Set[str]) -> None:
        """Drop objects that garbage collection deleted or marked. Withheld chunks are uploaded again."""
        for state in self.by_key.values():
            state.objects.drop_keys(deleted)

    def unstage_all(self) -> None:
        """Upload withheld chunks again: they continue the chunks of another manifest than the current one."""
        for state in self.by_key.values():
            state.objects.unstage()

    def mark_all_dirty(self) -> None:
        """Scan every partition in the next cycle."""
        for state in self.by_key.values():
            state.mark_dirty()
