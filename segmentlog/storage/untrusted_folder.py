"""Folders that somebody else may have put here: an archive or a table that was unpacked, say, or written to by others.

What a file of such a folder names lies below it, or is refused: no name leads out, no link is followed, and what is
opened is a regular file: a pipe would be waited for, a device read for ever. Whoever can change the folder *while* it
is being read is not kept out: what was looked at may be another one when it is opened by its name.
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
    """Something that such a folder should not hold or name; it was neither read nor written."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


def open_plain(fs: FileSystem, path: str) -> int:
    """A descriptor of a regular file, to read. Raises `NotAllowed` for anything else, OSError."""
    try:
        fd = fs.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UntrustedPath(
                path, "it is a symbolic link, which is not followed; put the file itself there"
            ) from None
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise UntrustedPath(path, "it is no regular file") from None
        raise
    try:
        kind = fs.fstat(fd).st_mode
        if not stat.S_ISREG(kind):
            raise UntrustedPath(path, f"it is {_what(kind)}, and should be a regular file")
    except BaseException:
        fs.close(fd)
        raise
    return fd


def read_plain(fs: FileSystem, path: str, limit_bytes: int) -> bytes:
    """The whole of a regular file. Raises `NotAllowed` for anything else, or one of more bytes; OSError."""
    fd = open_plain(fs, path)
    try:
        size = fs.fstat(fd).st_size
        if size > limit_bytes:
            raise UntrustedPath(path, f"it has {size:,} bytes; no such file has more than {limit_bytes:,}")
        parts: list[bytes] = []
        position = 0
        while part := fs.pread(fd, min(_PART_BYTES, limit_bytes + 1 - position), position):
            parts.append(part)
            position += len(part)
            if position > limit_bytes:
                raise UntrustedPath(path, f"it grows, and no such file has more than {limit_bytes:,} bytes")
        return b"".join(parts)
    finally:
        fs.close(fd)


def check_folder(path: str) -> None:
    """Raise `NotAllowed` unless it is a folder, and not a link to one; or nothing yet."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(kind):
        raise UntrustedPath(path, f"it is {_what(kind)}, and should be a folder; what it leads to is not touched")


def path_below(folder: str, name: str) -> str:
    """The path of what a file names as relative to ``folder``: every folder on the way there is one, or is not there.

    Raises `NotAllowed`.
    """
    if why := check_relative_path(name):
        raise UntrustedPath(folder, f"the name {name!r} is given for a file in it: {why}")
    *parents, _ = name.split("/")
    path = folder
    for parent in parents:
        path = f"{path}/{parent}"
        check_folder(path)
    return f"{folder}/{name}"


def is_plain_file(path: str) -> bool:
    """Whether a regular file lies there; False for nothing. Raises `NotAllowed` for anything else, links too."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(kind):
        raise UntrustedPath(path, f"it is {_what(kind)}, and should be a regular file")
    return True


def _what(kind: int) -> str:
    named = (
        (stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
        (stat.S_ISREG, "a regular file"),
    )  # fmt: skip
    return next((name for test, name in named if test(kind)), "something else")
