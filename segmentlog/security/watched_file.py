"""Read a file that people change while a server runs. Check its modification time twice a second."""

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
"""Logger of reloads. If several processes watch the same file, only one of them enables this logger."""

T = TypeVar("T")

CHECK_INTERVAL_S: Final = 0.5
_RECENT_NS: Final = 2_000_000_000
"""File times are coarse: a file that changed less than this long ago may change again without a new time."""

_Version = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """Parsed contents of the file at ``path``, reloaded when it changes. Thread-safe.

    The constructor raises the error of an unreadable or invalid file. If the file becomes invalid or disappears later,
    the previous contents stay in effect. The object logs the error once, and again when the reason changes. It logs a
    change with the text of ``describe(before, now)``, which must not contain a secret.
    """

    def __init__(
        self,
        path: str,
        parse: Callable[[bytes], T],
        describe: Callable[[T, T], str],
        *,
        fs: FileSystem | None = None,
        check_interval_s: float = CHECK_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._parse = parse
        self._describe = describe
        self._fs = fs or FileSystem()
        self._check_interval_s = check_interval_s
        self._clock = clock
        self._mutex = fork_safety.lock(self, "_mutex")
        self._complaint = ""
        self._version, self._is_old = self._version_on_disk()
        self._bytes = read_file(self._fs, path)
        self._value = parse(self._bytes)
        self._next_check_s = clock() + check_interval_s

    def current(self) -> T:
        """Return the contents, at most half a second old."""
        if self._clock() >= self._next_check_s:
            # Do not wait for a thread that is reloading: the previous contents are recent enough.
            with try_lock(self._mutex) as is_mine:
                if is_mine:
                    self._refresh()
        return self._value

    def reload(self) -> T:
        """Check the file now, and return its contents."""
        with self._mutex:
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        self._next_check_s = self._clock() + self._check_interval_s
        try:
            version, is_old = self._version_on_disk()
            if version == self._version and self._is_old:
                return
            found = read_file(self._fs, self.path)
            if found != self._bytes:
                before, self._value = self._value, self._parse(found)
                reloads.info("%s has changed and was reloaded: %s", self.path, self._describe(before, self._value))
        except (OSError, SegmentlogError) as error:
            complaint = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if complaint != self._complaint:
                self._complaint = complaint
                logger.error("%s cannot be used, so its previous contents stay in effect: %s", self.path, complaint)
            return
        self._version, self._is_old, self._bytes, self._complaint = version, is_old, found, ""

    def _version_on_disk(self) -> tuple[_Version, bool]:
        """Return (version, whether a later change of the file must get another version).

        Call this before the file is read. If the file changes in between, the next check then finds another version.
        """
        found = self._fs.stat(self.path)
        return (
            (found.st_ino, found.st_mtime_ns, found.st_size),
            time.time_ns() - found.st_mtime_ns > _RECENT_NS,
        )
