"""Locks on files, which processes keep each other out with; the kernel frees those of one that dies."""

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
    """Lock a file that is open, exclusively; False when somebody else still has it after ``wait_s``.

    flock knows no time-out: so it is asked again, ever more seldom. An interrupt may come right after the lock was
    taken, so the caller unlocks, or closes the file, whatever happens.
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
    """Whether ``path`` is still the name of the open file: else others lock another one by now."""
    try:
        return os.path.samestat(fs.fstat(fd), fs.stat(path))
    except FileNotFoundError:
        return False


@interrupt_safe.interrupt_safe_context
def folder_share_locked(
    fs: FileSystem, folder: str, opener: Callable[[LockableFiles, str, int], LockableFd] = open_lockable
) -> Iterator[None]:
    """Within, the folder of that name is the one that has the name: whoever moves it by `free_to_move` waits.

    Any number of threads and processes may keep it there, for moments. Raises FileNotFoundError when there is none,
    or what an ``opener`` that ends in `hold_open` makes of that. The lock is on the folder itself: it costs no file,
    and is the same one whatever the folder is called.
    """
    while True:
        with opened_lockable(fs, folder, os.O_RDONLY | os.O_DIRECTORY, opener) as fd:
            fs.flock(fd, SHARED)
            if is_current(fs, fd, folder):  # else it was moved between the two
                yield
                return


@interrupt_safe.interrupt_safe_context
def folder_exclusively_locked(fs: FileSystem, folder: str, wait_s: float) -> Iterator[bool]:
    """Keep everybody out who would `kept_in_place`, so that it may be renamed; False when somebody is there still."""
    with opened_lockable(fs, folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        yield lock_within(fs, fd, wait_s)


class ProcessLock:
    """One thread of one process holds it at a time: a lock on the file at ``path``, which is made if it is not there.

    Reentrant, thread-safe.
    """

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._fds: list[LockableFd] = []
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        fork_safety.on_fork(self, "_forget")

    def _forget(self) -> None:
        """In a forked child: whoever held it there is the parent's."""
        self._fds = []

    @interrupt_safe.interrupt_safe_context
    def held(self) -> Iterator[int]:
        """Hold it within; the descriptor of its file."""
        with self._mutex:
            if self._fds:
                yield self._fds[0]
                return
            fs = self._fs
            while True:
                with opened_lockable(fs, self._path, os.O_RDWR | os.O_CREAT) as fd:
                    fs.flock(fd, EXCLUSIVE)
                    if not is_current(fs, fd, self._path):
                        continue  # somebody removed the file
                    try:
                        self._fds = [fd]
                        yield fd
                    finally:
                        self._fds = []
                    return
