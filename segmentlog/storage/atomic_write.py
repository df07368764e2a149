"""A file that somebody is to find whole, or not at all: written beside its place, synced, and renamed into it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import IO, Final

from segmentlog.storage.file_operations import opened_temporary
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import failures_ignored

_ASIDE: Final = ".whole"


def is_leftover(path: str) -> bool:
    """Whether a file is by its name what a killed process left of one that was to be whole."""
    name = os.path.basename(path)
    return name.startswith(".") and name.endswith(".tmp") and _ASIDE in name


_STREAMS: Final = ("/dev/std", "/dev/fd/", "/proc/")
"""What an open descriptor is called: it may be one of a file, and somebody writes to that already."""


@contextlib.contextmanager
def opened_atomically(
    path: str, fs: FileSystem | None = None, verify: Callable[[str], None] | None = None
) -> Iterator[IO[bytes]]:
    """Within: write the file. Leaving well puts it under ``path``, durably; by an exception leaves ``path`` as it was.

    A process that is killed leaves what it had written under a hidden name, which the next one for the same
    ``path`` uses up. What is no regular file (a pipe, /dev/stdout) is written to as it is. Raises OSError.

    ``verify`` is called with the hidden name once all is written, before the file gets ``path``; what it raises leaves
    ``path`` as it was. It is not called for what is no regular file.
    """
    fs = fs or FileSystem()
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    real = os.path.realpath(path)
    if (mode is not None and not stat.S_ISREG(mode)) or os.path.abspath(path).startswith(_STREAMS):
        with open(path, "wb") as out:
            yield out
        return
    folder, name = os.path.split(real)
    with contextlib.ExitStack() as stack:
        try:
            temporary, fd = stack.enter_context(opened_temporary(fs, f"{folder}/.{name}{_ASIDE}"))
        except OSError as error:
            error.filename = path
            raise
        try:
            fs.ftruncate(fd, 0)
            if mode is not None:
                os.fchmod(fd, stat.S_IMODE(mode))
            with os.fdopen(fd, "wb", closefd=False) as out:
                yield out
            if verify is not None:
                verify(temporary)
            fs.fsync(fd)
            fs.replace(temporary, real)
        except BaseException:
            with failures_ignored():
                fs.unlink(temporary)
            raise
    fs.sync_folder(folder)
