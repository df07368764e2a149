"""Futures for coroutines that wait until records are appended or on disk, and the limit of unsent bytes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from segmentlog.aio.loop_bridge import LoopBridge
from segmentlog.producing.accumulator import Accumulator
from segmentlog.producing.delivery import ProducerChunk

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class AsyncFutures:
    """Futures of a producer's coroutines. Only `on_sent` may be called outside of the event loop's thread."""

    def __init__(self, bridge: LoopBridge, accumulator: Accumulator, max_unsent_bytes: int) -> None:
        self._bridge = bridge
        self._accumulator = accumulator
        self._max_unsent_bytes = max_unsent_bytes
        self._is_scheduled = False
        self._awaited: defaultdict[ProducerChunk, list[asyncio.Future[None]]] = defaultdict(list)
        self._waiting: list[asyncio.Future[None]] = []
        self._many_bytes = 0
        """Bytes of all `send_many` calls that are in progress."""
        self._unsynced: defaultdict[Partition, list[tuple[int, int, asyncio.Future[None]]]] = defaultdict(list)
        self._syncing: set[Partition] = set()

    # ------------------------------------------------------------ appended

    def sent_future(self, chunk: ProducerChunk) -> asyncio.Future[None]:
        """Return a future that is done once a chunk was sent or has failed."""
        self._bridge.check_loop()
        future: asyncio.Future[None] = self._bridge.loop.create_future()
        self._awaited[chunk].append(future)
        if chunk.is_sent:  # sent meanwhile: `on_sent` may not be called again
            self._complete_sent()
        return future

    def on_sent(self) -> None:
        """Schedule a check of all futures in the event loop, unless one is scheduled already. Thread-safe."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._bridge.mailbox.post(self._complete_sent)

    def _complete_sent(self) -> None:
        self._is_scheduled = False
        for chunk in [chunk for chunk in self._awaited if chunk.is_sent]:
            for future in self._awaited.pop(chunk):
                if not future.done():
                    future.set_result(None)
        if self._waiting and self.unsent_bytes <= self._max_unsent_bytes // 2:
            self._complete_waiting()

    def _complete_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # ------------------------------------------------------------ room

    @property
    def unsent_bytes(self) -> int:
        """Approximate bytes of records that are not sent yet."""
        return self._accumulator.sealed_bytes + self._many_bytes

    @property
    def is_full(self) -> bool:
        """Whether the limit of unsent bytes is reached, so that senders must wait."""
        return self.unsent_bytes >= self._max_unsent_bytes

    async def wait_for_room(self) -> None:
        """Wait until at most half of the allowed bytes are unsent."""
        while self.is_full:
            future: asyncio.Future[None] = self._bridge.loop.create_future()
            self._waiting.append(future)
            await future

    def add_unsent_bytes(self, size_bytes: int) -> None:
        """Add the bytes of a `send_many` when it starts, and subtract them (negative) when it has ended."""
        self._many_bytes += size_bytes
        if size_bytes < 0:
            self._complete_sent()

    # ------------------------------------------------------------ on disk

    def durable_future(self, log: Partition, base_offset: int, end_offset: int) -> asyncio.Future[None]:
        """Return a future that is done once these offsets are on disk; it raises the error of the sync.

        One sync per partition runs at a time. The next sync is for all calls that were made meanwhile.
        """
        self._bridge.check_loop()
        future: asyncio.Future[None] = self._bridge.loop.create_future()
        self._unsynced[log].append((base_offset, end_offset, future))
        if log not in self._syncing:
            self._sync(log)
        return future

    def _sync(self, log: Partition) -> None:
        waiting = self._unsynced.pop(log, [])
        if not waiting:
            self._syncing.discard(log)
            return
        self._syncing.add(log)
        done = self._bridge.call_parallel(lambda: _synced(log, [(base, end) for base, end, _ in waiting]))
        done.add_done_callback(lambda done: self._synced(log, [future for _, _, future in waiting], done))

    def _synced(self, log: Partition, futures: list[asyncio.Future[None]], done: asyncio.Future[list[Any]]) -> None:
        error = done.exception()
        outcomes = [error] * len(futures) if error is not None else done.result()
        for future, outcome in zip(futures, outcomes, strict=True):
            if future.done():
                continue
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)
        self._sync(log)


def _synced(log: Partition, ranges: list[tuple[int, int]]) -> list[Exception | None]:
    """Sync up to the last range. Return an error or None for each range."""
    log.sync_upto(max(end for _, end in ranges))
    outcomes: list[Exception | None] = []
    for base_offset, end_offset in ranges:
        try:
            log.sync_upto(end_offset, base_offset)  # check that the records still exist
        except Exception as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    return outcomes
