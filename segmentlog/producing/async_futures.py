"""Coroutines that wait for records to be appended, or to be on disk; and how much is on its way."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from segmentlog.aio.loop_bridge import Strand
from segmentlog.producing.accumulator import Pump
from segmentlog.producing.delivery import Chunk

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class Arrivals:
    """What a producer's coroutines wait for. For its loop's thread, but for `told`."""

    def __init__(self, strand: Strand, pump: Pump, max_unsent_bytes: int) -> None:
        self._strand = strand
        self._pump = pump
        self._max_unsent_bytes = max_unsent_bytes
        self._is_looking = False
        self._awaited: defaultdict[Chunk, list[asyncio.Future[None]]] = defaultdict(list)
        self._room: list[asyncio.Future[None]] = []
        self._many_bytes = 0
        """Of lists that are on their way as a whole."""
        self._unsynced: defaultdict[Partition, list[tuple[int, int, asyncio.Future[None]]]] = defaultdict(list)
        self._syncing: set[Partition] = set()

    # ------------------------------------------------------------ appended

    def arrival(self, chunk: Chunk) -> asyncio.Future[None]:
        """Done once a chunk was sent, or failed."""
        self._strand.check_loop()
        future: asyncio.Future[None] = self._strand.loop.create_future()
        self._awaited[chunk].append(future)
        if chunk.is_sent:  # just now: nobody may tell of it again
            self._look()
        return future

    def told(self) -> None:
        """A chunk was sent, or failed: by whatever thread. One look for all that come before it."""
        if not self._is_looking:
            self._is_looking = True
            self._strand.mailbox.post(self._look)

    def _look(self) -> None:
        self._is_looking = False
        for chunk in [chunk for chunk in self._awaited if chunk.is_sent]:
            for future in self._awaited.pop(chunk):
                if not future.done():
                    future.set_result(None)
        if self._room and self.unsent_bytes <= self._max_unsent_bytes // 2:
            self._tell_of_room()

    def _tell_of_room(self) -> None:
        waiting, self._room = self._room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # ------------------------------------------------------------ room

    @property
    def unsent_bytes(self) -> int:
        """Of records that are on their way, about."""
        return self._pump.full_bytes + self._many_bytes

    @property
    def is_full(self) -> bool:
        """Whether a sender has to wait."""
        return self.unsent_bytes >= self._max_unsent_bytes

    async def room(self) -> None:
        """Wait until half of what may be on its way is free."""
        while self.is_full:
            future: asyncio.Future[None] = self._strand.loop.create_future()
            self._room.append(future)
            await future

    def add_many(self, size_bytes: int) -> None:
        """A list of so many bytes is on its way; with a negative number it has arrived."""
        self._many_bytes += size_bytes
        if size_bytes < 0:
            self._look()

    # ------------------------------------------------------------ on disk

    def on_disk(self, log: Partition, base_offset: int, end_offset: int) -> asyncio.Future[None]:
        """Done once these offsets are on disk; raises what keeps them from it.

        One call a partition at a time, for all who came while the last one was under way.
        """
        self._strand.check_loop()
        future: asyncio.Future[None] = self._strand.loop.create_future()
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
        done = self._strand.beside(lambda: _synced(log, [(base, end) for base, end, _ in waiting]))
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
    """fsync up to the last of them; for each of them None, or what kept it from the disk."""
    log.sync_upto(max(end for _, end in ranges))
    outcomes: list[Exception | None] = []
    for base_offset, end_offset in ranges:
        try:
            log.sync_upto(end_offset, base_offset)  # a look whether it is still there
        except Exception as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    return outcomes
