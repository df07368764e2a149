"""A producer for asyncio: `send` adds to lists in the loop's thread, a few shared threads append."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy.typing as npt

from segmentlog.aio.loop_bridge import Strand, note
from segmentlog.errors import SegmentlogError, StoreClosed
from segmentlog.log.append.batch_encoding import as_list
from segmentlog.producing.async_futures import Arrivals
from segmentlog.producing.async_sender import AsyncDeliveries, AsyncDelivery, QueueingProducer
from segmentlog.producing.delivery import Chunk, Deliveries
from segmentlog.producing.producer import RECORD_OVERHEAD, CommitsPositions, passed_at
from segmentlog.records import K, TopicPartition, V

if TYPE_CHECKING:
    pass

T = TypeVar("T")

_UNSENT = "the records were not sent"


class CommitsPositionsSoon(Protocol):
    """A member of a group, as a transaction needs it; `AsyncConsumer` is one."""

    @property
    def member(self) -> CommitsPositions:
        """It, for threads."""

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of every partition."""


class AsyncProducer(Generic[K, V]):
    """Sends records to topics, from coroutines of one event loop. What it takes is as with `Producer`.

        async with store.aproducer() as producer:
            delivery = await producer.send("clicks", b"/home", key=b"user-1")
            topic, partition, offset, timestamp = await delivery

    max_unsent_bytes  `send` and `send_many` wait while so much is on its way

    No thread is started for a call, nor for a producer: what may block is done by a few threads that all share.

    A batch of `send` that fails keeps what was sent after it from being appended, as with `Producer`. Calls of
    `send_many` that are awaited at the same time are independent: await one before the next where their order counts.

    *Cancelled*, `send` has not sent its record. `send_many` has sent nothing if it was waiting for room, and otherwise
    goes on; `flush`, `commit` and `close` go on in any case. A note with the ``CancelledError`` says which it was. What
    comes next waits for what goes on.

    It belongs to the loop in which it was begun; in a forked child it raises `StoreClosed`.
    """

    def __init__(self, make: Callable[[], QueueingProducer], linger_ms: float, max_unsent_bytes: int) -> None:
        self._make = make
        self._linger_s = linger_ms / 1000
        self._max_unsent_bytes = max_unsent_bytes
        self._strand: Strand | None = None
        self._inner: QueueingProducer | None = None
        self._chunks: dict[str, Chunk] = {}
        """Those of the producer within, for records that need no serializer."""
        self._timer: asyncio.TimerHandle | None = None
        self._queued: set[str] = set()
        """Topics that a thread is about to send to."""
        self._known: set[str] = set()
        """Topics that were found to be there; what is first sent to one waits for a look."""
        self._has_to_pause = False
        """A chunk was sealed: the next `send` lets others come, and waits if there is no room."""
        self._closing: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ beginning and ending

    async def __aenter__(self) -> AsyncProducer[K, V]:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> AsyncProducer[K, V]:
        """Begin; ``async with`` does it. Raises `ProducerFenced` and what else making a producer does."""
        if self._closing is not None:
            raise StoreClosed("producer")
        if self._strand is None:
            strand = Strand("producer")
            inner = await strand.made(self._make)
            self._strand, self._inner = strand, inner
            self._arrivals = Arrivals(strand, inner.pump, self._max_unsent_bytes)
            inner.hook(self, self._arrivals)
            self._send = cast("Callable[..., AsyncDelivery]", inner.send)
            if inner.serializer is None and inner.key_serializer is None and inner.carrier is None:
                self._chunks, self._pump = inner.pump.chunks, inner.pump
        return self

    async def close(self) -> None:
        """Append what was sent, and take no more. An open transaction is aborted. Idempotent.

        Cancelled, it goes on. Raises the first failure that nobody was told of yet.
        """
        if self._closing is None:
            if self._strand is None or self._inner is None:
                return
            self._strand.check_loop()
            self._stop_timer()
            self._inner.pump.refuse_more()
            self._closing = self._strand.call(self._inner.close)
            self._closing.add_done_callback(self._closed)
        await self._wait(self._closing, "closing goes on")

    def _closed(self, closing: asyncio.Future[None]) -> None:
        assert self._strand is not None
        if not closing.cancelled():
            closing.exception()  # whoever called close is told of it, and nobody else
        self._strand.end()

    # ------------------------------------------------------------ sending

    async def send(
        self,
        topic: str,
        value: V,
        key: K | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp: int | datetime | None = None,
        partition: int | None = None,
    ) -> AsyncDelivery:
        """Send one record; waits only while there is no room. Raises as `Producer.send` does.

        Cancelled, it has not sent it.
        """
        # `Producer.send` for a record that is like most, once more: a call costs half as much again. What is not like
        # that, and the first record of a chunk, goes by the long way.
        try:
            chunk = self._chunks.get(topic)
        except TypeError:  # no name
            chunk = None
        if (
            chunk is None
            or value.__class__ is not bytes
            or (key is not None and (key.__class__ is not bytes or len(key) > chunk.surely_fits))  # type: ignore[arg-type]
            or headers is not None
            or timestamp is not None
            or partition is not None
            or self._has_to_pause
            or (size_bytes := RECORD_OVERHEAD + len(value)) > chunk.surely_fits  # type: ignore[arg-type]
            or (key is None and chunk.needs_keys)
        ):
            passed_ms = None if timestamp is None else self._open()[1].now_ms()
            await self._before(topic)
            with passed_at(passed_ms):
                return self._send(topic, value, key, headers=headers, timestamp=timestamp, partition=partition)
        number = chunk.number()
        chunk.add((number, value, key))
        chunk.room = room = chunk.room - size_bytes
        if room <= 0 or chunk.sealed:
            chunk, number = self._pump.send_sealed(chunk, number, value, key)
        return AsyncDelivery(chunk, number)

    async def _before(self, topic: str) -> None:
        """Wait for room, and for a topic that is not known yet to be found."""
        strand, inner = self._open()
        try:
            if self._has_to_pause:
                self._has_to_pause = False
                # Whoever sends without end lets others come now and then.
                await asyncio.sleep(0)
                if self._arrivals.is_full:
                    self._has_to_pause = True  # for others who come meanwhile
                    await self._arrivals.room()
                    self._has_to_pause = False
            if topic not in self._known:
                await strand.beside(lambda: inner.pump.check_topic(topic))
                self._known.add(topic)
        except asyncio.CancelledError as cancelled:
            note(cancelled, "the record was not sent")
            raise

    async def send_many(
        self,
        topic: str,
        values: Sequence[V],
        keys: Sequence[K | None] | None = None,
        *,
        headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
        timestamps: Sequence[int | datetime] | npt.NDArray[Any] | None = None,
        partition: int | None = None,
    ) -> AsyncDeliveries:
        """Send a list of records at once, after what was sent before them; returns when they are appended.

        Raises as `Producer.send_many` does. The lists may be changed as soon as it waits.
        """
        strand, inner = self._open()
        passed_ms = inner.now_ms()
        values = as_list("values", values) if values.__class__ is not list else values[:]
        keys = keys[:] if keys.__class__ is list and keys is not None else keys
        try:
            await self._arrivals.room()
        except asyncio.CancelledError as cancelled:
            note(cancelled, "none of the records was sent")
            raise
        size_bytes = _size_bytes(values)
        self._arrivals.add_many(size_bytes)

        def send_many() -> Deliveries:
            with passed_at(passed_ms):
                return inner.send_many(topic, values, keys, headers=headers, timestamps=timestamps, partition=partition)

        context = contextvars.copy_context()  # so that the span that is current here is so there
        sending = strand.call(lambda: context.run(send_many))
        sending.add_done_callback(lambda _: self._arrivals.add_many(-size_bytes))
        deliveries = await self._wait(sending, "the records are appended, or fail, all the same")
        return AsyncDeliveries(deliveries.chunk)

    async def flush(self) -> None:
        """Append everything that was sent so far. Raises the first failure that nobody was told of yet.

        With ``ack="durable"`` it is on disk when this returns.
        """
        strand, inner = self._open()
        await self._wait(strand.call(inner.flush), "flushing goes on")

    # ------------------------------------------------------------ names and transactions

    @property
    def name(self) -> str | None:
        """The name that it was given."""
        return self._open()[1].name

    @property
    def last_note(self) -> str | None:
        """The note of the last transaction that was committed under this name, by whatever instance; None without."""
        return self._open()[1].last_note

    async def last_sequence(self, topic: str, partition: int = 0) -> int:
        """See `Producer.last_sequence`."""
        strand, inner = self._open()
        return await strand.call(lambda: inner.last_sequence(topic, partition))

    @contextlib.asynccontextmanager
    async def transaction(self, note: str | None = None) -> AsyncIterator[AsyncProducer[K, V]]:
        """What is sent within is there for ``read_committed`` readers at once, or never; see `Producer.transaction`.

        Left by an exception, or cancelled, it is aborted. Cancelled while it commits it is committed all the same, or
        fails: `last_note` of a producer with a name tells.
        """
        await self.begin_transaction()
        try:
            yield self
        except BaseException:
            await self._abort_quietly()
            raise
        try:
            await self.commit_transaction(note)
        except Exception:  # a cancelled one goes on
            await self._abort_quietly()
            raise

    async def _abort_quietly(self) -> None:
        """Abort, if there is anything to abort still; the first reason is the one to tell."""
        with contextlib.suppress(SegmentlogError, OSError):
            await self.abort_transaction()

    async def begin_transaction(self) -> None:
        """Begin a transaction by hand; `transaction` is the easier way. Cancelled, none is begun."""
        strand, inner = self._open()
        begun: list[bool] = []

        def begin() -> None:
            inner.begin_transaction()
            begun.append(True)

        try:
            await asyncio.shield(strand.call(begin))
        except asyncio.CancelledError:
            # Only its own: what kept this one from being begun may be that another task has one open.
            strand.begin(lambda: _abort_quietly(inner) if begun else None)
            raise

    async def commit_transaction(self, note: str | None = None) -> None:
        """Send what is left, and commit. Raises what `Producer.transaction` does. Cancelled, it goes on."""
        strand, inner = self._open()
        await self._wait(strand.call(lambda: inner.commit_transaction(note)), "the transaction is committed, or fails")

    async def abort_transaction(self) -> None:
        """Take back everything that was sent in the transaction. Cancelled, it goes on."""
        strand, inner = self._open()
        await self._wait(strand.call(inner.abort_transaction), "the transaction is aborted")

    async def commit_positions(
        self, consumer: CommitsPositionsSoon, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> None:
        """Commit a group member's positions with the transaction; see `Producer.commit_positions`."""
        strand, inner = self._open()
        given = consumer.positions() if positions is None else positions
        committing = strand.call(lambda: inner.commit_positions(consumer.member, given, metadata=metadata))
        await self._wait(committing, "the positions are put into the transaction, or that fails")

    # ------------------------------------------------------------ what the pump calls

    def begun(self) -> None:
        """A chunk begins to linger."""
        strand, _ = self._open()
        strand.check_loop()
        if self._timer is None and self._linger_s:
            self._timer = strand.loop.call_later(self._linger_s, self._linger)

    def _linger(self) -> None:
        self._timer = None
        strand, inner = self._open()
        pause_s = inner.linger_tick()
        if inner.pump.chunks:
            self._timer = strand.loop.call_later(pause_s, self._linger)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def sealed(self, topic: str) -> None:
        """There are chunks of a topic to send."""
        strand, inner = self._open()
        self._has_to_pause = True
        if topic not in self._queued:
            self._queued.add(topic)
            strand.begin(lambda: self._send_full(inner, topic))

    def _send_full(self, inner: QueueingProducer, topic: str) -> None:
        """In a thread of the pool."""
        self._queued.discard(topic)  # before the look: what is sealed from now on is queued anew
        with contextlib.suppress(Exception):  # the deliveries have it, and the next flush tells
            inner.pump.send_full(topic)

    def told(self) -> None:
        """A chunk was sent, or failed; by whatever thread."""
        self._arrivals.told()

    # ------------------------------------------------------------ helpers

    def _open(self) -> tuple[Strand, QueueingProducer]:
        if self._strand is None or self._inner is None:
            raise StoreClosed("producer", "it is not open yet; use it inside `async with`")
        return self._strand, self._inner

    async def _wait(self, future: asyncio.Future[T], cancelled_note: str) -> T:
        """For what goes on when whoever waits for it is cancelled."""
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as cancelled:
            note(cancelled, cancelled_note)
            raise


def _abort_quietly(inner: QueueingProducer) -> None:
    with contextlib.suppress(SegmentlogError, OSError):
        inner.abort_transaction()


def _size_bytes(values: Sequence[Any]) -> int:
    """About; objects that a serializer has yet to make bytes of count little."""
    try:
        return 24 * len(values) + sum(map(len, values))
    except TypeError:
        return sum(24 + (len(value) if isinstance(value, bytes | bytearray) else 100) for value in values)
