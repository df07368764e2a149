"""Compute how far each partition must be shipped so that no recently committed transaction is split.

`transaction_ends` reads the ends of transactions from the transaction log, after all partitions have been scanned. If a
partition cannot be shipped up to the end of its transaction, the partitions of all such transactions are withheld, and
so is the transaction log.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

from segmentlog.format.file_names import TRANSACTIONS_TOPIC
from segmentlog.format.manifest import ShippedPartition
from segmentlog.objects.local.transaction_ends import (
    PartitionKey,
    TransactionEnds,
    commit_ends,
    find_markers,
    unconfirmed_commit_ends,
)
from segmentlog.objects.local.upload_state import UploadStates
from segmentlog.objects.upload.store_scan import StoreScan
from segmentlog.policy.upload_policy import PartitionPlan
from segmentlog.topics.topic_folders import TopicFile
from segmentlog.topics.topic_registry import Topics

_UNKNOWN: Final = 1 << 62
"""An end offset that no log reaches."""


class TransactionBarrier:
    """Withholds partitions of one shipper, so that every manifest contains only whole transactions. Not thread-safe."""

    def __init__(self, topics: Topics, states: UploadStates) -> None:
        self._topics = topics
        self._states = states
        self._pending: TransactionEnds | None = None
        """Ends of transactions whose decision is shipped and whose markers may not be shipped yet; None if unknown."""
        self._markers: dict[PartitionKey, dict[int, int]] = {}
        """Markers that the last cycle found: the offset after each, by partition and producer id."""

    def durable_decisions_offset(self, decisions: PartitionKey | None) -> int:
        """Return the durable offset of the transaction log now."""
        state = None if decisions is None else self._states.open_state(TRANSACTIONS_TOPIC, decisions)
        return 0 if state is None else state.local.partition.durable_offset

    def required_ends(
        self, scan: StoreScan, topics: list[tuple[str, TopicFile]], decisions: PartitionKey | None, decided_before: int
    ) -> dict[PartitionKey, int]:
        """Return the offset that each partition must reach so that no recently committed transaction is split.

        That is the end of the transaction's records, or of its marker if the marker is on disk. Scan a partition again
        if its scan ended before that. ``decisions`` is the partition of the transaction log, and ``decided_before`` its
        durable offset before the scan.
        """
        state = None if decisions is None else self._states.by_key.get(decisions)
        if decisions is None or state is None:
            was_created = self._topics.has(TRANSACTIONS_TOPIC)  # after the other topics were scanned
            return {key: _UNKNOWN for key, one in scan.found.items() if was_created and one.log.has_producers}
        entry, found = scan.shipped.get(decisions), scan.found.get(decisions)
        decided = found.log.end_offset if found is not None else state.local.partition.durable_offset
        shipped_offset = entry.end_offset if entry else 0
        if decided == shipped_offset and found is None:
            return {}
        ended = commit_ends(state.local.partition, shipped_offset, decided)
        self._markers = {}
        if ended is None:  # compacted away: require all that was scanned, unless there are new decisions
            self._pending = None
            is_whole = scan.is_complete and decided == decided_before
            whole = {key: one.log.end_offset for key, one in scan.found.items() if one.log.has_producers}
            return whole | {decisions: decided} if is_whole else dict.fromkeys([*whole, decisions], _UNKNOWN)
        if self._pending is None:
            self._pending = unconfirmed_commit_ends(state.local.partition, shipped_offset)
        pending = self._pending
        for partition_key, by_producer in ended.items():
            pending.setdefault(partition_key, {}).update(by_producer)
        known = {file.topic_id: (name, file.partitions) for name, file in topics}
        ends: dict[PartitionKey, int] = {}
        for partition_key in list(pending):
            if partition_key[0] in known:
                name, partition_count = known[partition_key[0]]
                # The next manifest has no entry of a partition that was added since ``topics`` were read.
                is_listed = partition_key[1] < partition_count
                ends[partition_key] = (
                    self._required_end(scan, name, partition_key, pending[partition_key]) if is_listed else _UNKNOWN
                )
            else:
                del pending[partition_key]
        return ends | {decisions: decided} if ends else {}

    def _required_end(self, scan: StoreScan, name: str, partition_key: PartitionKey, ends: Mapping[int, int]) -> int:
        """Return the offset that one partition must reach. Scan it again if its scan ended before that."""
        state, found = self._states.open_state(name, partition_key), scan.found.get(partition_key)
        if state is None:
            return _UNKNOWN
        entry = scan.shipped.get(partition_key)
        scanned_offset = found.log.end_offset if found else entry.end_offset if entry else 0
        durable_offset = state.local.partition.durable_offset
        markers = self._markers[partition_key] = find_markers(state.local.partition, ends, durable_offset)
        end = max([*ends.values(), *markers.values()])
        if scanned_offset < end:
            scan.rescan_up_to(name, partition_key, end)
        return end

    def record_published(self, shipped: Mapping[PartitionKey, ShippedPartition]) -> None:
        """Forget pending transactions whose markers the published manifest includes."""
        pending = self._pending or {}
        for partition_key, markers in self._markers.items():
            entry = shipped.get(partition_key)
            for producer_id, end in markers.items():
                if entry is not None and entry.end_offset >= end and partition_key in pending:
                    pending[partition_key].pop(producer_id, None)
            if not pending.get(partition_key, True):
                del pending[partition_key]
        self._markers = {}


def withheld_partitions(
    plans: Mapping[PartitionKey, PartitionPlan], shipped: Mapping[PartitionKey, ShippedPartition],
    ends: Mapping[PartitionKey, int], decisions: PartitionKey | None, offset_partitions: Set[PartitionKey],
    is_complete: bool,
) -> Set[PartitionKey]:  # fmt: skip
    """Return the planned partitions that must be withheld from the next manifest.

    If any transaction cannot be shipped whole, withhold all partitions in ``ends``, the transaction log (``decisions``)
    and the committed offsets (``offset_partitions``). Also withhold the committed offsets while records that they may
    refer to are not shipped.
    """
    withheld: set[PartitionKey] = set()
    if not is_complete or any(
        plan.is_incomplete for key, plan in plans.items() if key != decisions and key not in offset_partitions
    ):
        withheld |= offset_partitions
    reached = {key: entry.end_offset for key, entry in shipped.items()}
    reached.update((key, plan.end_offset) for key, plan in plans.items() if key not in withheld)
    if any(reached.get(key, 0) < end for key, end in ends.items()):
        withheld |= {*ends, *offset_partitions, *([decisions] if decisions else [])}
    return withheld & plans.keys()
