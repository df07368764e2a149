"""Sync appended records: one fsync for all waiting threads and processes."""

from __future__ import annotations

import contextlib
import logging
import os

from segmentlog.errors import CorruptBatch, DiskFull, LogTruncated, SegmentlogError, UnknownTopic
from segmentlog.format.file_names import LOG_SUFFIX
from segmentlog.log.handle import Handle
from segmentlog.log.recovery.open_partition import finish_interrupted_append
from segmentlog.records import LostRange
from segmentlog.storage.file_operations import sync_data
from segmentlog.storage.fs import DiskFailed, opened
from segmentlog.storage.interrupt_check import is_from_a_call, is_interrupt
from segmentlog.storage.interrupt_safe import EXCLUSIVE, UNLOCK, store_result
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state_page import REWRITING, WAITING_WORD, LogState, SyncState

logger = logging.getLogger("segmentlog")

CHECKPOINT_BYTES = 32 << 20
"""The recovery point advances after this many synced bytes. A recovery reads at most twice as many."""
_UNSYNCED = "the records are appended, but may not be on the disk; call flush() once the cause is fixed"


class Syncer:
    """Syncs the segments of one partition. Thread-safe; any number of processes may have one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._fd = -1
        self._key = (-1, -1)
        self._lost: tuple[int, tuple[LostRange, ...]] = (0, ())
        """(epoch, the lost ranges up to that epoch); epoch 0 has none."""
        self._last_warning = ""
        handle.closers.append(self._close)

    def sync(self, upto_offset: int | None = None) -> int:
        """Sync until everything below ``upto_offset`` (default: the log end) is durable. Return the durable offset.

        The process that gets the sync lock syncs everything written so far, so that waiting processes find their
        records durable. Raises `PartitionFailed` if an fsync fails now or failed before: it is never retried. Raises
        `ProcessLimitError` with ``appended`` if this process cannot open the files: nothing was synced, and the call
        may be repeated.
        """
        handle = self._handle
        page = handle.page
        if upto_offset is None:
            upto_offset = page.log.read().log_end_offset
        durable_offset = page.sync.read().durable_offset
        if durable_offset >= upto_offset:
            return durable_offset
        handle.check_writable()
        with handle.sync_mutex:
            if handle.state_fd < 0:
                handle.ensure_open(_UNSYNCED, appended=True)
            flock, fd = handle.fs.flock, handle.state_fd
            try:
                flock(fd, EXCLUSIVE)  # inside the try: an interrupt may come before it returns
                sync = page.sync.read()
                if sync.durable_offset >= upto_offset:
                    return sync.durable_offset
                return self._sync_locked(sync)
            except OSError as error:
                handle.raise_local_error(error, _UNSYNCED, appended=True)
                raise
            finally:
                flock(fd, UNLOCK)

    def sync_records(self, base_offset: int, end_offset: int) -> int:
        """Sync the records that were appended as ``[base_offset, end_offset)``. Return the durable offset.

        Raises `LogTruncated` if a recovery, a truncation or a repair by any process has dropped one of these records
        since. The rest of the log is durable even then.
        """
        durable_offset = self.sync(end_offset)
        self.raise_if_lost(base_offset, end_offset)
        return durable_offset

    def raise_if_lost(self, base_offset: int, end_offset: int) -> None:
        """Raise `LogTruncated` if one of the records appended at these offsets was dropped since."""
        try:
            lost = self.find_lost_range(base_offset, end_offset)
        except OSError as error:
            why = "the log was synced, but a recovery may have dropped the records first; read their offsets to check"
            self._handle.raise_local_error(error, why, appended=True)
            raise
        if lost is not None:
            raise LogTruncated(self._handle.log_name, max(base_offset, lost.base_offset), lost)

    def is_kept(self, base_offset: int, end_offset: int) -> bool:
        """Return whether no record in the range was dropped; False also if that cannot be checked."""
        try:
            return self.find_lost_range(base_offset, end_offset) is None
        except OSError as error:
            if not is_from_a_call(error):
                raise
            return False

    def find_lost_range(self, base_offset: int, end_offset: int) -> LostRange | None:
        """Return the first lost range that overlaps these offsets, or None.

        Offsets are never reused, so no epoch is needed.
        """
        handle = self._handle
        epoch = handle.page.log.read().epoch
        # A new lost range has a new epoch, and is in the checkpoint before the state page shows that epoch.
        if self._lost[0] != epoch:
            with handle.folder_locked():
                self._lost = (epoch, handle.ledger.checkpoint().lost_ranges)
        for lost in self._lost[1]:
            if lost.base_offset < end_offset and base_offset < lost.end_offset:
                return lost
        return None

    def _sync_locked(self, sync: SyncState) -> int:
        log = self._handle.page.log.read()
        sync = self.sync_all(log, sync)
        if sync.synced_bytes - sync.checkpointed_bytes >= CHECKPOINT_BYTES and not self._is_rewritten:
            self.advance_recovery_point(log, sync)
        return log.log_end_offset

    def sync_all(self, log: LogState, sync: SyncState) -> SyncState:
        """Sync everything that ``log`` shows. Does not advance the recovery point. The caller holds the sync lock."""
        handle = self._handle
        page = handle.page
        if page.moved != handle.moved:
            handle.check_usable()
        if handle.failed is not None or page.failed:
            handle.fail(handle.failed or "an fsync failed")
        is_open = self._key == (log.active_base_offset, log.epoch)
        is_open = is_open and log.active_base_offset == sync.synced_base_offset
        try:
            if is_open:
                handle.fs.fdatasync(self._fd)
            else:
                with handle.folder_locked():  # the folder's name may have another log now
                    self._sync_files(log, sync)
        except OSError as error:
            if not is_from_a_call(error):
                raise
            has_failed = is_open or isinstance(error, DiskFailed)  # else, for example, a file could not be opened
            if has_failed:
                # Before any other call: after an interrupt here, the fsync would be tried again.
                handle.ledger.mark_failed()
            try:
                handle.check_usable()  # deleted since the check above: the disk has not failed
                handle.check_in_place()
            except UnknownTopic:
                if has_failed:
                    handle.ledger.unmark_failed()
                raise
            if not has_failed:
                raise
            # Not retried: after a failed fsync the kernel marks the pages clean, whether or not they were written.
            handle.fail(f"an fsync failed ({error})")
        sync = handle.ledger.record_sync(log, sync)
        if page.words[WAITING_WORD]:
            handle.wake_followers()
        return sync

    def checkpoint_now(self) -> int:
        """Sync everything, sealed segments and names included, and advance the recovery point to the log end.

        Return the base offset of the segment with the recovery point. A recovery reads no earlier segment, and no
        earlier segment changes any more. Raises `DiskFull`, `PartitionFailed`.
        """
        handle = self._handle
        while True:
            self._finish_truncation()
            with handle.sync_locked():
                if self._is_rewritten:  # another truncation began since
                    continue
                log = handle.page.log.read()
                self._sync_locked(handle.page.sync.read())
                self._write_recovery_point(log, handle.page.sync.read())
                return log.active_base_offset

    @property
    def _is_rewritten(self) -> bool:
        """Whether a truncation was interrupted, if called under the sync lock: a running truncation holds that lock.

        The recovery that completes it begins at the checkpoint's recovery point, which must not advance before that.
        """
        page = self._handle.page
        return page.writing == REWRITING and not page.failed

    def _finish_truncation(self) -> None:
        """Complete an interrupted truncation. The caller holds no lock."""
        if self._is_rewritten:
            with self._handle.append_locked():
                if self._is_rewritten:
                    finish_interrupted_append(self._handle)

    def advance_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        """Record that everything ``log`` shows is on disk. The caller holds the sync lock and has synced it.

        If that fails, the old recovery point stays valid, and only costs a longer recovery.
        """
        try:
            self._write_recovery_point(log, sync, **changes)
        except DiskFull:
            pass  # the old recovery point stays valid, and only costs a longer recovery
        except (CorruptBatch, OSError) as error:
            if is_interrupt(error):
                raise
            if str(error) != self._last_warning:  # once, not with each fsync
                self._last_warning = str(error)
                logger.warning(
                    "%s: the recovery point cannot advance, so a recovery would read more: %s",
                    self._handle.log_name,
                    error,
                )

    def _write_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        with self._handle.folder_locked():
            self._write_recovery_point_locked(log, sync, **changes)

    def _write_recovery_point_locked(self, log: LogState, sync: SyncState, **changes: object) -> None:
        handle = self._handle
        if sync.synced_base_offset != log.active_base_offset:
            # The log rolled after every record was durable. But the truncation of the sealed file and the name of the
            # next segment are not durable yet. A power cut could give the file its preallocated space back, which a
            # recovery would take for damage below the recovery point.
            sync = self.sync_all(handle.page.log.read(), sync)
        try:
            handle.ledger.advance_recovery_point(log, sync, **changes)
        except OSError as error:
            if not is_from_a_call(error):
                raise
            if not isinstance(error, SegmentlogError):
                handle.check_usable()
                handle.check_in_place()
            if isinstance(error, DiskFailed):
                handle.fail(f"writing the checkpoint failed ({error})")
            raise

    def _sync_files(self, log: LogState, sync: SyncState) -> None:
        """Sync every segment written since the last sync, and the folder if a segment began since."""
        handle = self._handle
        fs = handle.fs
        if log.active_base_offset != sync.synced_base_offset:
            for base in handle.segments(log):
                if sync.synced_base_offset <= base < log.active_base_offset:
                    self._sync_sealed(base, log.epoch)
            # Sync the folder, too: until then a power cut may undo the new segment's name, and so lose the segment.
            fs.sync_folder(handle.folder)
        key = (log.active_base_offset, log.epoch)
        if self._key != key:
            self._close()
            path = segment_stem(handle.folder, log.active_base_offset) + LOG_SUFFIX
            store_result(self, "_fd", fs.open, path, os.O_RDONLY | os.O_CLOEXEC)
            self._key = key
        sync_data(fs, self._fd, handle.folder)
        for base in [base for base in handle.sealed if base < log.active_base_offset]:
            handle.drop_sealed(base)

    def _sync_sealed(self, base: int, epoch: int) -> None:
        """Sync a sealed segment, through the descriptor that wrote it if this process sealed it."""
        handle = self._handle
        path = segment_stem(handle.folder, base) + LOG_SUFFIX
        kept = handle.sealed.get(base)
        if kept is not None and kept.epoch == epoch:
            kept.sync()
            return
        with (
            contextlib.suppress(FileNotFoundError),  # retention has deleted it
            opened(handle.fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd,
        ):
            sync_data(handle.fs, fd, path)

    def _close(self) -> None:
        close_file = self._handle.fs.close
        fd, self._fd, self._key = self._fd, -1, (-1, -1)  # before closing, which frees the number for another file
        if fd >= 0:
            try:
                close_file(fd)
            except OSError as error:
                if is_interrupt(error):
                    raise
