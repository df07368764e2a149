"""The consumer for asyncio: it reads what is there, waits in the loop, and loses nothing by a cancellation."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aio_helpers import run

import segmentlog
from segmentlog.aio.pool import THREADS_MAX, pool
from segmentlog.consuming import wakeup
from segmentlog.consuming.consumer_options import ConsumerOptions
from segmentlog.consuming.cursor import Cursor
from segmentlog.consuming.cursor_set import CursorSet
from segmentlog.errors import (
    DeserializationError,
    InvalidConfig,
    OffsetOutOfRange,
    SegmentlogError,
    StoreClosed,
    UnknownTopic,
)
from segmentlog.producing.producer_options import ProducerOptions
from segmentlog.records import Record, TopicPartition
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with threads, and a topic of two partitions, 100 records each, in batches of ten."""
    with segmentlog.open(tmp_path / "store") as store:
        topic = store.create_topic("t", partitions=2)
        for number in range(2):
            for first in range(0, 100, 10):
                topic.partition(number).append([b"%d" % offset for offset in range(first, first + 10)])
        yield store


async def _take(consumer: Any, count: int) -> list[Record]:
    found: list[Record] = []
    async for record in consumer:
        found.append(record)
        if len(found) == count:
            break
    return found


def _is_whole(records: list[Record]) -> bool:
    """Return whether each record of both partitions is there once, in the order of its partition."""
    return all(
        [record.offset for record in records if record.partition == number] == list(range(100)) for number in range(2)
    )


def test_it_reads_what_is_there(store: LogStore) -> None:
    """It ends at the log ends that it met; later records are for the next iteration."""

    async def read() -> None:
        async with store.aconsumer("t") as consumer:
            records = [record async for record in consumer]
            assert _is_whole(records)
            assert [record async for record in consumer] == []
            assert consumer.positions() == {("t", 0): 100, ("t", 1): 100}
            assert await consumer.lag() == {("t", 0): 0, ("t", 1): 0}
            store.topic("t").partition(1).append([b"late"])
            assert await consumer.lag() == {("t", 0): 0, ("t", 1): 1}
            assert [record.value async for record in consumer] == [b"late"]

    run(read())


def test_batches(store: LogStore) -> None:
    """Batches return columns; mixed with single records, no record is lost or returned twice."""

    async def read() -> None:
        async with store.aconsumer("t") as consumer:
            first = await _take(consumer, 15)
            rest = [record async for batch in consumer.batches() for record in batch]
            assert _is_whole([*first, *rest])
            assert consumer.positions() == {("t", 0): 100, ("t", 1): 100}

    run(read())


def test_an_iteration_that_is_left_goes_on(store: LogStore) -> None:
    """The next one continues after any way of leaving, also after a seek."""

    async def read() -> None:
        async with store.aconsumer("t", fetch_bytes=300) as consumer:
            found = []
            while True:
                part = await _take(consumer, 7)
                found += part
                if len(part) < 7:
                    break
            assert _is_whole(found)
            assert await consumer.seek("t", 1, 95) == 95
            assert [(record.partition, record.offset) async for record in consumer] == [(1, n) for n in range(95, 100)]
            assert await consumer.seek("t", 0, -2) == 98
            consumer.pause("t", 0)
            assert [record async for record in consumer] == []
            consumer.resume("t", 0)
            assert [record.offset async for record in consumer] == [98, 99]
            with pytest.raises(OffsetOutOfRange):
                await consumer.seek("t", 0, 1000)
            with pytest.raises(UnknownTopic):
                await consumer.seek("t", 5, 0)

    run(read())


def test_a_seek_drops_what_was_fetched(store: LogStore) -> None:
    """A seek works in the middle of a batch, and between two batches that were fetched together."""

    async def read() -> None:
        async with store.aconsumer(("t", 0)) as consumer:
            offsets = []
            async for record in consumer:
                offsets.append(record.offset)
                if offsets == [0, 1, 2]:
                    await consumer.seek("t", 0, 45)
                if record.offset == 49:
                    await consumer.seek("t", 0, 98)
            assert offsets == [0, 1, 2, 45, 46, 47, 48, 49, 98, 99]

    run(read())


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_seek_while_something_is_fetched_counts(
    store: LogStore, monkeypatch: pytest.MonkeyPatch, is_trimmed: bool
) -> None:
    """This also holds if the fetch returns nothing, or if another task took the fetched records meanwhile."""
    with store.producer() as producer:
        producer.begin_transaction()
        producer.send_many("t", [b"never"] * 10, partition=0)
        producer.abort_transaction()
    real = CursorSet.fetch

    async def read() -> list[Record]:
        async with store.aconsumer(("t", 0), isolation="read_committed", auto_offset_reset="latest") as consumer:
            await consumer.seek("t", 0, 100)
            if is_trimmed:
                await consumer.seek("t", 0, 5)
                store.topic("t").partition(0).trim(10)

            def fetch(self: CursorSet, cursor: Cursor) -> Iterator[Any]:
                monkeypatch.undo()
                try:
                    yield from real(self, cursor)
                finally:
                    consumer.member.set_position("t", 0, 90)  # as `seek` does in the loop

            monkeypatch.setattr(CursorSet, "fetch", fetch)
            return [record async for record in consumer]

    assert [record.offset for record in run(read())] == list(range(90, 100))


def test_a_cancelled_iteration_loses_nothing(store: LogStore) -> None:
    """Cancelled at whatever point, again and again; the next one yields what this one did not."""

    async def read() -> None:
        found: list[Record] = []

        async def work(consumer: Any) -> None:
            async for record in consumer:
                found.append(record)
                if len(found) % 7 == 0:
                    await asyncio.sleep(0)

        async with store.aconsumer("t", follow=True, fetch_bytes=200) as consumer:
            pause_s = 0.0
            while len(found) < 200:
                task = asyncio.create_task(work(consumer))
                await asyncio.sleep(pause_s)
                pause_s = (pause_s + 0.0001) % 0.002
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert _is_whole(found)

    run(read())


def test_a_follower_waits_in_the_loop(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of followers takes no threads, and appends of threads and of other processes wake each of them."""

    async def read() -> None:
        monkeypatch.setattr(wakeup, "WAIT_S", 3_600.0)  # the append has to wake them
        consumers = [await store.aconsumer("t", start="latest", follow=True).start() for _ in range(20)]
        tasks = [asyncio.create_task(anext(aiter(consumer))) for consumer in consumers]
        await asyncio.sleep(0.3)
        before = threading.active_count()
        await asyncio.sleep(0.8)  # while idle they need no thread, except for periodic checks
        assert pool.thread_count <= THREADS_MAX
        assert threading.active_count() <= before + THREADS_MAX
        store.topic("t").partition(1).append([b"news"])
        records = await asyncio.gather(*tasks)
        assert {record.value for record in records} == {b"news"}
        await asyncio.gather(*(consumer.close() for consumer in consumers))

    run(read())


def test_a_timeout_around_an_iteration(store: LogStore) -> None:
    """The timeout ends the waiting, and not the consumer."""

    async def read() -> None:
        async with store.aconsumer("t", start="latest", follow=True) as consumer:
            iterator = aiter(consumer)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(iterator), 0.05)
            store.topic("t").partition(0).append([b"after"])
            assert (await anext(iterator)).value == b"after"

    run(read())


def test_a_wakeup_and_a_close_end_an_iteration(store: LogStore) -> None:
    """Any thread can call wakeup, and iterating again continues; close ends all iterations for good."""

    async def read() -> None:
        async with store.aconsumer("t", start="latest", follow=True) as consumer:
            threading.Timer(0.05, consumer.wakeup).start()
            assert await _take(consumer, 1) == []
            task = asyncio.create_task(_take(consumer, 1))
            await asyncio.sleep(0.05)
            assert not task.done()
            await consumer.close()
            assert await task == []
            with pytest.raises(StoreClosed):
                aiter(consumer)

    run(read())


def test_tasks_may_share_one(store: LogStore) -> None:
    """Each record goes to one of the tasks."""

    async def read() -> None:
        found: list[Record] = []

        async def work(consumer: Any) -> None:
            async for record in consumer:
                found.append(record)
                await asyncio.sleep(0)

        async with store.aconsumer("t", fetch_bytes=200) as consumer:
            await asyncio.gather(*(work(consumer) for _ in range(3)))
        assert _is_whole(found)

    run(read())


def test_a_group_shares_and_commits(store: LogStore) -> None:
    """Two members run in one loop; the next member continues after the first one's committed offset."""

    async def read() -> None:
        told: list[tuple[str, list[TopicPartition]]] = []

        async def on_assigned(partitions: list[TopicPartition]) -> None:
            await asyncio.sleep(0)
            told.append(("assigned", partitions))

        options: dict[str, Any] = {"group": "g", "max_poll_records": 7}
        async with store.aconsumer("t", on_assigned=on_assigned, **options) as one:
            assert len(await one.poll_group(5)) == 2
            assert told == [("assigned", [("t", 0), ("t", 1)])]
            records = await _take(one, 30)
            await one.commit()
            assert [await one.committed("t", number) for number in range(2)].count(None) <= 1
            async with store.aconsumer("t", **options) as two:
                while len(one.assignment()) != 1 or len(two.assignment()) != 1:
                    await asyncio.gather(one.poll_group(0.01), two.poll_group(0.01))
                shares = await asyncio.gather(_take(one, 1000), _take(two, 1000))
                for consumer in (one, two):
                    await consumer.commit(sync=False)
                assert _is_whole(sorted([*records, *shares[0], *shares[1]], key=lambda record: record.offset))
                assert one.member_id != two.member_id
                assert one.generation == two.generation
        async with store.aconsumer("t", group="g") as three:
            assert await _take(three, 1) == []

    run(read())


def test_a_callback_may_commit(store: LogStore) -> None:
    """While a partition is taken away: the thread that waits for the callback does it."""

    async def read() -> None:
        events: list[str] = []

        async def on_revoked(partitions: list[TopicPartition]) -> None:
            events.append("revoked")
            await one.commit()
            events.append("committed")

        one = store.aconsumer("t", group="g", on_revoked=on_revoked)
        async with one:
            records = await _take(one, 25)
            assert events == []
        assert events == ["revoked", "committed"]
        async with store.aconsumer("t", group="g") as two:
            assert _is_whole([*records, *await _take(two, 1000)])

    run(read())


def test_a_callback_of_a_store_that_is_closed_by_the_loop(store: LogStore, tmp_path: Path) -> None:
    """The coroutine cannot run, because its loop is busy: that is logged, and the close does not hang."""
    told: list[str] = []

    async def read(other: LogStore) -> None:
        async def coroutine(partitions: object) -> None:
            told.append("never")

        first = await other.aconsumer("t", group="g", on_revoked=lambda _: told.append("function")).start()
        await first.poll_group(5)
        second = await other.aconsumer("t", group="h", on_revoked=coroutine).start()
        await second.poll_group(5)
        other.close()

    with segmentlog.open(store.path) as other:
        run(read(other))
    assert told == ["function"]


def test_consume_and_produce_exactly_once(store: LogStore) -> None:
    """Positions of an asynchronous member in a transaction of an asynchronous producer."""
    store.create_topic("out")

    async def work(limit: int) -> None:
        async with store.aconsumer("t", group="g") as consumer, store.aproducer(name="p") as producer:
            records = await _take(consumer, limit)
            async with producer.transaction():
                for record in records:
                    await producer.send("out", record.value)
                await producer.commit_offsets(consumer)

    for _ in range(3):
        run(work(90))
    with store.consumer("out", isolation="read_committed") as consumer:
        found = [record.value for record in consumer]
    assert sorted(found) == sorted([b"%d" % offset for offset in range(100)] * 2)


def test_auto_commit(store: LogStore) -> None:
    """The close commits up to the last record that was processed, and not the current one."""

    async def read() -> None:
        async with store.aconsumer("t", group="g", auto_commit=True) as consumer:
            async for record in consumer:
                if record.offset == 4:
                    break
            partition = record.partition
        async with store.aconsumer("t", group="g") as consumer:
            committed = await consumer.committed("t", partition)
            assert committed is not None
            assert committed.offset == 4

    run(read())


def test_objects_and_bad_ones(store: LogStore) -> None:
    """Deserializers are those of `store.consumer`; an error leaves the position at the record."""
    store.create_topic("j").partition(0).append([b"1", b"2", b"bad", b"4"])

    async def read() -> None:
        found: list[int | None] = []
        async with store.aconsumer("j", deserializer=segmentlog.json_codec(int)) as consumer:

            async def work() -> None:
                async for record in consumer:
                    found.append(record.value)

            for _ in range(2):
                with pytest.raises(DeserializationError) as raised:
                    await work()
                assert consumer.position("j") == raised.value.offset == 2
            await consumer.seek("j", 0, 3)
            await work()
        assert found == [1, 2, 4]
        async with store.aconsumer("j", deserializer=segmentlog.json_codec(int), on_error="skip") as consumer:
            assert [batch.values async for batch in consumer.batches()] == [[1, 2], [4]]
            assert [error.offset for error in consumer.bad] == [2]

    run(read())


def test_read_committed_and_compacted_gaps(store: LogStore) -> None:
    """Control batches, aborted and compacted records are skipped, and the position reaches the end."""
    store.create_topic("x")
    with store.producer() as producer:
        for number in range(6):
            producer.begin_transaction()
            producer.send("x", b"%d" % number)
            if number % 2:
                producer.abort_transaction()
            else:
                producer.commit_transaction()

    async def read() -> None:
        async with store.aconsumer("x", isolation="read_committed") as consumer:
            assert [record.value async for record in consumer] == [b"0", b"2", b"4"]
            assert await consumer.lag() == {("x", 0): 0}

    run(read())


def test_beginning_fails_and_misuse(store: LogStore) -> None:
    """``async with`` or the constructor raises errors; use in another loop, or without one, is an error."""

    async def read() -> Any:
        with pytest.raises(UnknownTopic):
            await store.aconsumer("none").start()
        with pytest.raises(StoreClosed, match="async with"):
            aiter(store.aconsumer("t"))
        task = asyncio.create_task(store.aconsumer("t", group="g").start())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await store.aconsumer("t").start()

    with pytest.raises(InvalidConfig):
        store.aconsumer("t", start="middle")  # type: ignore[call-overload]
    consumer = run(read())

    async def misuse() -> None:
        with pytest.raises(SegmentlogError, match="another event loop"):
            await anext(consumer)

    run(misuse())


def test_a_forked_child_makes_its_own(store: LogStore) -> None:
    """The child's own consumer works, and the parent's is refused."""

    async def of_child(parents: Any) -> int:
        with pytest.raises(StoreClosed, match="before fork"):
            await parents.lag()
        async with store.aconsumer("t") as consumer:
            return len([record async for record in consumer])

    async def work() -> None:
        async with store.aconsumer("t", follow=True) as consumer:
            await anext(consumer)
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    asyncio.events._set_running_loop(None)
                    code = 0 if asyncio.run(of_child(consumer)) == 200 else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert len(await _take(consumer, 150)) == 150

    run(work())


def test_the_defaults_are_the_same() -> None:
    """Defaults are equal for named options and for those passed on."""
    for method, options in ((LogStore.consumer, ConsumerOptions()), (LogStore.producer, ProducerOptions())):
        given = {
            name: one.default
            for name, one in inspect.signature(method).parameters.items()
            if one.default is not one.empty
        }
        assert given == {name: getattr(options, name) for name in given}
        assert len(given) >= 7


@pytest.mark.parametrize("group", [None, "g"])
def test_one_that_follows_waits_for_its_topic(store: LogStore, group: str | None) -> None:
    """It reads the topic from its beginning once it is created; one that does not follow raises."""

    async def read() -> None:
        with pytest.raises(UnknownTopic, match="or pass follow=True"):
            await store.aconsumer("later", group=group).start()
        async with store.aconsumer("later", group=group, follow=True) as consumer:
            assert await consumer.poll(0.01) == []
            store.create_topic("later").partition(0).append([b"first"])
            assert [record.value for record in await _take(consumer, 1)] == [b"first"]

    run(read())
