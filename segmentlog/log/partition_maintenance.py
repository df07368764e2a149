"""Maintenance of an open partition: trim, truncate, roll, retention, compaction.

`Partition` inherits these methods. Reading and appending are in `segmentlog.log.partition`.
"""

from __future__ import annotations

from segmentlog.arguments import as_bool, as_int, as_offset, as_seconds, as_time_ms
from segmentlog.config import CLEANER_BUFFER_BYTES
from segmentlog.errors import InvalidConfig, StoreClosed
from segmentlog.log.append.appender import Appender
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.compaction.cleaner import Cleaner
from segmentlog.log.compaction.compaction_pass import Pace
from segmentlog.log.handle import Handle
from segmentlog.log.lease import CleanerLease, CleanerNote
from segmentlog.log.read.open_segments import OpenSegments
from segmentlog.log.read.segment_catalog import SegmentCatalogs
from segmentlog.log.retention_runner import RetentionRunner
from segmentlog.log.truncation import trim, truncate
from segmentlog.records import CompactionReport, LostRange, RetentionReport

_BUFFER_BYTES_MAX = 1 << 40


class PartitionMaintenance:
    """The methods of a `Partition` that delete, compact or seal segments. Thread-safe."""

    def __init__(self, handle: Handle, appender: Appender, syncer: Syncer, open_segments: OpenSegments) -> None:
        self._handle = handle
        self._closed = False
        self._appender = appender
        self._syncer = syncer
        self._open_segments = open_segments
        lease, catalogs = CleanerLease(handle), SegmentCatalogs(handle, open_segments)
        self._retention = RetentionRunner(handle, appender, catalogs, lease, self.trim)
        self._cleaner = Cleaner(handle, syncer, catalogs, lease)

    # ------------------------------------------------------------ shortening

    def trim(self, before_offset: int) -> int:
        """Delete records below ``before_offset`` from the front. Return the new log start offset.

        The segments below the offset are deleted. In the segment that contains the offset, the earlier records become
        unreadable but keep their disk space. Readers in the middle of a deleted segment continue. Raises
        `OffsetOutOfRange` for an offset after the log end.
        """
        self._check_open()
        return trim(self._handle, as_offset("before_offset", before_offset))

    def truncate(self, offset: int) -> LostRange | None:
        """Delete every record at and after ``offset``. Return the range that was lost; None if there was none.

        Neither the deleted offsets nor the offset of the old log end are used again. The log continues after them in a
        new epoch, so that a consumer that has read a deleted record gets `LogTruncated`. Durable when it returns.
        Raises `OffsetOutOfRange`.
        """
        self._check_open()
        return truncate(self._handle, as_offset("offset", offset))

    def roll(self) -> bool:
        """Seal the active segment and begin the next one. Return False if the active segment is empty."""
        self._check_open()
        with self._handle.translating_errors():
            return self._appender.roll()

    def advance_recovery_point(self) -> int:
        """Sync everything, and move the recovery point to the log end.

        Return the base offset of the segment that contains it. A recovery reads no earlier segment, and no earlier
        segment changes any more. Raises `DiskFull`, `PartitionFailed`.
        """
        self._check_open()
        with self._handle.translating_errors():
            return self._syncer.checkpoint_now()

    move_recovery_point = advance_recovery_point
    """The earlier name of `advance_recovery_point`."""

    def unmap_deleted_segments(self) -> None:
        """Unmap segments that any process has deleted, so that the disk space is freed. Background work calls this."""
        self._open_segments.unmap_deleted()

    let_go_of_deleted = unmap_deleted_segments
    """The earlier name of `unmap_deleted_segments`."""

    # ------------------------------------------------------------ retention

    def apply_retention(
        self, *, dry_run: bool = False, wait_s: float = 0.0, now_ms: int | None = None
    ) -> RetentionReport:
        """Delete the segments that the topic's configuration does not retain; with ``dry_run`` only report them.

        Background work does the same, by one thread or process at a time. If another thread or process still works
        after ``wait_s`` seconds, the report says `busy`. Readers in the middle of a deleted segment continue. A reader
        positioned before the new log start gets `OffsetOutOfRange`. Raises `ReadOnlyStore`, `PartitionFailed`.
        """
        self._check_open()
        if not as_bool("dry_run", dry_run):
            self._handle.check_writable()
        now_ms = self._handle.clock.now_ms() if now_ms is None else as_time_ms("now_ms", now_ms)
        wait_s = as_seconds("wait_s", wait_s)
        with self._handle.translating_errors():
            return self._retention.run(now_ms, dry_run=dry_run, wait_s=wait_s)

    retain = apply_retention
    """The earlier name of `apply_retention`."""

    # ------------------------------------------------------------ compaction

    def compact(
        self,
        *,
        dry_run: bool = False,
        wait_s: float = 0.0,
        buffer_bytes: int = CLEANER_BUFFER_BYTES,
        pace: Pace | None = None,
        now_ms: int | None = None,
    ) -> CompactionReport:
        """Retain only the last `compaction.keep.last` records of each key in sealed segments. Offsets do not change.

        Background work does the same once `min.cleanable.dirty.ratio` is reached; this call ignores the ratio.
        ``buffer_bytes`` limits the offset map: if the dirty section has more keys, it takes several passes. ``pace`` is
        called with the number of bytes read or written; it may wait, and may raise to stop. Raises `InvalidConfig` for
        a topic that is not compacted, `CorruptBatch`, `DiskFull`, `ReadOnlyStore`. After an error the log is complete.
        """
        self._check_open()
        if not self._handle.config.compacts:
            expected = "'compact' or 'delete,compact', for a topic that is to be compacted"
            raise InvalidConfig("cleanup.policy", self._handle.config.cleanup_policy, expected)
        if pace is not None and not callable(pace):
            raise InvalidConfig("pace", pace, "a function that takes a number of bytes")
        now_ms = self._handle.clock.now_ms() if now_ms is None else as_time_ms("now_ms", now_ms)
        buffer_bytes = as_int("buffer_bytes", buffer_bytes, 1, _BUFFER_BYTES_MAX)
        dry_run, wait_s = as_bool("dry_run", dry_run), as_seconds("wait_s", wait_s)
        with self._handle.translating_errors():
            return self._cleaner.run(
                now_ms, buffer_bytes=buffer_bytes, dry_run=dry_run, wait_s=wait_s, pace=pace or _at_full_speed
            )

    def compaction_due(self, now_ms: int | None = None) -> str | None:
        """Return why the topic's configuration calls for a compaction now; None if it does not."""
        self._check_open()
        return self._cleaner.why_due(self._handle.clock.now_ms() if now_ms is None else now_ms)

    def dirty_ratio(self) -> float:
        """Return the dirty share of the compactable bytes, 0 to 1."""
        self._check_open()
        return self._cleaner.measure_dirt(self._handle.clock.now_ms()).ratio

    def cleaner_note(self) -> CleanerNote:
        """Return the result of the last compaction by any process, and why compaction skips the partition, if so."""
        return self._cleaner.read_note()

    def record_uncleanable(self, why: str) -> None:
        """Record for users why compaction skips the partition. Background work calls this."""
        self._cleaner.record_uncleanable(why)

    @property
    def cleaned_offset(self) -> int:
        """Below this offset each key has at most `compaction.keep.last` records; 0 before any compaction."""
        return self._cleaner.compacted().cleaned_offset

    @property
    def compacted_below(self) -> int:
        """Compaction may have removed records below this offset, but none at or after it.

        A reader that needs every record of an earlier time must check it.
        """
        return self._cleaner.compacted().begun_offset

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"partition {self._handle.log_name}")


def _at_full_speed(size_bytes: int) -> None:
    """Do not limit the speed of a compaction."""
