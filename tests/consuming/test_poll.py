"""`Consumer.poll` and `AsyncConsumer.poll`: a list of records, or an empty one after the time-out."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aio_helpers import run

import segmentlog
from segmentlog.codecs import json_codec
from segmentlog.consuming.consumer import Consumer
from segmentlog.errors import ConsumerBusy, DeserializationError, InvalidConfig, StoreClosed
from segmentlog.records import Record
from segmentlog.store import LogStore
from segmentlog.testing.interrupts import interrupt_at, list_points

WITHIN_S = 30.0
"""A time-out that no test waits for."""

Poll = Callable[..., Awaitable[list[Record]]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with a topic of two partitions, 100 records each, in batches of ten."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        topic = store.create_topic("t", partitions=2, fsync="never")
        for number in range(2):
            for first in range(0, 100, 10):
                topic.partition(number).append([b"%d" % offset for offset in range(first, first + 10)])
        yield store


@pytest.fixture(params=["sync", "async"])
def polling(request: pytest.FixtureRequest, store: LogStore) -> Callable[..., Any]:
    """Run a coroutine function with a consumer and its `poll`, of either kind."""

    def call(work: Callable[[Any, Poll], Awaitable[None]], *topics: Any, **options: Any) -> None:
        async def with_async() -> None:
            async with store.aconsumer(*topics, **options) as consumer:
                await work(consumer, consumer.poll)

        async def with_sync() -> None:
            with store.consumer(*topics, **options) as consumer:

                async def poll(*args: Any, **settings: Any) -> list[Record]:
                    return consumer.poll(*args, **settings)

                await work(consumer, poll)

        run(with_async() if request.param == "async" else with_sync())

    return call


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("count", [1, 7, 10, 35, 500])
def test_each_record_is_in_one_list(polling: Callable[..., Any], count: int, follow: bool) -> None:
    """The order within a partition is kept. A list has records of one partition, as many as fit and exist."""

    async def read(consumer: Any, poll: Poll) -> None:
        found: list[Record] = []
        sizes = []
        while rows := await poll(max_records=count):
            assert len({row.partition for row in rows}) == 1
            assert consumer.position("t", rows[-1].partition) == rows[-1].offset + 1
            sizes.append(len(rows))
            found += rows
        for number in range(2):
            assert [row.offset for row in found if row.partition == number] == list(range(100))
        assert max(sizes) == min(count, 100)
        assert sizes.count(max(sizes)) >= 200 // max(sizes) - 1

    polling(read, "t", follow=follow)


def test_nothing_comes_in_time(polling: Callable[..., Any], store: LogStore) -> None:
    """An empty list, from a consumer that follows and from one that does not; what is appended later comes next."""

    async def read(consumer: Any, poll: Poll) -> None:
        assert await poll() == await poll(0.01) == []
        store.topic("t").partition(1).append([b"new"])
        assert [row.value for row in await poll(WITHIN_S)] == [b"new"]
        assert await poll() == []

    for follow in (False, True):
        polling(read, "t", follow=follow, start="latest")


def test_a_record_ends_the_waiting(polling: Callable[..., Any], store: LogStore) -> None:
    """It is returned when it is appended, before the timeout."""

    async def read(consumer: Any, poll: Poll) -> None:
        timer = threading.Timer(0.05, lambda: store.topic("t").partition(0).append([b"new"]))
        timer.start()
        assert [row.value for row in await poll(WITHIN_S)] == [b"new"]
        timer.join()

    for follow in (False, True):
        polling(read, "t", follow=follow, start="latest")


def test_a_wakeup_ends_the_waiting(polling: Callable[..., Any], store: LogStore) -> None:
    """The wakeup of any thread returns an empty list; the next call returns records."""

    async def read(consumer: Any, poll: Poll) -> None:
        timer = threading.Timer(0.05, consumer.wakeup)
        timer.start()
        assert await poll(WITHIN_S) == []
        timer.join()
        store.topic("t").partition(0).append([b"new"])
        assert [row.value for row in await poll(WITHIN_S)] == [b"new"]

    polling(read, "t", follow=True, start="latest")


def test_a_seek_and_a_pause_count_for_what_is_left_of_a_batch(polling: Callable[..., Any]) -> None:
    """The next list begins where the consumer was moved to; a paused partition has none."""

    async def read(consumer: Any, poll: Poll) -> None:
        assert [row.offset for row in await poll(max_records=3)] == [0, 1, 2]
        moved = consumer.seek("t", 0, 50)
        if isinstance(moved, Awaitable):
            await moved
        assert [row.offset for row in await poll(max_records=3)] == [50, 51, 52]
        consumer.pause("t", 0)
        assert await poll(max_records=3) == []
        consumer.resume("t", 0)
        assert [row.offset for row in await poll(max_records=3)] == [53, 54, 55]

    polling(read, ("t", 0))


def test_a_list_counts_as_processed_at_the_next_poll(polling: Callable[..., Any], store: LogStore) -> None:
    """With ``auto_commit``, no record of a list is committed before: a crash before the next poll loses none."""

    def committed() -> int | None:
        found = store.groups.describe("g").partitions[0].committed
        return None if found is None else found.offset

    async def read(consumer: Any, poll: Poll) -> None:
        async def poll_group() -> None:
            await asyncio.sleep(0.002)  # a commit is due
            done = consumer.poll_group()
            if isinstance(done, Awaitable):
                await done

        assert len(await poll(WITHIN_S, max_records=25)) == 25
        await poll_group()
        assert committed() in (None, 0)
        assert len(await poll(WITHIN_S, max_records=25)) == 25
        await poll_group()
        assert committed() == 25

    store.delete_topic("t")
    store.create_topic("t").partition(0).append([b"%d" % offset for offset in range(100)])
    polling(read, "t", group="g", follow=True, auto_commit=True, auto_commit_interval_ms=1)
    assert committed() == 25, "closing does not commit what the program may not have written out"


def test_commit_has_all_of_the_list(polling: Callable[..., Any], store: LogStore) -> None:
    """The next member continues after the last record that was returned."""

    async def read(consumer: Any, poll: Poll) -> None:
        rows = await poll(WITHIN_S, max_records=25)
        seen.extend((row.partition, row.offset) for row in rows)
        done = consumer.commit()
        if isinstance(done, Awaitable):
            await done

    seen: list[tuple[int, int]] = []
    for _ in range(8):
        polling(read, "t", group="g")
    assert sorted(seen) == [(partition, offset) for partition in range(2) for offset in range(100)]


def test_what_was_read_before_a_fault_is_returned_first(polling: Callable[..., Any], store: LogStore) -> None:
    """Then the fault is raised, at every call, until the consumer is moved."""
    store.create_topic("j").partition(0).append([b"1", b"2"])
    store.topic("j").partition(0).append([b"3", b"{", b"5"])

    async def read(consumer: Any, poll: Poll) -> None:
        assert [row.value for row in await poll()] == [1, 2, 3]
        for _ in range(2):
            with pytest.raises(DeserializationError, match="offset 3"):
                await poll()
        moved = consumer.seek("j", 0, 4)
        if isinstance(moved, Awaitable):
            await moved
        assert [row.value for row in await poll()] == [5]

    polling(read, "j", deserializer=json_codec())


@pytest.mark.parametrize("arguments", [(-1,), ("soon",), (float("nan"),), (0, 0), (0, 1.5), (True,)])
def test_what_is_no_time_or_count_is_refused(polling: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The error names the argument, and no record is read."""

    async def read(consumer: Any, poll: Poll) -> None:
        with pytest.raises(InvalidConfig, match=r"timeout_s|max_records"):
            await poll(*arguments)
        assert consumer.position("t", 0) == 0

    polling(read, "t")


def test_a_closed_consumer_raises(polling: Callable[..., Any]) -> None:
    """The error is that of an iteration."""

    async def read(consumer: Any, poll: Poll) -> None:
        done = consumer.close()
        if isinstance(done, Awaitable):
            await done
        with pytest.raises(StoreClosed):
            await poll()

    polling(read, "t")


def test_one_thread_at_a_time(store: LogStore) -> None:
    """A second thread that polls gets an error, and no record of the first."""
    with store.consumer("t", start="latest", follow=True) as consumer:
        waiting = threading.Thread(target=consumer.poll, args=(WITHIN_S,))
        waiting.start()
        while consumer._user is None:
            pass
        with pytest.raises(ConsumerBusy):
            consumer.poll()
        consumer.wakeup()
        waiting.join()


def test_a_cancelled_poll_loses_no_record(store: LogStore) -> None:
    """After a cancellation at any time, the next call returns the records."""

    async def read() -> None:
        found: list[Record] = []
        async with store.aconsumer("t", fetch_bytes=50) as consumer:
            for attempt in range(10_000):
                try:
                    async with asyncio.timeout(0.0005 * (attempt % 4)):
                        found += await consumer.poll(WITHIN_S, 7)
                except TimeoutError:
                    pass
                if len(found) >= 200:
                    break
        for number in range(2):
            assert [row.offset for row in found if row.partition == number] == list(range(100))

    run(read())


def test_an_interrupted_poll_loses_no_record(store: LogStore) -> None:
    """Ctrl-C while a list is gathered from several batches: the next call returns it from its first record."""

    class Interrupting:
        """A deserializer that is interrupted once."""

        left = 2

        def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[Any]:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return list(data)

    with store.consumer(("t", 0), deserializer=Interrupting()) as consumer:
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(max_records=25)
        assert consumer.position("t", 0) == 0
        assert [record.offset for record in consumer.poll(max_records=25)] == list(range(25))


def test_an_alarm_anywhere_in_a_poll_is_raised_and_loses_no_record(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that raises `TimeoutError`, an `OSError`: the caller gets it, and each record is in one list."""

    def gathering(consumer: Consumer) -> Callable[[], list[Record]]:
        return lambda: consumer.poll(max_records=25)

    in_finalizers: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", in_finalizers.append)  # Python itself swallows it there
    with store.consumer(("t", 0)) as consumer:
        points = len(list_points(gathering(consumer)))
    for at in range(1, points + 1, 5):
        with store.consumer(("t", 0)) as consumer:
            outcome = interrupt_at(at, gathering(consumer), TimeoutError)
            if outcome.place is not None and not in_finalizers:
                assert type(outcome.error) is TimeoutError, f"swallowed at {outcome.place}"
            in_finalizers.clear()
            found = list(outcome.result or [])
            while rows := consumer.poll():
                found += rows
            assert [record.offset for record in found] == list(range(100)), outcome.place
