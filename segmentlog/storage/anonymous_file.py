"""A file without a name, for what can be made again: it goes when nobody uses it any more, however that comes about.

Linux makes it so (`O_TMPFILE`); where a file system has no such files there is none. Its pages are the kernel's to
write out, and to drop when memory is short: it costs a process no memory that others need more.
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
    """So many bytes that are written once and read through a map. Thread-safe; of no use in a forked child."""

    def __init__(self, fs: FileSystem, folder: str, size_bytes: int) -> None:
        """Raises OSError where there is no such file, or no room for it."""
        if not _O_TMPFILE:
            raise OSError("no files without a name")
        self._fs = fs
        self._mutex = fork_safety.lock(self, "_mutex", "_forget")
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
        """The same bytes, in the file; None where it has no room for them. They stay as long as these views do.

        Raises OSError, `DiskFull`. Written by a system call, and not to the map: a full disk would kill the process.
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
        """Nothing more is added; the file is there until no view of it is. Idempotent."""
        with self._mutex:
            fd, self._fd = self._fd, None
            if fd is not None:
                close_lockable(self._fs, fd)

    def _forget(self) -> None:
        """In a forked child: the descriptor is closed there, and its number another file's."""
        self._fd = None


def free_bytes(folder: str) -> int:
    """What a file system has left for who is not its administrator. Raises OSError."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
