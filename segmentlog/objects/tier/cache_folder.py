"""A temporary folder of one process for downloaded data, removed when the process closes it.

The process locks the folder while it uses it. Creating a folder also removes the unlocked folders beside it, which
killed processes have left.
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
    """A new, locked folder below ``cache_dir``, or below the system's folder for temporary files.

    Raise `InvalidConfig` if it cannot be created, `DiskFull`.
    """

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
                    # Another process may have removed the folder before this process locked it.
                    if fs.exists(f"{self.path}/{REPLICA_FILE}"):
                        break
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(parent) from error
            expected = f"a folder that can be written to ({error.strerror})"
            raise InvalidConfig("cache_dir", parent, expected) from error
        self._lock: LockableFd | None = lock
        fork_safety.on_fork(self, "_forget")
        _sweep(fs, parent)

    def _forget(self) -> None:
        """Give up the folder in a forked child: it belongs to the parent."""
        self._lock = None

    @property
    def is_owned(self) -> bool:
        """Whether this process has created the folder and not closed it."""
        return self._lock is not None

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            _remove(self._fs, self.path)
            close_lockable(self._fs, lock)


def _sweep(fs: FileSystem, parent: str) -> None:
    """Remove folders of processes that were killed."""
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
    """Return whether the mark of a folder is empty. A replica has a file of the same name that is not empty."""
    try:
        return fs.stat(mark).st_size == 0
    except OSError:
        return False


def _remove(fs: FileSystem, path: str) -> None:
    with contextlib.suppress(OSError):
        fs.remove_tree(path)
