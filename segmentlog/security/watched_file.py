"""A file that people change while a server runs. Its times are checked twice a second at most."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from segmentlog.errors import SegmentlogError
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import try_lock

logger = logging.getLogger("segmentlog.server")
reloads = logging.getLogger("segmentlog.server.reloads")
"""Logs what a changed file contains. If several processes read the file, one of them logs it."""

T = TypeVar("T")

LOOK_EVERY_S: Final = 0.5
_SETTLED_NS: Final = 2_000_000_000
"""Times of files are coarse: a younger file may change again without a new time, so it is read again."""

_Version = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """The value that ``parse`` returns for the file at ``path``. Thread-safe.

    Creation raises any error. If the file is missing or invalid later, the previous value stays valid, and an error is
    logged once for each version of the file. A change is logged with ``describe(before, now)``, which must not return
    secrets.
    """

    def __init__(
        self,
        path: str,
        parse: Callable[[bytes], T],
        describe: Callable[[T, T], str],
        *,
        fs: FileSystem | None = None,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._parse = parse
        self._describe = describe
        self._fs = fs or FileSystem()
        self._look_every_s = look_every_s
        self._clock = clock
        self._mutex = fork_safety.lock(self, "_mutex")
        self._complaint = ""
        self._version, self._is_final = self._read_version()
        self._bytes = read_file(self._fs, path)
        self._value = parse(self._bytes)
        self._next_look_s = clock() + look_every_s

    def current(self) -> T:
        """Return the value of the file, which is at most half a second old."""
        if self._clock() >= self._next_look_s:
            # Other threads need not wait: the previous value is recent enough for them.
            with try_lock(self._mutex) as is_mine:
                if is_mine:
                    self._refresh()
        return self._value

    def reload(self) -> T:
        """Return the value of the file as it is now."""
        with self._mutex:
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        self._next_look_s = self._clock() + self._look_every_s
        try:
            version, is_final = self._read_version()
            if version == self._version and self._is_final:
                return
            found = read_file(self._fs, self.path)
            if found != self._bytes:
                before, self._value = self._value, self._parse(found)
                reloads.info("%s changed and was read again: %s", self.path, self._describe(before, self._value))
        except (OSError, SegmentlogError) as error:
            complaint = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if complaint != self._complaint:
                self._complaint = complaint
                logger.error("%s: cannot be used: %s; its previous contents stay in effect", self.path, complaint)
            return
        self._version, self._is_final, self._bytes, self._complaint = version, is_final, found, ""

    def _read_version(self) -> tuple[_Version, bool]:
        """Return times before the file is read, so that the contents are at least as new."""
        found = self._fs.stat(self.path)
        return (
            (found.st_ino, found.st_mtime_ns, found.st_size),
            time.time_ns() - found.st_mtime_ns > _SETTLED_NS,
        )
