"""Waiting for the disk, or the object store, for all connections together: one fsync covers whoever came meanwhile.

Each partition that somebody waits for is synced by one thread of a few; those who come while its fsync runs are covered
by the next one. So never is there an fsync for each request, and partitions do not wait for each other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.errors import LogTruncated

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

logger = logging.getLogger("segmentlog.server")

THREADS: Final = 8
"""Partitions that are synced at the same time."""
SHIPPED_THREADS: Final = 64
"""Partitions that are waited for at the same time: all of them are shipped at once."""

Done = Callable[[Exception | None], None]
"""Told that the records are on disk, or why nobody can say so. Must not raise, nor wait."""


class _Waiter(msgspec.Struct, gc=False):
    base_offset: int
    end_offset: int
    done: Done


class Durability:
    """Syncs partitions for those who wait, and with ``shipped`` has them shipped. Thread-safe."""

    def __init__(self, threads: int = THREADS, *, shipped: bool = False) -> None:
        self._threads = threads
        self._shipped = shipped
        self._started = self._idle = 0
        self._mutex = threading.Lock()
        self._waiting: dict[Partition, list[_Waiter]] = {}
        self._due: queue.SimpleQueue[Partition | None] = queue.SimpleQueue()

    def when_durable(self, partition: Partition, base_offset: int, end_offset: int, done: Done) -> None:
        """Call ``done`` once the records ``[base_offset, end_offset)`` are there: in another thread, or here."""
        waiter = _Waiter(base_offset, end_offset, done)
        reached = partition.shipped_offset if self._shipped else partition.durable_offset
        if reached >= end_offset:
            done(self._act(partition, [waiter]))  # no fsync is due; but whether they are still there is asked
            return
        with self._mutex:
            waiters = self._waiting.get(partition)
            if waiters is not None:
                waiters.append(waiter)
                return
            self._waiting[partition] = [waiter]
            if not self._idle and self._started < self._threads:
                self._started += 1
                threading.Thread(target=self._work, name=f"segmentlog-sync-{self._started}", daemon=True).start()
        self._due.put(partition)

    def wait(self, partition: Partition, base_offset: int, end_offset: int) -> None:
        """Return once the records are on disk. Raises what `Partition.sync_upto` does."""
        event = threading.Event()
        outcome: list[Exception | None] = []

        def done(error: Exception | None) -> None:
            outcome.append(error)
            event.set()

        self.when_durable(partition, base_offset, end_offset, done)
        event.wait()
        if outcome[0] is not None:
            raise outcome[0]

    @property
    def waiting_count(self) -> int:
        """Answers that wait, but for those whose fsync runs."""
        with self._mutex:
            return sum(map(len, self._waiting.values()))

    def is_well(self, patience_s: float) -> bool:
        """Whether nobody keeps the others out for that long."""
        if not self._mutex.acquire(timeout=patience_s):
            return False
        self._mutex.release()
        return True

    def close(self) -> None:
        """End the threads, once everybody was told who waits now."""
        with self._mutex:
            started = self._started
        for _ in range(started):
            self._due.put(None)

    def _work(self) -> None:
        while True:
            self._idle += 1  # a hint: under the GIL it may be off by one, and then there is a thread more or less
            partition = self._due.get()
            self._idle -= 1
            if partition is None:
                return
            self._sync(partition)

    def _sync(self, partition: Partition) -> None:
        with self._mutex:
            waiters = self._waiting[partition]
            self._waiting[partition] = []
        error = self._act(partition, waiters)
        is_of_some = isinstance(error, LogTruncated) and len(waiters) > 1
        for waiter in waiters:
            try:
                waiter.done(self._act(partition, [waiter]) if is_of_some else error)  # of some: each asks for itself
            except Exception:  # or those behind it would wait for ever
                logger.exception("who waited for the disk could not be told")
        with self._mutex:
            if self._waiting[partition]:
                self._due.put(partition)
            else:
                del self._waiting[partition]

    def _act(self, partition: Partition, waiters: list[_Waiter]) -> Exception | None:
        base = min(waiter.base_offset for waiter in waiters)
        end = max(waiter.end_offset for waiter in waiters)
        try:
            partition.sync_upto(end, base)
            if self._shipped:
                partition.wait_shipped(end)
        except Exception as error:
            return error
        return None
