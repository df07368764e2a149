"""Retention of one partition: old segments go, and a quiet active one is sealed so that it can."""

from __future__ import annotations

from collections.abc import Callable

from segmentlog.log.append.appender import Appender
from segmentlog.log.handle import Handle
from segmentlog.log.lease import CleanerLease
from segmentlog.log.read.segment_catalog import SegmentCatalogs
from segmentlog.log.segment_removal import sweep_deleted
from segmentlog.policy.retention import Expired, active_is_due, expired_segments, is_bounded
from segmentlog.records import RetentionReport


class RetentionRunner:
    """Removes what the topic's configuration does not keep. Thread-safe by the lease."""

    def __init__(
        self,
        handle: Handle,
        appender: Appender,
        catalogs: SegmentCatalogs,
        lease: CleanerLease,
        trim: Callable[[int], int],
    ) -> None:
        self._handle = handle
        self._appender = appender
        self._catalogs = catalogs
        self._lease = lease
        self._trim = trim
        self._sweep_ms: int | None = None
        """When the next put-aside file is to be deleted, of those that there were in this generation; None: never."""
        self._swept_generation = -1

    def run(self, now_ms: int, *, dry_run: bool = False, wait_s: float = 0.0) -> RetentionReport:
        """Remove what is to go by ``now_ms``. Returns at once when there is nothing, without taking the lease."""
        handle = self._handle
        handle.refresh_config()
        log = handle.page.log.read()
        rolls = bool(log.end_position) and active_is_due(handle.config, now_ms - log.first_append_ms)
        sweeps = self._may_sweep(log.generation, now_ms)
        expired = self._expired(now_ms)
        if dry_run or not (rolls or sweeps or expired):
            return self._report(expired, rolled=rolls)
        with self._lease.hold(wait_s) as held:
            if not held:
                if not (rolls or expired):
                    return self._report([], rolled=False)  # sweeping can wait, or the other one does it
                return RetentionReport(handle.topic, handle.partition, log.log_start_offset, busy=True)
            rolled = rolls and self._appender.roll()
            expired = self._expired(now_ms)
            if expired:
                if expired[-1][0].active:
                    rolled = self._appender.roll() or rolled
                self._trim(expired[-1][0].end_offset)
            if sweeps:
                with handle.folder_locked():
                    self._sweep_ms = sweep_deleted(handle, now_ms)
                self._swept_generation = log.generation  # as it was: what was put aside since is looked for next time
            return self._report(expired, rolled=rolled)

    def _may_sweep(self, generation: int, now_ms: int) -> bool:
        """Whether there may be files to delete: a trim and a compaction put some aside, too, in whatever process."""
        if generation != self._swept_generation:
            return True
        # Due, or the clock went back: then it would not be for long.
        delay_ms = self._handle.config.file_delete_delay_ms
        return self._sweep_ms is not None and not 0 < self._sweep_ms - now_ms <= delay_ms

    def _expired(self, now_ms: int) -> list[Expired]:
        handle = self._handle
        if not is_bounded(handle.config):
            return []
        log = handle.page.log.read()
        catalog = self._catalogs.of(log)
        return list(
            expired_segments(
                handle.config,
                catalog.candidates(log, now_ms),
                now_ms,
                size_bytes=lambda: catalog.size_bytes() + log.end_position,
                sealed_count=len(catalog.spans),
            )
        )

    def _report(self, expired: list[Expired], *, rolled: bool) -> RetentionReport:
        handle = self._handle
        start = handle.page.log.read().log_start_offset
        return RetentionReport(handle.topic, handle.partition, start, tuple(expired), rolled)
