"""Signals between the shipper of a store and the threads and processes that wait for it.

A waiting process writes a byte to the file that the shipper has locked; the shipper waits for that with inotify
(`storage.watch`). In the shipper's own process a callback wakes it: that saves two thread switches.

The state pages contain how far each partition is shipped. Threads of the shipper's process are woken; other processes
poll the pages every few milliseconds.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Final

import msgspec

from segmentlog.format.file_names import FILE_LOCK_SUFFIX, SHIP_FILE
from segmentlog.policy.shipped_topics import is_selected
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable, opened_lockable
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.hand_over_file import read_hand_over
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING

_POLL_S: Final = 0.002
"""How often a process polls if another process ships the store."""


class _Fence(msgspec.Struct):
    """The part of the file ``@ship`` that stops appends; see `objects.ownership.binding`."""

    topics: tuple[str, ...] = ()
    fenced: str = ""


_fence_decoder = msgspec.json.Decoder(_Fence)


class ShipSignals:
    """The shipping signals of one store in one process. Thread-safe."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._folder = path
        self.path = f"{path}/{SHIP_FILE}{FILE_LOCK_SUFFIX}"
        """The file that the shipper keeps locked."""
        self._news = fork_safety.condition(self, "_news")
        self._is_shipper = False
        self.is_starting = False
        """Whether threads of this process are about to try to become the shipper."""
        self._wake: Callable[[], Callable[[], None] | None] = lambda: None
        self.error = ""
        """Why the shipper of this process cannot ship; empty if it can."""
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """Reset the flags in a forked child: the parent keeps the lease and remains the shipper."""
        self._is_shipper = self.is_starting = False
        self._wake = lambda: None

    # ------------------------------------------------------------ the shipper

    def acquire_lease(self) -> LockableFd | None:
        """Become the shipper of the store until `release_lease`. Return None if another process is the shipper."""
        fd = open_lockable(self._fs, self.path, os.O_RDWR | os.O_CREAT)
        try:
            self._fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
        except BlockingIOError:
            close_lockable(self._fs, fd)
            return None
        except BaseException:
            close_lockable(self._fs, fd)
            raise
        self._is_shipper = True
        return fd

    def set_wake_callback(self, wake: Callable[[], None]) -> None:
        """Set the bound method that `request_cycle` calls in this process. It is referenced weakly."""
        self._wake = weakref.WeakMethod(wake)

    def release_lease(self, lease: LockableFd) -> None:
        """Stop being the shipper, and wake all waiters."""
        self._is_shipper = False
        close_lockable(self._fs, lease)
        self.notify_waiters()

    def notify_waiters(self) -> None:
        """Wake the waiting threads of this process, because something was shipped or cannot be shipped."""
        with self._news:
            self._news.notify_all()

    # ------------------------------------------------------------ waiters

    @property
    def is_shipping(self) -> bool:
        """Whether a process ships the store now, or this process is about to."""
        if self._is_shipper or self.is_starting:
            return True
        try:
            with opened_lockable(self._fs, self.path, os.O_RDWR) as fd:
                self._fs.flock(fd, EXCLUSIVE | NON_BLOCKING)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def are_appends_stopped(self, topic: str, *, has_grant: bool) -> bool:
        """Return whether appends to a topic are stopped, because the store is being handed over to another machine.

        ``has_grant``: whether the partition has an offset grant. It then counts as shipped, whatever its name is now.
        """
        hand_over = read_hand_over(self._fs, self._folder)
        if hand_over is None or not hand_over.is_stopping:
            return False
        return has_grant or is_selected(topic, hand_over.topics)

    def read_new_owner(self, topic: str, *, has_grant: bool) -> str:
        """Return the machine that took the store over, if it owns this topic; "" otherwise. Raise OSError.

        The file ``@ship`` names it even if the partition's own fence could not be written. A damaged file names none.
        """
        try:
            found = _fence_decoder.decode(read_file(self._fs, f"{self._folder}/{SHIP_FILE}"))
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError, UnicodeDecodeError):
            return ""
        return found.fenced if found.fenced and (has_grant or is_selected(topic, found.topics)) else ""

    def request_cycle(self) -> None:
        """Ask the shipper to run a cycle now, before its interval ends."""
        if self._is_shipper and (wake := self._wake()) is not None:
            wake()
            return
        with failures_ignored(), opened(self._fs, self.path, os.O_WRONLY | os.O_CLOEXEC) as fd:
            self._fs.pwritev(fd, [b"\0"], 0)

    def wait(self, at_most_s: float) -> None:
        """Sleep until the shipper may have shipped something or failed to, at most ``at_most_s`` seconds."""
        with self._news:
            self._news.wait(at_most_s if self._is_shipper else min(at_most_s, _POLL_S))
