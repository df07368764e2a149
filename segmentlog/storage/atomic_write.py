"""Write a file so that readers see all of it or nothing: write a temporary file, sync it, then rename it."""

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
    """Return whether a file has the name of a temporary file of `opened_atomically`, left by a killed process."""
    name = os.path.basename(path)
    return name.startswith(".") and name.endswith(".tmp") and _ASIDE in name


_STREAMS: Final = ("/dev/std", "/dev/fd/", "/proc/")
"""Paths of open descriptors. One may refer to a regular file, but a process writes to that file already."""


@contextlib.contextmanager
def opened_atomically(
    path: str, fs: FileSystem | None = None, verify: Callable[[str], None] | None = None
) -> Iterator[IO[bytes]]:
    """Open a file to write. If the body succeeds, the file gets the name ``path``, durably; else ``path`` is unchanged.

    A killed process leaves its data under a hidden name, and the next call for the same ``path`` reuses that file. A
    path that is not a regular file (a pipe, /dev/stdout) is written directly.

    ``verify`` is called with the hidden name once all data is written, before the file gets the name ``path``. An
    exception from it leaves ``path`` unchanged. It is not called for a path that is not a regular file. Raises OSError.
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
