"""The producer for asyncio: what it sender, when it waits, and what a cancellation leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aio_helpers import run
from logs import contents, values

import segmentlog
from segmentlog.aio.pool import THREADS_MAX, pool
from segmentlog.errors import (
    InvalidConfig,
    InvalidRecord,
    RecordTooLarge,
    SegmentlogError,
    StoreClosed,
    TransactionAborted,
    UnknownTopic,
)
from segmentlog.producing.async_futures import AsyncFutures
from segmentlog.producing.async_sender import EventLoopProducer
from segmentlog.producing.producer_options import ProducerOptions
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return the file system of the store."""
    return FaultyFileSystem()


@pytest.fixture
def store(tmp_path: Path, fs: FaultyFileSystem) -> Iterator[LogStore]:
    """Provide a new store without threads, with topics of one and of four partitions."""
    with LogStore(tmp_path / "store", background=False, fs=fs) as store:
        store.create_topic("one")
        store.create_topic("four", partitions=4)
        yield store


class _Stuck:
    """A disk whose writes hang until `let_go`."""

    def __init__(self, fs: FaultyFileSystem) -> None:
        self.is_there = threading.Event()
        self._go = threading.Event()
        fs.before("pwritev", self._hang)

    def _hang(self) -> None:
        self.is_there.set()
        assert self._go.wait(30)

    def let_go(self) -> None:
        self._go.set()

    async def is_reached(self) -> None:
        while not self.is_there.is_set():
            await asyncio.sleep(0.001)


def test_what_is_sent_arrives_in_order(store: LogStore) -> None:
    """This holds for single records and lists; each delivery has the offset in the log."""

    async def send() -> list[Any]:
        async with store.aproducer(linger_ms=1) as producer:
            first = [await producer.send("four", b"%d" % number, key=b"%d" % (number % 7)) for number in range(5000)]
            many = await producer.send_many("four", [b"x", b"y"], keys=[b"1", b"2"], timestamps=[5, 6])
            late = await producer.send("four", b"z", headers=[("a", b"b")], timestamp=7, partition=2)
            assert [await delivery for delivery in many] == many.result()
            assert len(many) == 2
            assert many.result()[1].timestamp == 6
            return [await delivery for delivery in [*first, many[0], many[-1], late]]

    found = run(send())
    with store.consumer("four") as consumer:
        by_place = {(record.partition, record.offset): record for record in consumer}
    sent = [*(b"%d" % number for number in range(5000)), b"x", b"y", b"z"]
    assert [by_place[place.partition, place.offset].value for place in found] == sent
    assert by_place[found[-1].partition, found[-1].offset].headers == (("a", b"b"),)
    for number in range(4):
        order = [place.offset for place in found if place.partition == number]
        assert order == sorted(order)
        assert order


def test_lingering_is_the_loops(store: LogStore) -> None:
    """The record is appended after ``linger_ms``, although no task flushes or waits."""

    async def send() -> None:
        async with store.aproducer(linger_ms=5) as producer:
            delivery = await producer.send("one", b"a")
            assert not delivery.done()
            while not delivery.done():
                await asyncio.sleep(0.001)
            assert values(store.topic("one").partition(0)) == [b"a"]

    run(send())


def test_durable_is_on_disk(store: LogStore, fs: FaultyFileSystem) -> None:
    """One fsync covers all that wait, lists included."""

    async def send() -> None:
        async with store.aproducer(linger_ms=1) as producer:
            deliveries = [await producer.send("one", b"%d" % number) for number in range(200)]
            await producer.flush()
            before = fs.count("fdatasync")
            places = await asyncio.gather(*(delivery.durable() for delivery in deliveries))
            assert fs.count("fdatasync") - before <= 3
            assert store.topic("one").partition(0).durable_offset == 200
            assert [place.offset for place in places] == list(range(200))
            many = await producer.send_many("four", [b"x"] * 10, keys=[b"%d" % number for number in range(10)])
            await many.durable()
            assert all(log.durable_offset == log.log_end_offset for log in store.topic("four").partitions())

    run(send())


def test_no_thread_for_a_call_nor_for_a_producer(store: LogStore) -> None:
    """Any number of calls and producers share a few threads, which end with the last producer."""
    before = threading.active_count()

    async def send() -> None:
        producers = [await store.aproducer(linger_ms=1).start() for _ in range(50)]
        tasks = [producer.send_many("four", [b"x"] * 10) for producer in producers for _ in range(4)]
        await asyncio.gather(*tasks)
        assert threading.active_count() - before <= THREADS_MAX
        assert pool.thread_count <= THREADS_MAX
        await asyncio.gather(*(producer.close() for producer in producers))

    run(send())
    assert sum(log.log_end_offset for log in store.topic("four").partitions()) == 2000


def test_a_sender_waits_while_too_much_is_on_its_way(store: LogStore, fs: FaultyFileSystem) -> None:
    """It waits until half is written; other tasks continue, and a time-out is respected."""

    async def send() -> None:
        async with store.aproducer(linger_ms=1000, batch_size=10_000, max_unsent_bytes=50_000) as producer:
            await producer.send("one", b"first")
            await producer.flush()
            stuck = _Stuck(fs)
            sent = 0

            async def fill() -> None:
                nonlocal sent
                while True:
                    await producer.send("one", b"x" * 1000)
                    sent += 1

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(fill(), 0.3)
            assert 40 <= sent <= 70
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await producer.send_many("one", [b"y"] * 10)
            stuck.let_go()
            await producer.send("one", b"last")
        assert store.topic("one").partition(0).log_end_offset == sent + 2

    run(send())


def test_what_is_told_of_takes_no_room(store: LogStore) -> None:
    """A waiting sender checks for room when a chunk was sent, and may be faster than the sending thread."""

    class AccumulatorHooks:
        def __init__(self, producer: EventLoopProducer) -> None:
            self.accumulator = producer.accumulator
            self.seen: list[int] = []

        def on_chunk_started(self) -> None:
            pass

        def on_sealed(self, topic: str) -> None:
            self.accumulator.send_queued(topic)

        def on_sent(self) -> None:
            self.seen.append(self.accumulator.sealed_bytes)

    producer = store._all_producers().create_event_loop_producer(ProducerOptions(linger_ms=1000))
    hooks = AccumulatorHooks(producer)
    producer.hook(hooks, AsyncFutures(cast("Any", None), producer.accumulator, 1))
    producer.send("one", bytes(1000))
    producer.flush()
    producer.send("one", bytes(300_000))
    assert hooks.seen == [0, 0]
    producer.close()


def test_a_cancelled_send_has_not_sent(store: LogStore, fs: FaultyFileSystem) -> None:
    """The cancellation has a note; a list that is being sent continues, and the note says so."""

    async def send() -> None:
        async with store.aproducer(linger_ms=1000, batch_size=1000, max_unsent_bytes=2000) as producer:
            await producer.send("one", b"first")
            await producer.flush()
            stuck = _Stuck(fs)
            many = asyncio.create_task(producer.send_many("one", [b"many"] * 100))
            await stuck.is_reached()
            many.cancel()
            with pytest.raises(asyncio.CancelledError) as raised:
                await many
            assert raised.value.__notes__ == ["segmentlog: sending the records continues"]
            for task in (
                asyncio.create_task(producer.send("four", b"never", partition=0)),
                asyncio.create_task(producer.send_many("four", [b"never"])),
            ):
                producer._has_to_pause = True
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError) as raised:
                    await task
                assert "not sent" in raised.value.__notes__[0] or "none of" in raised.value.__notes__[0]
            stuck.let_go()
        assert values(store.topic("one").partition(0)) == [b"first", *[b"many"] * 100]
        assert sum(log.log_end_offset for log in store.topic("four").partitions()) == 0

    run(send())


def test_leaving_under_cancellation_closes(store: LogStore) -> None:
    """Records are appended although the task that sent them was cancelled."""

    async def send() -> None:
        async def work() -> None:
            async with store.aproducer(linger_ms=10_000) as producer:
                await producer.send("one", b"a")
                is_sent.set()
                await asyncio.sleep(30)

        is_sent = asyncio.Event()
        task = asyncio.create_task(work())
        await is_sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert values(store.topic("one").partition(0)) == [b"a"]

    run(send())


def test_closing_that_is_cancelled_goes_on(store: LogStore, fs: FaultyFileSystem) -> None:
    """A second cancellation ends the waiting, and not the closing."""

    async def send() -> None:
        producer = await store.aproducer(linger_ms=10_000).start()
        await producer.send("one", b"a")
        stuck = _Stuck(fs)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await producer.close()
        stuck.let_go()
        await producer.close()
        assert values(store.topic("one").partition(0)) == [b"a"]
        with pytest.raises(StoreClosed):
            await producer.send("one", b"b")

    run(send())


def test_a_beginning_that_is_cancelled_leaves_nothing(store: LogStore) -> None:
    """No producer keeps the name."""

    async def send() -> None:
        task = asyncio.create_task(store.aproducer(name="n").start())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with store.aproducer(name="n") as producer:
            assert producer.name == "n"
            await producer.send("one", b"a")
            await producer.flush()
            assert await producer.last_sequence("one") == 0

    run(send())


def test_a_beginning_that_is_cancelled_half_way_takes_no_name_from_who_comes_next(store: LogStore) -> None:
    """Otherwise the cancelled start would take the name later, and fence the producer that has it by then."""
    begun, may_go_on = threading.Event(), threading.Event()

    async def send() -> None:
        first = store.aproducer(name="n")
        make = first._make

        def make_slowly() -> Any:
            begun.set()
            may_go_on.wait(30)
            return make()

        first._make = make_slowly
        task = asyncio.create_task(first.start())
        while not begun.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with store.aproducer(name="n") as producer:
            await producer.send("one", b"a")
            await producer.flush()

    run(send())


def test_what_fails_is_told(store: LogStore, fs: FaultyFileSystem) -> None:
    """The delivery raises the error, and so does the next flush; the next record is appended."""

    async def send() -> None:
        async with store.aproducer(linger_ms=1) as producer:
            with pytest.raises(UnknownTopic):
                await producer.send("none", b"a")
            with pytest.raises(InvalidRecord):
                await producer.send("one", "text")  # type: ignore[arg-type]
            with pytest.raises(InvalidRecord):
                await producer.send_many("one", [b"x", 3])  # type: ignore[list-item]
            with pytest.raises(RecordTooLarge):
                await producer.send("one", os.urandom(store.topic("one").config.max_message_bytes + 1))
            fs.fail("pwritev", errno.ENOSPC, times=None)
            delivery = await producer.send("one", b"a")
            with pytest.raises(segmentlog.DiskFull):
                await delivery
            assert isinstance(await delivery.exception(), segmentlog.DiskFull)
            with pytest.raises(segmentlog.DiskFull):
                await producer.flush()
            fs.heal()
            assert (await (await producer.send("one", b"b"))).offset == 0

    run(send())


def test_transactions(store: LogStore) -> None:
    """Committed at the end, aborted by an exception and by a cancellation."""

    async def send() -> None:
        async with store.aproducer(name="n") as producer:
            async with producer.transaction("first"):
                await producer.send("one", b"a")
                await producer.send_many("four", [b"b"] * 10)

            async def leave(how: Awaitable[object]) -> None:
                async with producer.transaction():
                    await producer.send("one", b"never")
                    await how

            with pytest.raises(StoreClosed):
                await leave(store.aproducer().send("one", b"x"))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(leave(asyncio.sleep(10)), 0.05)
            assert producer.last_note == "first"
            async with producer.transaction("second"):
                await producer.send("one", b"c")
            assert producer.last_note == "second"

    run(send())
    with store.consumer("one", isolation="read_committed") as consumer:
        assert [record.value for record in consumer] == [b"a", b"c"]


def test_a_beginning_that_is_cancelled_aborts_no_other_task_s(store: LogStore) -> None:
    """If a task that could not begin another transaction is cancelled, the current transaction is not aborted."""

    async def send() -> None:
        async with store.aproducer() as producer:
            async with producer.transaction():
                await producer.send("one", b"1")
                beginning = asyncio.create_task(producer.begin_transaction())
                await asyncio.sleep(0)
                beginning.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await beginning
                await producer.send("one", b"2")
            beginning = asyncio.create_task(producer.begin_transaction())
            await asyncio.sleep(0)
            beginning.cancel()
            with pytest.raises(asyncio.CancelledError):
                await beginning
            async with producer.transaction():  # its own is ended
                await producer.send("one", b"3")

    run(send())
    with store.consumer("one", isolation="read_committed") as consumer:
        assert [record.value for record in consumer] == [b"1", b"2", b"3"]


def test_a_failed_transaction_is_aborted(store: LogStore, fs: FaultyFileSystem) -> None:
    """The next transaction works."""

    async def send() -> None:
        async with store.aproducer() as producer:
            await producer.begin_transaction()
            fs.fail("pwritev", errno.ENOSPC)
            await producer.send("one", b"a")
            with pytest.raises(TransactionAborted):
                await producer.commit_transaction()
            await producer.begin_transaction()
            await producer.send("one", b"b")
            await producer.abort_transaction()
            async with producer.transaction():
                await producer.send("one", b"c")

    run(send())
    with store.consumer("one", isolation="read_committed") as consumer:
        assert [record.value for record in consumer] == [b"c"]


def test_objects(store: LogStore) -> None:
    """Serializers are those of `store.producer`."""

    async def send() -> None:
        async with store.aproducer(
            serializer=segmentlog.json_codec(), key_serializer=segmentlog.text_codec()
        ) as producer:
            await producer.send("one", {"a": 1}, "k")
            await producer.send_many("one", [[1], None], keys=["x", None])
            with pytest.raises(segmentlog.SerializationError):
                await producer.send("one", object())

    run(send())
    found = [(record.key, record.value) for record in contents(store.topic("one").partition(0))]
    assert found == [(b"k", b'{"a":1}'), (b"x", b"[1]"), (None, None)]


def test_each_loop_has_its_own(store: LogStore) -> None:
    """Two loops work at once; a producer of one loop is refused in the other."""

    def work(number: int) -> None:
        async def send() -> None:
            async with store.aproducer(linger_ms=1) as producer:
                for _ in range(500):
                    await producer.send("four", b"x", key=b"%d" % number)

        run(send())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(log.log_end_offset for log in store.topic("four").partitions()) == 1500

    async def begin() -> Any:
        return await store.aproducer().start()

    producer = run(begin())

    async def misuse() -> None:
        with pytest.raises(SegmentlogError, match="belongs to another event loop"):
            await producer.send("one", b"x")
        with pytest.raises(SegmentlogError, match="belongs to another event loop"):
            await producer.close()

    run(misuse())


def test_a_forked_child_makes_its_own(store: LogStore) -> None:
    """The child's producer has its own threads; the parent's is refused there."""

    async def begin() -> Any:
        producer = await store.aproducer(linger_ms=1).start()
        await (await producer.send("one", b"parent"))
        return producer

    async def of_child(parents: Any) -> None:
        with pytest.raises(StoreClosed, match="before fork"):
            await parents.send_many("one", [b"x"])
        async with store.aproducer(linger_ms=1) as producer:
            await producer.send("one", b"child")

    async def after(parents: Any) -> None:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                asyncio.events._set_running_loop(None)
                asyncio.run(of_child(parents))
                store.topic("one").partition(0).flush()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    async def both() -> None:
        producer = await begin()
        await after(producer)
        await producer.close()

    run(both())
    assert values(store.topic("one").partition(0)) == [b"parent", b"child"]


def test_what_is_not_begun_says_so(store: LogStore) -> None:
    """Wrong options are refused at construction."""

    async def send() -> None:
        producer = store.aproducer()
        with pytest.raises(StoreClosed, match="async with"):
            await producer.send("one", b"x")
        await producer.close()

    run(send())
    with pytest.raises(InvalidConfig):
        store.aproducer(linger_ms=-1)
    with pytest.raises(InvalidConfig):
        store.aproducer(max_unsent_bytes=0)
    with pytest.raises(TypeError):
        store.aproducer(lingers=3)  # type: ignore[call-overload]


def test_one_that_is_not_closed_is_closed_with_the_store(tmp_path: Path) -> None:
    """Its records are appended, although its loop is gone."""

    async def send(store: LogStore) -> Any:
        producer = await store.aproducer(linger_ms=10_000).start()
        await producer.send("one", b"a")
        return producer

    with segmentlog.open(tmp_path / "s") as store:
        store.create_topic("one")
        producer = run(send(store))
    with segmentlog.open(tmp_path / "s") as store:
        assert values(store.topic("one").partition(0)) == [b"a"]
    del producer
