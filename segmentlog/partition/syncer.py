"""Making appends durable: one fsync for all who wait, in all threads and processes (group commit)."""

from __future__ import annotations

import contextlib
import fcntl
import os

import msgspec

from segmentlog.errors import DiskFull
from segmentlog.format.names import LOG_SUFFIX
from segmentlog.partition.handle import Handle
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state import WAITING_WORD, LogState, SyncState

CHECKPOINT_BYTES = 32 << 20
"""The recovery point follows the durable offset once so much was synced: what a recovery reads at most, twice over."""


class Syncer:
    """fsyncs what was appended. Thread-safe; any number of processes have one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._fd = -1
        self._key = (-1, -1)
        handle.closers.append(self._close)

    def sync(self, upto_offset: int | None = None) -> int:
        """Return the durable offset once everything below ``upto_offset`` (default: the log end) is on disk.

        Whoever gets the sync lock syncs everything written so far, so that those who waited
        for it find their records durable. Raises `PartitionFailed` when an fsync fails (now or
        before): it is never tried again.
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
                handle.ensure_open()
            flock, fd = handle.fs.flock, handle.state_fd
            flock(fd, fcntl.LOCK_EX)
            try:
                sync = page.sync.read()
                if sync.durable_offset >= upto_offset:
                    return sync.durable_offset
                return self._sync_locked(sync)
            finally:
                flock(fd, fcntl.LOCK_UN)

    def _sync_locked(self, sync: SyncState) -> int:
        handle = self._handle
        page = handle.page
        if page.moved != handle.moved:
            handle.check_usable()
        if handle.failed is not None or page.failed:
            handle.fail(handle.failed or "an fsync failed")
        log = page.log.read()
        try:
            if self._key == (log.active_base_offset, log.epoch) and log.active_base_offset == sync.synced_base_offset:
                handle.fs.fdatasync(self._fd)
            else:
                self._sync_files(log, sync)
        except OSError as error:
            handle.check_usable()  # deleted since the look above: no failure of the disk
            handle.check_in_place()
            # Not retried: after a failed fsync the pages are marked clean whatever happened to them.
            handle.fail(f"an fsync failed ({error})")
        sync = SyncState(
            log.log_end_offset,
            log.appended_bytes,
            log.active_base_offset,
            sync.checkpointed_bytes,
            handle.clock.monotonic_ms(),
            sync.sync_count + 1,
        )
        page.sync.write(sync)
        if page.words[WAITING_WORD]:
            handle.wake_followers()
        if sync.synced_bytes - sync.checkpointed_bytes >= CHECKPOINT_BYTES:
            self.move_recovery_point(log, sync)
        return log.log_end_offset

    def checkpoint_now(self) -> int:
        """fsync everything, sealed segments and names included, and put the recovery point there.

        Returns the base offset of the segment that it lies in: no segment before that is needed
        by a recovery, or changes any more. Raises `DiskFull`, `PartitionFailed`.
        """
        handle = self._handle
        with handle.sync_locked():
            log = handle.page.log.read()
            self._sync_locked(handle.page.sync.read())
            self._write_recovery_point(log, handle.page.sync.read())
            return log.active_base_offset

    def move_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        """Write down that everything ``log`` shows is on disk. The caller holds the sync lock, and synced it."""
        with contextlib.suppress(DiskFull):  # the old recovery point is as true as ever, and only costs a longer scan
            self._write_recovery_point(log, sync, **changes)

    def _write_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        handle = self._handle
        try:
            handle.update_checkpoint(
                recovery_offset=log.log_end_offset,
                recovery_segment=log.active_base_offset,
                recovery_position=log.end_position,
                **changes,
            )
        except DiskFull:
            raise
        except OSError as error:
            handle.check_usable()
            handle.check_in_place()
            handle.fail(f"writing the checkpoint failed ({error})")
        handle.page.sync.write(msgspec.structs.replace(sync, checkpointed_bytes=sync.synced_bytes))

    def _sync_files(self, log: LogState, sync: SyncState) -> None:
        """fsync every segment written to since the last time, and the folder if one was begun since."""
        handle = self._handle
        fs = handle.fs
        if log.active_base_offset != sync.synced_base_offset:
            for base in handle.segments(log):
                if sync.synced_base_offset <= base < log.active_base_offset:
                    with contextlib.suppress(FileNotFoundError):  # retention was faster
                        fd = fs.open(segment_stem(handle.folder, base) + LOG_SUFFIX, os.O_RDONLY | os.O_CLOEXEC)
                        try:
                            fs.fdatasync(fd)
                        finally:
                            fs.close(fd)
            # The folder too: until then a power cut may take the new segment's name, and with it the segment.
            fs.sync_folder(handle.folder)
        key = (log.active_base_offset, log.epoch)
        if self._key != key:
            self._close()
            path = segment_stem(handle.folder, log.active_base_offset) + LOG_SUFFIX
            self._fd = fs.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._key = key
        fs.fdatasync(self._fd)

    def _close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._handle.fs.close(self._fd)
        self._fd, self._key = -1, (-1, -1)
