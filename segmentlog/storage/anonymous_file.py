"""A file without a name, for data that can be recreated. The kernel deletes it when its last descriptor and mapping are
closed.

Linux creates such files with `O_TMPFILE`, if the file system supports it. The kernel may write the file's pages to disk
and drop them when memory is short, so the data does not occupy memory that other processes need.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable
from segmentlog.storage.fs import Buffer, FileSystem

_O_TMPFILE = getattr(os, "O_TMPFILE", 0)


class AnonymousFile:
    """A file of a fixed size that is written once and read through a map. Thread-safe; not usable in a forked child."""

    def __init__(self, fs: FileSystem, folder: str, size_bytes: int) -> None:
        """Create the file. Raises OSError if the file system has no room, or does not support anonymous files."""
        if not _O_TMPFILE:
            raise OSError("this system has no anonymous files (O_TMPFILE)")
        self._fs = fs
        self._mutex = fork_safety.lock(self, "_mutex", "_reset_after_fork")
        self._size_bytes = size_bytes
        self._end = 0
        self._fd: LockableFd | None = open_lockable(fs, folder, os.O_RDWR | _O_TMPFILE)
        try:
            fs.ftruncate(self._fd, size_bytes)
            self._view = fs.map_file(self._fd, size_bytes)
        except BaseException:
            self.close()
            raise

    def add(self, buffers: Sequence[Buffer]) -> list[memoryview] | None:
        """Write ``buffers`` and return views of them in the file; None if they exceed the rest of the file.

        The data stays as long as the views exist. Raises OSError, `DiskFull`. A system call writes the data. A store to
        the map would kill the process on a full disk.
        """
        with self._mutex:
            if self._fd is None or self._end + sum(map(len, buffers)) > self._size_bytes:
                return None
            write_all(self._fs, self._fd, buffers, self._end)
            views = []
            for buffer in buffers:
                views.append(self._view[self._end : self._end + len(buffer)])
                self._end += len(buffer)
            return views

    def close(self) -> None:
        """Accept no more data. The kernel deletes the file with the last view of it. Idempotent."""
        with self._mutex:
            fd, self._fd = self._fd, None
            if fd is not None:
                close_lockable(self._fs, fd)

    def _reset_after_fork(self) -> None:
        """Drop the descriptor in a forked child: the child has closed its copy, and may have reused the number."""
        self._fd = None


def free_bytes(folder: str) -> int:
    """Return the bytes that an unprivileged process can still write on the disk of ``folder``. Raises OSError."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
