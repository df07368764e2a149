"""Producers: partitions, order, timing and delivery reports of records."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import contents, values

import segmentlog
from segmentlog.errors import (
    DiskFull,
    InvalidConfig,
    InvalidRecord,
    ProcessLimitError,
    RecordTooLarge,
    SegmentlogError,
    StoreClosed,
    UnknownTopic,
)
from segmentlog.policy.partitioner import RangePartitioner, partition_for_key
from segmentlog.store import LogStore, Topic
from segmentlog.testing.interrupts import interrupt_at, list_points


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a new store without threads, with topics of one and of four partitions."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("one")
        store.create_topic("four", partitions=4)
        yield store


def _everything(topic: Topic) -> dict[int, list[tuple[bytes | None, bytes | None]]]:
    """(key, value) of every record, by partition."""
    return {
        number: [(record.key, record.value) for record in contents(topic.partition(number))]
        for number in range(topic.partition_count)
    }


def test_keys_go_where_kafkas_murmur2_sends_them(store: LogStore) -> None:
    """With `send` and `send_many`, each key is in its one partition, in the order in which it was sent."""
    sent = [(b"key %d" % (number % 37), b"%d" % number) for number in range(400)]
    with store.producer(linger_ms=1000) as producer:
        for key, value in sent[:200]:
            producer.send("four", value, key=key)
        producer.send_many("four", [value for _, value in sent[200:]], keys=[key for key, _ in sent[200:]])
    found = _everything(store.topic("four"))
    for number in range(4):
        assert found[number] == [pair for pair in sent if partition_for_key(pair[0], 4) == number]
        assert found[number]


def test_deliveries_tell_where_records_went(store: LogStore) -> None:
    """`Delivery.result` is the topic, partition, offset and timestamp at which the record is read."""
    with store.producer(linger_ms=1000) as producer:
        deliveries = [
            producer.send("four", b"%d" % number, key=b"%d" % number, timestamp=number) for number in range(50)
        ]
        many = producer.send_many("four", [b"x", b"y", b"z"], keys=[b"1", None, b"3"], timestamps=[7, 8, 9])
        assert deliveries[0].done(), "send_many sender what was sent before it"
        assert len(many) == 3
        results = [delivery.result() for delivery in deliveries] + many.result()
        assert many[-1].result() == many.result()[2]
    expected = [b"%d" % number for number in range(50)] + [b"x", b"y", b"z"]
    for result, value in zip(results, expected, strict=True):
        (record,) = contents(store.topic(result.topic).partition(result.partition), result.offset, max_bytes=1)[:1]
        assert (record.offset, record.value, record.timestamp) == (result.offset, value, result.timestamp)
    assert len({(result.partition, result.offset) for result in results}) == 53


def test_an_explicit_partition_overrules_the_key(store: LogStore) -> None:
    """``partition=`` is obeyed for single records and lists; records without key or partition take turns."""
    with store.producer(linger_ms=1000) as producer:
        for number in range(4):
            producer.send("four", b"%d" % number, key=b"same", partition=number)
        producer.send_many("four", [b"a", b"b"], keys=[b"same", b"other"], partition=2)
    found = _everything(store.topic("four"))
    assert found == {
        0: [(b"same", b"0")], 1: [(b"same", b"1")], 3: [(b"same", b"3")],
        2: [(b"same", b"2"), (b"same", b"a"), (b"other", b"b")],
    }  # fmt: skip
    with store.producer(linger_ms=0) as producer:
        places = [producer.send("four", b"no key").result().partition for _ in range(8)]
    assert sorted(places) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_range_partitioner_keeps_neighbours_together(store: LogStore) -> None:
    """Keys below the first bound go to partition 0, and so on."""
    with store.producer(partitioner=RangePartitioner([b"g", b"n", b"t"])) as producer:
        producer.send_many("four", [b""] * 5, keys=[b"a", b"g", b"m", b"n", b"zz"])
    found = _everything(store.topic("four"))
    assert {number: [key for key, _ in pairs] for number, pairs in found.items()} == {
        0: [b"a"], 1: [b"g", b"m"], 2: [b"n"], 3: [b"zz"],
    }  # fmt: skip


def test_lingering_gathers_records_into_one_batch(tmp_path: Path) -> None:
    """Records sent within ``linger_ms`` share a batch, which is sent when the time is up."""
    with segmentlog.open(tmp_path / "store") as store:
        partition = store.create_topic("t").partition(0)
        with store.producer(linger_ms=150) as producer:
            deliveries = [producer.send("t", b"%d" % number) for number in range(10)]
            assert values(partition) == []
            assert not deliveries[0].done()
            assert [delivery.result(timeout_s=10).offset for delivery in deliveries] == list(range(10))
            assert len(list(partition.read(0))) == 1
            producer.send("t", b"later")
            deadline = time.monotonic() + 10
            while partition.log_end_offset < 11 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert partition.log_end_offset == 11


def test_without_lingering_each_record_goes_at_once(store: LogStore) -> None:
    """``linger_ms=0``: `send` returns with the record in the log."""
    with store.producer(linger_ms=0) as producer:
        for number in range(3):
            assert producer.send("one", b"a").done()
            assert store.topic("one").partition(0).log_end_offset == number + 1


def test_a_full_batch_does_not_linger(store: LogStore) -> None:
    """``batch_size`` bytes are sent at once, by the `send` that fills them."""
    partition = store.topic("one").partition(0)
    with store.producer(linger_ms=3_600_000, batch_size=1000) as producer:
        for _ in range(40):
            producer.send("one", b"x" * 100)
        assert 30 <= partition.log_end_offset < 40
        assert all(5 <= len(batch) <= 10 for batch in partition.read(0))
        producer.flush()
        assert partition.log_end_offset == 40


def test_what_is_spread_over_partitions_is_gathered_for_each_of_them(store: LogStore) -> None:
    """``batch_size`` counts for each partition that the last chunk went to: or a thousand of them get tiny batches."""
    topic = store.topic("four")
    with store.producer(linger_ms=3_600_000, batch_size=4_000) as producer:
        sizes, before = [], 0
        for number in range(400):
            producer.send("four", b"x" * 76, key=b"%d" % number)  # 100 bytes each, as they are counted
            end = sum(log.log_end_offset for log in topic.partitions())
            if end != before:
                sizes.append(end - before)
                before = end
        assert sizes == [40, 160, 160]
        producer.flush()
        for _ in range(160):
            producer.send("four", b"x" * 76)  # records without keys: each chunk goes to one partition
        assert sum(log.log_end_offset for log in topic.partitions()) == 400 + 160
        for _ in range(40):
            producer.send("four", b"x" * 76)
        assert sum(log.log_end_offset for log in topic.partitions()) == 400 + 200
    assert sum(len(values(log)) for log in topic.partitions()) == 600


def test_durable_deliveries_are_on_disk(store: LogStore) -> None:
    """`Delivery.durable` and ``ack="durable"`` return after the fsync; `result` need not."""
    store.alter_topic("one", fsync="never")
    partition = store.topic("one").partition(0)
    with store.producer(linger_ms=1000) as producer:
        first = producer.send("one", b"a")
        assert first.result().offset == 0
        assert partition.durable_offset == 0
        assert first.durable().offset == 0
        assert partition.durable_offset == 1
        assert [one.offset for one in producer.send_many("one", [b"b", b"c"]).durable()] == [1, 2]
        assert partition.durable_offset == 3
    with store.producer(ack="durable") as producer:
        producer.send("one", b"d")
        producer.flush()
        assert partition.durable_offset == 4


def test_a_failure_is_told_by_the_delivery_and_once_more_by_flush(store: LogStore) -> None:
    """`result`, `exception` and `flush` report a failure, and then the producer works again."""
    producer = store.producer(linger_ms=1000)
    good = producer.send("four", b"good", key=b"k")
    bad = producer.send("one", b"x" * 2000)
    store.alter_topic("one", max_message_bytes=1000)
    with pytest.raises(RecordTooLarge):
        producer.flush()
    assert isinstance(bad.exception(), RecordTooLarge)
    with pytest.raises(RecordTooLarge):
        bad.result()
    with pytest.raises(RecordTooLarge):
        bad.durable()
    assert good.exception() is None
    producer.flush()
    assert producer.send("one", b"small").result().offset == 0
    producer.send("one", b"x" * 900)
    store.alter_topic("one", max_message_bytes=500)
    with pytest.raises(RecordTooLarge):
        producer.close()
    producer.close()


def test_send_manys_failure_hides_no_other(store: LogStore) -> None:
    """`send_many` reports its failure; `flush` still reports an earlier one."""
    store.create_topic("tiny", max_message_bytes=100)
    store.create_topic("gone")
    producer = store.producer(linger_ms=1000)
    lost = producer.send("gone", b"a")
    store.delete_topic("gone")
    assert isinstance(lost.exception(), UnknownTopic)
    with pytest.raises(RecordTooLarge):
        producer.send_many("tiny", [b"x" * 200])
    with pytest.raises(UnknownTopic):
        producer.flush()
    producer.flush()


@pytest.mark.parametrize("with_partition", [False, True])
@pytest.mark.parametrize("size", [1, 500_000])
def test_a_topic_made_anew_is_sent_to(store: LogStore, with_partition: bool, size: int) -> None:
    """Records are sent to names: a producer continues with the new topic of that name."""
    options: dict[str, Any] = {"partition": 0} if with_partition else {}
    store.create_topic("anew")
    with (
        store.producer(linger_ms=1000, batch_size=4 << 20) as producer,
        segmentlog.open(store.path, background=False) as other,
    ):
        producer.send("anew", b"1").result()
        other.delete_topic("anew")
        for _ in range(2):
            with pytest.raises(UnknownTopic):
                producer.send("anew", b"2" * size, **options)
        other.create_topic("anew")
        assert producer.send("anew", b"3" * size, **options).result().offset == 0
        # The chunk that takes records meanwhile has started before.
        late = producer.send("anew", b"4" * size, **options)
        other.delete_topic("anew")
        other.create_topic("anew")
        assert producer.send("anew", b"5" * size, **options).result().offset == 1
        assert late.result().offset == 0


def test_each_partition_has_its_own_error(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records get the error of their own partition, not that of another."""
    topic = store.topic("four")

    def failing(error: Exception) -> Callable[..., int]:
        def append(*_: Any) -> int:
            raise error

        return append

    errors: list[Exception] = [DiskFull("/disk", 1), ProcessLimitError(errno.EMFILE, "Too many open files", "/disk")]
    with store.producer(linger_ms=1000) as producer:
        for number, error in enumerate(errors):
            monkeypatch.setattr(topic.partition(number), "append_columns", failing(error))
        deliveries = [producer.send("four", b"x", partition=number) for number in range(3)]
        with pytest.raises(DiskFull):
            producer.flush()
    assert [delivery.exception() for delivery in deliveries] == [*errors, None]


@pytest.mark.parametrize("name", [None, "named"])
def test_a_handler_that_raises_is_heard_once(store: LogStore, name: str | None) -> None:
    """If a signal handler raises an `Exception`, appended records do not fail, and no later flush raises it again."""
    log = store.topic("one").partition(0)
    with store.producer(name=name, linger_ms=1000) as producer:

        def send_many() -> None:
            assert producer.send_many("one", [b"x"]).result()[0].offset == log.log_end_offset - 1

        def send() -> None:
            delivery = producer.send("one", b"x")
            producer.flush()
            assert delivery.result().offset == log.log_end_offset - 1

        tried = 0
        for operation in (send_many, send):
            operation()
            for at in range(1, len(list_points(operation)) + 1):
                outcome = interrupt_at(at, operation, TimeoutError)
                tried += outcome.place is not None
                try:
                    operation()
                except TimeoutError as error:
                    raise AssertionError(f"told again after point {at}, {outcome.place}") from error
        assert tried > 200


class _Partitioner:
    """One that divides by nothing."""

    def partitions(self, keys: Any, partition_count: int, sticky: int) -> Any:
        raise ZeroDivisionError


def test_an_error_of_a_partitioner_keeps_no_other_topic_back(store: LogStore) -> None:
    """The delivery and `flush` raise it, as any other; later records of the topic fail until a call has raised it."""
    producer = store.producer(linger_ms=1000, partitioner=_Partitioner())
    failed = producer.send("four", b"1", b"key")
    sent = producer.send("one", b"2")
    with pytest.raises(ZeroDivisionError):
        producer.flush()
    producer.flush()
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert sent.done()
    producer.send("four", b"3", b"key")
    with pytest.raises(SegmentlogError, match="ZeroDivisionError") as withheld:
        producer.send_many("four", [b"4"])  # refused, because the failed record may belong to the same partition
    assert isinstance(withheld.value.__cause__, ZeroDivisionError)
    assert producer.send_many("four", [b"4"]).result()[0].offset == 0
    with pytest.raises(ZeroDivisionError):
        producer.send_many("four", [b"5"], [b"key"])
    producer.send("one", b"6")
    producer.send("four", b"7", b"key")
    with pytest.raises(ZeroDivisionError):
        producer.close()
    assert values(store.topic("one").partition(0)) == [b"2", b"6"]


def test_a_store_is_closed_whatever_is_raised(tmp_path: Path) -> None:
    """If a partitioner or callback raises, everything is closed, and the first error is raised."""

    def fail(_: object) -> None:
        raise LookupError

    store = segmentlog.open(tmp_path / "store", background=False)
    store.create_topic("t", partitions=2)
    producers = [store.producer(linger_ms=1000, partitioner=_Partitioner()) for _ in range(2)]
    for producer in producers:
        producer.send("t", b"1", b"key")
    member = store.consumer("t", group="g", on_revoked=fail)
    member.poll_group(5)
    with pytest.raises(ZeroDivisionError):
        store.close()
    assert store.is_closed
    for producer in producers:
        with pytest.raises(StoreClosed):
            producer.send("t", b"2")
    store = segmentlog.open(tmp_path / "store", background=False)
    member = store.consumer("t", group="g", on_revoked=fail)
    member.poll_group(5)
    with pytest.raises(LookupError):
        store.close()
    with segmentlog.open(tmp_path / "store", background=False) as store:
        assert store.groups.describe("g").state == "Empty"


def test_a_partition_that_does_not_exist_is_told(store: LogStore) -> None:
    """The error is `UnknownTopic`, at once, and later records are appended."""
    producer = store.producer(linger_ms=1000)
    with pytest.raises(UnknownTopic):
        producer.send("four", b"a", partition=9)
    with pytest.raises(UnknownTopic):
        producer.send_many("four", [b"a"], partition=4)
    producer.flush()
    assert producer.send("four", b"a", partition=3).result().offset == 0


def test_a_slow_batch_times_out(tmp_path: Path) -> None:
    """`result` with a timeout raises `TimeoutError` while the record lingers, and works later."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t")
        with store.producer(linger_ms=3_600_000) as producer:
            delivery = producer.send("t", b"a")
            with pytest.raises(TimeoutError):
                delivery.exception(0.01)
            with pytest.raises(TimeoutError):
                delivery.result(timeout_s=0.05)
            producer.flush()
            assert delivery.result(timeout_s=0).offset == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"value": "text"}, InvalidRecord),
        ({"value": 1}, InvalidRecord),
        ({"key": "text"}, InvalidRecord),
        ({"headers": [("a", "b")]}, InvalidRecord),
        ({"headers": [("good", b"1")], "timestamp": -(2**62)}, InvalidRecord),
        ({"headers": [("good", b"1")], "partition": -1}, InvalidConfig),
        ({"timestamp": 5, "partition": "0"}, InvalidConfig),
        ({"timestamp": 1.5}, InvalidRecord),
    ],
)
def test_a_refused_record_leaves_no_trace(store: LogStore, options: dict[str, Any], error: type[Exception]) -> None:
    """`send` raises at once for an invalid record, and the next record is not affected."""
    with store.producer(linger_ms=1000) as producer:
        producer.send("one", b"before")
        with pytest.raises(error):
            producer.send("one", **{"value": b"v", **options})
        producer.send("one", b"after")
    found = contents(store.topic("one").partition(0))
    assert [(record.value, record.headers) for record in found] == [(b"before", ()), (b"after", ())]
    assert found[0].timestamp == found[1].timestamp > 10**12


def test_headers_and_mutable_values_are_taken_as_they_are_when_sent(store: LogStore) -> None:
    """A bytearray that changes after `send` does not change the record; tombstones and headers arrive."""
    value = bytearray(b"then")
    with store.producer(linger_ms=1000) as producer:
        producer.send("one", value, key=memoryview(b"k"), headers=[("h", b"1"), ("h", None)])  # type: ignore[arg-type]
        value[:] = b"now!"
        producer.send("one", None, key=b"k")
    first, second = contents(store.topic("one").partition(0))
    assert (first.key, first.value, first.headers) == (b"k", b"then", (("h", b"1"), ("h", None)))
    assert (second.key, second.value, second.headers) == (b"k", None, ())


def test_options_that_make_no_sense_are_refused(store: LogStore) -> None:
    """A typo is an error where it is made."""
    for options in ({"linger_ms": -1}, {"linger_ms": "5"}, {"batch_size": 0}, {"ack": "all"}, {"batch_size": 1.5}):
        with pytest.raises(InvalidConfig):
            store.producer(**options)
    with store.producer() as producer, pytest.raises(UnknownTopic):
        producer.send("nowhere", b"a")


def test_a_closed_producer_takes_no_records(store: LogStore) -> None:
    """`close` flushes; afterwards `send` raises `StoreClosed`."""
    producer = store.producer(linger_ms=1000)
    producer.send("one", b"a")
    producer.close()
    producer.close()
    assert values(store.topic("one").partition(0)) == [b"a"]
    with pytest.raises(StoreClosed):
        producer.send("one", b"b")
    with pytest.raises(StoreClosed):
        producer.send_many("one", [b"b"])


@pytest.mark.parametrize("flush_first", [True, False])
def test_a_record_that_meets_a_chunk_being_sent_arrives_once(store: LogStore, flush_first: bool) -> None:
    """A chunk is sent right before, or right after a record was added to it: the record is in it or in the next."""
    with store.producer(linger_ms=1000) as producer:
        producer.send("one", b"a")
        chunk = producer._chunks["one"]
        add = chunk.add

        def add_meanwhile(record: Any) -> None:
            if flush_first:
                producer.flush()
            add(record)
            if not flush_first:
                producer.flush()

        chunk.add = add_meanwhile
        delivery = producer.send("one", b"b", headers=[("h", b"1")])
        producer.send("one", b"c")
        producer.flush()
        assert delivery.result().offset == 1
    records = contents(store.topic("one").partition(0))
    assert [record.value for record in records] == [b"a", b"b", b"c"]
    assert records[1].headers == (("h", b"1"),)


@pytest.fixture
def hurried_threads() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried_threads")
def test_many_threads_share_a_producer(tmp_path: Path) -> None:
    """Every record of every thread arrives once, at its delivery's place, in its thread's order for each key."""
    with segmentlog.open(tmp_path / "store") as store:
        topic = store.create_topic("t", partitions=3)
        failures: list[BaseException] = []
        told: dict[tuple[int, int], bytes] = {}

        with store.producer(linger_ms=1, batch_size=2000) as producer:

            def work(name: int) -> None:
                try:
                    deliveries = []
                    for number in range(300):
                        value = b"%d:%d" % (name, number)
                        deliveries.append((producer.send("t", value, key=b"%d" % name), value))
                        if number % 100 == 50:
                            producer.flush()
                    for delivery, value in deliveries:
                        place = delivery.result(timeout_s=30)
                        told[place.partition, place.offset] = value
                except BaseException as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        assert not failures, failures
        found = _everything(topic)
        for (number, offset), value in told.items():
            assert found[number][offset][1] == value
        assert sum(map(len, found.values())) == len(told) == 1800
        for name in range(6):
            own = [value for key, value in found[partition_for_key(b"%d" % name, 3)] if key == b"%d" % name]
            assert own == [b"%d:%d" % (name, number) for number in range(300)]


def test_a_store_takes_its_producers_along(store: LogStore) -> None:
    """Records sent before are appended; sending afterwards raises an error of this library."""
    producer = store.producer(linger_ms=1000)
    delivery = producer.send("one", b"a")
    store.close()
    assert delivery.result().offset == 0
    producer.close()
    with pytest.raises(StoreClosed):
        producer.send("one", b"b")


def test_the_store_s_own_topics_are_not_written_to(tmp_path):
    """A producer cannot write to internal topics, but consumers can read them."""
    with segmentlog.open(tmp_path / "store", background=False) as store, store.producer() as producer:
        store._topics.internal_topic("__consumer_offsets")
        with pytest.raises(segmentlog.InvalidTopicName, match="internal"):
            producer.send("__consumer_offsets", b"x", key=b"k")
        assert list(store.consumer("__consumer_offsets")) == []


# ---------------------------------------------------------------- records that no batch holds


_LARGE = b"x" * (2 << 20)


@pytest.mark.parametrize("options", [{"value": _LARGE}, {"key": _LARGE}, {"headers": [("h", _LARGE)]}])
def test_a_record_that_is_too_large_is_refused_at_send(tmp_path, options):
    """Records that would have shared its batch are sent; the limit is exact."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t")
        with store.producer(linger_ms=50) as producer:
            first = producer.send("t", b"g")
            with pytest.raises(segmentlog.RecordTooLarge) as raised:
                producer.send("t", **{"value": b"v", **options})
            assert raised.value.size_bytes > raised.value.limit_bytes == 1_048_588
            second = producer.send("t", b"g2")
            assert (first.result().offset, second.result().offset) == (0, 1)


def test_the_largest_record_is_sent(tmp_path):
    """`send` accepts what an append accepts, to the byte, and rejects one byte more."""
    with segmentlog.open(tmp_path / "store") as store:
        log = store.create_topic("t", max_message_bytes=5000).partition(0)
        size = 5000
        while True:
            try:
                log.append([b"x" * size])
                break
            except segmentlog.RecordTooLarge:
                size -= 1
        with store.producer() as producer:
            assert producer.send("t", b"x" * size).result().offset == 1
            with pytest.raises(segmentlog.RecordTooLarge):
                producer.send("t", b"x" * (size + 1))


def test_what_its_topic_cannot_take_is_refused_at_send(tmp_path):
    """A missing key and an invalid partition are rejected alone, without affecting other records."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("c", cleanup_policy="compact")
        store.create_topic("t", partitions=2)
        with store.producer(linger_ms=50) as producer:
            sent = [producer.send("c", b"1", key=b"k"), producer.send("t", b"1", partition=1)]
            with pytest.raises(segmentlog.InvalidRecord, match="compacted"):
                producer.send("c", b"2")
            with pytest.raises(segmentlog.UnknownTopic, match="no partition 2"):
                producer.send("t", b"2", partition=2)
            sent += [producer.send("c", b"3", key=b"k"), producer.send("t", b"3", partition=1)]
            assert [one.result().offset for one in sent] == [0, 0, 1, 1]
            store.alter_topic("t", partitions=3)
            assert producer.send("t", b"4", partition=2).result().partition == 2
