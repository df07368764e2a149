"""Replace a file that people and other processes also change: atomically, one writer at a time, keeping the owner."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from typing import Final, TypeVar

from segmentlog.format.file_names import FILE_LOCK_SUFFIX, TEMPORARY_SUFFIX
from segmentlog.storage.file_locks import ProcessLock
from segmentlog.storage.file_operations import read_file, write_all
from segmentlog.storage.fs import FileSystem, opened

T = TypeVar("T")

PRIVATE: Final = 0o600


def change_file(
    path: str, change: Callable[[bytes | None], tuple[bytes | None, T]], *, mode: int | None = None,
    fs: FileSystem | None = None,
) -> T:  # fmt: skip
    """Replace a file's bytes by those that ``change`` computes from them, and return its result.

    ``change`` gets the present bytes, or None for a missing file. It returns (new bytes, result); if the new bytes are
    None, the file stays unchanged. A lock excludes other writers that use this function. Readers see the old file or
    the new file, also after a power cut. Without ``mode`` the file keeps its mode. Raise OSError.
    """
    fs = fs or FileSystem()
    real = os.path.realpath(path)
    with ProcessLock(fs, real + FILE_LOCK_SUFFIX).hold():
        try:
            before = read_file(fs, real)
        except FileNotFoundError:
            before = None
        after, result = change(before)
        if after is not None and after != before:
            _replace(fs, real, after, mode)
    return result


def _replace(fs: FileSystem, path: str, data: bytes, mode: int | None) -> None:
    """Replace the file like `fs.replace_file`, but keep the owner, and never expose the contents to other users."""
    folder = os.path.dirname(path)
    try:
        found = fs.stat(path)
        mode = stat.S_IMODE(found.st_mode) if mode is None else mode
    except FileNotFoundError:
        found = fs.stat(folder)
        mode = PRIVATE if mode is None else mode
    temporary = path + TEMPORARY_SUFFIX
    with contextlib.suppress(FileNotFoundError):  # left by a killed process; this one has the lock
        fs.unlink(temporary)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with opened(fs, temporary, flags, PRIVATE) as fd:
            if os.geteuid() == 0:  # root adds users, and a server that is not root must be able to read them
                os.fchown(fd, found.st_uid, found.st_gid)
            os.fchmod(fd, mode)
            write_all(fs, fd, [data], 0)
            fs.fsync(fd)
        fs.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        raise
    fs.sync_folder(folder)
