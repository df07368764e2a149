"""Acknowledge batches after an fsync or after shipping, for all connections together.

A thread of a small pool syncs a partition for all requests that wait for it. Requests that arrive during an fsync wait
for the next. So many requests share an fsync, and partitions do not wait for each other.
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
"""Partitions that can be synced at the same time."""
SHIPPED_THREADS: Final = 64
"""Partitions whose shipping can be awaited at the same time: a cycle of the uploader ships all of them."""

Done = Callable[[Exception | None], None]
"""Called with None once the records are on disk, or with the error of the fsync. It must not raise or block."""


class _Waiter(msgspec.Struct, gc=False):
    base_offset: int
    end_offset: int
    done: Done


class AckWaiter:
    """Syncs partitions for waiting requests; with ``shipped`` also waits until they are shipped. Thread-safe."""

    def __init__(self, threads: int = THREADS, *, shipped: bool = False) -> None:
        self._threads = threads
        self._shipped = shipped
        self._started = self._idle = 0
        self._mutex = threading.Lock()
        self._waiting: dict[Partition, list[_Waiter]] = {}
        self._due: queue.SimpleQueue[Partition | None] = queue.SimpleQueue()

    def when_durable(self, partition: Partition, base_offset: int, end_offset: int, done: Done) -> None:
        """Call ``done`` once the records ``[base_offset, end_offset)`` are durable, in this thread or another."""
        waiter = _Waiter(base_offset, end_offset, done)
        reached = partition.shipped_offset if self._shipped else partition.durable_offset
        if reached >= end_offset:
            done(self._reach(partition, [waiter]))  # no fsync is due; this checks that the records still exist
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
        """Return once the records are on disk. Raise the errors of `Partition.sync_upto`."""
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
        """Number of waiting acknowledgements, without those whose fsync is running."""
        with self._mutex:
            return sum(map(len, self._waiting.values()))

    def is_healthy(self, patience_s: float) -> bool:
        """Return whether the lock becomes free within ``patience_s`` seconds. If not, its holder is stuck."""
        if not self._mutex.acquire(timeout=patience_s):
            return False
        self._mutex.release()
        return True

    def close(self) -> None:
        """Complete all waiting acknowledgements, then stop the threads."""
        with self._mutex:
            started = self._started
        for _ in range(started):
            self._due.put(None)

    def _work(self) -> None:
        while True:
            self._idle += 1  # only a hint: if it is off by one, the pool has one thread more or less
            partition = self._due.get()
            self._idle -= 1
            if partition is None:
                return
            self._sync(partition)

    def _sync(self, partition: Partition) -> None:
        with self._mutex:
            waiters = self._waiting[partition]
            self._waiting[partition] = []
        error = self._reach(partition, waiters)
        is_of_some = isinstance(error, LogTruncated) and len(waiters) > 1
        for waiter in waiters:
            # A crash may have lost the records of some waiters: check each waiter for itself.
            try:
                waiter.done(self._reach(partition, [waiter]) if is_of_some else error)
            except Exception:  # otherwise the remaining waiters would wait forever
                logger.exception("an acknowledgement that waited for the disk could not be sent")
        with self._mutex:
            if self._waiting[partition]:
                self._due.put(partition)
            else:
                del self._waiting[partition]

    def _reach(self, partition: Partition, waiters: list[_Waiter]) -> Exception | None:
        base = min(waiter.base_offset for waiter in waiters)
        end = max(waiter.end_offset for waiter in waiters)
        try:
            partition.sync_upto(end, base)
            if self._shipped:
                partition.wait_shipped(end)
        except Exception as error:
            return error
        return None
