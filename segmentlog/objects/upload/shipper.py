"""Ship a store in cycles: upload what is new as one object, then publish the manifest by one conditional put.

A few KiB of new data are stored in the manifest itself, so that such a cycle needs only one request.

scan      find partitions with new data on disk (`store_scan`), and plan what to upload and what to withhold (`plan`)
upload    sealed segments on threads, over as many cycles as it takes (`segment_uploader`); new data of all partitions
          at once, as a tail (`tail_uploader`)
publish   replace the manifest that was read or published last (`manifest_builder`, `manifest_publisher`)
notify    pass end offsets and offset grants to local readers and appenders; evict segments; delete marked objects
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from segmentlog.arguments import as_patterns
from segmentlog.defaults import SHIP_INTERVAL_MS
from segmentlog.errors import SegmentlogError, ShippingRefused
from segmentlog.format.manifest import Manifest, Owner, ShippedPartition
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket, PreconditionFailed
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import UploadStates
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.objects.ownership.binding import Binding, write_binding
from segmentlog.objects.ownership.claim import claim
from segmentlog.objects.tier.eviction import Evictor
from segmentlog.objects.upload.excluded_topics import release_excluded_topics
from segmentlog.objects.upload.hand_over_steps import HandOverSteps
from segmentlog.objects.upload.manifest_builder import build_topics, content_of, count_shipped_offsets, tail_numbers
from segmentlog.objects.upload.manifest_publisher import ManifestPublisher, PutOutcome
from segmentlog.objects.upload.plan import UploadPlan, UploadPlanner
from segmentlog.objects.upload.segment_uploader import SegmentUploader
from segmentlog.objects.upload.server_nodes import read_server_nodes
from segmentlog.objects.upload.store_files import StoreFiles
from segmentlog.objects.upload.store_scan import entries_by_partition
from segmentlog.objects.upload.tail_uploader import TailUploader
from segmentlog.policy.shipped_topics import is_selected
from segmentlog.storage import fork_safety
from segmentlog.storage.fork_safety import LockableFd
from segmentlog.topics.topic_registry import Topics

GRACE_MS: Final = 5 * 60_000
"""Objects are deleted this long after they were marked: a reader with an older manifest may still need them."""

_UPLOAD_WAIT_S: Final = 1.0
_PATIENCE_S: Final = 3.0
"""A partition is stuck if none of its data could be shipped for this long, while other partitions were shipped."""
_PAUSE_S: Final = 0.02
_PAUSE_MS: Final = 3_000
"""A time without a cycle that is longer than the interval by this much was a pause of the process."""
_OWNER_CHECK_MS: Final = 5_000
"""An idle shipper reads the manifest this often, to notice a takeover: a standby takes over after eight seconds, and a
former owner must not serve old records much longer."""


Progress = Callable[[int, int], None]
"""Called with (bytes uploaded so far, bytes in total)."""


class ShipResult(msgspec.Struct, frozen=True):
    """Result of a cycle, or of one call of `Shipper.ship`.

    put         whether a manifest was published
    records     newly shipped offsets, without those in lost ranges
    size_bytes  uploaded bytes of new records, without whole segments
    pending     number of segments whose upload is running or waiting
    waiting     reason why a partition has data that could not be shipped, by partition
    """

    put: bool
    records: int
    size_bytes: int
    pending: int = 0
    waiting: dict[str, str] = {}


_NOTHING: Final = ShipResult(put=False, records=0, size_bytes=0)


class Shipper:
    """Ships one store to one bucket. Thread-safe; one thread of one process at a time runs a cycle.

    If another process ships the store, `run_cycle` uploads nothing and returns. A call after the end of that process
    takes its place.
    """

    def __init__(
        self,
        topics: Topics,
        bucket: Bucket,
        *,
        topic_patterns: Iterable[str] = (),
        interval_ms: int = SHIP_INTERVAL_MS,
        grace_ms: int = GRACE_MS,
        parallel: int = upload_pool.PARALLEL,
        grants_on_request: bool = False,
    ) -> None:
        self._topics = topics
        self._grants_on_request = grants_on_request
        """Whether a partition without appends since a takeover gets offsets only when an append requests them.

        For a shipper that keeps running cycles. After one that ships once, no process would answer the request.
        """
        self._fs = topics.fs
        self._clock = topics.clock
        self.heartbeat_ms = 0
        """While the manifest names a server: publish it again this long after the last time, even if nothing is new. A
        standby that cannot reach the server sees that this owner works. 0: never."""
        self._patterns = as_patterns("topics", topic_patterns)
        self._interval_ms = interval_ms
        self._grace_ms = grace_ms
        self.bucket = bucket
        self._parallel = parallel
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._reset()
        fork_safety.on_fork(self, "_reset")

    def _reset(self) -> None:
        """Set the initial state, also in a forked child: the parent keeps shipping."""
        topics, bucket, parallel = self._topics, self.bucket, self._parallel
        self._lease: LockableFd | None = None
        self._binding: Binding | None = None
        self._owner: Owner | None = None
        self._publisher = ManifestPublisher(topics, bucket)
        orphans = self._orphans = Orphans()
        self._states = UploadStates(topics, orphans, grants_on_request=self._grants_on_request)
        self._planner = UploadPlanner(topics, bucket.url, self._states)
        self._segments = SegmentUploader(topics.fs, topics.path, bucket, parallel, self._states, orphans)
        self._tails = TailUploader(bucket, parallel, orphans)
        self._files = StoreFiles(topics.fs, topics.path, bucket, orphans)
        self._evictor = Evictor(bucket)
        self._hand_over = HandOverSteps(topics, self._states, self._publisher, bucket.url)
        self._released_for: frozenset[str] | None = None
        """Topic ids in the manifest when the grants of all other topics were removed; None if a removal has failed."""
        self._published_ms = 0
        """When the manifest was last published or checked."""
        self._cycle_ms: tuple[int, int] | None = None
        """Monotonic clock and wall clock at the end of the last cycle."""
        self._is_finished = True
        """Whether the last cycle ran to its end. Otherwise the data that it scanned may not be shipped."""
        self.error: str | None = None
        """Why the last cycle failed; None if it succeeded."""
        self.shipped_ms = 0
        """Wall-clock time of the last cycle after which the object store had all that was on disk."""
        self._waiting: dict[str, tuple[str, float]] = {}
        """(reason why a partition has data that could not be shipped, monotonic time since when), by partition."""

    # ------------------------------------------------------------ the cycle

    def run_cycle(self, now_ms: int | None = None) -> ShipResult:
        """Ship everything that is on disk now, except segments whose upload takes longer.

        Raise `ObjectStoreError` (the next cycle ships the rest), `StoreFenced`, `ShippingRefused`.
        """
        signals = self._topics.ship_signals
        with self._mutex:
            now_ms = self._clock.now_ms() if now_ms is None else now_ms
            if not self._is_finished:
                self._states.mark_all_dirty()
            self._is_finished = False
            try:
                if not self._become_owner(now_ms):
                    return _NOTHING
                if self._was_paused():
                    self._check_owner(now_ms)
                try:
                    result = self._run_cycle(now_ms)
                except PreconditionFailed:  # a garbage collection marked objects; its manifest has been read since
                    result = self._run_cycle(now_ms)
            except (SegmentlogError, OSError) as error:
                self.error = signals.error = str(error)
                raise
            finally:
                self._cycle_ms = self._clock.monotonic_ms(), self._clock.now_ms()
            self._is_finished = True
            self.error = None
            if not result.pending and not result.waiting:
                self.shipped_ms = now_ms
            signals.error = ""
        signals.notify_waiters()
        return result

    def _run_cycle(self, now_ms: int) -> ShipResult:
        assert self._binding is not None
        if self._publisher.is_uncertain:
            self._resolve_outcome()
        if self._hand_over.begin_cycle(self._binding, now_ms, self._publish, self._resolve_outcome):
            return _NOTHING
        self._segments.collect_finished(self._publisher.manifest)
        before = self._publisher.manifest
        plan = self._planner.make_plan(self._binding.topics, before, now_ms)
        pending = self._segments.start(plan.uploads)
        size_bytes = self._tails.upload(plan.uploads, before)
        self._files.upload_changed(before)
        manifest = self._build_manifest(plan, now_ms)
        is_new = before is None or content_of(manifest) != content_of(before)
        wait_ms = self.heartbeat_ms if self.heartbeat_ms and manifest.owner.nodes else _OWNER_CHECK_MS
        is_due = not 0 <= now_ms - self._published_ms < wait_ms  # also if the clock was set back
        if is_new or (is_due and wait_ms == self.heartbeat_ms):
            self._publish(manifest)
            self._published_ms = now_ms
        elif is_due:
            self._check_owner(now_ms)
        self._release_excluded_topics()
        shipped = entries_by_partition(self._publisher.manifest)
        self._planner.record_published(plan, shipped)
        self._notify(plan, shipped)
        pending += any(upload.plan.is_incomplete for upload in plan.uploads.values())
        excluded = {file.topic_id for name, file in plan.topics if not is_selected(name, self._binding.topics)}
        if not self._hand_over.is_stopping:
            self._evictor.run(self._states.by_key, shipped, excluded, now_ms)
        records = count_shipped_offsets(manifest) - count_shipped_offsets(before)
        waiting = self._record_waiting(plan, shipped)
        self._topics.ship_signals.notify_waiters()  # now, so that they do not wait for the deletions
        self._publisher.delete_marked(now_ms, self._grace_ms)
        is_put = manifest is self._publisher.manifest
        self._hand_over.end_cycle(self._binding, plan, now_ms, self._publish)
        return ShipResult(is_put, records, size_bytes, pending, waiting)

    def _build_manifest(self, plan: UploadPlan, now_ms: int) -> Manifest:
        """Return the next manifest. Everything that it refers to has been uploaded."""
        assert self._owner is not None
        before = self._publisher.manifest
        topics = build_topics(plan, self._states.by_key)
        manifest = Manifest(
            store_id=self._topics.store_id,
            owner=replace(self._owner, nodes=read_server_nodes(self._fs, self._topics.path)),
            sequence=before.sequence + 1 if before else 0,
            nonce=upload_pool.new_nonce(),
            shipped_ms=now_ms,
            interval_ms=self._interval_ms,
            topics=topics,
            tails=self._tails.referenced_tails(tail_numbers(topics), before),
            files=self._files.entries,
            next_tail=self._tails.next_number(before),
        )
        in_use = self._states.keys_in_use() | self._tails.keys_in_use(self._states.staged_tails())
        return self._publisher.mark_unreferenced(manifest, self._orphans.keys, in_use, now_ms)

    def _notify(self, plan: UploadPlan, shipped: Mapping[PartitionKey, ShippedPartition]) -> None:
        """Pass the manifest's end offsets and offset grants to local readers and appenders.

        Raise the first error after all partitions have been notified.
        """
        first: SegmentlogError | OSError | None = None
        for partition_key, entry in shipped.items():
            state, upload = self._states.by_key.get(partition_key), plan.uploads.get(partition_key)
            if state is None or (upload is None and entry.offset_grant <= state.offset_grant):
                continue
            if upload is not None and upload.plan.segments_to_upload:
                state.mark_dirty()
            if upload is not None and not upload.is_withheld:
                state.objects.retain_snapshots(entry)
            try:
                state.publish_shipped(entry)
            except (SegmentlogError, OSError) as error:
                first = first or error
        if first is not None:
            raise first

    def _release_excluded_topics(self) -> None:
        """Remove the offset grants of topics that the published manifest no longer lists."""
        assert self._binding is not None
        manifest = self._publisher.manifest
        shipped = frozenset(topic.id for topic in manifest.topics) if manifest else frozenset()
        if shipped != self._released_for:
            is_done = release_excluded_topics(self._topics, self._binding.topics, shipped)
            self._released_for = shipped if is_done else None

    def _record_waiting(self, plan: UploadPlan, shipped: Mapping[PartitionKey, ShippedPartition]) -> dict[str, str]:
        """Return the reasons why partitions wait, by name. Record since when each waits for the same reason."""
        names = {file.topic_id: name for name, file in plan.topics}
        now_s, waiting = time.monotonic(), {}
        for partition_key, why in plan.waiting.items():
            end_offset = shipped[partition_key].end_offset if partition_key in shipped else 0
            waiting[f"{names[partition_key[0]]}/{partition_key[1]}"] = f"shipped up to offset {end_offset}: {why}"
        before = self._waiting
        self._waiting = {name: before[name] if name in before and before[name][0] == why else (why, now_s)
                         for name, why in waiting.items()}  # fmt: skip
        return waiting

    @property
    def stuck(self) -> dict[str, str]:
        """The reason why a partition has been waiting for `_PATIENCE_S` or longer, by partition."""
        long_ago_s = time.monotonic() - _PATIENCE_S
        return {name: why for name, (why, since_s) in self._waiting.copy().items() if since_s <= long_ago_s}

    # ------------------------------------------------------------ ownership

    def _become_owner(self, now_ms: int) -> bool:
        if self._owner is not None:
            return True
        signals = self._topics.ship_signals
        if self._lease is None:
            try:
                self._lease = signals.acquire_lease()
            finally:
                signals.is_starting = False
        if self._lease is None:
            return False
        self._binding, self._owner, found, uncompared = claim(self._topics, self.bucket, self._patterns, now_ms)
        self._segments.load()
        if found is not None:
            self._publisher.resume_from(*found, uncompared)
            self._states.uncompared = set(uncompared)
            self._segments.remove_published(self._publisher.accounted_keys())
        return True

    def _was_paused(self) -> bool:
        """Return whether this process was stopped, or its machine suspended, since the last cycle.

        Another machine may own the store since then. The next idle check would notice it up to `_OWNER_CHECK_MS` later.
        """
        if self._cycle_ms is None:
            return False
        gap_ms = max(self._clock.monotonic_ms() - self._cycle_ms[0], self._clock.now_ms() - self._cycle_ms[1])
        return gap_ms > self._interval_ms + _PAUSE_MS

    def _check_owner(self, now_ms: int) -> None:
        """Read the manifest. Raise `StoreFenced` if it names another owner."""
        self._resolve_outcome()
        self._published_ms = now_ms

    def _publish(self, manifest: Manifest) -> None:
        """Replace the last manifest. Raise `ObjectStoreError`: then the next cycle resolves the outcome."""
        try:
            self._publisher.publish(manifest)
        except PreconditionFailed:
            self._resolve_outcome()
            if self._publisher.manifest is not manifest:
                raise
        else:
            self._record_published()

    def _resolve_outcome(self) -> None:
        """Read the current manifest and adopt it; raise as `ManifestPublisher.resolve_outcome` does."""
        assert self._binding is not None
        assert self._owner is not None
        outcome = self._publisher.resolve_outcome(self._binding, self._owner)
        if outcome is not PutOutcome.NO_MANIFEST:
            self._files.invalidate()
        match outcome:
            case PutOutcome.PUBLISHED:
                self._record_published()
                self._states.unstage_all()
                self._states.mark_all_dirty()
            case PutOutcome.MARKED:
                self._record_published()
                self._states.drop_keys(self._publisher.marked_keys())
                self._states.mark_all_dirty()
            case PutOutcome.EARLIER_PROCESS:
                self._states.uncompared |= self._publisher.uncompared
                # Drop all states, staged chunks included: the manifest has other tails with the same numbers.
                self._states.drop_deleted_topics(set())
                self._record_published()

    def _record_published(self) -> None:
        """Remove the objects that the manifest now lists from all records of unpublished objects."""
        assert self._binding is not None
        accounted = self._publisher.accounted_keys()
        self._segments.remove_published(accounted)
        self._tails.retain_staged(self._states.staged_tails())
        self._orphans.remove(accounted)
        if not self._binding.begun:
            self._binding = replace(self._binding, begun=True)
            write_binding(self._fs, self._topics.path, self._binding)

    # ------------------------------------------------------------ for callers

    def ship(self, progress: Progress | None = None) -> ShipResult:
        """Ship everything that is on disk now, and return when it is uploaded. Raise as `run_cycle` does.

        Also raise `ShippingRefused` if a partition cannot be shipped, after all other partitions are shipped.
        """
        put_before = self._put_bytes
        first = self.run_cycle()
        records, size_bytes, put = first.records, first.size_bytes, first.put
        while True:
            with self._mutex:
                if self._owner is None:
                    raise ShippingRefused(self.bucket.url, f"another process ships {self._topics.path} to this URL")
            self.wait_for_upload(_UPLOAD_WAIT_S)
            now = self.run_cycle()
            records, size_bytes, put = records + now.records, size_bytes + now.size_bytes, put or now.put
            if progress is not None:
                done = self._put_bytes - put_before
                progress(done, done + self._segments.left_bytes)
            if not now.pending and not now.waiting and not self._evictor.has_more:
                return ShipResult(put, records, size_bytes)
            if not now.pending and (stuck := self.stuck):
                reasons = "; ".join(f"{name}: {why}" for name, why in stuck.items())
                why = f"all partitions were shipped except these, which cannot be shipped: {reasons}"
                raise ShippingRefused(self.bucket.url, why)
            if now.waiting:
                time.sleep(_PAUSE_S)

    def wait_for_upload(self, wait_s: float) -> None:
        """Wait until the upload of a segment has ended, for at most ``wait_s``. Return at once if no upload is running.

        Raise the error of a failed upload; the next cycle starts it again.
        """
        with self._mutex:
            self._segments.collect_finished(self._publisher.manifest, max(wait_s, 0.0))

    @property
    def _put_bytes(self) -> int:
        """Bytes of segments and tails uploaded so far."""
        return self._tails.put_bytes + self._segments.put_bytes

    @property
    def manifest(self) -> Manifest | None:
        """The manifest that was published or read last; None before the first."""
        return self._publisher.manifest

    @property
    def eviction_errors(self) -> dict[str, str]:
        """Why segments of a partition could not be evicted or recalled, by partition."""
        return self._evictor.errors.copy()

    @property
    def unshipped_bytes(self) -> int:
        """Bytes appended since the last cycle, whether on disk or not."""
        return self._states.unshipped_bytes

    def log_ends(self) -> dict[PartitionKey, int]:
        """Return the current local log end offset of each partition that the last cycle scanned."""
        with self._mutex:
            return {key: state.local.log_end_offset for key, state in self._states.by_key.items()}

    def count_unshipped(self, ends: Mapping[PartitionKey, int]) -> int:
        """Return how many offsets below ``ends`` the manifest does not include. Leave out deleted topics."""
        with self._mutex:
            shipped = entries_by_partition(self._publisher.manifest)
            counted = ((end, shipped.get(key)) for key, end in ends.items() if key in self._states.by_key)
            return sum(max(end - (entry.end_offset if entry else 0), 0) for end, entry in counted)

    @property
    def topic_patterns(self) -> tuple[str, ...]:
        """Names and patterns of the shipped topics; empty for all."""
        return self._binding.topics if self._binding is not None else self._patterns

    @property
    def is_handing_over(self) -> bool:
        """Whether the next cycle should run soon, because a hand-over of the store is under way."""
        return self._owner is not None and self._hand_over.is_active

    @property
    def is_owner(self) -> bool:
        """Whether this process ships the store."""
        return self._owner is not None

    def close(self) -> None:
        """Stop shipping and release the lease. Do not wait for running uploads."""
        with self._mutex:
            self._segments.close()
            lease, self._lease = self._lease, None
            self._owner = None
            if lease is not None:
                self._topics.ship_signals.release_lease(lease)
