"""Scan the partitions of a store: find the data of each on the local disk, and partitions that cannot be shipped."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from segmentlog.errors import PartitionFailed, SegmentlogError
from segmentlog.format.manifest import Manifest, ShippedPartition
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import PartitionUploadState, UploadStates
from segmentlog.objects.tier.recall import recall_unreferenced
from segmentlog.policy.upload_policy import LocalLog

_REPLACED = "its segment files are being replaced"


class ScannedPartition(msgspec.Struct):
    """Snapshot of a scanned partition, and its next offset grant."""

    state: PartitionUploadState
    log: LocalLog
    offset_grant: int


class StoreScan:
    """The scan of one cycle. ``shipped`` are the entries of the current manifest, ``url`` is its object store."""

    def __init__(self, states: UploadStates, url: str, shipped: Mapping[PartitionKey, ShippedPartition]) -> None:
        self._states = states
        self._url = url
        self.shipped = shipped
        self.found: dict[PartitionKey, ScannedPartition] = {}
        """Partitions that may have something to ship."""
        self.offset_grants: dict[PartitionKey, int] = {}
        """Next offset grant of every partition that could be opened."""
        self.waiting: dict[PartitionKey, str] = {}
        """The reason why a partition may have data that this cycle cannot ship, by partition."""
        self.is_complete = True
        """Whether every existing partition was scanned, or has not changed since its last scan."""

    def scan(self, name: str, partition_key: PartitionKey, wasted: Set[int], now_ms: int) -> None:
        """Scan a partition if it has changed, or if one of its chunks is in a ``wasted`` tail.

        If the partition cannot be opened, record it as waiting. But raise its error if the manifest has no entry of the
        partition yet.
        """
        entry = self.shipped.get(partition_key)
        try:
            state = self._states.open_state(name, partition_key)
        except (SegmentlogError, OSError) as error:
            if entry is None:
                raise
            self.waiting[partition_key] = str(error)
            self.is_complete = False
            return
        if state is None:
            return
        if entry is not None and (why := self._states.divergence(partition_key, entry)):
            self.waiting[partition_key] = why
            self.is_complete = False
            return
        is_wasted = entry is not None and any(chunk.tail in wasted for chunk in entry.chunks)
        offset_grant = self.offset_grants[partition_key] = state.next_offset_grant(entry, now_ms)
        is_published = entry is not None and offset_grant == entry.offset_grant and not is_wasted
        if not is_published or state.local.signature() != state.scanned:
            self.is_complete &= self._scan(partition_key, state, offset_grant) is not None

    def rescan_up_to(self, name: str, partition_key: PartitionKey, end_offset: int) -> None:
        """Scan a partition again, up to ``end_offset``, where a transaction that another scan found ends."""
        state, found = self._states.open_state(name, partition_key), self.found.get(partition_key)
        if state is None:
            return
        log = self._scan(partition_key, state, found.offset_grant if found else state.offset_grant)
        truncated = None if log is None else state.local.truncated_to(log, end_offset)
        state.mark_dirty()
        if truncated is not None:
            self.found[partition_key].log = truncated
        elif found is not None:
            self.found[partition_key] = found
        else:
            self.found.pop(partition_key, None)

    def _scan(self, partition_key: PartitionKey, state: PartitionUploadState, offset_grant: int) -> LocalLog | None:
        entry = self.shipped.get(partition_key)
        signature, appended_bytes = state.local.signature(), state.local.appended_bytes
        log = state.local.snapshot()
        if log is None:  # the next cycle tries again
            state.mark_dirty()
            failed = state.local.partition.failed
            name = state.local.partition.handle.log_name
            self.waiting[partition_key] = str(PartitionFailed(name, failed)) if failed else _REPLACED
            return None
        if (why := self._recall_unreferenced(state, log, entry)) is not None:
            state.mark_dirty()
            self.waiting[partition_key] = why
            return None
        state.scanned, state.appended_bytes = signature, appended_bytes
        state.objects.add_snapshots(entry)
        self.found[partition_key] = ScannedPartition(state, log, offset_grant)
        return log

    def _recall_unreferenced(
        self, state: PartitionUploadState, log: LocalLog, entry: ShippedPartition | None
    ) -> str | None:  # fmt: skip
        """Recall evicted segments whose object the manifest does not refer to.

        Such segments exist only if shipping was started over, or if a stub is damaged. Return the reason why the
        partition must wait; None if there are no such segments.
        """
        unreferenced = state.objects.unreferenced_segments(log, entry)
        try:
            for segment in unreferenced:
                recall_unreferenced(state.local.partition.handle, self._url, segment, entry)
        except (SegmentlogError, OSError) as error:
            return str(error)
        return _REPLACED if unreferenced else None


def entries_by_partition(manifest: Manifest | None) -> dict[PartitionKey, ShippedPartition]:
    """Return the manifest's entries of all partitions."""
    topics = () if manifest is None else manifest.topics
    return {(topic.id, part.number): part for topic in topics for part in topic.partitions}
