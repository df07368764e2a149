"""The lease for retention and compaction of a partition: a file lock, which the kernel releases if its holder dies."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from segmentlog.format.file_names import CLEANER_FILE
from segmentlog.log.handle import Handle
from segmentlog.storage.file_locks import lock_within
from segmentlog.storage.file_operations import read_file, write_all
from segmentlog.storage.fork_safety import LockableFd, LockableFiles, open_lockable, opened_lockable
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.interrupt_safe import interrupt_safe_context


class CleanerNote(msgspec.Struct, frozen=True):
    """Result of the last compaction pass, which the lease holder writes for users: `segmentlog describe` shows it."""

    at_ms: int = 0
    """Wall clock at the end of the last compaction pass; 0 before the first."""
    seconds: float = 0.0
    records_before: int = 0
    records_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    uncleanable: str = ""
    """Why compaction skips the partition; "" if it does not."""
    unreadable: str = ""
    """Why the records of the first batch that the last pass could not read are unreadable; "" if all were readable."""


class CleanerLease:
    """The exclusive right to remove old records of a partition. Thread-safe; not reentrant."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._path = f"{handle.folder}/{CLEANER_FILE}"
        self._fd = -1
        handle.after_fork.append(self._drop_after_fork)

    @interrupt_safe_context
    def hold(self, wait_s: float = 0.0) -> Iterator[bool]:
        """Hold the lease for the duration of the context.

        Yield False if another thread or process still holds it after ``wait_s`` seconds.
        """
        with opened_lockable(self._handle.fs, self._path, os.O_RDWR | os.O_CREAT, self._open_lease_file) as fd:
            if not lock_within(self._handle.fs, fd, wait_s):
                yield False
                return
            try:
                self._fd = fd
                yield True
            finally:
                self._fd = -1

    def _open_lease_file(self, fs: LockableFiles, path: str, flags: int) -> LockableFd:
        with self._handle.folder_locked():  # else it could be the lease of another log
            return open_lockable(fs, path, flags)

    def _drop_after_fork(self) -> None:
        """Drop the lease in a forked child: it belongs to the parent, and the descriptor is closed."""
        self._fd = -1

    # ------------------------------------------------------------ the note

    def write_note(self, result: CleanerNote) -> None:
        """Write the result for users. Errors are ignored: it is only information. The caller holds the lease."""
        with failures_ignored():
            self._handle.fs.ftruncate(self._fd, 0)
            write_all(self._handle.fs, self._fd, [msgspec.json.encode(result)], 0)

    def read_note(self) -> CleanerNote:
        """Return the last result; an empty one if there is none, or while it is being written."""
        try:
            return _decoder.decode(read_file(self._handle.fs, self._path))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if is_interrupt(error):
                raise
            return CleanerNote()


_decoder = msgspec.json.Decoder(CleanerNote)
