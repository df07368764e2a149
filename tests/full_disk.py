"""A full disk, simulated in a process: only the files below one folder see it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from segmentlog.storage.fs import Buffer, FileSystem


class FullDisk:
    """Refuses calls that need space while ``is_full``: growing a file, creating a file, adding a name to a folder.

    ``patch`` is `setattr` or a function that undoes it later. With ``folder``, only names below it are refused.
    """

    is_full = False

    def __init__(self, patch: Callable[[Any, str, Any], object], folder: str = "") -> None:
        self.refused = 0
        self._folder = folder
        real_open, real_mkdir = os.open, os.mkdir
        real_pwritev, real_fallocate = FileSystem.pwritev, FileSystem.fallocate

        def open_file(path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
            if flags & os.O_CREAT and self._is_below(path) and not os.path.exists(path):
                self.check(path)
            return real_open(path, flags, mode, **options)

        def mkdir(path: Any, mode: int = 0o777, **options: Any) -> None:
            if self._is_below(path) and not os.path.exists(path):
                self.check(path)
            real_mkdir(path, mode, **options)

        def pwritev(fd: int, buffers: Sequence[Buffer], position: int) -> int:
            if position + sum(map(len, buffers)) > os.fstat(fd).st_size:
                self.check(fd)
            return real_pwritev(fd, buffers, position)

        def fallocate(fs: FileSystem, fd: int, position: int, size_bytes: int) -> None:
            if position + size_bytes > os.fstat(fd).st_size:
                self.check(fd)
            real_fallocate(fs, fd, position, size_bytes)

        patch(os, "open", open_file)
        patch(os, "mkdir", mkdir)
        patch(FileSystem, "pwritev", staticmethod(pwritev))
        patch(FileSystem, "fallocate", fallocate)

    def _is_below(self, path: Any) -> bool:
        return os.fspath(path).startswith(self._folder)

    def check(self, what: object) -> None:
        """Raise ENOSPC when the disk is full."""
        if self.is_full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(what))


class FlaggedDisk(FullDisk):
    """A disk that is full for all processes that have it, while a file exists. A process that gets the error creates
    another file.
    """

    def __init__(self, folder: str, flag: str) -> None:
        self._flag = flag
        super().__init__(setattr, folder)

    @property
    def is_full(self) -> bool:  # type: ignore[override]
        return os.path.exists(self._flag)

    def check(self, what: object) -> None:
        try:
            super().check(what)
        except OSError:
            Path(f"{self._flag}.met").touch()
            raise
