"""Park fetches that wait for records (Kafka's purgatory), and recheck them when a partition grows.

A parked fetch is rechecked on three occasions:

- after an append in this process, by the thread that handled the request, once it has answered it;
- after an append in another process, by a thread that watches the files of all awaited partitions (`storage.watch`);
- when its time is up.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from segmentlog.storage.watch import Watch

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

logger = logging.getLogger("segmentlog.server")

RECHECK_S: Final = 1.0
"""Interval at which every parked fetch is rechecked, whether a file changed or not."""
_POLL_S: Final = 0.005
"""Interval on systems where file changes cannot be watched."""
_WATCHED_MAX: Final = 8192
"""Maximum number of watched files. Above it, once fewer than half are awaited, a new watch of these starts."""


class ParkedRequest(Protocol):
    """A request that waits for records."""

    paths: Sequence[str]
    """Files that change when there may be new records."""
    topic_ids: Sequence[str]
    """Topic id of each path: another topic may get the path after a rename."""
    ends_s: float
    """End of the request's waiting time (monotonic)."""

    def recheck(self) -> None:
        """Respond if there are enough records or the wait is over, and then `unpark`.

        Several threads may call this at once.
        """


class FetchPurgatory:
    """All parked fetches of a server. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: dict[str, set[ParkedRequest]] = {}
        self._topic_ids: dict[str, str] = {}
        """Topic id of each awaited path, from the latest fetch that waits for it."""
        self._waiters: set[ParkedRequest] = set()
        self._ends: list[tuple[float, int, ParkedRequest]] = []
        """A heap by end time. It may contain fetches that are no longer parked."""
        self._numbers = count()
        self._sleeps_until_s = 0.0
        self._polls = False
        self._grown: dict[Partition, None] = {}
        self._watch: Watch | None = None
        self._watched: set[str] = set()
        """Paths added to the present watch; for most of them no fetch waits any more."""
        self.is_closed = False
        """Whether fetches must not wait any more."""

    @property
    def waiting_count(self) -> int:
        """Number of parked fetches."""
        return len(self._waiters)

    def is_healthy(self, patience_s: float) -> bool:
        """Return whether the lock becomes free within ``patience_s`` seconds. If not, its holder is stuck."""
        if not self._mutex.acquire(timeout=patience_s):
            return False
        self._mutex.release()
        return True

    def close(self) -> None:
        """Recheck all parked fetches, which answers them: after the call, none may wait any more."""
        with self._mutex:
            self.is_closed = True
            waiters, watch = list(self._waiters), self._watch
        if watch is not None:
            watch.interrupt()
        for waiter in waiters:
            _recheck(waiter)

    def park(self, waiter: ParkedRequest) -> None:
        """Park a fetch until one of its files changes or its time is up. The caller must recheck it once afterwards."""
        with self._mutex:
            if self.is_closed:
                return
            if self._watch is None or len(self._watched) > max(_WATCHED_MAX, 2 * len(self._waiting)):
                self._begin_watch_locked()
            watch = self._watch
            assert watch is not None
            self._polls |= watch.must_poll
            for path, topic_id in zip(waiter.paths, waiter.topic_ids, strict=True):
                if not watch.add(path, file=topic_id):
                    self._polls = True
                self._topic_ids[path] = topic_id
                self._watched.add(path)
                self._waiting.setdefault(path, set()).add(waiter)
            self._waiters.add(waiter)
            heapq.heappush(self._ends, (waiter.ends_s, next(self._numbers), waiter))
            if self._polls or waiter.ends_s < self._sleeps_until_s:
                watch.interrupt()

    def unpark(self, waiter: ParkedRequest) -> None:
        """Remove a fetch that does not wait any more."""
        with self._mutex:
            self._waiters.discard(waiter)
            if not self._waiters:
                self._polls = False
                self._ends.clear()
            for path in waiter.paths:
                waiters = self._waiting.get(path)
                if waiters is not None:
                    waiters.discard(waiter)
                    if not waiters:
                        del self._waiting[path], self._topic_ids[path]

    def mark_grown(self, partition: Partition) -> None:
        """Record an append of this process. The caller must call `recheck_grown` once the append is answered."""
        self._grown[partition] = None

    def recheck_grown(self) -> None:
        """Recheck the fetches that wait for partitions with new records, in this thread; then wake other processes."""
        while self._grown:
            try:
                partition, _ = self._grown.popitem()
            except KeyError:  # another thread took it
                return
            waiters = self._waiting.get(partition.handle.lock_path)
            if waiters:
                with self._mutex:
                    waiters = waiters.copy()
                for waiter in waiters:
                    _recheck(waiter)
            partition.wake_followers()

    def _begin_watch_locked(self) -> None:
        former, self._watch = self._watch, Watch()
        self._watched = set(self._waiting)
        if former is not None:
            former.interrupt()
            for path in self._waiting:
                self._watch.add(path, file=self._topic_ids[path])
        threading.Thread(target=self._run, args=(self._watch,), name="segmentlog-arrivals", daemon=True).start()

    def _run(self, watch: Watch) -> None:
        all_s = 0.0
        while not self.is_closed and watch is self._watch:
            with self._mutex:
                self._sleeps_until_s = self._next_end(time.monotonic() + (_POLL_S if self._polls else RECHECK_S))
                sleep_s = self._sleeps_until_s - time.monotonic()
            changed = watch.wait_for_changes(max(sleep_s, 0.0))
            now_s = time.monotonic()
            with self._mutex:
                self._sleeps_until_s = 0.0
                if self._polls or now_s >= all_s:
                    due, all_s = self._waiters.copy(), now_s + RECHECK_S
                else:
                    due = {waiter for path in changed for waiter in self._waiting.get(path, ())}
                while self._ends and self._ends[0][0] <= now_s:
                    due.add(heapq.heappop(self._ends)[2])
            for waiter in due:
                _recheck(waiter)
            self.recheck_grown()  # for appends of a connection that ended before it called this
        watch.close()

    def _next_end(self, at_most_s: float) -> float:
        """Return when the next fetch's time is up, at most ``at_most_s``."""
        ends = self._ends
        while ends and ends[0][2] not in self._waiters:
            heapq.heappop(ends)
        return min(at_most_s, ends[0][0]) if ends else at_most_s


def _recheck(waiter: ParkedRequest) -> None:
    try:
        waiter.recheck()
    except Exception:  # otherwise the remaining fetches would not be rechecked
        logger.exception("a fetch that waits for records could not be answered")
