"""What is done with a file by several calls of a `FileSystem`: reading and writing all of it, and replacing it.

After a crash a file that was being replaced is the old file or the new one, never half of either.
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

_BUFFERS_MAX: Final = 1024  # of one pwritev; with more it fails with EINVAL
_NO_LINK: Final = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
_NO_FALLOCATE: Final = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, *LOCAL_ERRORS))


def read_file(fs: FileSystem, path: str) -> bytes:
    """The whole of a small file."""
    with opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        parts = []
        position, most = 0, 1 << 12
        while part := fs.pread(fd, most, position):
            parts.append(part)
            position += len(part)
            most = 1 << 20
        return b"".join(parts)


def write_all(fs: FileSystem, fd: int, buffers: Sequence[Buffer], position: int) -> None:
    """Write all buffers at ``position``, going on after a short write. Raises OSError, `DiskFull` without room."""
    try:
        _write_all(fs, fd, buffers, position)
    except OSError as error:
        if error.errno in NO_ROOM and not isinstance(error, DiskFull):
            raise DiskFull(_path_of(fd), sum(map(len, buffers))) from error
        raise


def _path_of(fd: int) -> str:
    """For people: where a descriptor's file lies, as far as that can be told."""
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
    """fdatasync. Raises `DiskFailed`."""
    try:
        fs.fdatasync(fd)
    except OSError as error:
        raise DiskFailed.of(error, path) from error


def write_new_file(fs: FileSystem, path: str, data: bytes) -> None:
    """Make a file where nobody looks yet, its bytes durable; its name is once the folder is synced.

    Without a rename an fsync of the folder right after finds it in the journal already. Raises FileExistsError,
    DiskFull, `DiskFailed` for an fsync that failed, and OSError.
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
    """Put ``data`` under ``path`` durably: before or after a crash, the old file or the new one, whole.

    Which of them is only certain once the folder is synced; ``sync_folder=False`` leaves that to the caller.

    Raises DiskFull when there is no room, and OSError; the old file is then still there. `DiskFailed` for
    an fsync that failed: either file may be there. Several threads
    or processes may replace one file at the same time: the last one wins.
    """
    replace_file_by_parts(fs, path, (data,), sync_folder=sync_folder)


def replace_file_by_parts(fs: FileSystem, path: str, parts: Iterable[Buffer], *, sync_folder: bool = True) -> None:
    """`replace_file` with what is too large to be held in memory. What ``parts`` raises leaves the old file there."""
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
    """Make a folder and those that it lies in, and put their names on disk; also those that were there already.

    For whoever made one of those may have died, or never have thought of it: all up to where the file system
    begins. Raises OSError.
    """
    fs.make_folders(path)
    folder, device = os.path.abspath(path), fs.stat(path).st_dev
    with contextlib.suppress(PermissionError):  # a relative path, of which nobody may know where it is
        while (parent := os.path.dirname(folder)) != folder and fs.stat(parent).st_dev == device:
            with contextlib.suppress(PermissionError):  # somebody else's, who lets others in, and not look around
                fs.sync_folder(parent)
            folder = parent


def link_over(fs: FileSystem, source: str, path: str) -> None:
    """Put the file ``source`` under the name ``path`` as well, in place of what is there. Not durable yet.

    A copy of it where the file system has no hard links.
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
    with contextlib.suppress(FileNotFoundError):  # two names of one file: then replacing does nothing
        fs.unlink(temporary)


@interrupt_safe_context
def opened_temporary(fs: FileSystem, path: str) -> Iterator[tuple[str, int]]:
    """(name, descriptor) of a file beside ``path`` that nobody else is writing to.

    Always the same name if it can be had, so that what a killed process left is used up and
    does not pile up; locked, or a second writer would empty it under the first one's rename.
    """
    aside = f"{path}.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}"
    for name in (f"{path}{TEMPORARY_SUFFIX}", aside):
        with opened_lockable(fs, name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW) as fd:
            try:
                fs.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_mine = os.path.samestat(fs.fstat(fd), fs.stat(name))
            except (BlockingIOError, FileNotFoundError):
                continue  # somebody is writing it, or has just put it in place
            if is_mine:
                yield name, fd
                return
    raise OSError(errno.EBUSY, "temporary files come and go", aside)


def try_fallocate(fs: FileSystem, fd: int, position: int, size_bytes: int) -> bool:
    """Preallocate if there is room and the file system can; appending works without, only slower."""
    try:
        fs.fallocate(fd, position, size_bytes)
        return True
    except OSError as error:
        if error.errno in NO_ROOM or error.errno in _NO_FALLOCATE:
            return False
        raise
