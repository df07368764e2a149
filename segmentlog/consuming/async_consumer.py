"""A consumer for asyncio: a few shared threads read, and the event loop waits for new records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from segmentlog.aio.loop_bridge import LoopBridge, add_note
from segmentlog.aio.loop_callbacks import Callbacks
from segmentlog.arguments import as_bool, as_int, as_seconds, as_text
from segmentlog.consuming.consumer_options import Start, check_start
from segmentlog.consuming.nonblocking_consumer import FetchedBatches, NonblockingConsumer
from segmentlog.consuming.wakeup import Pause
from segmentlog.errors import CorruptBatch, DeserializationError, StoreClosed
from segmentlog.format.record_batch import RecordBatch
from segmentlog.groups.committed_offsets import CommittedOffset
from segmentlog.records import K, Record, TopicPartition, V

T = TypeVar("T")


class AsyncConsumer(Generic[K, V]):
    """Reads records in coroutines of one event loop. Its arguments are those of `Consumer`.

        async with store.aconsumer("clicks", group="g", follow=True) as consumer:
            async for record in consumer:
                ...
                await consumer.commit()

    Neither a call nor a consumer starts a thread: a consumer that follows waits in the event loop. ``on_assigned``,
    ``on_revoked`` and ``on_lost`` are called in the loop, and may be coroutine functions that await methods of this
    consumer.

    *A cancelled* iteration loses no record: the next iteration returns it. `commit` and `close` complete even if
    cancelled; a cancelled `seek` changes nothing. Several tasks may iterate at the same time: each record is returned
    to one of them. With ``auto_commit``, a request of any task for the next record marks all earlier records as
    processed.

    Use it only in the event loop in which it was started. In a forked child it raises `StoreClosed`.
    """

    def __init__(self, make: Callable[[], NonblockingConsumer], callbacks: Callbacks) -> None:
        self._make = make
        self._callbacks = callbacks
        self._bridge: LoopBridge | None = None
        self._inner: NonblockingConsumer | None = None
        self._records: Iterator[Record[K, V]] = iter(())
        """Rest of the current batch, up to the next poll of the group."""
        self._batch_records: Iterator[Record[K, V]] = iter(())
        """Rest of the current batch."""
        self._fetched: FetchedBatches | None = None
        self._step: asyncio.Future[FetchedBatches | Pause | None] | None = None
        """A step that is running, or that is done but whose task was cancelled before it used the result."""
        self._is_first = True
        self._polling: asyncio.Future[None] | None = None
        self._sleeping: asyncio.Future[None] | None = None
        self._stop_sleeping: Callable[[], None] | None = None
        self._closing: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ beginning and ending

    async def __aenter__(self) -> AsyncConsumer[K, V]:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self) -> AsyncConsumer[K, V]:
        """Open the partitions and join the group; ``async with`` calls this. Raises `UnknownTopic` and other errors."""
        if self._closing is not None:
            raise StoreClosed("consumer")
        if self._bridge is None:
            bridge = LoopBridge("consumer")
            self._callbacks.bridge = bridge
            inner = await bridge.create(self._make)
            self._bridge, self._inner = bridge, inner
        return self

    async def close(self) -> None:
        """Close the consumer; a member leaves its group. Idempotent. Completes even if cancelled."""
        if self._closing is None:
            if self._bridge is None or self._inner is None:
                return
            self._bridge.check_loop()
            self._inner.stop_returning()
            self._wake()
            # The selector must forget the descriptors before they are closed.
            self._closing = self._bridge.call(self._inner.close)
            self._closing.add_done_callback(self._closed)
        await self._wait(self._closing, "closing continues")

    def _closed(self, closing: asyncio.Future[None]) -> None:
        assert self._bridge is not None
        if not closing.cancelled():
            closing.exception()  # mark as retrieved: only the caller of close gets the error
        if self._step is not None and self._step.done() and not self._step.cancelled():
            self._step.exception()
        self._bridge.end()

    # ------------------------------------------------------------ reading

    def __aiter__(self) -> AsyncConsumer[K, V]:
        """Iterate over records; the position follows each record.

        The iteration begins with records that an earlier iteration fetched but did not return.
        """
        self._open()
        if self._closing is not None:
            raise StoreClosed("consumer")
        self._is_first = True
        return self

    async def __anext__(self) -> Record[K, V]:
        """Return the next record. Raises StopAsyncIteration at the end; later calls return later records."""
        record = next(self._records, None)
        if record is None:
            record = await self._next_record()
        return record

    async def poll(self, timeout_s: float = 0.0, max_records: int | None = None) -> list[Record[K, V]]:
        """Return the next records of one partition, or an empty list if none arrived within ``timeout_s`` seconds.

        Arguments, results and errors are those of `Consumer.poll`. If cancelled, it loses no record. Several tasks may
        call it at the same time.
        """
        bridge, inner = self._open()
        count = inner.max_poll_records if max_records is None else as_int("max_records", max_records, 1)
        until_s = bridge.loop.time() + as_seconds("timeout_s", timeout_s)
        if self._closing is not None:
            raise StoreClosed("consumer")
        try:
            records = [await self._next_record(until_s)]
        except StopAsyncIteration:
            return []
        fetched = self._fetched
        assert fetched is not None
        records += islice(self._records, count - 1)
        cursor = fetched.ahead.cursor
        while len(records) < count and not cursor.has_remaining and fetched.ahead.batches:
            if (batch := self._next_batch(inner)) is None:
                break
            self._start_batch(inner, fetched, batch)
            records += islice(self._records, count - len(records))
        inner.set_processing(fetched)
        cursor.processing_offset = records[0].offset
        return records

    async def _next_record(self, until_s: float | None = None) -> Record[K, V]:
        """Return the next record; raise StopAsyncIteration at the end, or at ``until_s`` of the loop's clock."""
        while True:
            _, inner = self._open()
            if (record := next(self._records, None)) is not None:
                return record
            if inner.records_between_polls is not None and (polling := self._poll_between(inner)) is not None:
                await polling
                continue
            if (batch := self._next_batch(inner)) is None:
                await self._fetch(with_records=True, until_s=until_s)
                continue
            fetched = self._fetched
            assert fetched is not None
            self._start_batch(inner, fetched, batch)

    def _start_batch(self, inner: NonblockingConsumer, fetched: FetchedBatches, batch: RecordBatch[Any, Any]) -> None:
        records = fetched.records.pop() if fetched.records else list(batch.records())
        self._batch_records = fetched.ahead.cursor.iterate(batch, records)
        count = inner.records_between_polls
        self._records = self._batch_records if count is None else islice(self._batch_records, count)

    def _poll_between(self, inner: NonblockingConsumer) -> Awaitable[None] | None:
        """Return an awaitable that polls the group in the middle of a batch; None at the end of the batch."""
        if self._fetched is None or not self._fetched.ahead.cursor.has_remaining:
            return None
        return self._poll(inner)

    async def _poll(self, inner: NonblockingConsumer) -> None:
        if self._polling is None:
            self._polling = self._open()[0].call(inner.poll_session)
        polling = self._polling
        try:
            await asyncio.shield(polling)
        finally:
            if polling.done() and self._polling is polling:
                self._polling = None
                if not polling.cancelled() and polling.exception() is None:
                    self._records = islice(self._batch_records, inner.records_between_polls)

    async def batches(self) -> AsyncIterator[RecordBatch[K, V]]:
        """Iterate over batches of columns, which is the fastest way to read. The position follows each batch.

        Records that a record iteration has already returned are not returned again.
        """
        _, inner = self._open()
        self._is_first = True
        self._drop_rest()
        while True:
            if (batch := self._next_batch(inner)) is None:
                try:
                    await self._fetch(with_records=False)
                except StopAsyncIteration:
                    return
                continue
            fetched = self._fetched
            assert fetched is not None
            if fetched.records:
                fetched.records.pop()
            cursor = fetched.ahead.cursor
            cursor.position = batch.next_offset
            cursor.epoch, cursor.processing_offset = batch.epoch, batch.base_offset
            yield batch
            cursor.processing_offset = None

    def _drop_rest(self) -> None:
        """Drop the rest of the current batch. The next fetch reads it again."""
        self._records = self._batch_records = iter(())
        self._fetched = None

    def _next_batch(self, inner: NonblockingConsumer) -> RecordBatch[Any, Any] | None:
        """Return the next batch that is already fetched, or None if the caller must fetch.

        A seek, pause or rebalance makes fetched batches out of date.
        """
        fetched = self._fetched
        if fetched is None:
            return None
        ahead = fetched.ahead
        if inner.is_current(fetched):
            if ahead.batches:
                batch = ahead.batches.popleft()
                ahead.position = batch.next_offset
                inner.set_processing(fetched)
                return batch
            if ahead.end_position != ahead.position:
                ahead.cursor.position = ahead.end_position
        self._fetched = None
        inner.set_processing(None)
        return None

    async def _fetch(self, *, with_records: bool, until_s: float | None = None) -> None:
        """Fetch batches into `_fetched`; wait until there are some. Raises StopAsyncIteration at the end.

        With ``until_s`` it waits until then, even if the consumer does not follow.
        """
        bridge, inner = self._open()
        if self._closing is not None:
            raise StopAsyncIteration
        if self._step is None:
            waits = until_s is not None
            is_first, self._is_first = self._is_first or waits, False
            self._step = bridge.call(lambda: inner.step(is_first=is_first, with_records=with_records, waits=waits))
        step = self._step
        try:
            found = await asyncio.shield(step)
        except BaseException as error:
            if step.done() and self._step is step and not step.cancelled() and step.exception() is not None:
                self._step = None
            if isinstance(error, StoreClosed) and self._closing is not None:
                raise StopAsyncIteration from None
            raise
        if self._step is not step:
            return  # another task has used the result
        self._step = None
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, FetchedBatches):
            self._fetched = found
        elif until_s is not None and bridge.loop.time() >= until_s:
            raise StopAsyncIteration
        else:
            await self._sleep(inner, found, until_s)

    async def _sleep(self, inner: NonblockingConsumer, pause: Pause, until_s: float | None) -> None:
        """Wait until an append wakes the consumer, or until ``until_s``."""
        bridge, watch = self._open()[0], inner.watch
        if self._sleeping is None:
            sleeping = self._sleeping = bridge.loop.create_future()
            seconds = pause.seconds if watch is None else watch.pause_s(pause.seconds, poll=pause.must_poll)
            fds = [] if watch is None else watch.descriptors
            timer = bridge.loop.call_later(seconds, self._wake)
            for fd in fds:
                bridge.loop.add_reader(fd, self._wake)

            def stop() -> None:
                timer.cancel()
                for fd in fds:
                    bridge.loop.remove_reader(fd)
                if not sleeping.done():
                    sleeping.set_result(None)

            self._stop_sleeping = stop
        # Neither call cancels the future, because other tasks may wait for it.
        if until_s is None:
            await asyncio.shield(self._sleeping)
        else:
            await asyncio.wait([self._sleeping], timeout=max(until_s - bridge.loop.time(), 0.0))

    def _wake(self) -> None:
        stop, self._stop_sleeping, self._sleeping = self._stop_sleeping, None, None
        if stop is not None:
            stop()

    # ------------------------------------------------------------ positions

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that this consumer reads."""
        return self._open()[1].assignment()

    def position(self, topic: str, partition: int = 0) -> int:
        """Return the offset of the next record of a partition."""
        return self._open()[1].position(topic, partition)

    def positions(self) -> dict[TopicPartition, int]:
        """Return the offset of the next record of every partition."""
        return self._open()[1].positions()

    async def seek(self, topic: str, partition: int, to: Start) -> int:
        """Set the position of a partition; return the offset. Raises `OffsetOutOfRange`, `LogTruncated`."""
        bridge, inner = self._open()
        check_start(to, "to")
        offset = await bridge.call(lambda: inner.resolve_offset(topic, partition, to))
        inner.set_position(topic, partition, offset)
        return offset

    async def lag(self) -> dict[TopicPartition, int]:
        """Return the number of offsets from the position to the end, for every partition."""
        bridge, inner = self._open()
        return await bridge.call(inner.lag)

    def pause(self, topic: str, partition: int = 0) -> None:
        """Stop reading a partition until `resume`."""
        self._open()[1].pause(topic, partition)

    def resume(self, topic: str, partition: int = 0) -> None:
        """Resume reading a paused partition."""
        self._open()[1].resume(topic, partition)
        self._wake()

    def wakeup(self) -> None:
        """End the wait of an iteration or a `poll`, now or the next time; see `Consumer.wakeup`."""
        self._open()[1].wakeup()

    @property
    def skipped(self) -> list[tuple[TopicPartition, int, int, CorruptBatch]]:
        """See `Consumer.skipped`."""
        return self._open()[1].skipped

    @property
    def resets(self) -> list[tuple[TopicPartition, int, int]]:
        """See `Consumer.resets`."""
        return self._open()[1].resets

    @property
    def bad(self) -> Sequence[DeserializationError]:
        """See `Consumer.bad`."""
        return self._open()[1].bad

    # ------------------------------------------------------------ as a member of a group

    @property
    def member(self) -> NonblockingConsumer:
        """The member of the group, for `AsyncProducer.commit_offsets`."""
        return self._open()[1]

    @property
    def member_id(self) -> str:
        """Id of this member in the group; an evicted member gets a new one."""
        return self._open()[1].member_id

    @property
    def generation(self) -> int:
        """Generation of the group's assignment that this member has; it grows with each assignment."""
        return self._open()[1].generation

    async def poll_group(self, wait_s: float = 0.0) -> list[TopicPartition]:
        """Poll the group without reading; return the assigned partitions.

        Waits up to ``wait_s`` seconds until the former members have released every assigned partition. An iteration
        polls the group, too.
        """
        bridge, inner = self._open()
        ends_s = bridge.loop.time() + wait_s
        while not await bridge.call(inner.is_settled) and bridge.loop.time() < ends_s:
            await asyncio.sleep(min(_POLL_S, max(ends_s - bridge.loop.time(), 0.0)))
        return self.assignment()

    async def commit(
        self, positions: Mapping[Any, int] | None = None, *, metadata: str = "", sync: bool = True
    ) -> None:
        """Commit offsets of the group; by default up to and including the last record returned before the call.

        Arguments and errors are those of `Consumer.commit`. Completes even if cancelled.
        """
        bridge, inner = self._open()
        metadata, sync = as_text("metadata", metadata), as_bool("sync", sync)
        if positions is not None:
            committing = bridge.call(lambda: inner.commit(positions, metadata=metadata, sync=sync))
        else:
            offsets = inner.positions()
            committing = bridge.call(lambda: inner.commit_current(offsets, metadata=metadata, sync=sync))
        await self._wait(committing, "the commit continues")

    async def committed(self, topic: str, partition: int = 0) -> CommittedOffset | None:
        """Return the group's committed offset of a partition, whichever member reads it; None if there is none."""
        bridge, inner = self._open()
        return await bridge.call(lambda: inner.committed(topic, partition))

    # ------------------------------------------------------------ helpers

    def _open(self) -> tuple[LoopBridge, NonblockingConsumer]:
        if self._bridge is None or self._inner is None:
            raise StoreClosed("consumer", "it is not open yet; use it inside `async with`")
        return self._bridge, self._inner

    async def _wait(self, future: asyncio.Future[T], cancelled_note: str) -> T:
        """Await a future that continues even if the awaiting task is cancelled; add a note to the cancellation."""
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError as cancelled:
            add_note(cancelled, cancelled_note)
            raise


_POLL_S = 0.02
