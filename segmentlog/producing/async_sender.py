"""The inner producer of an `AsyncProducer`, whose chunks pool threads send, and its deliveries."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.producing.accumulator import Accumulator, AccumulatorHooks
from segmentlog.producing.delivery import Delivery, ProducerChunk
from segmentlog.producing.serializing_producer import SerializingProducer
from segmentlog.records import Appended

if TYPE_CHECKING:
    import asyncio

    from segmentlog.log.partition import Partition


class DeliveryFutures(Protocol):
    """The interface of `AsyncFutures` that deliveries use."""

    def sent_future(self, chunk: ProducerChunk) -> asyncio.Future[None]:
        """Return a future that is done once a chunk was sent or has failed."""

    def durable_future(self, log: Partition, base_offset: int, end_offset: int) -> asyncio.Future[None]:
        """Return a future that is done once these offsets are on disk; it raises the error of the sync."""


class EventLoopProducer(SerializingProducer[Any, Any]):
    """A producer whose `send` only adds a record. Use it in the thread of an event loop."""

    awaiting: DeliveryFutures

    def hook(self, hooks: AccumulatorHooks, awaiting: DeliveryFutures) -> None:
        """Set the callbacks that send chunks, and the futures of the deliveries. Call this before the first `send`."""
        self._delivery = cast("type[Delivery]", AsyncDelivery)
        self._accumulator.hooks = hooks
        self.awaiting = awaiting

    @property
    def accumulator(self) -> Accumulator:
        """The accumulator that has this producer's chunks."""
        return self._accumulator


def _awaiting(chunk: ProducerChunk) -> DeliveryFutures:
    return cast("EventLoopProducer", chunk.producer).awaiting


class AsyncDelivery(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The outcome of one record; await it to get its offset. Use it in the event loop of its producer."""

    _chunk: ProducerChunk
    _number: int

    def done(self) -> bool:
        """Return whether the record was appended or has failed."""
        return self._chunk.is_sent

    def __await__(self) -> Generator[Any, None, Appended]:
        """Wait, and return (topic, partition, offset, timestamp). Raises the error of the record."""
        if not self._chunk.is_sent:
            yield from _awaiting(self._chunk).sent_future(self._chunk)
        return self._chunk.result(self._number)

    async def exception(self) -> Exception | None:
        """Wait, and return the error of the record, or None if it was appended."""
        try:
            await self
        except (SegmentlogError, OSError) as error:
            return error
        return None

    async def durable(self) -> Appended:
        """Return the result once the record is on disk. Raises the errors of `Delivery.durable`."""
        appended = await self
        log = self._chunk.logs[appended.partition]
        await _awaiting(self._chunk).durable_future(log, appended.offset, appended.offset + 1)
        return appended


class AsyncDeliveries:
    """The outcomes of the records of one `AsyncProducer.send_many`, in order. All of them were appended."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: ProducerChunk) -> None:
        self._chunk = chunk

    def __len__(self) -> int:
        return len(self._chunk.values)

    def __getitem__(self, index: int) -> AsyncDelivery:
        return AsyncDelivery(self._chunk, range(len(self))[index])

    def __iter__(self) -> Iterator[AsyncDelivery]:
        return (AsyncDelivery(self._chunk, index) for index in range(len(self)))

    def places(self) -> list[tuple[int, int, int]]:
        """Return (partition, first offset, count) for each partition to which records were appended."""
        return self._chunk.places()

    def result(self) -> list[Appended]:
        """Return topic, partition, offset and timestamp of each record."""
        return [self._chunk.result(index) for index in range(len(self))]

    async def durable(self) -> list[Appended]:
        """Return the result once all records are on disk. Raises `LogTruncated` as `Delivery.durable` does."""
        awaiting = _awaiting(self._chunk)
        syncs = [
            awaiting.durable_future(self._chunk.logs[partition], base_offset, base_offset + count)
            for partition, base_offset, count in self.places()
        ]
        from asyncio import gather  # imports TLS and subprocesses, which programs without asyncio do not need

        await gather(*syncs)
        return self.result()
