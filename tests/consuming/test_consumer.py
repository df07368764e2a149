"""Consumers: what is read, from where, until when, and how one is woken and ended."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from leftovers import opened
from logs import log_files
from waiting import wait_until

import segmentlog
from segmentlog.consuming import wakeup
from segmentlog.consuming.consumer import Consumer, Start
from segmentlog.errors import (
    CorruptBatch,
    InvalidConfig,
    InvalidTopicName,
    LogTruncated,
    OffsetOutOfRange,
    StoreClosed,
    UnknownTopic,
)
from segmentlog.groups.group_folder import Assignment, GroupFolder
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with topics ``a`` (two partitions of 10 records), ``b`` (5 records) and ``other`` (empty)."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("a", partitions=2, fsync="never")
        store.create_topic("b", fsync="never")
        store.create_topic("other", fsync="never")
        for number in range(10):
            store.topic("a").partition(0).append([b"a0:%d" % number], timestamps=[1000 * number])
            store.topic("a").partition(1).append([b"a1:%d" % number], timestamps=[500 * number])
        store.topic("b").partition(0).append([b"b0:%d" % number for number in range(5)])
        yield store


def _values(consumer: Consumer) -> list[bytes | None]:
    return [record.value for record in consumer]


def _numbered(prefix: bytes, *numbers: int) -> list[bytes]:
    return [prefix + b":%d" % number for number in numbers]


def test_several_topics_partitions_and_patterns(store: LogStore) -> None:
    """Whole topics, single partitions and patterns; each record once, in order within its partition."""
    everything = _numbered(b"a0", *range(10)) + _numbered(b"a1", *range(10)) + _numbered(b"b0", *range(5))
    for topics in (("a", "b"), ("*",), ("[ab]", "b"), (("a", 1), "b", ("a", 0))):
        consumer = store.consumer(*topics)
        found = [value or b"" for value in _values(consumer)]
        assert sorted(found) == sorted(everything)
        for prefix in (b"a0", b"a1", b"b0"):
            assert [one for one in found if one.startswith(prefix)] == [
                one for one in everything if one.startswith(prefix)
            ]
    assert store.consumer("*").assignment() == [
        TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0), TopicPartition("other", 0),
    ]  # fmt: skip
    assert _values(store.consumer(("a", 1))) == _numbered(b"a1", *range(10))
    assert _values(store.consumer("nothing-*")) == []


def test_batches_are_the_fast_path_to_the_same_records(store: LogStore) -> None:
    """`batches` yields the columns, and the position moves with each."""
    consumer = store.consumer("a", fetch_bytes=1)
    found: list[bytes | None] = []
    for batch in consumer.batches():
        found += batch.values
        assert consumer.position(batch.topic, batch.partition) == batch.next_offset
    assert sorted(found) == sorted(_values(store.consumer("a")))  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("start", "numbers"),
    [
        ("earliest", range(10)),
        ("latest", ()),
        (7, (7, 8, 9)),
        (10, ()),
        (datetime.fromtimestamp(4, UTC), range(4, 10)),
        (datetime.fromtimestamp(3.5, UTC), range(4, 10)),
        (datetime.fromtimestamp(4), range(4, 10)),
        (datetime(2030, 1, 1, tzinfo=UTC), ()),
    ],
)
def test_reading_begins_where_it_is_asked_to(store: LogStore, start: Start, numbers: range) -> None:
    """Reading begins at an end of the log, an offset, or the first record at or after a time."""
    assert _values(store.consumer(("a", 0), start=start)) == _numbered(b"a0", *numbers)


def test_a_start_that_makes_no_sense_is_refused(store: LogStore) -> None:
    """Offsets that do not exist and unknown words raise when the consumer is created."""
    for offset in (11, 12):
        with pytest.raises(OffsetOutOfRange):
            store.consumer(("a", 0), start=offset)
    for start in ("first", True, 1.5, None):
        with pytest.raises(InvalidConfig):
            store.consumer("a", start=start)  # type: ignore[arg-type]
    for options in ({"isolation": "dirty"}, {"fetch_bytes": 0}):
        with pytest.raises(InvalidConfig):
            store.consumer("a", **options)
    with pytest.raises(InvalidConfig):
        store.consumer()
    for topic in ("unknown", ("a", 2), ("unknown", 0)):
        with pytest.raises(UnknownTopic):
            store.consumer(topic)


def test_iterating_ends_at_the_end_it_met_and_goes_on_from_there(store: LogStore) -> None:
    """Without ``follow`` records appended meanwhile are for the next iteration."""
    partition = store.topic("b").partition(0)
    consumer = store.consumer("b")
    seen = []
    for record in consumer:
        seen.append(record.value)
        partition.append([b"b0:more"])
    assert seen == _numbered(b"b0", *range(5))
    assert _values(consumer) == [b"b0:more"] * 5
    assert _values(consumer) == []


def test_leaving_an_iteration_keeps_the_position(store: LogStore) -> None:
    """After a ``break`` within a batch, the next iteration continues with the next record."""
    consumer = store.consumer("b")
    for record in consumer:
        if record.offset == 2:
            break
    assert consumer.position("b") == 3
    assert _values(consumer) == _numbered(b"b0", 3, 4)


def test_seek_position_and_lag(store: LogStore) -> None:
    """`seek` moves, also while iterating; `position` is the next offset; `lag` what is left."""
    consumer = store.consumer("a")
    assert consumer.lag() == {TopicPartition("a", 0): 10, TopicPartition("a", 1): 10}
    assert consumer.seek("a", 0, 8) == 8
    assert consumer.seek("a", 1, "latest") == 10
    assert consumer.positions() == {TopicPartition("a", 0): 8, TopicPartition("a", 1): 10}
    assert _values(consumer) == _numbered(b"a0", 8, 9)
    assert set(consumer.lag().values()) == {0}
    assert consumer.seek("a", 1, datetime.fromtimestamp(4, UTC)) == 8
    seen = []
    for record in consumer:
        seen.append(record.value)
        if len(seen) == 1:
            consumer.seek("a", 1, "earliest")
    assert seen == _numbered(b"a1", 8, *range(10))
    with pytest.raises(OffsetOutOfRange):
        consumer.seek("a", 0, 99)
    with pytest.raises(UnknownTopic):
        consumer.seek("b", 0, 0)


def test_a_paused_partition_waits(store: LogStore) -> None:
    """`pause` keeps the position of a partition, and `resume` continues there."""
    consumer = store.consumer("a")
    consumer.pause("a", 0)
    assert _values(consumer) == _numbered(b"a1", *range(10))
    assert consumer.lag()[TopicPartition("a", 0)] == 10
    consumer.resume("a", 0)
    assert _values(consumer) == _numbered(b"a0", *range(10))
    consumer = store.consumer("b")
    seen = []
    for record in consumer:
        seen.append(record.value)
        if len(seen) == 2:
            consumer.pause("b")
    assert seen == _numbered(b"b0", 0, 1), "the rest of its batch came all the same"
    consumer.resume("b")
    assert _values(consumer) == _numbered(b"b0", 2, 3, 4)


def test_durable_only_shows_what_no_crash_takes(store: LogStore) -> None:
    """Such a consumer ends at the durable offset, and so does its lag."""
    partition = store.topic("b").partition(0)
    consumer = store.consumer("b", durable_only=True)
    assert _values(consumer) == []
    partition.flush()
    partition.append([b"b0:5"])
    assert consumer.lag() == {TopicPartition("b", 0): 5}
    assert _values(consumer) == _numbered(b"b0", *range(5))


def test_a_truncated_position_is_told(store: LogStore) -> None:
    """A consumer that had read what is gone gets `LogTruncated` with the range, not silence."""
    partition = store.topic("b").partition(0)
    consumer = store.consumer("b")
    assert len(_values(consumer)) == 5
    lost = partition.truncate(3)
    partition.append([b"b0:new"])
    with pytest.raises(LogTruncated) as caught:
        _values(consumer)
    assert caught.value.lost == lost
    consumer.seek("b", 0, caught.value.lost.end_offset)
    assert _values(consumer) == [b"b0:new"]


def test_damage_is_raised_or_skipped(tmp_path: Path, store: LogStore) -> None:
    """`CorruptBatch` is the default; with ``skip_damaged`` other batches are read, and ``skipped`` lists the damage."""
    store.close()
    file = log_files(tmp_path / "store" / "a" / "0")[0]
    with segmentlog.open(tmp_path / "store", background=False) as again:
        batches = list(again.topic("a").partition(0).read(0))
        position = sum(batch.size_bytes for batch in batches[:4]) + 100
        with file.open("r+b") as writable:
            writable.seek(position)
            writable.write(b"!")
        with pytest.raises(CorruptBatch) as caught:
            _values(again.consumer(("a", 0)))
        assert Path(caught.value.path) == file
        consumer = again.consumer(("a", 0), skip_damaged=True)
        assert _values(consumer) == _numbered(b"a0", 0, 1, 2, 3, 5, 6, 7, 8, 9)
        assert [skipped[:3] for skipped in consumer.skipped] == [(TopicPartition("a", 0), 4, 5)]


# ---------------------------------------------------------------- following


class _Follower:
    """A thread that follows, and what it has seen."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.seen: list[bytes | None] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for record in self.consumer:
                self.seen.append(record.value)
        except BaseException as error:
            self.error = error

    def wait_for(self, count: int, timeout_s: float = 60) -> list[bytes | None]:
        deadline = time.monotonic() + timeout_s
        while len(self.seen) < count and time.monotonic() < deadline and self.thread.is_alive():
            time.sleep(0.002)
        assert self.error is None, self.error
        return self.seen

    def join(self, timeout_s: float = 60) -> None:
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "it does not end"


@pytest.fixture
def only_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make followers poll once an hour: records they find earlier have woken them."""
    monkeypatch.setattr(wakeup, "WAIT_S", 3_600.0)


@pytest.mark.usefixtures("only_woken")
@pytest.mark.parametrize("background", [True, False])
def test_a_follower_is_woken_by_a_thread(tmp_path: Path, background: bool) -> None:
    """Appends of another thread arrive at once, one after another."""
    with segmentlog.open(tmp_path / "store", background=background) as store:
        partition = store.create_topic("t").partition(0)
        follower = _Follower(store.consumer("t", follow=True))
        for number in range(10):
            time.sleep(0.02)
            partition.append([b"%d" % number])
            assert follower.wait_for(number + 1)[-1] == b"%d" % number
        follower.consumer.close()
        follower.join()
        assert follower.error is None


@pytest.mark.usefixtures("only_woken")
def test_a_follower_is_woken_by_a_process(tmp_path: Path) -> None:
    """Appends of another process wake it, too."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t")
        follower = _Follower(store.consumer("t", follow=True))
        script = (
            "import sys, time, segmentlog\n"
            "partition = segmentlog.open(sys.argv[1]).topic('t').partition(0)\n"
            "for number in range(20):\n"
            "    partition.append([b'%d' % number])\n"
            "    time.sleep(0.005)\n"
        )
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "store")], check=True, timeout=60)
        assert follower.wait_for(20) == [b"%d" % number for number in range(20)]
        follower.consumer.close()
        follower.join()


@pytest.mark.usefixtures("only_woken")
def test_a_durable_follower_is_woken_by_the_fsync(store: LogStore) -> None:
    """A consumer with ``durable_only`` is woken by the flush."""
    partition = store.topic("other").partition(0)
    follower = _Follower(store.consumer("other", follow=True, durable_only=True))
    partition.append([b"a"])
    time.sleep(0.05)
    assert follower.seen == []
    partition.flush()
    assert follower.wait_for(1) == [b"a"]
    follower.consumer.close()
    follower.join()


def test_topics_and_partitions_that_appear_are_followed(store: LogStore) -> None:
    """A pattern takes in new topics, a topic new partitions, both from their beginning."""
    follower = _Follower(store.consumer("new-*", "b", follow=True, start="latest"))
    time.sleep(0.05)
    store.create_topic("new-1").partition(0).append([b"first"])
    assert follower.wait_for(1) == [b"first"]
    store.alter_topic("b", partitions=2)
    store.topic("b").partition(1).append([b"second"])
    store.create_topic("new-2").partition(0).append([b"third"])
    assert sorted(one or b"" for one in follower.wait_for(3)) == [b"first", b"second", b"third"]
    follower.consumer.close()
    follower.join()


@pytest.mark.usefixtures("only_woken")
def test_wakeup_ends_an_iteration_that_waits(store: LogStore) -> None:
    """After a wakeup by another thread, iterating again continues at the position."""
    consumer = store.consumer("b", follow=True)
    follower = _Follower(consumer)
    follower.wait_for(5)
    time.sleep(0.05)
    consumer.wakeup()
    follower.join()
    store.topic("b").partition(0).append([b"next"])
    again = _Follower(consumer)
    assert again.wait_for(1) == [b"next"]
    consumer.close()
    again.join()


def test_close_from_another_thread_ends_it_without_an_error(store: LogStore) -> None:
    """The follower ends in every state, and another iteration raises `StoreClosed`."""
    for attempt in range(60):
        consumer = store.consumer("b", follow=True)
        follower = _Follower(consumer)
        time.sleep(attempt % 10 / 5000)
        consumer.close()
        follower.join()
        assert follower.error is None or isinstance(follower.error, StoreClosed), repr(follower.error)
        with pytest.raises(StoreClosed):
            next(iter(consumer))


def test_a_topic_deleted_while_it_is_followed_is_unknown(store: LogStore) -> None:
    """The follower gets `UnknownTopic`, soon, and does not sleep on."""
    with store.consumer("b", follow=True) as consumer:
        follower = _Follower(consumer)
        follower.wait_for(5)
        store.delete_topic("b")
        follower.join()
        assert isinstance(follower.error, UnknownTopic)


def test_an_event_loop_is_not_blocked(store: LogStore) -> None:
    """``async for`` yields the same records, follows, and leaves the loop to others."""

    async def main() -> tuple[list[bytes | None], int]:
        plain = [record.value async for record in store.consumer("b")]
        assert plain == _numbered(b"b0", *range(5))
        consumer = store.consumer("other", follow=True)
        ticks = 0
        seen: list[bytes | None] = []

        async def tick() -> None:
            nonlocal ticks
            while len(seen) < 3:
                ticks += 1
                if ticks % 10 == 0:
                    store.topic("other").partition(0).append([b"%d" % ticks])
                await asyncio.sleep(0.002)
            consumer.wakeup()

        ticker = asyncio.ensure_future(tick())
        async for record in consumer:
            seen.append(record.value)
        await ticker
        return seen, ticks

    seen, ticks = asyncio.run(asyncio.wait_for(main(), 20))
    assert seen[:3] == [b"10", b"20", b"30"]
    assert ticks >= 30


# ---------------------------------------------------------------- retention overtakes a consumer


def _overtaken(tmp_path, **options):
    """Return a consumer at offset 10 of a log that starts at 60 and ends at 100."""
    store = opened(segmentlog.open(tmp_path / "overtaken", background=False))
    log = store.create_topic("t", segment_records=10).partition(0)
    for start in range(0, 100, 10):
        log.append([b"%d" % number for number in range(start, start + 10)])
    consumer = store.consumer("t", start=10, **options)
    log.trim(60)
    return store, log, consumer


def test_a_position_that_was_deleted_is_an_error(tmp_path):
    """The error has the offsets that exist, and the position stays."""
    store, _, consumer = _overtaken(tmp_path)
    with store, pytest.raises(segmentlog.OffsetOutOfRange) as raised:
        list(consumer)
    assert (raised.value.offset, raised.value.log_start_offset, raised.value.log_end_offset) == (10, 60, 100)
    assert consumer.position("t") == 10


@pytest.mark.parametrize(("reset", "first"), [("earliest", 60), ("latest", 100)])
def test_a_position_that_was_deleted_moves_by_policy(tmp_path, reset, first):
    """The position moves to the first remaining record or to the end; `resets` lists the jump."""
    store, log, consumer = _overtaken(tmp_path, auto_offset_reset=reset)
    with store:
        assert [record.offset for record in consumer] == list(range(first, 100))
        assert consumer.resets == [(("t", 0), 10, first)]
        log.append([b"new"])
        assert [record.value for record in consumer] == [b"new"]


def test_an_unknown_reset_policy_is_refused(tmp_path):
    """The error lists the valid policies."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t")
        with pytest.raises(segmentlog.InvalidConfig, match="earliest"):
            store.consumer("t", auto_offset_reset="none")


@pytest.mark.parametrize("records_before", [0, 3])
def test_a_read_only_reader_sees_what_is_written_after_it_opened(tmp_path, records_before):
    """This holds even if no process had the topic open: after its creation, or before the first writer of a boot."""
    with segmentlog.open(tmp_path / "s", background=False) as store:
        store.create_topic("t")
        if records_before:
            store.topic("t").partition(0).append([b"before"] * records_before)
    (tmp_path / "s/t/0/state").unlink(missing_ok=True)  # as after a boot: it is of no use then
    with segmentlog.open(tmp_path / "s", read_only=True, background=False) as reader:
        assert reader.topic("t").partition(0).log_end_offset == records_before
        with reader.consumer("t", start="latest", follow=True) as consumer:
            found = []
            thread = threading.Thread(target=lambda: found.append(next(iter(consumer)).value))
            thread.start()
            with segmentlog.open(tmp_path / "s", background=False) as store:
                store.topic("t").partition(0).append([b"after"])
                assert reader.topic("t").partition(0).log_end_offset > records_before
                thread.join(10)
            assert found == [b"after"]


@pytest.mark.parametrize("trimmed", [0, 8, 11])
def test_the_last_records_before_and_behind_a_lost_range(store: LogStore, trimmed: int) -> None:
    """They are counted by records, also if a trim ended within the range."""
    log = store.create_topic("lost").partition(0)
    log.append(_numbered(b"old", *range(10)))
    log.truncate(5)
    log.append(_numbered(b"new", *range(3)))
    log.trim(trimmed)
    there = _numbered(b"new", *range(3)) if trimmed else [*_numbered(b"old", *range(5)), *_numbered(b"new", *range(3))]
    for count in (1, 2, 3, 4, 7, 50):
        assert _values(store.consumer("lost", start=-count)) == there[-count:]


# ------------------------------------------------------------ a topic that does not exist yet


@pytest.mark.parametrize("wanted", ["later", ("later", 1)])
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_a_consumer_that_follows_waits_for_its_topic(
    store: LogStore, wanted: str | tuple[str, int], start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads the topic from its beginning once another thread or process creates it, and logs that it waits, once."""
    follower = _Follower(store.consumer("b", wanted, follow=True, start=start))
    follower.wait_for(5 if start == "earliest" else 0)
    store.create_topic("later", partitions=2).partition(1).append([b"first"])
    assert follower.wait_for(6 if start == "earliest" else 1)[-1] == b"first"
    follower.consumer.close()
    follower.join()
    assert [record.message for record in caplog.records if "later" in record.message] == [
        "topic 'later' does not exist yet; the consumer waits until it is created"
    ]


def test_a_partition_that_the_awaited_topic_lacks_is_an_error(store: LogStore) -> None:
    """Waiting for the partition would take forever, because its number is probably wrong."""
    follower = _Follower(store.consumer(("later", 7), follow=True))
    store.create_topic("later", partitions=2)
    follower.join()
    assert isinstance(follower.error, UnknownTopic)
    assert "7" in str(follower.error)
    follower.consumer.close()


def test_a_consumer_that_does_not_follow_says_what_to_do(store: LogStore) -> None:
    """The error names both ways out."""
    with pytest.raises(UnknownTopic, match=r"topic 'later': it does not exist. Create it .* or pass follow=True"):
        store.consumer("later")
    with pytest.raises(UnknownTopic, match="or pass follow=True"):
        store.consumer("later", group="g")


@pytest.mark.parametrize("name", ["no name", "../b", ""])
def test_a_name_that_no_topic_can_have_is_not_waited_for(store: LogStore, name: str) -> None:
    """This holds for a consumer alone and in a group."""
    for group in (None, "g"):
        with pytest.raises(InvalidTopicName):
            store.consumer(name, follow=True, group=group)


def test_a_member_of_a_group_waits_for_its_topic(store: LogStore) -> None:
    """It is assigned the partitions once they exist."""
    follower = _Follower(store.consumer("later", follow=True, group="g"))
    store.create_topic("later", partitions=2)
    for number in range(2):
        store.topic("later").partition(number).append([b"%d" % number])
    assert sorted(one or b"" for one in follower.wait_for(2)) == [b"0", b"1"]
    follower.consumer.close()
    follower.join()


def test_a_topic_that_appears_while_a_member_joins_is_assigned(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if the topic appears just after the first assignment was written without it."""
    rebalance = GroupFolder.rebalance

    def rebalance_and_create(folder: GroupFolder, now_ms: int) -> Assignment:
        made = rebalance(folder, now_ms)
        store.create_topic("later", exist_ok=True)
        return made

    monkeypatch.setattr(GroupFolder, "rebalance", rebalance_and_create)
    with store.consumer("later", follow=True, group="g") as consumer:
        monkeypatch.undo()
        wait_until(lambda: consumer.poll_group(0.1), "it is never assigned")


def test_a_poll_waits_for_its_topic(store: LogStore) -> None:
    """An empty list as long as it does not exist."""
    with store.consumer("later", follow=True) as consumer:
        assert consumer.poll() == []
        store.create_topic("later").partition(0).append([b"first"])
        assert [record.value for record in consumer.poll(30.0)] == [b"first"]
