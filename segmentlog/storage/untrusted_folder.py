"""Read folders with untrusted content, such as an unpacked archive or a table that others wrote.

Every path that such a folder contains is checked, or refused. It must lie below the folder and lead through no symbolic
link. Only regular files are opened: reading a pipe would wait, and reading a device might never end. This does not
protect against a process that changes the folder *while* it is read: it may replace a file between the check and the
open.
"""

from __future__ import annotations

import errno
import os
import stat

from segmentlog.errors import SegmentlogError
from segmentlog.format.file_names import check_relative_path
from segmentlog.storage.fs import FileSystem

_PART_BYTES = 1 << 20


class UntrustedPath(SegmentlogError):
    """An untrusted folder contains or names a path that it must not. The path was neither read nor written."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


def open_plain(fs: FileSystem, path: str) -> int:
    """Open a regular file for reading and return its descriptor. Raises `UntrustedPath` for any other kind, OSError."""
    try:
        fd = fs.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedPath(
                path, "it is a symbolic link, and was not followed; replace the link by the file that it names"
            ) from None
        if error.errno == errno.ENXIO:  # a socket, or a device that does not exist
            raise UntrustedPath(path, "it is not a regular file, and was not read") from None
        raise
    try:
        kind = fs.fstat(fd).st_mode
        if not stat.S_ISREG(kind):
            raise UntrustedPath(path, f"it is {_kind_name(kind)}, but must be a regular file; it was not read")
    except BaseException:
        fs.close(fd)
        raise
    return fd


def read_plain(fs: FileSystem, path: str, limit_bytes: int) -> bytes:
    """Read a whole regular file. Raises `UntrustedPath` for any other kind or more than ``limit_bytes``, OSError."""
    fd = open_plain(fs, path)
    try:
        size = fs.fstat(fd).st_size
        if size > limit_bytes:
            raise UntrustedPath(path, f"it has {size:,} bytes, but may have {limit_bytes:,} at most; it was not read")
        parts: list[bytes] = []
        position = 0
        while part := fs.pread(fd, min(_PART_BYTES, limit_bytes + 1 - position), position):
            parts.append(part)
            position += len(part)
            if position > limit_bytes:
                raise UntrustedPath(path, f"it grew while it was read, beyond the limit of {limit_bytes:,} bytes")
        return b"".join(parts)
    finally:
        fs.close(fd)


def check_folder(path: str) -> None:
    """Raise `UntrustedPath` if ``path`` exists and is not a folder, or is a link to a folder."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(kind):
        raise UntrustedPath(path, f"it is {_kind_name(kind)}, but must be a folder; its target was not touched")


def path_below(folder: str, name: str) -> str:
    """Return the path of a file with the relative name ``name`` in ``folder``, after checking each folder on the way.

    Raises `UntrustedPath` if the name leads out of the folder, or a parent exists and is not a folder.
    """
    if why := check_relative_path(name):
        raise UntrustedPath(
            folder, f"a file in it refers to the path {name!r}: {why}; nothing at that path was read or written"
        )
    *parents, _ = name.split("/")
    path = folder
    for parent in parents:
        path = f"{path}/{parent}"
        check_folder(path)
    return f"{folder}/{name}"


def is_plain_file(path: str) -> bool:
    """Return whether a regular file exists at ``path``. Raises `UntrustedPath` for any other kind, links included."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(kind):
        raise UntrustedPath(path, f"it is {_kind_name(kind)}, but must be a regular file")
    return True


def _kind_name(kind: int) -> str:
    named = (
        (stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
        (stat.S_ISREG, "a regular file"),
    )  # fmt: skip
    return next((name for test, name in named if test(kind)), "something else")
