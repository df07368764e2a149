"""Who retains and compacts a partition: one process at a time, by a lock that the kernel frees when it dies."""

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
    """What the holder of the lease wrote down last, for people: `segmentlog details` shows it."""

    at_ms: int = 0
    """Wall clock at the end of the last compaction pass; 0 before the first."""
    seconds: float = 0.0
    records_before: int = 0
    records_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    uncleanable: str = ""
    """Why compaction leaves the partition alone; empty while it does not."""
    unreadable: str = ""
    """Of the batches that the last pass kept because their records cannot be read, why not of the first; or empty."""


class CleanerLease:
    """The right to remove old records of one partition. Thread-safe; not reentrant."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._path = f"{handle.folder}/{CLEANER_FILE}"
        self._fd = -1
        handle.after_fork.append(self._leave_to_parent)

    @interrupt_safe_context
    def hold(self, wait_s: float = 0.0) -> Iterator[bool]:
        """Hold the lease within; yields False when another thread or process still has it after ``wait_s``."""
        with opened_lockable(self._handle.fs, self._path, os.O_RDWR | os.O_CREAT, self._open_there) as fd:
            if not lock_within(self._handle.fs, fd, wait_s):
                yield False
                return
            try:
                self._fd = fd
                yield True
            finally:
                self._fd = -1

    def _open_there(self, fs: LockableFiles, path: str, flags: int) -> LockableFd:
        with self._handle.folder_locked():  # or it would be the lease of another log, for the work on this one
            return open_lockable(fs, path, flags)

    def _leave_to_parent(self) -> None:
        """In a forked child: the lease is the parent's, and the descriptor is closed."""
        self._fd = -1

    # ------------------------------------------------------------ the note

    def write_note(self, note: CleanerNote) -> None:
        """Leave a note for people. A note only: no room for it is no failure. The caller holds the lease."""
        with failures_ignored():
            self._handle.fs.ftruncate(self._fd, 0)
            write_all(self._handle.fs, self._fd, [msgspec.json.encode(note)], 0)

    def read_note(self) -> CleanerNote:
        """The last note; an empty one without any, or when it is being written."""
        try:
            return _decoder.decode(read_file(self._handle.fs, self._path))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if is_interrupt(error):
                raise
            return CleanerNote()


_decoder = msgspec.json.Decoder(CleanerNote)
