"""Operations on a file that need several calls of a `FileSystem`: read, write, replace a whole file.

A crash while a file is being replaced leaves the old file or the new file, never parts of both.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from segmentlog.errors import DiskFull, SegmentlogError
from segmentlog.format.file_names import TEMPORARY_SUFFIX
from segmentlog.storage.fork_safety import opened_lockable
from segmentlog.storage.fs import LOCAL_ERRORS, NO_ROOM, Buffer, DiskFailed, FileSystem, opened
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.interrupt_safe import interrupt_safe_context

_BUFFERS_MAX: Final = 1024  # buffers of one pwritev; with more it fails with EINVAL
_NO_LINK: Final = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
_NO_FALLOCATE: Final = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, *LOCAL_ERRORS))


def read_file(fs: FileSystem, path: str, position: int = 0) -> bytes:
    """Read a small file, from byte ``position`` to its end. Raises OSError."""
    with opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        parts = []
        most = 1 << 12
        while part := fs.pread(fd, most, position):
            parts.append(part)
            position += len(part)
            most = 1 << 20
        return b"".join(parts)


def write_all(fs: FileSystem, fd: int, buffers: Sequence[Buffer], position: int) -> None:
    """Write all buffers at ``position``, continuing after short writes. Raises OSError, `DiskFull` without room."""
    try:
        _write_all(fs, fd, buffers, position)
    except OSError as error:
        if error.errno in NO_ROOM and not isinstance(error, DiskFull):
            raise DiskFull(_path_of(fd), sum(map(len, buffers))) from error
        raise


def _path_of(fd: int) -> str:
    """Return the path of an open file, for messages; "descriptor N" if the system does not report the path."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError as error:
        if is_interrupt(error):
            raise
        return f"descriptor {fd}"


def _write_all(fs: FileSystem, fd: int, buffers: Sequence[Buffer], position: int) -> None:
    if len(buffers) > _BUFFERS_MAX:
        for start in range(0, len(buffers), _BUFFERS_MAX):
            some = buffers[start : start + _BUFFERS_MAX]
            _write_all(fs, fd, some, position)
            position += sum(map(len, some))
        return
    total = sum(map(len, buffers))
    written = fs.pwritev(fd, buffers, position)
    if written == total:
        return
    rest = memoryview(b"".join(buffers))
    while written < total:
        count = fs.pwritev(fd, [rest[written:]], position + written)
        if count <= 0:
            raise OSError(errno.EIO, "the file system wrote nothing and reported no error")
        written += count


def sync_data(fs: FileSystem, fd: int, path: str) -> None:
    """Call fdatasync. Raises `DiskFailed`."""
    try:
        fs.fdatasync(fd)
    except OSError as error:
        raise DiskFailed.of(error, path) from error


def write_new_file(fs: FileSystem, path: str, data: bytes) -> None:
    """Create a file with durable content. Its name is durable only once the caller has synced the folder.

    No process may look for the name yet. Without a rename, an fsync of the folder directly afterwards finds the change
    in the journal already. Raises FileExistsError, `DiskFull`, `DiskFailed` if an fsync failed, and OSError.
    """
    with opened(fs, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC) as fd:
        write_all(fs, fd, [data], 0)
        _fsync(fs, fd, path)


def _fsync(fs: FileSystem, fd: int, path: str) -> None:
    try:
        fs.fsync(fd)
    except OSError as error:
        raise DiskFailed.of(error, path) from error


def replace_file(fs: FileSystem, path: str, data: bytes, *, sync_folder: bool = True) -> None:
    """Store ``data`` under ``path`` durably. A crash leaves the old file or the new file, complete.

    Until the folder is synced, a crash may leave either. ``sync_folder=False`` leaves that sync to the caller.

    Raises `DiskFull` without room, and OSError: ``path`` is then unchanged. Raises `DiskFailed` if an fsync failed:
    then ``path`` may be the old file or the new file. Several threads or processes may replace the same file at the
    same time; the last replacement wins.
    """
    replace_file_by_parts(fs, path, (data,), sync_folder=sync_folder)


def replace_file_by_parts(fs: FileSystem, path: str, parts: Iterable[Buffer], *, sync_folder: bool = True) -> None:
    """Replace a file like `replace_file`, with data too large to be held in memory.

    If the iterator ``parts`` raises, the old file stays.
    """
    size_bytes = 0
    try:
        with opened_temporary(fs, path) as (temporary, fd):
            try:
                fs.ftruncate(fd, 0)
                for part in parts:
                    size_bytes += len(part)
                    write_all(fs, fd, [part], size_bytes - len(part))
                _fsync(fs, fd, path)
                fs.replace(temporary, path)
            except (OSError, SegmentlogError):
                with failures_ignored():
                    fs.unlink(temporary)
                raise
    except OSError as error:
        if error.errno in NO_ROOM:
            raise DiskFull(path, size_bytes) from error
        raise
    if sync_folder:
        fs.sync_folder(os.path.dirname(path))


def make_folders_durably(fs: FileSystem, path: str) -> None:
    """Create a folder and its missing parents, and make the names of all parents durable, including existing ones.

    A process that created one of the existing parents may have died before it synced the name. So all parents up to the
    root of the file system are synced. Raises OSError.
    """
    fs.make_folders(path)
    folder, device = os.path.abspath(path), fs.stat(path).st_dev
    with contextlib.suppress(PermissionError):  # a relative path whose parent this process may not look up
        while (parent := os.path.dirname(folder)) != folder and fs.stat(parent).st_dev == device:
            with contextlib.suppress(PermissionError):  # a folder that this process may enter but not read
                fs.sync_folder(parent)
            folder = parent


def link_over(fs: FileSystem, source: str, path: str) -> None:
    """Give the file ``source`` the additional name ``path``, replacing the file there. Not durable yet.

    On a file system without hard links it is copied.
    """
    temporary = path + TEMPORARY_SUFFIX
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(temporary)
    try:
        fs.link(source, temporary)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        replace_file(fs, path, read_file(fs, source))
        return
    fs.replace(temporary, path)
    with contextlib.suppress(FileNotFoundError):  # a rename between two names of the same file does nothing
        fs.unlink(temporary)


@interrupt_safe_context
def opened_temporary(fs: FileSystem, path: str) -> Iterator[tuple[str, int]]:
    """Open a temporary file beside ``path`` that no other thread or process writes. Yield its name and descriptor.

    The name is always the same if possible, so that files left by killed processes are reused and do not pile up. The
    file is locked: otherwise a second writer would truncate it while the first renames it.
    """
    aside = f"{path}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}"
    for name in (f"{path}{TEMPORARY_SUFFIX}", aside):
        with opened_lockable(fs, name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as fd:
            try:
                fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_mine = os.path.samestat(fs.fstat(fd), fs.stat(name))
            except (BlockingIOError, FileNotFoundError):
                continue  # another process is writing it, or has just renamed it
            if is_mine:
                yield name, fd
                return
    raise OSError(errno.EBUSY, "other processes keep using or removing the temporary file; try again", aside)


def try_fallocate(fs: FileSystem, fd: int, position: int, size_bytes: int) -> bool:
    """Preallocate file space. Return False if the file system cannot, or has no room: appends then work, but slower."""
    try:
        fs.fallocate(fd, position, size_bytes)
        return True
    except OSError as error:
        if error.errno in NO_ROOM or error.errno in _NO_FALLOCATE:
            return False
        raise
