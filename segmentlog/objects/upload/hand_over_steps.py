"""The owner's side of a hand-over: the shipper stops all appends, ships the rest, and waits for another owner.

- ``requested``: ship as always, until little is left and no transaction is open (or `_TRANSACTIONS_MS` have passed).
- ``stopped``: write the file that stops appends, and make all processes read it. Sync and ship the rest. A shipper that
  finds this stage does it again: the shipper that wrote the file may have died before all processes had to read it.
- ``published``: put the manifest that is marked as handed over, in which each offset grant ends at the log end offset.
  Read it again until it names another owner. That fences this store.

If the time is up, the store is taken back: a conditional put raises the grants again, then appends are allowed. Each
step starts from the file ``@hand-over`` and the manifest, so that any process of the owner can continue after a crash.
The local grants never change: the manifest's grants are lower than they are only while the file stops all appends.

*Rejected:* a fence in each partition's grant file. Setting and removing 1,000 of them takes four syncs each, and topics
that are created meanwhile have none.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from segmentlog.errors import PartitionFailed, SegmentlogError, ShippingRefused, UnknownTopic
from segmentlog.format.file_names import CHECKPOINT_FILE
from segmentlog.format.hand_over import HandOver
from segmentlog.format.manifest import Manifest, ShippedPartition
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.local.partition_snapshot import topics_to_ship
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import PartitionUploadState, UploadStates
from segmentlog.objects.ownership import claim
from segmentlog.objects.ownership.binding import Binding
from segmentlog.objects.upload.manifest_publisher import ManifestPublisher
from segmentlog.objects.upload.plan import UploadPlan
from segmentlog.objects.upload.store_scan import entries_by_partition
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.grant_file import read_grant
from segmentlog.storage.hand_over_file import (
    change_hand_over,
    read_hand_over,
    remove_hand_over,
    write_hand_over,
)
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_TRANSACTIONS_MS: Final = 2_000
"""Wait this long for a moment in which no transaction is open. The new owner aborts those that are open."""
_NOT_STOPPED: Final = "this process has not stopped appends yet"


class HandOverSteps:
    """The steps of a hand-over, in the cycles of one shipper. Not thread-safe."""

    def __init__(self, topics: Topics, states: UploadStates, publisher: ManifestPublisher, url: str) -> None:
        self._topics = topics
        self._states = states
        self._publisher = publisher
        self._url = url
        self.current: HandOver | None = None
        """The hand-over as the last cycle left it."""
        self._missing = ""
        """Why the store could not be handed over at the end of the last cycle."""
        self._unstopped = _NOT_STOPPED
        """Why a process may still append during ``current``; "" once this shipper has stopped every partition."""
        self._seen_ms = 0
        """Monotonic time at which this process first saw ``current``."""

    @property
    def is_active(self) -> bool:
        """Whether a hand-over is requested or under way: cycles should follow one another soon."""
        return self.current is not None and self.current.is_active

    @property
    def is_stopping(self) -> bool:
        """Whether appends are stopped."""
        return self.current is not None and self.current.is_stopping

    # ------------------------------------------------------------ in each cycle

    def begin_cycle(
        self, binding: Binding, now_ms: int, publish: Callable[[Manifest], None], resolve: Callable[[], None]
    ) -> bool:  # fmt: skip
        """Take the step that is due before anything is shipped. Return whether this cycle must ship nothing.

        ``publish`` replaces the manifest, ``resolve`` reads it. Raise what they raise: `StoreFenced` once the manifest
        names another owner.
        """
        hand_over = self._find(binding)
        manifest = self._publisher.manifest
        is_handed_over = manifest is not None and manifest.is_handed_over
        if is_handed_over and (hand_over is None or not hand_over.is_stopping):
            why = "the file of the hand-over was removed"
            hand_over = HandOver(stage="published", owner_id=binding.owner_id, topics=binding.topics, reason=why)
            self._write(hand_over)
            self._stop_partitions(binding)
        if hand_over is None or not hand_over.is_active:
            return False
        is_due = self._is_expired(hand_over, now_ms)
        if hand_over.stage != "published":
            if is_due:
                self._give_up(hand_over, self._missing or "the process that ships the store had no time for it")
            elif hand_over.is_stopping and self._unstopped:  # before the scan, which then finds the last records
                self._stop_partitions(binding)
            return False
        if not is_due:
            if is_handed_over:
                resolve()
            elif self._unstopped:
                self._stop_partitions(binding)
            return is_handed_over
        if manifest is not None:
            # Even if the manifest is not handed over: this put makes one fail that may still be on its way.
            publish(self._raised(manifest, now_ms))
        self._give_up(
            hand_over, hand_over.reason or f"no machine took it over within {hand_over.wait_ms / 1000:g} s"
        )  # fmt: skip
        return False

    def end_cycle(
        self, binding: Binding, plan: UploadPlan, now_ms: int, publish: Callable[[Manifest], None]
    ) -> None:  # fmt: skip
        """Take the step that is due after a cycle that shipped what was on disk. Raise as ``publish`` does."""
        hand_over = self.current
        if hand_over is None or not hand_over.is_active:
            return
        if hand_over.stage == "requested":
            if self._is_ready(plan):
                logger.warning("%s: appends are stopped, to hand the store over to another machine", self._topics.path)
                until_ms = now_ms + hand_over.wait_ms
                if self._change(hand_over, stage="stopped", topics=binding.topics, until_ms=until_ms):
                    self._stop_partitions(binding)
            return
        self._missing = self._unstopped or self._find_missing(plan)
        manifest = self._publisher.manifest
        if self._missing or manifest is None:
            self._flush()  # a shipper that finds this stage knows the unsynced partitions only after its first scan
            return
        # Before the put: from then on, only another put makes sure that no other machine takes the store over.
        if self._change(hand_over, stage="published", until_ms=now_ms + hand_over.wait_ms):
            publish(_lowered(manifest, now_ms))

    # ------------------------------------------------------------ stages

    def _find(self, binding: Binding) -> HandOver | None:
        found = read_hand_over(self._topics.fs, self._topics.path)
        if found is not None and found.owner_id not in ("", binding.owner_id):  # of an earlier binding
            remove_hand_over(self._topics.fs, self._topics.path)
            found = None
        if found != self.current:
            self._unstopped = _NOT_STOPPED
        self._remember(found)
        return found

    def _write(self, hand_over: HandOver) -> None:
        write_hand_over(self._topics.fs, self._topics.path, hand_over)
        self._remember(hand_over)

    def _change(self, hand_over: HandOver, **changes: Any) -> bool:
        """Write the next stage, unless another process has given the hand-over up. Return whether it is written."""
        changed = replace(hand_over, **changes)
        if not change_hand_over(self._topics.fs, self._topics.path, hand_over, changed):
            return False
        self._remember(changed)
        return True

    def _remember(self, hand_over: HandOver | None) -> None:
        if hand_over != self.current:
            self.current, self._seen_ms = hand_over, self._topics.clock.monotonic_ms()

    def _is_expired(self, hand_over: HandOver, now_ms: int) -> bool:
        waited_ms = self._topics.clock.monotonic_ms() - self._seen_ms
        # The second condition counts if the wall clock was set back.
        return now_ms >= hand_over.until_ms or (hand_over.is_stopping and waited_ms >= hand_over.wait_ms)

    def _is_ready(self, plan: UploadPlan) -> bool:
        """Return whether little is left to ship, so that appends have to be stopped for a short time only."""
        is_incomplete = any(upload.plan.is_incomplete for upload in plan.uploads.values())
        self._missing = "; ".join(plan.waiting.values()) or ("data is still being uploaded" if is_incomplete else "")
        if self._missing:
            return False
        self._flush()
        waited_ms = self._topics.clock.monotonic_ms() - self._seen_ms
        logs = [state.local.partition.handle.page.log.read() for state in self._states.by_key.values()]
        has_transactions = any(log.last_stable_offset < log.log_end_offset for log in logs)
        return not has_transactions or waited_ms >= _TRANSACTIONS_MS

    def _stop_partitions(self, binding: Binding) -> None:
        """Make all processes read the file that stops appends, and sync. Then no append is in progress.

        Set ``_unstopped`` if this fails for a partition. The shipper then tries again in its next cycle.
        """
        manifest = self._publisher.manifest
        shipped = [topic.id for topic in manifest.topics] if manifest else []
        failed: dict[str, str] = {}
        for name, file in topics_to_ship(self._topics, binding.topics, shipped):
            for number in range(file.partitions):
                try:
                    handle = self._topics.open_partition(name, number, file.topic_id).handle
                    with handle.translating_errors("nothing was changed"), handle.append_locked():
                        handle.ledger.count_config_change()
                except UnknownTopic as error:
                    with contextlib.suppress(UnknownTopic):  # nothing to stop in a deleted topic
                        self._topics.topic_name(file.topic_id)  # it still exists, for example under another name
                        failed[f"{name}/{number}"] = str(error)
                    break
                except (SegmentlogError, OSError) as error:
                    failed[f"{name}/{number}"] = str(error)
        before, self._unstopped = self._unstopped, ""
        if failed:
            partition, why = min(failed.items())
            others = f" (and {len(failed) - 1} more partitions)" if len(failed) > 1 else ""
            self._unstopped = self._missing = f"appends cannot be stopped: {partition}: {why}{others}"
            if self._unstopped != before:
                logger.warning("%s: %s", self._topics.path, self._unstopped)
        self._flush()

    def _flush(self) -> None:
        """Sync what any process has appended to the shipped partitions."""

        def flush(state: PartitionUploadState) -> None:
            try:
                state.local.partition.flush()
            except (SegmentlogError, OSError) as error:
                if not isinstance(error, PartitionFailed | UnknownTopic):  # the shipper reports these
                    logger.warning("%s: cannot be synced: %s", state.local.partition, error)

        unsynced = [
            state for state in self._states.by_key.values()
            if state.local.partition.durable_offset < state.local.log_end_offset
        ]  # fmt: skip
        upload_pool.run_parallel(flush, unsynced, claim.FILES_PARALLEL)

    def _find_missing(self, plan: UploadPlan) -> str:
        """Return what the manifest lacks, so that the store cannot be handed over yet; "" if it has everything."""
        shipped = entries_by_partition(self._publisher.manifest)
        for name, file in plan.topics:
            for number in range(file.partitions):
                partition_key = (file.topic_id, number)
                why = plan.waiting.get(partition_key) or self._lag(partition_key, shipped)
                if why:
                    return f"{name}/{number}: {why}"
        return ""

    def _lag(self, partition_key: PartitionKey, shipped: Mapping[PartitionKey, ShippedPartition]) -> str:
        state, entry = self._states.by_key.get(partition_key), shipped.get(partition_key)
        if state is None or entry is None:
            return "it is not shipped yet"
        log = state.local.partition.handle.page.log.read()
        if (log.log_end_offset, log.epoch) == (entry.end_offset, entry.epoch):
            return ""
        state.mark_dirty()
        return f"it ends at offset {log.log_end_offset}, and is shipped up to {entry.end_offset}"

    def _give_up(self, hand_over: HandOver, why: str) -> None:
        """Allow appends again. The manifest's grants must cover the local ones."""
        self._write(replace(hand_over, stage="failed", reason=why))
        logger.warning(
            "%s: the store is not handed over: %s. This machine continues as the owner", self._topics.path, why
        )  # fmt: skip

    # ------------------------------------------------------------ manifests

    def _raised(self, manifest: Manifest, now_ms: int) -> Manifest:
        """Return the manifest that takes the store back: each grant covers the local grant again."""
        topics = tuple(
            replace(topic, partitions=tuple(
                replace(part, offset_grant=max(part.offset_grant, self._local_grant(topic.id, part.number)))
                for part in topic.partitions
            ))
            for topic in manifest.topics
        )  # fmt: skip
        return _next(manifest, now_ms, topics=topics, is_handed_over=False)

    def _local_grant(self, topic_id: str, number: int) -> int:
        """Return the end of the offsets that processes of this machine may assign, or have reserved.

        It is read from the files: a partition that cannot be opened here may be open in another process.
        """
        name = ""
        while True:
            before = name
            try:
                name = self._topics.topic_name(topic_id)
            except UnknownTopic:
                return 0
            folder = f"{self._topics.path}/{name}/{number}"
            granted = read_grant(self._topics.fs, folder)
            checkpoint = None
            if self._topics.fs.exists(f"{folder}/{CHECKPOINT_FILE}"):
                checkpoint, _ = CheckpointFile(self._topics.fs, f"{folder}/{CHECKPOINT_FILE}").read()
            if granted is not None or checkpoint is not None:
                reserved_offset = 0 if checkpoint is None else checkpoint.offset_ceiling
                return max(reserved_offset, 0 if granted is None else granted.end_offset)
            if name == before:  # else it may have been renamed meanwhile
                why = f"{name}/{number}: neither its offset grant nor its checkpoint can be read"
                raise ShippingRefused(self._url, why)


def _lowered(manifest: Manifest, now_ms: int) -> Manifest:
    """Return the manifest that hands the store over: each grant ends at the log end offset."""
    topics = tuple(
        replace(topic, partitions=tuple(
            replace(part, offset_grant=part.end_offset, markers_end_offset=-1) for part in topic.partitions
        ))
        for topic in manifest.topics
    )  # fmt: skip
    return _next(manifest, now_ms, topics=topics, is_handed_over=True)


def _next(manifest: Manifest, now_ms: int, **changes: Any) -> Manifest:
    return replace(
        manifest, sequence=manifest.sequence + 1, nonce=upload_pool.new_nonce(), shipped_ms=now_ms, **changes
    )  # fmt: skip
