"""How those who wait for records to be shipped and the one who ships them hear of each other, in whatever process.

Who waits rewrites a byte of the file that the shipper holds locked; the shipper sleeps on inotify (`storage.watch`). In
its own process it is called: that takes two threads less to be woken.
How far it came stands in the state pages; the threads of its own process are woken, others look every few milliseconds.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Final

from segmentlog.format.file_names import FILE_LOCK_SUFFIX, SHIP_FILE
from segmentlog.storage import fork_safety
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable, opened_lockable
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING

_LOOK_S: Final = 0.002
"""Nobody tells of what another process has shipped."""


class ShipSignals:
    """Of one store in one process. Thread-safe."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = f"{path}/{SHIP_FILE}{FILE_LOCK_SUFFIX}"
        """The file that whoever ships holds locked."""
        self._news = fork_safety.condition(self, "_news")
        self._is_here = False
        self.is_starting = False
        """A shipper of this process has threads that have not tried to become the one who ships yet."""
        self._wake: Callable[[], Callable[[], None] | None] = lambda: None
        self.trouble = ""
        """What keeps the shipper of this process from shipping."""
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """In a forked child: it is the parent that ships."""
        self._is_here = self.is_starting = False
        self._wake = lambda: None

    # ------------------------------------------------------------ who ships

    def become_shipper(self) -> LockableFd | None:
        """Be the one who ships the store, until the descriptor is let go of; None while somebody else is."""
        fd = open_lockable(self._fs, self.path, os.O_RDWR | os.O_CREAT)
        try:
            self._fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
        except BlockingIOError:
            close_lockable(self._fs, fd)
            return None
        except BaseException:
            close_lockable(self._fs, fd)
            raise
        self._is_here = True
        return fd

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have a method called when somebody of this process wants it shipped, as long as its object is there."""
        self._wake = weakref.WeakMethod(wake)

    def resign(self, lease: LockableFd) -> None:
        """Ship no more."""
        self._is_here = False
        close_lockable(self._fs, lease)
        self.tell()

    def tell(self) -> None:
        """Something was shipped, or cannot be."""
        with self._news:
            self._news.notify_all()

    # ------------------------------------------------------------ who waits

    @property
    def is_shipping(self) -> bool:
        """Whether a process ships the store now, or this one is about to."""
        if self._is_here or self.is_starting:
            return True
        try:
            with opened_lockable(self._fs, self.path, os.O_RDWR) as fd:
                self._fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def want(self) -> None:
        """Have the shipper ship now, and not at the end of its interval."""
        if self._is_here and (wake := self._wake()) is not None:
            wake()
            return
        with failures_ignored(), opened(self._fs, self.path, os.O_WRONLY | os.O_CLOEXEC) as fd:
            self._fs.pwritev(fd, [b"\0"], 0)

    def wait(self, at_most_s: float) -> None:
        """Sleep until there may be news."""
        with self._news:
            self._news.wait(at_most_s if self._is_here else min(at_most_s, _LOOK_S))
