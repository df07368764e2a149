"""Long polls: who waits for a partition to grow is woken by whoever appends to it, in whatever process.

One thread watches the partitions that somebody waits for, as the library's followers do (`storage.watch`), and wakes
those who wait for the ones that changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from segmentlog.storage.watch import Watch

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

_LOOK_S: Final = 1.0
"""How long anybody sleeps before he looks for himself."""
_POLL_S: Final = 0.005
"""The same where nobody can be asked to wake us."""
_WATCHED_MAX: Final = 8192
"""Files; beyond that the watch is begun anew, with those that are waited for."""


class Arrivals:
    """Wakes who waits. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: dict[str, set[threading.Event]] = {}
        self._watch: Watch | None = None
        self.waiting_count = 0
        """Who waits now."""
        self.is_closed = False
        """Nobody is to wait any more."""

    def begin(self, partitions: Sequence[Partition]) -> Waiting:
        """Wait for any of these from now on: look whether there is something after this, and then `Waiting.wait`."""
        return Waiting(self, partitions)

    def is_well(self, patience_s: float) -> bool:
        """Whether nobody keeps the others out for that long."""
        if not self._mutex.acquire(timeout=patience_s):
            return False
        self._mutex.release()
        return True

    def close(self) -> None:
        """Wake everybody, and let nobody wait any more."""
        with self._mutex:
            self.is_closed = True
            events = [event for events in self._waiting.values() for event in events]
            watch = self._watch
        for event in events:
            event.set()
        if watch is not None:
            watch.interrupt()

    def enter(self, event: threading.Event, paths: Sequence[str]) -> bool:
        """Have ``event`` set when one of the files changes; False where one has to poll."""
        with self._mutex:
            if self.is_closed:
                event.set()
                self.waiting_count += 1
                return True
            if self._watch is None or len(self._waiting) > _WATCHED_MAX:
                self._begin_watch()
            watch = self._watch
            assert watch is not None
            can_wake = not watch.polls
            for path in paths:
                can_wake &= watch.add(path)
                self._waiting.setdefault(path, set()).add(event)
            self.waiting_count += 1
            return can_wake

    def leave(self, event: threading.Event, paths: Sequence[str]) -> None:
        """Nobody waits for ``event`` any more."""
        with self._mutex:
            self.waiting_count -= 1
            for path in paths:
                events = self._waiting.get(path)
                if events is not None:
                    events.discard(event)
                    if not events:
                        del self._waiting[path]

    def _begin_watch(self) -> None:
        former, self._watch = self._watch, Watch()
        if former is not None:
            former.interrupt()
            for path in self._waiting:
                self._watch.add(path)
        threading.Thread(target=self._run, args=(self._watch,), name="segmentlog-arrivals", daemon=True).start()

    def _run(self, watch: Watch) -> None:
        while not self.is_closed and watch is self._watch:
            changed = watch.wait_for_changes(_LOOK_S)
            with self._mutex:
                for path in changed:
                    for event in self._waiting.get(path, ()):
                        event.set()
        watch.close()


class Waiting:
    """One who waits for some partitions. Use it in a ``with``; for one thread."""

    def __init__(self, arrivals: Arrivals, partitions: Sequence[Partition]) -> None:
        self._arrivals = arrivals
        self._partitions = partitions
        self._paths = [partition.handle.lock_path for partition in partitions]
        self._event = threading.Event()
        self._is_woken = True

    def __enter__(self) -> Waiting:
        self._is_woken = self._arrivals.enter(self._event, self._paths)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._arrivals.leave(self._event, self._paths)

    def announce(self) -> None:
        """Ask appenders to wake us: before looking whether there is something."""
        self._event.clear()
        for partition in self._partitions:
            partition.handle.announce_waiting(2 * _LOOK_S)

    def wait(self, ends_s: float) -> bool:
        """Sleep until something may have come, or it is ``ends_s`` (monotonic); False once it is."""
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return False
        self._event.wait(min(left_s, _LOOK_S if self._is_woken else _POLL_S))
        return True

    @property
    def is_closed(self) -> bool:
        """Whether nobody is to wait any more."""
        return self._arrivals.is_closed
