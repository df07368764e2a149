"""A lock that one thread of one process holds at a time, whoever it is; the kernel frees it when the process dies."""

from __future__ import annotations

import os
from collections.abc import Iterator

from segmentlog.storage import forks, locks
from segmentlog.storage.forks import Held, hold_open, let_go
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.locks import EXCLUSIVE


class ProcessLock:
    """A lock on the file at ``path``, which is made if it is not there. Reentrant, thread-safe."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._fds: list[Held] = []
        self._mutex = forks.reentrant_lock(self, "_mutex")
        forks.on_fork(self, "_forget")

    def _forget(self) -> None:
        """In a forked child: whoever held it there is the parent's."""
        self._fds = []

    @locks.held
    def held(self) -> Iterator[int]:
        """Hold it within; the descriptor of its file."""
        with self._mutex:
            if self._fds:
                yield self._fds[0]
                return
            fs = self._fs
            fds: list[Held] = []
            try:
                while True:
                    fds.append(hold_open(fs, self._path, os.O_RDWR | os.O_CREAT))
                    fs.flock(fds[0], EXCLUSIVE)
                    if self._is_current(fds[0]):
                        break
                    let_go(fs, fds.pop())  # somebody removed the file: others lock another one by now
                self._fds = fds
                yield fds[0]
            finally:
                self._fds = []
                for fd in fds:
                    let_go(fs, fd)

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(self._fs.fstat(fd), self._fs.stat(self._path))
        except FileNotFoundError:
            return False
