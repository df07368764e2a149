"""File locks between processes. The kernel releases the locks of a process that dies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Final

from segmentlog.storage import fork_safety, interrupt_safe
from segmentlog.storage.fork_safety import LockableFd, LockableFiles, open_lockable, opened_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING, SHARED

_SHORTEST_S: Final = 0.0005
_LONGEST_S: Final = 0.05


def lock_within(fs: FileSystem, fd: int, wait_s: float) -> bool:
    """Lock an open file exclusively. Return False if another process still holds the lock after ``wait_s`` seconds.

    flock has no time-out, so this function retries, with growing pauses. An interrupt may come directly after the lock
    was acquired. The caller must therefore unlock or close the file in any case.
    """
    ends_s = time.monotonic() + wait_s
    pause_s = _SHORTEST_S
    while True:
        try:
            fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
            return True
        except BlockingIOError:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _LONGEST_S)


def is_current(fs: FileSystem, fd: int, path: str) -> bool:
    """Return whether ``path`` still names the open file. If not, other processes now lock the file with that name."""
    try:
        return os.path.samestat(fs.fstat(fd), fs.stat(path))
    except FileNotFoundError:
        return False


@interrupt_safe.interrupt_safe_context
def folder_share_locked(
    fs: FileSystem, folder: str, opener: Callable[[LockableFiles, str, int], LockableFd] = open_lockable
) -> Iterator[None]:
    """Hold a shared lock on a folder. Meanwhile `folder_exclusively_locked` waits, so no process renames the folder.

    Any number of threads and processes may hold the shared lock; hold it briefly. The lock is on the folder itself: it
    needs no file, and it stays the same lock if the folder is renamed. Raises FileNotFoundError, or what ``opener``
    raises instead, if there is no such folder. ``opener`` must open the folder by `open_lockable`.
    """
    while True:
        with opened_lockable(fs, folder, os.O_RDONLY | os.O_DIRECTORY, opener) as fd:
            fs.flock(fd, SHARED)
            if is_current(fs, fd, folder):  # else it was renamed between open and lock
                yield
                return


@interrupt_safe.interrupt_safe_context
def folder_exclusively_locked(fs: FileSystem, folder: str, wait_s: float) -> Iterator[bool]:
    """Lock a folder exclusively, so that it may be renamed. Yield False if `folder_share_locked` is still held after
    ``wait_s``.
    """
    with opened_lockable(fs, folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        yield lock_within(fs, fd, wait_s)


class ProcessLock:
    """A lock that one thread of one process holds at a time, on the file at ``path``.

    Creates the file if it is missing. Reentrant, thread-safe.
    """

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._fds: list[LockableFd] = []
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        fork_safety.on_fork(self, "_reset_after_fork")

    def _reset_after_fork(self) -> None:
        """Drop the lock in a forked child: the parent holds it."""
        self._fds = []

    @interrupt_safe.interrupt_safe_context
    def hold(self) -> Iterator[int]:
        """Hold the lock for the duration of the context. Yield the descriptor of its file."""
        with self._mutex:
            if self._fds:
                yield self._fds[0]
                return
            fs = self._fs
            while True:
                with opened_lockable(fs, self._path, os.O_RDWR | os.O_CREAT) as fd:
                    fs.flock(fd, EXCLUSIVE)
                    if not is_current(fs, fd, self._path):
                        continue  # another process removed the file
                    try:
                        self._fds = [fd]
                        yield fd
                    finally:
                        self._fds = []
                    return
