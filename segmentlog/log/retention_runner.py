"""Apply retention to a partition: delete expired segments, and seal an old active segment so that it can expire."""

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
    """Removes the segments that the topic's configuration does not retain. Thread-safe, by the lease."""

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
        """When the next retired file of this generation is to be deleted; None: there is none."""
        self._swept_generation = -1

    def run(self, now_ms: int, *, dry_run: bool = False, wait_s: float = 0.0) -> RetentionReport:
        """Remove what has expired at ``now_ms``. Return at once, without the lease, if there is nothing to do."""
        handle = self._handle
        handle.refresh_config()
        log = handle.page.log.read()
        rolls = bool(log.end_position) and active_is_due(handle.config, now_ms - log.first_append_ms)
        sweeps = self._may_sweep(log.generation, now_ms)
        expired = self._expired(now_ms)
        if dry_run or not (rolls or sweeps or expired):
            return self._report(expired, rolled=rolls)
        with self._lease.hold(wait_s) as is_held:
            if not is_held:
                if not (rolls or expired):
                    return self._report([], rolled=False)  # sweeping can wait, or the holder of the lease does it
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
                # Remember the generation read before the sweep: files retired since then are checked next time.
                self._swept_generation = log.generation
            return self._report(expired, rolled=rolled)

    def _may_sweep(self, generation: int, now_ms: int) -> bool:
        """Return whether there may be retired files to delete. Trims and compactions of any process retire files."""
        if generation != self._swept_generation:
            return True
        # Due, or the clock went back: without this check the next sweep would wait for a long time.
        delay_ms = self._handle.config.file_delete_delay_ms
        return self._sweep_ms is not None and not 0 < self._sweep_ms - now_ms <= delay_ms

    def _expired(self, now_ms: int) -> list[Expired]:
        handle = self._handle
        if not is_bounded(handle.config):
            return []
        log = handle.page.log.read()
        catalog = self._catalogs.get(log)
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
