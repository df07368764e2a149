"""The producer within an asynchronous one: it gathers records, and has others send them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.producing.accumulator import Hooks, Pump
from segmentlog.producing.delivery import Chunk, Delivery
from segmentlog.producing.serializing_producer import SerializingProducer
from segmentlog.records import Appended

if TYPE_CHECKING:
    import asyncio

    from segmentlog.log.partition import Partition


class Awaiting(Protocol):
    """What coroutines wait by."""

    def arrival(self, chunk: Chunk) -> asyncio.Future[None]:
        """Done once a chunk was sent, or failed."""

    def on_disk(self, log: Partition, base_offset: int, end_offset: int) -> asyncio.Future[None]:
        """Done once these offsets are on disk; raises what keeps them from it."""


class QueueingProducer(SerializingProducer[Any, Any]):
    """Its `send` adds a record and returns; for the thread of an event loop."""

    awaiting: Awaiting

    def hook(self, hooks: Hooks, awaiting: Awaiting) -> None:
        """Say who sends, and who is told; before anything is sent."""
        self._delivery = cast("type[Delivery]", AsyncDelivery)
        self._pump.hooks = hooks
        self.awaiting = awaiting

    @property
    def pump(self) -> Pump:
        """What has the chunks."""
        return self._pump


def _awaiting(chunk: Chunk) -> Awaiting:
    return cast("QueueingProducer", chunk.producer).awaiting


class AsyncDelivery(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What becomes of one record that was sent: to await it says where it lies. For the loop of its producer."""

    _chunk: Chunk
    _number: int

    def done(self) -> bool:
        """Whether it was appended, or failed."""
        return self._chunk.is_sent

    def __await__(self) -> Generator[Any, None, Appended]:
        """(topic, partition, offset, timestamp) once it is appended; raises what kept it from being."""
        if not self._chunk.is_sent:
            yield from _awaiting(self._chunk).arrival(self._chunk)
        return self._chunk.result(self._number)

    async def exception(self) -> Exception | None:
        """What kept it from being appended, or None; waits as awaiting does."""
        try:
            await self
        except (SegmentlogError, OSError) as error:
            return error
        return None

    async def durable(self) -> Appended:
        """Where it lies, once it is on disk; makes the fsync happen if nobody does. Raises as `Delivery.durable`."""
        appended = await self
        log = self._chunk.logs[appended.partition]
        await _awaiting(self._chunk).on_disk(log, appended.offset, appended.offset + 1)
        return appended


class AsyncDeliveries:
    """What became of the records of one `AsyncProducer.send_many`, in their order: all are appended."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk

    def __len__(self) -> int:
        return len(self._chunk.values)

    def __getitem__(self, index: int) -> AsyncDelivery:
        return AsyncDelivery(self._chunk, range(len(self))[index])

    def __iter__(self) -> Iterator[AsyncDelivery]:
        return (AsyncDelivery(self._chunk, index) for index in range(len(self)))

    def places(self) -> list[tuple[int, int, int]]:
        """(partition, offset of the first, how many) for each partition that records went to."""
        return self._chunk.places()

    def result(self) -> list[Appended]:
        """Where each record went."""
        return [self._chunk.result(index) for index in range(len(self))]

    async def durable(self) -> list[Appended]:
        """Where each record went, once all are on disk. Raises `LogTruncated` as `Delivery.durable` does."""
        awaiting = _awaiting(self._chunk)
        syncs = [
            awaiting.on_disk(self._chunk.logs[partition], base_offset, base_offset + count)
            for partition, base_offset, count in self.places()
        ]
        from asyncio import gather  # with it come TLS and processes, for which threads have no use

        await gather(*syncs)
        return self.result()
