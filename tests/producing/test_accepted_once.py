"""A producer judges a timestamp once, when the program passes the record: an accepted record may wait for any time."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from aio_helpers import run
from logs import FakeClock, contents

from segmentlog.errors import DiskFull, InvalidRecord
from segmentlog.logs.handler import LogHandler
from segmentlog.policy.partitioner import HashPartitioner
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem

_LIMIT_MS = 60_000
_LIMITS = {"message_timestamp_before_max_ms": _LIMIT_MS, "message_timestamp_after_max_ms": _LIMIT_MS}


@pytest.fixture
def clock() -> FakeClock:
    """Return the clock of the store."""
    return FakeClock()


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return the file system of the store."""
    return FaultyFileSystem()


@pytest.fixture(params=["never", "always"])
def store(tmp_path: Path, clock: FakeClock, fs: FaultyFileSystem, request: pytest.FixtureRequest) -> Iterator[LogStore]:
    """Provide a store without threads, with a topic that accepts timestamps of the last minute and the next one."""
    with LogStore(tmp_path / "store", background=False, fs=fs, clock=clock) as store:
        store.create_topic("t", partitions=2, fsync=request.param, **_LIMITS)
        for log in store.topic("t").partitions():
            log.append([b"first"])
        yield store


def _appended(store: LogStore, topic: str = "t") -> list[tuple[bytes | None, int]]:
    """Return each value and its timestamp, except the first record of each partition."""
    logs = store.topic(topic).partitions()
    return sorted((one.value, one.timestamp) for log in logs for one in contents(log, isolation="read_committed")[1:])


@pytest.mark.parametrize("moved_ms", [-3 * _LIMIT_MS, 3 * _LIMIT_MS])
@pytest.mark.parametrize("name", [None, "named"])
def test_an_accepted_record_is_appended_after_any_wait(
    store: LogStore, clock: FakeClock, name: str | None, moved_ms: int
) -> None:
    """The record waits in a chunk, in a transaction too, while the clock moves or the topic gets stricter limits."""
    at_ms = clock.now_ms()
    with store.producer(linger_ms=1000, name=name) as producer:
        for number, stamp in enumerate((at_ms - _LIMIT_MS, at_ms, at_ms + _LIMIT_MS)):
            producer.send("t", b"%d" % number, b"k", timestamp=stamp)
        producer.send("t", b"3", b"k")
        clock.advance(moved_ms)
        store.alter_topic("t", {"message.timestamp.before.max.ms": "1s", "message.timestamp.after.max.ms": "1s"})
        producer.flush()
    expected = [(b"0", at_ms - _LIMIT_MS), (b"1", at_ms), (b"2", at_ms + _LIMIT_MS), (b"3", at_ms)]
    assert _appended(store) == expected
    with store.producer(linger_ms=1000) as producer, producer.transaction():
        producer.send("t", b"4", timestamp=clock.now_ms())
        clock.advance(moved_ms)
    assert len(_appended(store)) == 5


@pytest.mark.parametrize("wrong_ms", [-_LIMIT_MS - 1, _LIMIT_MS + 1])
def test_the_check_uses_the_clock_of_the_store(store: LogStore, clock: FakeClock, wrong_ms: int) -> None:
    """`send` and `send_many` refuse a record by the time of the call, and append every record before it."""
    with store.producer(linger_ms=1000) as producer:
        producer.send("t", b"before", timestamp=clock.now_ms())
        with pytest.raises(InvalidRecord, match=r"message\.timestamp"):
            producer.send("t", b"refused", timestamp=clock.now_ms() + wrong_ms)
        with pytest.raises(InvalidRecord, match=r"timestamps\[1\].*message\.timestamp") as raised:
            producer.send_many("t", [b"", b"refused"], timestamps=[clock.now_ms(), clock.now_ms() + wrong_ms])
        assert raised.value.indices == (1,)
    assert _appended(store) == [(b"before", clock.now_ms())]


class _Waiting:
    """Lets time pass between the check of records and their append."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def partitions(self, keys: Sequence[bytes | None], count: int, sticky: int) -> npt.NDArray[np.int32]:
        self._wait()
        return HashPartitioner().partitions(keys, count, sticky)


def test_a_list_is_judged_once(store: LogStore, clock: FakeClock) -> None:
    """A list that `send_many` accepts is appended to each of its partitions, however long the first append takes."""
    at_ms = clock.now_ms()
    with store.producer(partitioner=_Waiting(lambda: clock.advance(2 * _LIMIT_MS))) as producer:
        producer.send_many("t", [b"0", b"1"], [b"a", b"b"], timestamps=[at_ms, at_ms])
    assert _appended(store) == [(b"0", at_ms), (b"1", at_ms)]


def test_a_record_that_the_program_sends_again_is_judged_again(
    store: LogStore, clock: FakeClock, fs: FaultyFileSystem
) -> None:
    """A full disk fails the record, and the program passes it a second time: that call decides by its own time."""
    at_ms = clock.now_ms()
    with store.producer(linger_ms=1000) as producer:
        fs.fail("pwritev", errno.ENOSPC)
        delivery = producer.send("t", b"0", timestamp=at_ms)
        with pytest.raises(DiskFull):
            producer.flush()
        assert isinstance(delivery.exception(), DiskFull)
        clock.advance(_LIMIT_MS + 1)
        with pytest.raises(InvalidRecord):
            producer.send("t", b"0", timestamp=at_ms)


@pytest.mark.parametrize("many", [False, True])
def test_an_asynchronous_producer_judges_when_it_is_called(store: LogStore, clock: FakeClock, many: bool) -> None:
    """A record may wait for other calls, or in a chunk, for longer than the topic's timestamp limit."""
    at_ms, is_called = clock.now_ms(), threading.Event()

    def advance() -> None:
        assert is_called.wait(30)
        clock.advance(2 * _LIMIT_MS)

    async def sent() -> None:
        async with store.aproducer(linger_ms=60_000) as producer:
            await producer.send("t", b"before")
            producer._bridge.queue(advance)  # type: ignore[union-attr]
            asyncio.get_running_loop().call_soon(is_called.set)  # runs when the call below waits
            if many:
                await producer.send_many("t", [b"0"], timestamps=[at_ms])
            else:
                await producer.send("t", b"0", timestamp=at_ms)
            await producer.flush()
            with pytest.raises(InvalidRecord):
                await producer.send("t", b"refused", timestamp=at_ms)
            with pytest.raises(InvalidRecord):
                await producer.send_many("t", [b"refused"], timestamps=[at_ms])

    run(sent())
    assert _appended(store) == [(b"0", at_ms), (b"before", at_ms)]


def test_a_log_handler_judges_when_a_line_is_logged(
    store: LogStore, clock: FakeClock, fs: FaultyFileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk delays the line for longer than the topic's limit. The topic refuses only the line of long ago."""
    logger = logging.getLogger("accepted.once")
    logger.propagate, clock.wall_ms = False, time.time_ns() // 1_000_000
    handler = LogHandler(store, "lines", config=_LIMITS)
    logger.addHandler(handler)
    try:
        logger.error("first")
        assert handler.flush_within(30)
        with handler._append_lock:  # the handler's thread waits
            logger.error("full disk")
            old = logging.makeLogRecord({"name": logger.name, "msg": "old", "levelno": 40, "levelname": "ERROR"})
            old.created -= 5 * _LIMIT_MS / 1000
            logger.handle(old)
            logger.error("after it")
            clock.advance(2 * _LIMIT_MS)
            fs.fail("pwritev", errno.ENOSPC)
        assert handler.flush_within(30)
    finally:
        logger.removeHandler(handler)
        handler.close()
    lines = [json.loads(value)["message"] for value, _ in _appended(store, "lines") if value]
    assert sorted(lines)[1:] == ["after it", "full disk"]
    assert "1 earlier log records of this process were dropped" in sorted(lines)[0]
    assert "No space left" in capsys.readouterr().err
