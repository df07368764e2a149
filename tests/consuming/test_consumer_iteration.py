"""Iterating over a consumer: left and entered again in every way, by one thread at a time, topics coming and going."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from pathlib import Path

import pytest
from logs import NOW_MS, FakeClock
from waiting import wait_until

import segmentlog
from segmentlog.consuming.consumer import Consumer
from segmentlog.errors import ConsumerBusy, InvalidConfig, UnknownTopic
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with ten records in t/0, b"0" to b"9"."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        opened.create_topic("t").partition(0).append([b"%d" % number for number in range(10)])
        yield opened


def _numbered(*numbers: int) -> list[bytes | None]:
    return [b"%d" % number for number in numbers]


# ---------------------------------------------------------------- async


async def _take(consumer: Consumer, count: int) -> list[bytes | None]:
    taken = []
    async for record in consumer:
        taken.append(record.value)
        if len(taken) == count:
            break
    return taken


async def _fail(consumer: Consumer, value: bytes) -> None:
    async for record in consumer:
        assert record.value == value
        raise ZeroDivisionError


def _run(coroutine: object) -> object:
    return asyncio.run(asyncio.wait_for(coroutine, 20))  # type: ignore[arg-type]


def test_an_async_iteration_goes_on_after_a_break(store: LogStore) -> None:
    """Each iteration starts after the last returned record, and waits if there are no more."""

    async def main() -> None:
        consumer = store.consumer("t", follow=True)
        assert await _take(consumer, 3) == _numbered(0, 1, 2)
        assert await _take(consumer, 7) == _numbered(*range(3, 10))
        for _ in range(5):  # each of these ended by itself, at once
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_take(consumer, 1), 0.05)
        store.topic("t").partition(0).append([b"10", b"11"])
        assert await _take(consumer, 2) == _numbered(10, 11)
        consumer.close()

    _run(main())


def test_a_cancelled_async_iteration_loses_nothing(store: LogStore) -> None:
    """Cancelled while its thread waits, or while it hands out: the next one has every record that none was given."""

    async def main() -> None:
        consumer = store.consumer("t", follow=True)
        seen: list[bytes | None] = []

        async def follow() -> None:
            async for record in consumer:
                seen.append(record.value)
                await asyncio.sleep(0)

        for number in range(10, 40):
            task = asyncio.ensure_future(follow())
            await asyncio.sleep(0.001 * (number % 7))
            store.topic("t").partition(0).append([b"%d" % number])
            await asyncio.sleep(0.001 * (number % 3))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        task = asyncio.ensure_future(follow())
        while len(seen) < 40:
            await asyncio.sleep(0.001)
        task.cancel()
        assert seen == _numbered(*range(40))
        consumer.close()

    _run(main())


def test_an_exception_in_an_async_loop_ends_it_alone(store: LogStore) -> None:
    """The next iteration works."""

    async def main() -> None:
        consumer = store.consumer("t", follow=True)
        for number in range(10):
            with pytest.raises(ZeroDivisionError):
                await _fail(consumer, b"%d" % number)
        consumer.close()

    _run(main())


def test_wakeup_ends_an_async_iteration(store: LogStore) -> None:
    """It ends an async iteration like a synchronous one; iterating again continues."""

    async def main() -> None:
        consumer = store.consumer("t", follow=True)
        assert len(await _take(consumer, 10)) == 10
        asyncio.get_running_loop().call_later(0.05, consumer.wakeup)
        assert await _take(consumer, 1) == []
        store.topic("t").partition(0).append([b"10"])
        assert await _take(consumer, 1) == _numbered(10)
        consumer.close()

    _run(main())


# ---------------------------------------------------------------- for and next


def test_an_iteration_goes_on_after_a_break_or_an_exception(store: LogStore) -> None:
    """After any way of leaving an iteration, the next one starts after the last returned record."""
    with store.consumer("t", follow=True) as consumer:
        for record in consumer:
            if record.value == b"2":
                break
        for record in consumer:
            with contextlib.suppress(ZeroDivisionError):
                assert record.value == b"3"
                raise ZeroDivisionError
            break
        assert next(iter(consumer)).value == b"4"
        assert [record.value for record in islice(consumer, 5)] == _numbered(*range(5, 10))


def test_next_goes_on_from_call_to_call(store: LogStore) -> None:
    """It ends with StopIteration, and continues once there are more records."""
    with store.consumer("t") as consumer:
        assert [next(consumer).value for _ in range(10)] == _numbered(*range(10))
        with pytest.raises(StopIteration):
            next(consumer)
        assert next(consumer, None) is None
        store.topic("t").partition(0).append([b"10"])
        assert next(consumer).value == b"10"


def test_two_threads_are_told(store: LogStore) -> None:
    """A consumer that is being iterated over by another thread says so; once that has ended, it does not."""
    consumer = store.consumer("t", follow=True)
    records = iter(consumer)
    assert next(records).value == b"0"
    told: list[BaseException] = []

    def other() -> None:
        try:
            next(iter(consumer))
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert isinstance(told[0], ConsumerBusy)
    assert next(records).value == b"1"
    records.close()  # type: ignore[attr-defined]
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(told) == 1
    consumer.close()


def test_a_thread_that_ended_holds_nobody_back(store: LogStore) -> None:
    """The iteration of a thread that has ended is never closed, and does not block other threads."""
    consumer = store.consumer("t")
    kept: list[Iterator[segmentlog.Record]] = []

    def first() -> None:
        kept.append(iter(consumer))
        next(kept[0])

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert next(iter(consumer)).value == b"1"
    consumer.close()


# ---------------------------------------------------------------- topics that go


@pytest.mark.parametrize("how", ["delete", "rename", "recreate"])
@pytest.mark.parametrize("who", ["this store", "another"])
def test_a_pattern_outlives_a_topic(store: LogStore, how: str, who: str) -> None:
    """One of its topics is deleted or renamed while it follows: the others are read on."""
    for name in ("ev-a", "ev-b"):
        store.create_topic(name).partition(0).append([name.encode()])
    seen: list[tuple[str, bytes | None]] = []
    failed: list[BaseException] = []
    consumer = store.consumer("ev-*", follow=True)

    def follow() -> None:
        try:
            for record in consumer:
                seen.append((record.topic, record.value))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    wait_until(lambda: len(seen) >= 2 or failed)
    with segmentlog.open(store.path, background=False) as other:
        admin = store if who == "this store" else other
        if how == "rename":
            admin.rename_topic("ev-a", "gone")
        else:
            admin.delete_topic("ev-a")
        if how == "recreate":
            admin.create_topic("ev-a").partition(0).append([b"anew"])
        admin.topic("ev-b").partition(0).append([b"on"])
        wait_until(lambda: ("ev-b", b"on") in seen or failed)
        if how == "recreate":
            wait_until(lambda: ("ev-a", b"anew") in seen or failed)
    assert failed == []
    consumer.wakeup()
    thread.join(5)
    assert [value for topic, value in seen if topic == "ev-b"] == [b"ev-b", b"on"]
    consumer.close()


def test_a_topic_that_was_named_is_missed(store: LogStore) -> None:
    """A consumer that named the deleted topic gets an error."""
    consumer = store.consumer("t", follow=True)
    assert len(list(islice(consumer, 10))) == 10
    store.delete_topic("t")
    with pytest.raises(UnknownTopic):
        next(iter(consumer))
    consumer.close()


# ---------------------------------------------------------------- what to read, and from where


def test_lists_of_topics(store: LogStore) -> None:
    """A list may contain everything that may be given alone."""
    store.create_topic("a", partitions=2).partition(1).append([b"a1"])
    store.create_topic("b").partition(0).append([b"b0"])
    with store.consumer(["a", "b"]) as consumer:
        assert {record.value for record in consumer} == {b"a1", b"b0"}
    with store.consumer(["b", ("a", 1)], "t") as consumer:
        assert len(list(consumer)) == 12


@pytest.mark.parametrize(
    "topics", [(), ([],), (5,), (None,), (b"t",), (("t",),), (("t", "0"),), (("t", -1),), (("t", True),)]
)
def test_what_is_no_topic_is_refused(store: LogStore, topics: tuple[object, ...]) -> None:
    """The error has the name and the value, and comes before any topic is opened."""
    with pytest.raises(InvalidConfig, match=r"topics|partition"):
        store.consumer(*topics)  # type: ignore[arg-type]


def test_places_as_the_shell_has_them(tmp_path: Path) -> None:
    """-N, durations and dates start where a person expects."""
    clock = FakeClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("t", retention_ms=-1).partition(0)
        for hour in range(48):
            log.append([b"%d" % hour], timestamps=[NOW_MS - (47 - hour) * 3_600_000])

        def begins(start: object) -> int:
            with store.consumer("t", start=start) as consumer:  # type: ignore[arg-type]
                return consumer.position("t")

        assert begins(-5) == 43
        assert begins(-100) == 0
        assert begins(timedelta(hours=3)) == 44
        assert begins(timedelta(0)) == 47
        assert begins(timedelta(days=400)) == 0
        day = datetime.fromtimestamp(NOW_MS / 1000).date()
        midnight = datetime.combine(day, datetime.min.time()).timestamp() * 1000
        assert begins(day) == -(-(midnight - NOW_MS) // 3_600_000) + 47
        assert begins(date(2100, 1, 1)) == 48
        assert begins(datetime.fromtimestamp(NOW_MS / 1000, UTC)) == 47
        for wrong in ("0", 1.5, None, True, b"earliest", "-5"):
            with pytest.raises(InvalidConfig, match="start"):
                begins(wrong)
