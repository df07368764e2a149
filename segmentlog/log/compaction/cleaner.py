"""Compact a partition: decide when it is due, take the lease, and sync what the removals rely on."""

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
from segmentlog.policy.compaction import Dirt, cleanable_end, measure_dirt, why_due
from segmentlog.records import CompactionReport, SegmentInfo


class Cleaner:
    """Compacts one partition. The lease allows one pass at a time, in any process. Thread-safe."""

    def __init__(self, handle: Handle, syncer: Syncer, catalogs: SegmentCatalogs, lease: CleanerLease) -> None:
        self._handle = handle
        self._syncer = syncer
        self._catalogs = catalogs
        self._lease = lease

    def compacted(self) -> Compacted:
        """Read from the checkpoint how far the log is compacted."""
        return self._handle.ledger.last_checkpoint().compacted

    def why_due(self, now_ms: int) -> str | None:
        """Return why a compaction pass is worth it now, or None."""
        handle = self._handle
        handle.refresh_config()
        if not handle.config.compacts:
            return None
        return why_due(handle.config, self.measure_dirt(now_ms), self.compacted().due_ms, now_ms)

    def measure_dirt(self, now_ms: int) -> Dirt:
        """Return the clean and the dirty bytes of the part of the log that can be compacted now."""
        plan = self._plan(now_ms)
        return measure_dirt(plan.segments, plan.dirty_offset, plan.end_offset)

    def read_note(self) -> CleanerNote:
        """Return the result that the last lease holder wrote."""
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
        """Compact everything that can be compacted. With ``dry_run`` only count.

        Raises `CorruptBatch`, `DiskFull`, OSError and what ``pace`` raises. The log is then complete, and compacted as
        far as the pass got.
        """
        handle = self._handle
        handle.refresh_config()
        if dry_run:
            return CompactionPass(handle, partial(self._plan, now_ms), now_ms, buffer_bytes, pace, dry_run=True).run()
        handle.check_writable()
        with self._lease.hold(wait_s) as is_held:
            if not is_held:
                return CompactionReport(handle.topic, handle.partition, busy=True)
            with handle.folder_locked():
                self._finish_passes()
            # Compact only below this offset. A removal relies on the newer record of the key, the marker that decides
            # its transaction, and the file in which a recovery begins. A power cut must not lose any of them.
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

    def record_uncleanable(self, why: str) -> None:
        """Record for users why the partition is not compacted."""
        with self._lease.hold() as is_held:
            if is_held:
                self._lease.write_note(replace(self._lease.read_note(), uncleanable=why))

    def _finish_passes(self) -> None:
        """Complete or delete the segment copies of a process that died during a compaction pass."""
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
        """Return what can be compacted now, and which part of it is dirty: segments below ``durable_base``."""
        handle = self._handle
        config, log = handle.config, handle.page.log.read()
        catalog = self._catalogs.get(log)
        compacted = self.compacted()
        dirty_offset = min(max(compacted.cleaned_offset, log.log_start_offset), log.log_end_offset)
        if compacted.keep_last != config.compaction_keep_last:
            dirty_offset = log.log_start_offset

        def dirty_segments() -> Iterator[SegmentInfo]:
            yield from (segment for segment in catalog.sealed() if segment.end_offset > dirty_offset)
            yield catalog.active(log)

        limit = log.last_stable_offset if durable_base is None else min(durable_base, log.last_stable_offset)
        end = cleanable_end(config, dirty_segments(), dirty_offset, limit, now_ms)
        return CompactionPlan(
            [segment for segment in catalog.sealed() if segment.base_offset < end], dirty_offset, end, config
        )
