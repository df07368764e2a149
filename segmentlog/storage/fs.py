"""Every call that reaches the operating system's files, in one place that can be replaced.

`FileSystem` is the seam for fault injection: a test hands in a subclass that fails, forgets
or records. Its methods are the system calls themselves wherever Python has them, so that
the seam costs an attribute look-up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from segmentlog.errors import DiskFull
from segmentlog.format.names import TEMPORARY_SUFFIX

Buffer = bytes | bytearray | memoryview

NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
_NO_FALLOCATE: Final = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV))


class FileSystem:
    """The real one. Raises OSError as the system calls do; EINTR is retried by Python."""

    # Signatures are those of `os`; static, so that a call is one attribute look-up.
    open: Callable[..., int] = staticmethod(os.open)
    close: Callable[[int], None] = staticmethod(os.close)
    pread: Callable[[int, int, int], bytes] = staticmethod(os.pread)
    pwritev: Callable[[int, Sequence[Buffer], int], int] = staticmethod(os.pwritev)
    fdatasync: Callable[[int], None] = staticmethod(getattr(os, "fdatasync", os.fsync))
    fsync: Callable[[int], None] = staticmethod(os.fsync)
    ftruncate: Callable[[int, int], None] = staticmethod(os.ftruncate)
    rename: Callable[[str, str], None] = staticmethod(os.rename)
    replace: Callable[[str, str], None] = staticmethod(os.replace)
    unlink: Callable[[str], None] = staticmethod(os.unlink)
    rmdir: Callable[[str], None] = staticmethod(os.rmdir)
    flock: Callable[[int, int], None] = staticmethod(fcntl.flock)

    def mkdir(self, path: str) -> None:
        """Make a folder; FileExistsError if it is there."""
        os.mkdir(path, 0o777)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def fallocate(self, fd: int, position: int, size_bytes: int) -> None:
        """Reserve and zero ``[position, position + size_bytes)``, growing the file. No room is an OSError."""
        os.posix_fallocate(fd, position, size_bytes)

    def sync_folder(self, path: str) -> None:
        """Make names in this folder durable: until then a power cut may undo a create or a rename."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd)
        finally:
            self.close(fd)

    def map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> mmap.mmap:
        """Map the first ``size_bytes`` of a file, shared with every process that maps it."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, size_bytes, access=access)

    def boot_id(self) -> str:
        """A name for the time since the machine started: page caches live as long as it does."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux: the start of process 1 changes with every boot, too
            return f"init-{os.stat('/').st_ctime_ns}"


def read_file(fs: FileSystem, path: str) -> bytes:
    """The whole of a small file."""
    fd = fs.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        position = 0
        while part := fs.pread(fd, 1 << 20, position):
            parts.append(part)
            position += len(part)
        return b"".join(parts)
    finally:
        fs.close(fd)


def write_all(fs: FileSystem, fd: int, buffers: Sequence[Buffer], position: int) -> None:
    """Write all buffers at ``position``, going on after a short write. Raises OSError."""
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


def replace_file(fs: FileSystem, path: str, data: bytes) -> None:
    """Put ``data`` under ``path`` durably: before or after a crash, the old file or the new one, whole.

    Raises DiskFull when there is no room; the old file is then still there.
    """
    temporary = f"{path}{TEMPORARY_SUFFIX}"
    try:
        fd = fs.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fs, fd, [data], 0)
            fs.fsync(fd)
        finally:
            fs.close(fd)
        fs.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fs.unlink(temporary)
        if error.errno in NO_ROOM:
            raise DiskFull(path, len(data)) from error
        raise
    fs.sync_folder(os.path.dirname(path))


def try_fallocate(fs: FileSystem, fd: int, position: int, size_bytes: int) -> bool:
    """Preallocate if there is room and the file system can; appending works without, only slower."""
    try:
        fs.fallocate(fd, position, size_bytes)
        return True
    except OSError as error:
        if error.errno in NO_ROOM or error.errno in _NO_FALLOCATE:
            return False
        raise
