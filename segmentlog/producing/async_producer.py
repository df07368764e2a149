"""A producer for asyncio: `send` only adds a record to a chunk, and a few shared threads append the chunks."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy.typing as npt

from segmentlog.aio.loop_bridge import LoopBridge, add_note
from segmentlog.errors import SegmentlogError, StoreClosed
from segmentlog.log.append.batch_encoding import as_list
from segmentlog.producing.async_futures import AsyncFutures
from segmentlog.producing.async_sender import AsyncDeliveries, AsyncDelivery, EventLoopProducer
from segmentlog.producing.delivery import Deliveries, ProducerChunk
from segmentlog.producing.producer import RECORD_OVERHEAD, OffsetCommitter, checked_metadata, passed_at
from segmentlog.records import K, TopicPartition, V

if TYPE_CHECKING:
    pass

T = TypeVar("T")

_UNSENT = "the records were not sent"


class AsyncOffsetCommitter(Protocol):
    """A group member whose offsets a transaction can commit; `AsyncConsumer` is one."""

    @property
    def member(self) -> OffsetCommitter:
        """The member, for use in threads."""

    def positions(self) -> dict[TopicPartition, int]:
        """Return the offset of the next record of every partition."""


class AsyncProducer(Generic[K, V]):
    """Sends records to topics, from coroutines of one event loop. Its arguments are those of `Producer`.

        async with store.aproducer() as producer:
            delivery = await producer.send("clicks", b"/home", key=b"user-1")
            topic, partition, offset, timestamp = await delivery

    max_unsent_bytes  `send` and `send_many` wait while this many bytes are unsent

    Neither a call nor a producer starts a thread: a few threads, which all producers share, run calls that may block.

    If a batch of `send` fails, later records are not appended, as with `Producer`. Calls of `send_many` that are
    awaited at the same time are independent: if their order matters, await each call before the next.

    *A cancelled* `send` has not sent its record. A cancelled `send_many` has sent nothing if it was waiting because of
    ``max_unsent_bytes``; otherwise it completes. `flush`, commits and `close` always complete. A note on the
    ``CancelledError`` reports the outcome. Later calls wait until the cancelled call has completed.

    Use it only in the event loop in which it was started. In a forked child it raises `StoreClosed`.
    """

    def __init__(self, make: Callable[[], EventLoopProducer], linger_ms: float, max_unsent_bytes: int) -> None:
        self._make = make
        self._linger_s = linger_ms / 1000
        self._max_unsent_bytes = max_unsent_bytes
        self._bridge: LoopBridge | None = None
        self._inner: EventLoopProducer | None = None
        self._chunks: dict[str, ProducerChunk] = {}
        """Chunks of the inner producer, for records that need no serializer."""
        self._timer: asyncio.TimerHandle | None = None
        self._queued: set[str] = set()
        """Topics whose chunks a pool thread is about to send."""
        self._known: set[str] = set()
        """Topics that were looked up. The first record of any other topic waits for the lookup."""
        self._has_to_pause = False
        """Whether a chunk was sealed: then the next `send` yields to other tasks, and waits if too much is unsent."""
        self._closing: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ beginning and ending

    async def __aenter__(self) -> AsyncProducer[K, V]:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> AsyncProducer[K, V]:
        """Start the producer; ``async with`` calls this. Raises `ProducerFenced` and other errors of creation."""
        if self._closing is not None:
            raise StoreClosed("producer")
        if self._bridge is None:
            bridge = LoopBridge("producer")
            inner = await bridge.create(self._make)
            self._bridge, self._inner = bridge, inner
            self._futures = AsyncFutures(bridge, inner.accumulator, self._max_unsent_bytes)
            inner.hook(self, self._futures)
            self._send = cast("Callable[..., AsyncDelivery]", inner.send)
            if inner.serializer is None and inner.key_serializer is None and inner.carrier is None:
                self._chunks, self._accumulator = inner.accumulator.chunks, inner.accumulator
        return self

    async def close(self) -> None:
        """Append the records sent before, and reject new ones. Aborts an open transaction. Idempotent.

        Completes even if cancelled. Raises the first failure that no call has raised yet.
        """
        if self._closing is None:
            if self._bridge is None or self._inner is None:
                return
            self._bridge.check_loop()
            self._stop_timer()
            self._inner.accumulator.stop_accepting()
            self._closing = self._bridge.call(self._inner.close)
            self._closing.add_done_callback(self._closed)
        await self._wait(self._closing, "closing continues")

    def _closed(self, closing: asyncio.Future[None]) -> None:
        assert self._bridge is not None
        if not closing.cancelled():
            closing.exception()  # mark as retrieved: only the caller of close gets the error
        self._bridge.end()

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
        """Send one record. Waits only while ``max_unsent_bytes`` are unsent. Raises the errors of `Producer.send`.

        If the call is cancelled, the record is not sent.
        """
        # A copy of `Producer.send` for usual records: with a call, sending would take half as much time again. Other
        # records, and the first record of a chunk, use `Producer.send`.
        try:
            chunk = self._chunks.get(topic)
        except TypeError:  # not a topic name
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
            chunk, number = self._accumulator.send_sealed(chunk, number, value, key)
        return AsyncDelivery(chunk, number)

    async def _before(self, topic: str) -> None:
        """Wait until fewer than ``max_unsent_bytes`` are unsent, and look up a new topic."""
        bridge, inner = self._open()
        try:
            if self._has_to_pause:
                self._has_to_pause = False
                # A task that sends many records must sometimes yield to other tasks.
                await asyncio.sleep(0)
                if self._futures.is_full:
                    self._has_to_pause = True  # for tasks that send meanwhile
                    await self._futures.wait_for_room()
                    self._has_to_pause = False
            if topic not in self._known:
                await bridge.call_parallel(lambda: inner.accumulator.check_topic(topic))
                self._known.add(topic)
        except asyncio.CancelledError as cancelled:
            add_note(cancelled, "the record was not sent")
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
        """Send a list of records after those sent before; return when they are appended.

        Raises the errors of `Producer.send_many`. The caller may change the lists as soon as the call waits.
        """
        bridge, inner = self._open()
        passed_ms = inner.now_ms()
        values = as_list("values", values) if values.__class__ is not list else values[:]
        keys = keys[:] if keys.__class__ is list and keys is not None else keys
        try:
            await self._futures.wait_for_room()
        except asyncio.CancelledError as cancelled:
            add_note(cancelled, "none of the records was sent")
            raise
        size_bytes = _size_bytes(values)
        self._futures.add_unsent_bytes(size_bytes)

        def send_many() -> Deliveries:
            with passed_at(passed_ms):
                return inner.send_many(topic, values, keys, headers=headers, timestamps=timestamps, partition=partition)

        context = contextvars.copy_context()  # keeps the current trace span
        sending = bridge.call(lambda: context.run(send_many))
        sending.add_done_callback(lambda _: self._futures.add_unsent_bytes(-size_bytes))
        deliveries = await self._wait(sending, "sending the records continues")
        return AsyncDeliveries(deliveries.chunk)

    async def flush(self) -> None:
        """Append all records sent so far. Raises the first failure that no call has raised yet.

        With ``ack="durable"``, they are on disk when this returns.
        """
        bridge, inner = self._open()
        await self._wait(bridge.call(inner.flush), "flushing continues")

    # ------------------------------------------------------------ names and transactions

    @property
    def name(self) -> str | None:
        """Name of the producer; None for an unnamed producer."""
        return self._open()[1].name

    @property
    def last_commit_metadata(self) -> str | None:
        """Metadata of the last transaction committed under this name, by any instance; None if there is none."""
        return self._open()[1].last_commit_metadata

    @property
    def last_note(self) -> str | None:
        """Former name of `last_commit_metadata`."""
        return self.last_commit_metadata

    async def last_sequence(self, topic: str, partition: int = 0) -> int:
        """Return the number of the last record in a partition; see `Producer.last_sequence`."""
        bridge, inner = self._open()
        return await bridge.call(lambda: inner.last_sequence(topic, partition))

    @contextlib.asynccontextmanager
    async def transaction(
        self, commit_metadata: str | None = None, *, note: str | None = None
    ) -> AsyncIterator[AsyncProducer[K, V]]:
        """Commit all records sent within the context, or none of them; see `Producer.transaction`.

        An exception or a cancellation aborts the transaction. A cancellation during the commit does not stop the
        commit: `last_commit_metadata` of a named producer shows whether it succeeded.
        """
        commit_metadata = checked_metadata(commit_metadata, note)
        await self.begin_transaction()
        try:
            yield self
        except BaseException:
            await self._abort_quietly()
            raise
        try:
            await self.commit_transaction(commit_metadata)
        except Exception:  # a cancelled commit continues
            await self._abort_quietly()
            raise

    async def _abort_quietly(self) -> None:
        """Abort an open transaction; ignore errors, because the caller raises an earlier one."""
        with contextlib.suppress(SegmentlogError, OSError):
            await self.abort_transaction()

    async def begin_transaction(self) -> None:
        """Begin a transaction; `transaction` is easier to use. If the call is cancelled, no transaction is open."""
        bridge, inner = self._open()
        begun: list[bool] = []

        def begin() -> None:
            inner.begin_transaction()
            begun.append(True)

        try:
            await asyncio.shield(bridge.call(begin))
        except asyncio.CancelledError:
            # Abort only a transaction of this call: it may have failed because another task has a transaction open.
            bridge.queue(lambda: _abort_quietly(inner) if begun else None)
            raise

    async def commit_transaction(self, commit_metadata: str | None = None, *, note: str | None = None) -> None:
        """Send the remaining records and commit; see `Producer.transaction`. Completes even if cancelled."""
        bridge, inner = self._open()
        await self._wait(
            bridge.call(lambda: inner.commit_transaction(commit_metadata, note=note)), "the commit continues"
        )

    async def abort_transaction(self) -> None:
        """Abort the transaction. Completes even if cancelled."""
        bridge, inner = self._open()
        await self._wait(bridge.call(inner.abort_transaction), "the abort continues")

    async def commit_offsets(
        self, consumer: AsyncOffsetCommitter, offsets: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> None:
        """Commit a group member's offsets with the transaction; see `Producer.commit_offsets`."""
        bridge, inner = self._open()
        given = consumer.positions() if offsets is None else offsets
        committing = bridge.call(lambda: inner.commit_offsets(consumer.member, given, metadata=metadata))
        await self._wait(committing, "adding the offsets to the transaction continues")

    async def commit_positions(
        self, consumer: AsyncOffsetCommitter, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> None:
        """Former name of `commit_offsets`."""
        await self.commit_offsets(consumer, positions, metadata=metadata)

    # ------------------------------------------------------------ callbacks of the accumulator

    def on_chunk_started(self) -> None:
        """Start the timer for the new chunk, unless it runs already."""
        bridge, _ = self._open()
        bridge.check_loop()
        if self._timer is None and self._linger_s:
            self._timer = bridge.loop.call_later(self._linger_s, self._linger)

    def _linger(self) -> None:
        self._timer = None
        bridge, inner = self._open()
        pause_s = inner.send_lingering()
        if inner.accumulator.chunks:
            self._timer = bridge.loop.call_later(pause_s, self._linger)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_sealed(self, topic: str) -> None:
        """Let a pool thread send the chunks of a topic."""
        bridge, inner = self._open()
        self._has_to_pause = True
        if topic not in self._queued:
            self._queued.add(topic)
            bridge.queue(lambda: self._send_queued(inner, topic))

    def _send_queued(self, inner: EventLoopProducer, topic: str) -> None:
        """Send the queued chunks of a topic, in a thread of the pool."""
        self._queued.discard(topic)  # first, so that chunks sealed from now on queue the topic again
        with contextlib.suppress(Exception):  # the deliveries have the error, and the next flush raises it
            inner.accumulator.send_queued(topic)

    def on_sent(self) -> None:
        """Complete futures after a chunk was sent or has failed. Thread-safe."""
        self._futures.on_sent()

    # ------------------------------------------------------------ helpers

    def _open(self) -> tuple[LoopBridge, EventLoopProducer]:
        if self._bridge is None or self._inner is None:
            raise StoreClosed("producer", "it is not open yet; use it inside `async with`")
        return self._bridge, self._inner

    async def _wait(self, future: asyncio.Future[T], cancelled_note: str) -> T:
        """Await a future that continues even if the awaiting task is cancelled; add a note to the cancellation."""
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as cancelled:
            add_note(cancelled, cancelled_note)
            raise


def _abort_quietly(inner: EventLoopProducer) -> None:
    with contextlib.suppress(SegmentlogError, OSError):
        inner.abort_transaction()


def _size_bytes(values: Sequence[Any]) -> int:
    """Return the approximate size. An object that is not serialized yet counts as 100 bytes."""
    try:
        return 24 * len(values) + sum(map(len, values))
    except TypeError:
        return sum(24 + (len(value) if isinstance(value, bytes | bytearray) else 100) for value in values)
