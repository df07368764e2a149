"""Compaction of one partition: when it is due, who may do it, and what has to be on disk before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from msgspec.structs import replace

from segmentlog.format.checkpoint import Compacted
from segmentlog.format.file_names import CLEANED_SUFFIX, parse_copy_name
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.compaction.compaction_pass import CompactionPass, CompactionPlan, Pace
from segmentlog.log.handle import Handle
from segmentlog.log.lease import CleanerLease, CleanerNote
from segmentlog.log.read.segment_catalog import SegmentCatalogs
from segmentlog.log.swap import finish_swaps
from segmentlog.policy.compaction import Dirt, cleanable_end, measure, why_due
from segmentlog.records import CompactionReport, SegmentInfo


class Cleaner:
    """Compacts one partition. One pass at a time, by the lease; thread-safe."""

    def __init__(self, handle: Handle, syncer: Syncer, catalogs: SegmentCatalogs, lease: CleanerLease) -> None:
        self._handle = handle
        self._syncer = syncer
        self._catalogs = catalogs
        self._lease = lease

    def compacted(self) -> Compacted:
        """How far the log is clean, as the checkpoint says."""
        return self._handle.ledger.last_checkpoint().compacted

    def why_due(self, now_ms: int) -> str | None:
        """Why a pass is worth it now; None when it is not."""
        handle = self._handle
        handle.refresh_config()
        if not handle.config.compacts:
            return None
        return why_due(handle.config, self.dirt(now_ms), self.compacted().due_ms, now_ms)

    def dirt(self, now_ms: int) -> Dirt:
        """How much there is to clean."""
        plan = self._plan(now_ms)
        return measure(plan.segments, plan.dirty_offset, plan.end_offset)

    def read_note(self) -> CleanerNote:
        """What whoever held the lease wrote down last."""
        return self._lease.read_note()

    def run(
        self,
        now_ms: int,
        *,
        buffer_bytes: int,
        dry_run: bool = False,
        pace: Pace = lambda size_bytes: None,
        wait_s: float = 0.0,
    ) -> CompactionReport:
        """Clean everything that can be cleaned. With ``dry_run`` nothing is changed, but counted.

        Raises `CorruptBatch`, `DiskFull`, OSError and what ``pace`` raises: the log is whole then, and as clean
        as it came.
        """
        handle = self._handle
        handle.refresh_config()
        if dry_run:
            return CompactionPass(handle, partial(self._plan, now_ms), now_ms, buffer_bytes, pace, dry_run=True).run()
        handle.check_writable()
        with self._lease.hold(wait_s) as held:
            if not held:
                return CompactionReport(handle.topic, handle.partition, busy=True)
            with handle.folder_locked():
                self._tidy_up()
            # A record must not go for the sake of a newer one that a power cut could take, or whose transaction
            # was decided by a marker that it could take, nor the file that a recovery would begin in: only what is
            # below this is cleaned.
            decided_offset = handle.page.log.read().last_stable_offset
            durable_base = min(self._syncer.checkpoint_now(), decided_offset)
            plan = partial(self._plan, now_ms, durable_base)
            report = CompactionPass(handle, plan, now_ms, buffer_bytes, pace, dry_run=False).run()
            self._lease.write_note(
                CleanerNote(
                    handle.clock.now_ms(),
                    report.seconds,
                    report.records_before,
                    report.records_after,
                    report.bytes_before,
                    report.bytes_after,
                    unreadable=report.unreadable[0] if report.unreadable else "",
                )
            )
            return report

    def give_up(self, why: str) -> None:
        """Write down for people why the partition is not cleaned."""
        with self._lease.hold() as held:
            if held:
                self._lease.write_note(replace(self._lease.read_note(), uncleanable=why))

    def _tidy_up(self) -> None:
        """Complete or drop what a process left that died in a pass."""
        handle = self._handle
        if any(map(parse_copy_name, handle.fs.listdir(handle.folder))):
            with handle.append_locked():
                finish_swaps(handle)
            for name in handle.fs.listdir(handle.folder):
                if name.endswith(CLEANED_SUFFIX) and parse_copy_name(name):
                    with contextlib.suppress(FileNotFoundError):
                        handle.fs.unlink(f"{handle.folder}/{name}")
        handle.fs.sync_folder(handle.folder)

    def _plan(self, now_ms: int, durable_base: int | None = None) -> CompactionPlan:
        """What can be cleaned now, and what of it is dirty: segments below ``durable_base``."""
        handle = self._handle
        config, log = handle.config, handle.page.log.read()
        catalog = self._catalogs.of(log)
        compacted = self.compacted()
        dirty_offset = min(max(compacted.cleaned_offset, log.log_start_offset), log.log_end_offset)
        if compacted.keep_last != config.compaction_keep_last:
            dirty_offset = log.log_start_offset

        def behind() -> Iterator[SegmentInfo]:
            yield from (one for one in catalog.sealed() if one.end_offset > dirty_offset)
            yield catalog.active(log)

        limit = log.last_stable_offset if durable_base is None else min(durable_base, log.last_stable_offset)
        end = cleanable_end(config, behind(), dirty_offset, limit, now_ms)
        return CompactionPlan([one for one in catalog.sealed() if one.base_offset < end], dirty_offset, end, config)
