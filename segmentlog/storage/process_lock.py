"""A lock that one thread of one process holds at a time, whoever it is; the kernel frees it when the process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator

from segmentlog.storage.fs import FileSystem
from segmentlog.storage.held import hold_open, let_go


class ProcessLock:
    """A lock on the file at ``path``, which is made if it is not there, and holds nothing. Reentrant, thread-safe."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self.after_fork()
        _live.add(self)

    def after_fork(self) -> None:
        """In a forked child: whoever held it there is the parent's."""
        self._mutex = threading.RLock()
        self._depth = 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold it within."""
        with self._mutex:
            if self._depth:
                yield
                return
            fs = self._fs
            fd = -1
            try:
                while True:
                    fd = hold_open(fs, self._path, os.O_RDWR | os.O_CREAT)
                    fs.flock(fd, fcntl.LOCK_EX)
                    if self._is_current(fd):
                        break
                    let_go(fs, fd)  # somebody removed the file: others lock another one by now
                self._depth = 1
                yield
            finally:
                self._depth = 0
                if fd >= 0:
                    let_go(fs, fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(self._fs.fstat(fd), self._fs.stat(self._path))
        except FileNotFoundError:
            return False


_live: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _forget_parent() -> None:
    for lock in list(_live):
        lock.after_fork()


os.register_at_fork(after_in_child=_forget_parent)
