"""A folder for what was brought from an object store: of one process, and gone with it.

It is locked for as long as it is used. What killed processes left of theirs goes when the next one is made there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Final

from segmentlog.errors import DiskFull, InvalidConfig, SegmentlogError
from segmentlog.format.file_names import REPLICA_FILE
from segmentlog.storage import fork_safety
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable
from segmentlog.storage.fs import NO_ROOM, FileSystem
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING

_PREFIX: Final = "segmentlog-"


class CacheFolder:
    """Made at once, below ``cache_dir``, or where the system keeps such. Raises `InvalidConfig`, `DiskFull`."""

    def __init__(self, fs: FileSystem, cache_dir: str | os.PathLike[str] | None) -> None:
        self._fs = fs
        parent = "" if cache_dir is None else os.path.abspath(os.path.expanduser(cache_dir))
        try:
            parent = parent or tempfile.gettempdir()
            fs.make_folders(parent)
            while True:
                self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
                with contextlib.suppress(FileNotFoundError):
                    lock = open_lockable(fs, f"{self.path}/{REPLICA_FILE}", os.O_RDWR | os.O_CREAT)
                    fs.flock(lock, EXCLUSIVE)
                    if fs.exists(f"{self.path}/{REPLICA_FILE}"):  # else somebody has swept it before it was locked
                        break
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(parent) from error
            wanted = f"a folder that can be written to ({error.strerror})"
            raise InvalidConfig("cache_dir", parent, wanted) from error
        self._lock: LockableFd | None = lock
        fork_safety.on_fork(self, "_forget")
        _sweep(fs, parent)

    def _forget(self) -> None:
        """In a forked child: the folder is the parent's."""
        self._lock = None

    @property
    def is_here(self) -> bool:
        """Whether it is this process's, and there."""
        return self._lock is not None

    def close(self) -> None:
        """The folder goes. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove(self._fs, self.path)
            close_lockable(self._fs, lock)


def _sweep(fs: FileSystem, parent: str) -> None:
    """Remove what processes that were killed have left of theirs."""
    for name in fs.listdir(parent):
        mark = f"{parent}/{name}/{REPLICA_FILE}"
        if not name.startswith(_PREFIX) or not _is_ours(fs, mark):
            continue
        with contextlib.suppress(OSError, SegmentlogError):
            fd = open_lockable(fs, mark, os.O_RDWR)
            try:
                fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
                _remove(fs, f"{parent}/{name}")
            finally:
                close_lockable(fs, fd)


def _is_ours(fs: FileSystem, mark: str) -> bool:
    """An empty mark: what is a replica says of what."""
    try:
        return fs.stat(mark).st_size == 0
    except OSError:
        return False


def _remove(fs: FileSystem, path: str) -> None:
    with contextlib.suppress(OSError):
        fs.remove_tree(path)
