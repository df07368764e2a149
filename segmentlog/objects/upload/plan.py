"""Plan the uploads of one cycle: scan each partition, decide what to upload, and read it.

First all partitions are scanned (`store_scan`), in the order of `partition_snapshot.scan_order`, the transaction log
last. Then each partition is planned by itself. Last, partitions whose upload would split a transaction are withheld
(`transaction_barrier`): their bytes are uploaded, but no manifest refers to these bytes until all of the transaction is
uploaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from segmentlog.format.file_names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from segmentlog.format.manifest import Chunk, Manifest, ShippedPartition
from segmentlog.objects.local.partition_snapshot import SegmentReplaced, topics_to_ship
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import PartitionUploadState, UploadStates
from segmentlog.objects.upload.store_scan import StoreScan, entries_by_partition
from segmentlog.objects.upload.transaction_barrier import TransactionBarrier, withheld_partitions
from segmentlog.policy.fair_share import Turns
from segmentlog.policy.upload_policy import (
    TAIL_BYTES,
    LocalLog,
    PartitionPlan,
    plan_upload,
    tails_to_move,
    wasted_tails,
)
from segmentlog.topics.topic_folders import TopicFile
from segmentlog.topics.topic_registry import Topics


class PartitionUpload(msgspec.Struct):
    """The upload of a partition in one cycle. ``data`` contains the bytes of the plan's pieces, in the same order."""

    state: PartitionUploadState
    log: LocalLog
    plan: PartitionPlan
    offset_grant: int
    data: list[memoryview]
    chunks: list[Chunk] = []
    """The manifest's chunks for the uploaded pieces."""
    unchanged: Set[Chunk] = frozenset()
    """Earlier chunks whose bytes match the local files."""
    is_withheld: bool = False
    """Whether the next manifest must repeat the partition's current entry."""


class UploadPlan(msgspec.Struct, frozen=True):
    """The plan of one cycle.

    uploads        the upload of each partition that has new data
    topics         name and file of each topic to ship
    shipped        the entries of the current manifest
    offset_grants  the next offset grant of every partition that could be opened
    waiting        the reason why a partition may have data that this cycle cannot ship, by partition
    """

    uploads: dict[PartitionKey, PartitionUpload]
    topics: list[tuple[str, TopicFile]]
    shipped: Mapping[PartitionKey, ShippedPartition]
    offset_grants: dict[PartitionKey, int]
    waiting: dict[PartitionKey, str]


class UploadPlanner:
    """Plans each cycle of one shipper. Not thread-safe."""

    def __init__(self, topics: Topics, url: str, states: UploadStates) -> None:
        self._topics = topics
        self._url = url
        self._states = states
        self._barrier = TransactionBarrier(topics, states)
        self._turns: Turns[PartitionKey] = Turns()
        """Shares the limited size of tails among the partitions."""

    def make_plan(self, patterns: tuple[str, ...], manifest: Manifest | None, now_ms: int) -> UploadPlan:
        """Scan the store and plan the next cycle. ``manifest`` is the current one.

        A partition that cannot be opened does not stop the others from being shipped. But if the manifest has no entry
        of it yet, and so no offset grant, its error is raised.
        """
        topics = topics_to_ship(self._topics, patterns, [topic.id for topic in manifest.topics] if manifest else ())
        self._states.drop_deleted_topics({file.topic_id for _, file in topics})
        shipped = entries_by_partition(manifest)
        wasted = _wasted_tails(manifest, shipped)
        decisions = next(((file.topic_id, 0) for name, file in topics if name == TRANSACTIONS_TOPIC), None)
        decided_before = self._barrier.durable_decisions_offset(decisions)
        scan = StoreScan(self._states, self._url, shipped)
        for name, file in topics:
            for number in range(file.partitions):
                scan.scan(name, (file.topic_id, number), wasted, now_ms)
        ends = self._barrier.required_ends(scan, topics, decisions, decided_before)
        uploads = self._plan_uploads(scan, decisions, wasted)
        offset_partitions = {(file.topic_id, number) for name, file in topics if name == OFFSETS_TOPIC
                             for number in range(file.partitions)}  # fmt: skip
        plans = {partition_key: upload.plan for partition_key, upload in uploads.items()}
        withheld = withheld_partitions(plans, shipped, ends, decisions, offset_partitions, scan.is_complete)
        waiting: dict[PartitionKey, str] = {}
        for partition_key, upload in uploads.items():
            if partition_key in withheld:
                upload.is_withheld = True
                upload.state.mark_dirty()
                waiting[partition_key] = (
                    "waiting for the rest of a transaction, or for records that a committed offset refers to"
                )
        return UploadPlan(uploads, topics, shipped, scan.offset_grants, waiting | scan.waiting)

    def record_published(self, plan: UploadPlan, shipped: Mapping[PartitionKey, ShippedPartition]) -> None:
        """Record that the manifest with the entries ``shipped`` was published: only withheld chunks stay staged."""
        for upload in plan.uploads.values():
            if not upload.is_withheld:
                upload.state.objects.unstage()
        self._barrier.record_published(shipped)

    def _plan_uploads(
        self, scan: StoreScan, decisions: PartitionKey | None, wasted: Set[int]
    ) -> dict[PartitionKey, PartitionUpload]:  # fmt: skip
        """Plan each scanned partition: those whose bytes have waited longest first, the transaction log last."""
        uploads: dict[PartitionKey, PartitionUpload] = {}
        room_bytes = TAIL_BYTES
        order = self._turns.order(key for key in scan.found if key != decisions)
        for partition_key in [*order, *(key for key in scan.found if key == decisions)]:
            scanned = scan.found[partition_key]
            state, log = scanned.state, scanned.log
            entry, objects = scan.shipped.get(partition_key), state.objects
            chunks = objects.staged if objects.staged is not None else entry.chunks if entry is not None else ()
            unchanged = objects.unchanged_chunks(log, {*chunks, *(entry.chunks if entry is not None else ())})
            segments = objects.matching_segments(log, entry)
            # Give the transaction log the size of a whole tail: transactions of all other partitions wait for it.
            room_bytes = TAIL_BYTES if partition_key == decisions else room_bytes
            plan = plan_upload(
                log, entry, segments, chunks, unchanged.__contains__, wasted.__contains__, room_bytes
            )  # fmt: skip
            try:
                data = [state.local.read(log, piece.segment, piece.position, piece.size_bytes) for piece in plan.pieces]
            except SegmentReplaced:
                state.mark_dirty()
                continue
            room_bytes -= plan.size_bytes
            if plan.size_bytes:
                self._turns.record_served(partition_key)
            if plan.is_incomplete:
                state.mark_dirty()
            offset_grant = max(scanned.offset_grant, state.offset_grant)
            uploads[partition_key] = PartitionUpload(state, log, plan, offset_grant, data, unchanged=unchanged)
        return uploads


def _wasted_tails(manifest: Manifest | None, shipped: Mapping[PartitionKey, ShippedPartition]) -> set[int]:
    if manifest is None:
        return set()
    chunks = (chunk for part in shipped.values() for chunk in part.chunks)
    inline = {tail.number: len(tail.data) for tail in manifest.tails if tail.object is None}
    return tails_to_move(inline) | wasted_tails({tail.number: tail.size_bytes for tail in manifest.tails}, chunks)
