"""A file that people change while a server runs: what is in it now, at the cost of a look at its times now and then."""

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
"""Where a process says what a changed file says now. Of several processes that read one file, one says it."""

T = TypeVar("T")

LOOK_EVERY_S: Final = 0.5
_SETTLED_NS: Final = 2_000_000_000
"""Times of files have steps: a younger file may change once more without a later time, and is read again."""

_Version = tuple[int, int, int]


class WatchedFile(Generic[T]):
    """What ``parse`` makes of the file at ``path``. Thread-safe.

    The first look raises whatever is wrong. Later on a file that is gone or broken changes nothing: what was known goes
    on to count, and an error is logged, once for each state of the file. A file that says something else is logged with
    ``describe(before, now)``, which must hold no secret.
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
        self._version, self._is_settled = self._look()
        self._bytes = read_file(self._fs, path)
        self._value = parse(self._bytes)
        self._next_look_s = clock() + look_every_s

    def current(self) -> T:
        """What is in the file, at most half a second ago."""
        if self._clock() >= self._next_look_s:
            # Whoever comes meanwhile need not wait: what was known a moment ago is as good.
            with try_lock(self._mutex) as is_mine:
                if is_mine:
                    self._refresh()
        return self._value

    def reload(self) -> T:
        """What is in the file now."""
        with self._mutex:
            self._refresh()
        return self._value

    def _refresh(self) -> None:
        self._next_look_s = self._clock() + self._look_every_s
        try:
            version, is_settled = self._look()
            if version == self._version and self._is_settled:
                return
            found = read_file(self._fs, self.path)
            if found != self._bytes:
                before, self._value = self._value, self._parse(found)
                reloads.info("%s changed and was read again: %s", self.path, self._describe(before, self._value))
        except (OSError, SegmentlogError) as error:
            complaint = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if complaint != self._complaint:
                self._complaint = complaint
                logger.error("%s: cannot be used, and what it said before goes on to count: %s", self.path, complaint)
            return
        self._version, self._is_settled, self._bytes, self._complaint = version, is_settled, found, ""

    def _look(self) -> tuple[_Version, bool]:
        """Before reading: what is read is then at least as new."""
        found = self._fs.stat(self.path)
        return (
            (found.st_ino, found.st_mtime_ns, found.st_size),
            time.time_ns() - found.st_mtime_ns > _SETTLED_NS,
        )
