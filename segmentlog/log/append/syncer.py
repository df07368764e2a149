"""Making appends durable: one fsync for all who wait, in all threads and processes (group commit)."""

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
"""The recovery point follows the durable offset once so much was synced: what a recovery reads at most, twice over."""
_UNSYNCED = "what was appended stays, but is not known to be on the disk"


class Syncer:
    """fsyncs what was appended. Thread-safe; any number of processes have one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._fd = -1
        self._key = (-1, -1)
        self._lost: tuple[int, tuple[LostRange, ...]] = (0, ())
        """(epoch, the ranges that were lost up to then): before the first one nothing is."""
        self._told = ""
        handle.closers.append(self._close)

    def sync(self, upto_offset: int | None = None) -> int:
        """Return the durable offset once everything below ``upto_offset`` (default: the log end) is on disk.

        Whoever gets the sync lock syncs everything written so far, so that those who waited
        for it find their records durable. Raises `PartitionFailed` when an fsync fails (now or
        before): it is never tried again. And `LocalError`, with ``appended``, when this process cannot open what is
        to be synced: then nothing happened, and it can be asked again.
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
                flock(fd, EXCLUSIVE)  # inside: an interrupt may come before it has returned
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
        """`sync` of records that were appended as ``[base_offset, end_offset)``, if they are still there.

        Raises `LogTruncated` when a recovery, a truncation or a repair by whatever process has dropped one of them
        since: what is durable then is the log that goes on behind them.
        """
        durable_offset = self.sync(end_offset)
        self.raise_if_lost(base_offset, end_offset)
        return durable_offset

    def raise_if_lost(self, base_offset: int, end_offset: int) -> None:
        """Raise `LogTruncated` when one of the records that were appended there was dropped since."""
        try:
            lost = self.find_lost_range(base_offset, end_offset)
        except OSError as error:
            why = "what was appended was synced, and may have been dropped before"
            self._handle.raise_local_error(error, why, appended=True)
            raise
        if lost is not None:
            raise LogTruncated(self._handle.log_name, max(base_offset, lost.base_offset), lost)

    def is_kept(self, base_offset: int, end_offset: int) -> bool:
        """Whether nothing of it was dropped; False also when that cannot be seen."""
        try:
            return self.find_lost_range(base_offset, end_offset) is None
        except OSError as error:
            if not is_from_a_call(error):
                raise
            return False

    def find_lost_range(self, base_offset: int, end_offset: int) -> LostRange | None:
        """The first lost range that touches these offsets; they are never used again, so no epoch is asked."""
        handle = self._handle
        epoch = handle.page.log.read().epoch
        if self._lost[0] != epoch:  # a range only ever comes with an epoch, and is in the checkpoint before that shows
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
        """fsync everything that ``log`` shows, and no more is done. The caller holds the sync lock."""
        handle = self._handle
        page = handle.page
        if page.moved != handle.moved:
            handle.check_usable()
        if handle.failed is not None or page.failed:
            handle.fail(handle.failed or "an fsync failed")
        is_known = self._key == (log.active_base_offset, log.epoch)
        is_known = is_known and log.active_base_offset == sync.synced_base_offset
        try:
            if is_known:
                handle.fs.fdatasync(self._fd)
            else:
                with handle.folder_locked():  # or another log's files would be synced for this one's
                    self._sync_files(log, sync)
        except OSError as error:
            if not is_from_a_call(error):
                raise
            has_failed = is_known or isinstance(error, DiskFailed)  # else a file could not be opened, say
            if has_failed:
                # Before anything else is called: an interrupt must not have it forgotten, and then tried again.
                handle.ledger.mark_failed()
            try:
                handle.check_usable()  # deleted since the look above: no failure of the disk
                handle.check_in_place()
            except UnknownTopic:
                if has_failed:
                    handle.ledger.unmark_failed()
                raise
            if not has_failed:
                raise
            # Not retried: after a failed fsync the pages are marked clean whatever happened to them.
            handle.fail(f"an fsync failed ({error})")
        sync = handle.ledger.record_sync(log, sync)
        if page.words[WAITING_WORD]:
            handle.wake_followers()
        return sync

    def checkpoint_now(self) -> int:
        """fsync everything, sealed segments and names included, and put the recovery point there.

        Returns the base offset of the segment that it lies in: no segment before that is needed
        by a recovery, or changes any more. Raises `DiskFull`, `PartitionFailed`.
        """
        handle = self._handle
        while True:
            self._settle()
            with handle.sync_locked():
                if self._is_rewritten:  # another one since
                    continue
                log = handle.page.log.read()
                self._sync_locked(handle.page.sync.read())
                self._write_recovery_point(log, handle.page.sync.read())
                return log.active_base_offset

    @property
    def _is_rewritten(self) -> bool:
        """Whether a truncation was cut short, if asked under the sync lock: whoever is at one holds that, too.

        The recovery that is to end it begins at the point that the checkpoint has, and nobody moves that before.
        """
        page = self._handle.page
        return page.writing == REWRITING and not page.failed

    def _settle(self) -> None:
        """End a truncation that was cut short. The caller holds no lock."""
        if self._is_rewritten:
            with self._handle.append_locked():
                if self._is_rewritten:
                    finish_interrupted_append(self._handle)

    def advance_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        """Write down that everything ``log`` shows is on disk. The caller holds the sync lock, and synced it."""
        try:
            self._write_recovery_point(log, sync, **changes)
        except DiskFull:
            pass  # the old recovery point is as true as ever, and only costs a longer scan
        except (CorruptBatch, OSError) as error:
            if is_interrupt(error):
                raise
            if str(error) != self._told:  # once, and not with each fsync
                self._told = str(error)
                logger.warning("%s: the recovery point stays where it is: %s", self._handle.log_name, error)

    def _write_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        with self._handle.folder_locked():
            self._write_recovery_point_there(log, sync, **changes)

    def _write_recovery_point_there(self, log: LogState, sync: SyncState, **changes: object) -> None:
        handle = self._handle
        if sync.synced_base_offset != log.active_base_offset:
            # Rolled since, when every record was durable: where the sealed file was cut off is not, nor the next one's
            # name. Behind the recovery point the space that comes back after a power cut would be damage.
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
        """fsync every segment written to since the last time, and the folder if one was begun since."""
        handle = self._handle
        fs = handle.fs
        if log.active_base_offset != sync.synced_base_offset:
            for base in handle.segments(log):
                if sync.synced_base_offset <= base < log.active_base_offset:
                    self._sync_sealed(base, log.epoch)
            # The folder too: until then a power cut may take the new segment's name, and with it the segment.
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
        """fsync a sealed segment: where it was sealed here, through the descriptor that it was written with."""
        handle = self._handle
        path = segment_stem(handle.folder, base) + LOG_SUFFIX
        kept = handle.sealed.get(base)
        if kept is not None and kept.epoch == epoch:
            kept.sync()
            return
        with (
            contextlib.suppress(FileNotFoundError),  # retention was faster
            opened(handle.fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd,
        ):
            sync_data(handle.fs, fd, path)

    def _close(self) -> None:
        close_file = self._handle.fs.close
        fd, self._fd, self._key = self._fd, -1, (-1, -1)  # before: its number may be another file's right after
        if fd >= 0:
            try:
                close_file(fd)
            except OSError as error:
                if is_interrupt(error):
                    raise
