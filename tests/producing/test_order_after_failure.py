"""A batch that fails keeps what was sent after it from being appended before it: sent again, all is in its order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aio_helpers import run
from logs import values

from segmentlog.errors import DiskFull, RecordTooLarge, SegmentlogError
from segmentlog.policy.partitioner import partition_for_key
from segmentlog.producing.producer import Producer
from segmentlog.store import LogStore
from segmentlog.testing.faults import FaultyFileSystem

VALUES = [b"%03d" % number for number in range(60)]
BATCH_BYTES = 200
"""Seven records or so."""


@pytest.fixture
def fs() -> FaultyFileSystem:
    """The file system of the store."""
    return FaultyFileSystem()


@pytest.fixture
def store(tmp_path: Path, fs: FaultyFileSystem) -> Iterator[LogStore]:
    """A new store without threads, with topics of one and of four partitions."""
    with LogStore(tmp_path / "store", background=False, fs=fs) as store:
        store.create_topic("one")
        store.create_topic("four", partitions=4)
        for topic in ("one", "four"):
            for log in store.topic(topic).partitions():
                log.append([b"first"])  # its files are there: what is written from now on are batches
        yield store


def _appended(store: LogStore, topic: str) -> list[list[bytes | None]]:
    """The values that the test sent, by partition."""
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
        except DiskFull:
            pass
        unsent = [value for value, delivery in sent if delivery.exception() is not None] + unsent[len(sent) :]
        if not unsent:
            return attempt
        with contextlib.suppress(DiskFull):  # where `send` raised it, `flush` tells it once more
            producer.flush()
    raise AssertionError(f"{len(unsent)} records were never appended")


@pytest.mark.parametrize("call", range(1, 8))
@pytest.mark.parametrize("name", [None, "named"])
def test_sent_again_it_is_in_order(store: LogStore, fs: FaultyFileSystem, call: int, name: str | None) -> None:
    """One write fails for want of room, the next one would find some: the log has each record once, as it was sent."""
    with store.producer(name=name, linger_ms=1000, batch_size=BATCH_BYTES) as producer:
        fs.fail("pwritev", errno.ENOSPC, call=call)
        assert _send_until_appended(producer, "one", keyed=False) == 2
    assert _appended(store, "one") == [VALUES]


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 6])
def test_each_of_several_partitions_is_in_order(store: LogStore, fs: FaultyFileSystem, call: int, keyed: bool) -> None:
    """Records with a key and records without one."""
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
    """A partition that fails keeps no other one from its records, not even those that were sent after the failure."""
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
    """A run that met a full disk is run again from `last_sequence`: no record is missing, none is there twice."""

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
    """Its own record is not sent. Whoever was told already, by a delivery or by `flush`, is not told by `send`."""
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


def test_what_send_raises_of_earlier_records_is_no_fault_of_its_own(store: LogStore) -> None:
    """An earlier record is too large by now: who takes that for the record in hand would drop that one."""
    with store.producer(linger_ms=1000, batch_size=2000) as producer:
        producer.send("one", b"x" * 1000)
        store.alter_topic("one", max_message_bytes=500)
        failed = producer.send("one", b"x" * 2000)  # measured by what the chunk knew: it fills it
        with pytest.raises(SegmentlogError) as told:
            producer.send("one", b"small")
        assert not isinstance(told.value, RecordTooLarge)
        assert isinstance(told.value.__cause__, RecordTooLarge)
        assert isinstance(failed.exception(), RecordTooLarge)
        with pytest.raises(RecordTooLarge):
            producer.flush()
        assert producer.send("one", b"small").result().offset == 1


def test_what_was_sent_while_a_batch_failed_fails_too(store: LogStore, fs: FaultyFileSystem) -> None:
    """Another thread appends it: what its own thread sends meanwhile is not appended before it either."""
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
    """What coroutines sent before the failure was known fails as well; sent again it is in order."""

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
