"""A batch that fails keeps what was sent after it from being appended before it: sent again, all is in its order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from aio_helpers import run
from logs import values
from waiting import wait_until

from segmentlog.errors import DiskFull, InvalidRecord, RecordTooLarge, SegmentlogError
from segmentlog.policy.partitioner import HashPartitioner, partition_for_key
from segmentlog.producing.delivery import Delivery
from segmentlog.producing.producer import Producer
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem

VALUES = [b"%03d" % number for number in range(60)]
BATCH_BYTES = 200
"""Seven records or so."""


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
        for topic in ("one", "four"):
            for log in store.topic(topic).partitions():
                log.append([b"first"])  # creates its files, so that later writes are batches only
        yield store


def _appended(store: LogStore, topic: str) -> list[list[bytes | None]]:
    """Return the values that the test sent, by partition."""
    return [values(log)[1:] for log in store.topic(topic).partitions()]


def _send_until_appended(producer: Producer, topic: str, keyed: bool) -> int:
    """Send all values, and again what failed or was refused, as its caller would; how many rounds that took."""
    unsent = VALUES
    for attempt in range(1, 20):
        sent = []
        try:
            for value in unsent:
                sent.append((value, producer.send(topic, value, value[-1:] if keyed else None)))
            producer.flush()
        except OSError:
            pass
        unsent = [value for value, delivery in sent if delivery.exception() is not None] + unsent[len(sent) :]
        if not unsent:
            return attempt
        with contextlib.suppress(OSError):  # an error that `send` raised is raised once more by `flush`
            producer.flush()
    raise AssertionError(f"{len(unsent)} records were never appended")


def _wait_until_done(delivery: Delivery) -> None:
    """Wait without asking what became of the record: that would report its failure."""
    wait_until(lambda: delivery.done())


@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize("name", [None, "named"])
def test_sent_again_it_is_in_order(store: LogStore, fs: FaultyFileSystem, call: int, name: str | None) -> None:
    """One write fails for lack of room, and the next one would succeed: the log has each record once, in order."""
    with store.producer(name=name, linger_ms=1000, batch_size=BATCH_BYTES) as producer:
        fs.fail("pwritev", errno.ENOSPC, call=call)
        assert _send_until_appended(producer, "one", keyed=False) == 2
    assert _appended(store, "one") == [VALUES]


@pytest.mark.parametrize("topic", ["one", "four"])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("call", range(1, 8))
def test_a_batch_that_fails_before_its_records_have_partitions(
    store: LogStore, fs: FaultyFileSystem, call: int, keyed: bool, topic: str
) -> None:
    """The topic's file cannot be read: the producer withholds every later record, as it could go to any partition."""
    with store.producer(linger_ms=1000, batch_size=BATCH_BYTES) as producer:
        fs.fail("stat", errno.EIO, call=call)
        assert _send_until_appended(producer, topic, keyed) <= 2  # some calls are of no importance to the batch
    found = _appended(store, topic)
    assert sorted(value for part in found for value in part if value) == VALUES
    assert found == [sorted(part, key=lambda value: value or b"") for part in found]


class _Refusing:
    """Partitions by key, until it is told to refuse; calls ``meanwhile`` before it refuses."""

    def __init__(self) -> None:
        self.refuses = False
        self.meanwhile: Callable[[], object] = lambda: None

    def partitions(self, keys: Sequence[bytes | None], count: int, sticky: int) -> npt.NDArray[np.int32]:
        if self.refuses:
            self.refuses = False
            self.meanwhile()
            raise ValueError("the key is refused")
        return HashPartitioner().partitions(keys, count, sticky)


def test_what_was_sent_while_a_partitioner_failed_fails_too(store: LogStore) -> None:
    """The later records fail with an error that is not about a record of their own, and so does the next `send`."""
    partitioner, later = _Refusing(), []
    with store.producer(linger_ms=1000, partitioner=partitioner) as producer:
        partitioner.refuses = True
        partitioner.meanwhile = lambda: later.append(producer.send("four", b"1", key=b"k"))
        first = producer.send("four", b"0", key=b"k")
        with pytest.raises(ValueError, match="the key is refused"):
            producer.flush()
        with pytest.raises(ValueError, match="the key is refused"):
            first.result()
        error = later[0].exception()
        assert type(error) is SegmentlogError
        assert isinstance(error.__cause__, ValueError)
        for value in (b"0", b"1"):
            producer.send("four", value, key=b"k")
    assert [part for part in _appended(store, "four") if part] == [[b"0", b"1"]]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 6])
def test_each_of_several_partitions_is_in_order(store: LogStore, fs: FaultyFileSystem, call: int, keyed: bool) -> None:
    """Records stay in order in each partition, with keys and without."""
    with store.producer(linger_ms=1000, batch_size=BATCH_BYTES) as producer:
        fs.fail("pwritev", errno.ENOSPC, call=call)
        assert _send_until_appended(producer, "four", keyed) == 2
    found = _appended(store, "four")
    assert sorted(value for part in found for value in part if value) == VALUES
    for number, part in enumerate(found):
        assert part == sorted(value for value in part if value)
        if keyed:
            assert part == [value for value in VALUES if partition_for_key(value[-1:], 4) == number]


def test_other_partitions_are_appended_to(store: LogStore, fs: FaultyFileSystem) -> None:
    """A failure in one partition does not affect the records of others, even those sent after it."""
    with store.producer(linger_ms=1000, batch_size=1 << 20) as producer:
        failed = producer.send("four", b"a", partition=0)
        spread = [producer.send("four", b"b", partition=number) for number in range(4)]
        fs.fail("pwritev", errno.ENOSPC)
        with pytest.raises(DiskFull):
            producer.flush()
        assert isinstance(failed.exception(), DiskFull)
        assert [delivery.exception() is None for delivery in spread] == [False, True, True, True]
    assert _appended(store, "four") == [[], [b"b"], [b"b"], [b"b"]]


def test_what_a_named_producer_counts_is_a_beginning_of_its_input(store: LogStore, fs: FaultyFileSystem) -> None:
    """A run that met a full disk resumes from `last_sequence`: no record is missing or duplicated."""

    def load(fails_at: int = 0) -> None:
        with store.producer(name="etl", linger_ms=1000, batch_size=BATCH_BYTES) as producer:
            done = producer.last_sequence("one", 0) + 1
            if fails_at:
                fs.fail("pwritev", errno.ENOSPC, call=fails_at)
            for value in VALUES[done:]:
                producer.send("one", value)

    with pytest.raises(DiskFull):
        load(fails_at=4)  # the first writes note that the partition has producers
    (before,) = _appended(store, "one")
    assert 0 < len(before) < len(VALUES)
    assert before == VALUES[: len(before)]
    load()
    assert _appended(store, "one") == [VALUES]


def test_send_raises_what_nobody_was_told_of(store: LogStore, fs: FaultyFileSystem) -> None:
    """The new record is not sent. If a delivery or `flush` has raised the failure, `send` does not."""
    with store.producer(linger_ms=0) as producer:
        for told in (False, True):
            fs.fail("pwritev", errno.ENOSPC)
            failed = producer.send("one", b"failed")
            if told:
                assert isinstance(failed.exception(), DiskFull)
            else:
                with pytest.raises(DiskFull):
                    producer.send("one", b"not sent")
            producer.send("one", b"sent %d" % told)
        with pytest.raises(DiskFull):
            producer.flush()
        fs.fail("pwritev", errno.ENOSPC)
        producer.send("one", b"failed")
        with pytest.raises(DiskFull):
            producer.flush()
        producer.send("one", b"sent")
    assert _appended(store, "one") == [[b"sent 0", b"sent 1", b"sent"]]


@pytest.mark.parametrize("linger_ms", [0, 1000])
def test_send_many_raises_what_no_call_has_raised(store: LogStore, fs: FaultyFileSystem, linger_ms: int) -> None:
    """The failed record was sent before the list: the list is not appended, and the next one is."""
    with store.producer(linger_ms=linger_ms) as producer:
        fs.fail("pwritev", errno.ENOSPC)
        producer.send("one", b"a")
        with pytest.raises(DiskFull):
            producer.send_many("one", [b"b"])
        producer.send_many("one", [b"a", b"b"])
        with contextlib.suppress(DiskFull):  # `flush` may raise it once more
            producer.flush()
        producer.send("one", b"c")
    assert _appended(store, "one") == [[b"a", b"b", b"c"]]


def test_send_many_raises_what_the_linger_thread_met(tmp_path: Path, fs: FaultyFileSystem) -> None:
    """The thread that watches how long records linger appends them, and the disk is full only then."""
    with LogStore(tmp_path / "threads", fs=fs) as store:
        store.create_topic("one").partition(0).append([b"first"])
        with store.producer(linger_ms=1) as producer:
            fs.fail("pwritev", errno.ENOSPC)
            failed = producer.send("one", b"a")
            _wait_until_done(failed)
            with pytest.raises(DiskFull):
                producer.send_many("one", [b"b"])
            producer.send_many("one", [b"a", b"b"])
            with pytest.raises(DiskFull):
                producer.flush()
        assert _appended(store, "one") == [[b"a", b"b"]]


def test_an_old_delivery_does_not_hide_a_newer_failure(store: LogStore, fs: FaultyFileSystem) -> None:
    """Two records fail one after another: a second look at the first one's delivery raises nothing of the second."""
    with store.producer(linger_ms=0) as producer:
        fs.fail("pwritev", errno.ENOSPC)
        first = producer.send("one", b"1")
        assert isinstance(first.exception(), DiskFull)
        fs.fail("pwritev", errno.ENOSPC)
        second = producer.send("one", b"2")
        assert isinstance(first.exception(), DiskFull)
        with pytest.raises(DiskFull):
            producer.send("one", b"3")
        assert isinstance(second.exception(), DiskFull)
        for value in (b"1", b"2", b"3"):
            producer.send("one", value)
        with pytest.raises(DiskFull):
            producer.flush()
    assert _appended(store, "one") == [[b"1", b"2", b"3"]]


def test_a_delivery_does_not_hide_the_failure_of_another_partition(store: LogStore, fs: FaultyFileSystem) -> None:
    """One batch fails in two partitions, and the caller looks at one of the two records."""
    with store.producer(linger_ms=1000) as producer:
        sent = [producer.send("four", b"a", partition=number) for number in (0, 1)]
        fs.fail("pwritev", errno.ENOSPC, times=2)
        producer.send_lingering()
        assert [delivery.done() for delivery in sent] == [False, False]
        assert isinstance(sent[0].exception(), DiskFull)
        with pytest.raises(DiskFull):
            producer.send("four", b"b", partition=1)
        assert isinstance(sent[1].exception(), DiskFull)
        for value in (b"a", b"b"):
            producer.send("four", value, partition=1)
        with pytest.raises(DiskFull):
            producer.flush()
    assert _appended(store, "four") == [[], [b"a", b"b"], [], []]


def test_send_many_raises_each_failure_of_earlier_records(store: LogStore, fs: FaultyFileSystem) -> None:
    """Two partitions fail while a list waits: the list's own error reports one, the next call the other."""
    with store.producer(linger_ms=1000) as producer:
        for number in (0, 1):
            producer.send("four", b"a", partition=number)
        fs.fail("pwritev", errno.ENOSPC, times=2)
        with pytest.raises(DiskFull):
            producer.send_many("four", [b"b"], partition=0)
        with pytest.raises(DiskFull):
            producer.flush()
        producer.flush()
        producer.send_many("four", [b"a", b"b"], partition=1)
    assert _appended(store, "four") == [[], [b"a", b"b"], [], []]


def test_a_withheld_list_is_not_said_to_have_a_record_that_is_too_large(store: LogStore) -> None:
    """The record that is too large by now was sent before the list: who leaves the named index out would lose data."""
    with store.producer(linger_ms=1000) as producer:
        failed = producer.send("one", b"x" * 1000)
        store.alter_topic("one", max_message_bytes=500)
        with pytest.raises(SegmentlogError, match="earlier records") as withheld:
            producer.send_many("one", [b"a", b"b"])
        assert type(withheld.value) is SegmentlogError
        assert isinstance(withheld.value.__cause__, RecordTooLarge)
        assert isinstance(failed.exception(), RecordTooLarge)
        assert producer.send("one", b"a").exception() is None
    assert _appended(store, "one") == [[b"a"]]


def test_records_without_a_key_are_named_by_their_place_in_the_list(store: LogStore) -> None:
    """A compacted topic refuses them; the other partitions of the list have their records."""
    store.create_topic("compacted", partitions=4, config={"cleanup.policy": "compact"})
    keys = [b"k%d" % number if number != 7 else None for number in range(10)]
    with store.producer() as producer:
        producer.send_many("compacted", [b""], [b"k"], partition=0)
        deliveries, error = producer.try_send_many("compacted", keys, keys)
    assert isinstance(error, InvalidRecord)
    assert (error.index, error.indices) == (7, (7,))
    assert deliveries.first_missing <= 7


def test_what_send_raises_of_earlier_records_is_no_fault_of_its_own(store: LogStore) -> None:
    """An earlier record is too large: the error must not look like one of the current record."""
    with store.producer(linger_ms=1000, batch_size=2000) as producer:
        producer.send("one", b"x" * 1000)
        store.alter_topic("one", max_message_bytes=500)
        # It still fits the old limit, which the chunk uses, and fills the chunk.
        failed = producer.send("one", b"x" * 2000)
        with pytest.raises(SegmentlogError) as told:
            producer.send("one", b"small")
        assert not isinstance(told.value, RecordTooLarge)
        assert isinstance(told.value.__cause__, RecordTooLarge)
        assert isinstance(failed.exception(), RecordTooLarge)
        with pytest.raises(RecordTooLarge):
            producer.flush()
        assert producer.send("one", b"small").result().offset == 1


def test_what_was_sent_while_a_batch_failed_fails_too(store: LogStore, fs: FaultyFileSystem) -> None:
    """Another thread appends it, and records that its own thread sends meanwhile must not come before it."""
    reached, fails = threading.Event(), threading.Event()
    with store.producer(linger_ms=1000, batch_size=BATCH_BYTES) as producer:

        def fail() -> None:
            reached.set()
            assert fails.wait(30)
            raise OSError(errno.ENOSPC, "No space left on device")

        fs.before("pwritev", fail)
        first = producer.send("one", b"0")
        flushing = threading.Thread(target=lambda: first.exception())
        flushing.start()
        assert reached.wait(30)
        later = [producer.send("one", b"%d" % number) for number in (1, 2)]
        fails.set()
        flushing.join(30)
        assert not flushing.is_alive()
        assert [isinstance(delivery.exception(), DiskFull) for delivery in (first, *later)] == [True] * 3
        with pytest.raises(DiskFull):
            producer.flush()
        for number in range(3):
            producer.send("one", b"%d" % number)
    assert _appended(store, "one") == [[b"0", b"1", b"2"]]


@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_asynchronous_producer_likewise(store: LogStore, fs: FaultyFileSystem, call: int) -> None:
    """Records that coroutines sent before the failure was known fail as well; sent again, they are in order."""

    async def send() -> int:
        async with store.aproducer(linger_ms=1, batch_size=BATCH_BYTES) as producer:
            fs.fail("pwritev", errno.ENOSPC, call=call)
            unsent = VALUES
            for attempt in range(1, 20):
                sent: list[tuple[bytes, Any]] = []
                try:
                    for value in unsent:
                        sent.append((value, await producer.send("one", value)))
                    await producer.flush()
                except DiskFull:
                    pass
                outcomes = await asyncio.gather(*(delivery.exception() for _, delivery in sent))
                failed = [value for (value, _), error in zip(sent, outcomes, strict=True) if error is not None]
                unsent = failed + unsent[len(sent) :]
                if not unsent:
                    return attempt
                with contextlib.suppress(DiskFull):
                    await producer.flush()
            raise AssertionError(f"{len(unsent)} records were never appended")

    assert run(send()) == 2
    assert _appended(store, "one") == [VALUES]


def test_an_asynchronous_send_many_raises_what_no_call_has_raised(store: LogStore, fs: FaultyFileSystem) -> None:
    """A record failed in a thread of the pool and no coroutine awaited its delivery: the list is not appended."""

    async def send() -> None:
        async with store.aproducer(linger_ms=1) as producer:
            fs.fail("pwritev", errno.ENOSPC)
            failed = await producer.send("one", b"a")
            while not failed.done():
                await asyncio.sleep(0.001)
            with pytest.raises(DiskFull):
                await producer.send_many("one", [b"b"])
            assert isinstance(await failed.exception(), DiskFull)
            await producer.send_many("one", [b"a", b"b"])
            with pytest.raises(DiskFull):
                await producer.flush()

    run(send())
    assert _appended(store, "one") == [[b"a", b"b"]]


def test_an_asynchronous_delivery_does_not_hide_a_newer_failure(store: LogStore, fs: FaultyFileSystem) -> None:
    """The first record's delivery is awaited twice: before and after the second record fails."""

    async def send() -> None:
        async with store.aproducer(linger_ms=1) as producer:
            fs.fail("pwritev", errno.ENOSPC)
            first = await producer.send("one", b"1")
            assert isinstance(await first.exception(), DiskFull)
            fs.fail("pwritev", errno.ENOSPC)
            second = await producer.send("one", b"2")
            while not second.done():
                await asyncio.sleep(0.001)
            assert isinstance(await first.exception(), DiskFull)
            with pytest.raises(DiskFull):
                await producer.send("one", b"3")
            for value in (b"1", b"2", b"3"):
                await producer.send("one", value)
            with pytest.raises(DiskFull):
                await producer.flush()

    run(send())
    assert _appended(store, "one") == [[b"1", b"2", b"3"]]
