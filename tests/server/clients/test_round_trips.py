"""Each client, through both doors: what one writes the other reads, to the byte."""

from __future__ import annotations

import contextlib
import os
import time

import pytest
from server.clients.driver import Driver, Got, Sent, sorted_records
from waiting import wait_until
from wire import Sent as Record
from wire import foreign

from segmentlog.format.wire_codecs import WIRE_CODEC_NAMES
from segmentlog.store import LogStore

_START_MS = 1_700_000_000_000
_PARTITIONS = 3
_REFUSED = r"(?i)invalid.?record|failed to validate record|failed the validation|UnknownError"
"""aiokafka does not know this error."""


def by_library(store: LogStore, topic: str, *, committed: bool = False) -> list[Got]:
    """Return the records that the library reads."""
    isolation = "read_committed" if committed else "read_uncommitted"
    with store.consumer(topic, isolation=isolation) as consumer:
        return sorted_records([
            Got(one.partition, one.offset, one.key, one.value, one.timestamp, tuple(one.headers)) for one in consumer
        ])  # fmt: skip


def records_for(client: Driver, count: int = 12, start: int = 0) -> list[Sent]:
    """Return records of every kind that the client can write."""
    found = []
    for number in range(start, start + count):
        key: bytes | None = b"key-%d" % number
        value: bytes | None = b"value-%d" % number
        headers: tuple[tuple[str, bytes | None], ...] = (("number", b"%d" % number), ("client", b"c"))
        kind = number % 6
        if kind == 0:
            value = b"all the same " * 400
        elif kind == 1:
            headers = ()
        elif kind == 2 and client.takes_any_bytes:
            key = None
        elif kind == 3 and client.takes_any_bytes:
            value = None
        elif kind == 4 and client.takes_any_bytes:
            key, value = bytes(range(256)), b""
        elif kind == 5:
            key, value = "schlüssel".encode(), "wert ✓".encode()
        found.append(Sent(number % _PARTITIONS, key, value, _START_MS + number, headers))
    return found


def fields(records: list[Got] | list[Sent], *, with_time: bool) -> list[object]:
    """Return the written fields of records, by partition and in their order."""
    ordered = sorted(records, key=lambda one: one.partition)
    return [(one.partition, one.key, one.value, one.timestamp if with_time else 0, one.headers) for one in ordered]


def test_what_a_client_writes(client: Driver, store: LogStore) -> None:
    """With every codec, with headers and nulls, the library and the client read the records as they were sent."""
    sent: list[Sent] = []
    store.create_topic("t", partitions=_PARTITIONS)
    for round_, codec in enumerate(client.codecs):
        records = records_for(client, start=100 * round_)
        before = [partition.log_end_offset for partition in store.topic("t").partitions()]
        placed = client.write("t", records, codec=codec)
        sent += records
        if client.tells_offsets:
            expected = [
                (one.partition, before[one.partition] + index // _PARTITIONS) for index, one in enumerate(records)
            ]
            assert placed == expected
    found = by_library(store, "t")
    assert fields(found, with_time=client.sets_timestamps) == fields(sent, with_time=client.sets_timestamps)
    assert sorted_records(client.read("t", len(sent))) == found


@pytest.mark.parametrize("wanted", ["gzip", "snappy", "zstd", "none"])
def test_what_a_topic_recompresses(client: Driver, store: LogStore, wanted: str) -> None:
    """For each codec of a client, records are stored with the topic's codec, and client and library read them."""
    sent: list[Sent] = []
    store.create_topic("t", compression_type=wanted)
    for round_, codec in enumerate(client.codecs):
        records = [one._replace(partition=0) for one in records_for(client, start=100 * round_)]
        client.write("t", records, codec=codec)
        sent += records
    batches = list(store.topic("t").partition(0).read(0))
    assert {WIRE_CODEC_NAMES[batch.header.codec] for batch in batches} == {wanted}
    found = by_library(store, "t")
    assert fields(found, with_time=client.sets_timestamps) == fields(sent, with_time=client.sets_timestamps)
    if wanted in client.codecs:
        assert sorted_records(client.read("t", len(sent))) == found


def test_null_headers(client: Driver, store: LogStore) -> None:
    """A header may be there without a value."""
    store.create_topic("t")
    store.topic("t").partition(0).append([b"by the library"], headers=[[("empty", b""), ("null", None)]])
    found = by_library(store, "t")
    assert found[0].headers == (("empty", b""), ("null", None))
    assert client.read("t", 1) == found
    if not client.writes_null_headers:
        return
    client.write("t", [Sent(0, b"k", b"by the client", _START_MS, (("empty", b""), ("null", None)))])
    assert by_library(store, "t")[1].headers == (("empty", b""), ("null", None))


@pytest.mark.parametrize("codec", ["none", "lz4", "gzip", "snappy"])
def test_what_the_library_writes(client: Driver, store: LogStore, codec: str) -> None:
    """Records of every kind, in several batches, and transactions of which one was aborted: each sees what it may."""
    store.create_topic("t", partitions=2, compression_type=codec)
    for number, partition in enumerate(store.topic("t").partitions()):
        for batch in range(3):
            part = [one for one in records_for(client, 30, 100 * batch) if one.partition == number]
            partition.append(
                [one.value for one in part], [one.key for one in part], [one.timestamp for one in part],
                [list(one.headers) for one in part],
            )  # fmt: skip
    with store.producer() as producer:
        with producer.transaction():
            producer.send_many("t", [b"committed %d" % number for number in range(20)])
        with contextlib.suppress(ZeroDivisionError), producer.transaction():
            producer.send_many("t", [b"aborted %d" % number for number in range(20)])
            producer.flush()
            raise ZeroDivisionError
        with producer.transaction():
            producer.send_many("t", [b"committed at last %d" % number for number in range(4)])
    for committed in (False, True):
        found = by_library(store, "t", committed=committed)
        assert sum(b"aborted" in (one.value or b"") for one in found) == (0 if committed else 20)
        assert sorted_records(client.read("t", len(found), committed=committed)) == found


def test_an_open_transaction(client: Driver, store: LogStore) -> None:
    """A read_committed consumer reads up to its start, and the rest once it is decided."""
    store.create_topic("t")
    store.topic("t").partition(0).append([b"before"])
    with store.producer() as producer, producer.transaction():
        producer.send_many("t", [b"within"])
        producer.flush()
        store.topic("t").partition(0).append([b"after"])
        assert [one.value for one in client.read("t", 1, committed=True)] == [b"before"]
        assert [one.value for one in client.read("t", 3)] == [b"before", b"within", b"after"]
    assert [one.value for one in client.read("t", 3, committed=True)] == [b"before", b"within", b"after"]


def test_a_compacted_topic(client: Driver, store: LogStore) -> None:
    """Gaps between offsets, tombstones, batches of either writer: what compaction left is the same for both."""
    store.create_topic("t", cleanup_policy="compact", min_cleanable_dirty_ratio=0)
    partition = store.topic("t").partition(0)
    for turn in range(3):
        keys = [b"k%d" % (number % 7) for number in range(40)]
        partition.append([b"library %d %d" % (turn, number) for number in range(40)], keys)
        client.write("t", [Sent(0, b"k%d" % (number % 5), b"client %d" % number, _START_MS) for number in range(10)])
    partition.append([None, None], [b"k1", b"k6"])
    partition.roll()
    wait_until(lambda: partition.compact() and len(by_library(store, "t")) == 7)  # unless the store was faster
    partition.append([b"last"], [b"k2"])
    found = by_library(store, "t")
    assert len(found) == 8
    assert [one.value for one in found].count(None) == 2
    assert sorted_records(client.read("t", len(found))) == found


def test_no_key_on_a_compacted_topic(client: Driver, store: LogStore) -> None:
    """The batch is rejected as a whole, and its client gets the error."""
    if not client.takes_any_bytes:
        pytest.skip("it writes an empty key where there is none")
    store.create_topic("t", cleanup_policy="compact")
    with pytest.raises(Exception, match=_REFUSED):
        client.write("t", [Sent(0, None, b"v", _START_MS)])
    assert store.topic("t").partition(0).log_end_offset == 0


@pytest.mark.parametrize(("acks", "idempotent"), [("0", False), ("1", False), ("all", False), ("all", True)])
def test_acks(client: Driver, store: LogStore, acks: str, idempotent: bool) -> None:
    """With any acks, idempotent or not, each record exists once."""
    store.create_topic("t", partitions=_PARTITIONS)
    sent = records_for(client, 6)
    client.write("t", sent, acks=acks, idempotent=idempotent)
    wait_until(lambda: len(by_library(store, "t")) >= len(sent))
    found = by_library(store, "t")
    assert fields(found, with_time=client.sets_timestamps) == fields(sent, with_time=client.sets_timestamps)
    producers = store.topic("t").partition(0).producers()
    assert bool(producers) == idempotent


def test_administration(client: Driver, store: LogStore) -> None:
    """Topics are made and deleted, records found by their time and deleted from the front."""
    if client.has_admin:
        client.create("t", 2, {"retention.ms": "3600000", "cleanup.policy": "compact,delete"})
        assert store.topic("t").partition_count == 2
        assert store.topic("t").config.retention_ms == 3_600_000
    else:
        store.create_topic("t", partitions=2)
    partition = store.topic("t").partition(1)
    start_ms = round(time.time() * 1000) - 1000  # not yet for retention to remove
    for number in range(10):
        partition.append([b"%d" % number], [b"%d" % number], [start_ms + 10 * number])
    client.write("t", [Sent(1, b"k", b"v", start_ms + 200)])
    assert [client.at_time("t", 1, start_ms + moment) for moment in (0, 1, 55, 90)] == [0, 1, 6, 9]
    if not client.has_admin:
        return
    assert client.at_time("t", 1, start_ms + 150) == 10
    assert client.at_time("t", 1, start_ms + 900) == -1
    client.trim("t", 1, 4)
    assert partition.log_start_offset == 4
    assert [one.offset for one in client.read("t", 7)] == list(range(4, 11))
    client.delete("t")
    assert store.topics() == []


def test_the_log_says_when(client: Driver, store: LogStore) -> None:
    """With `LogAppendTime`, the library and the client see the time of the append."""
    before_ms = round(time.time() * 1000)
    store.create_topic("t", message_timestamp_type="LogAppendTime")
    client.write("t", records_for(client, 3)[:1], codec="gzip")
    (found,) = by_library(store, "t")
    assert before_ms <= found.timestamp <= round(time.time() * 1000)
    assert client.read("t", 1) == [found]


def test_before_1970(client: Driver, store: LogStore) -> None:
    """A client reads the timestamps that the library writes; in both layouts, and without a timestamp."""
    stamps = [-14_182_940_000, -2, -1, 0, -62_135_596_800_000]
    log = store.create_topic("t", retention_ms=-1).partition(0)
    log.append([b"%d" % stamp for stamp in stamps], timestamps=stamps)
    log.append_wire(foreign([Record(None, b"%d" % stamp, stamp) for stamp in stamps]))
    found = client.read("t", 2 * len(stamps))
    assert [one.value for one in found] == [b"%d" % stamp for stamp in stamps * 2]
    assert [one.timestamp for one in found] == stamps * 2
    assert by_library(store, "t") == found


def test_too_large(client: Driver, store: LogStore) -> None:
    """A batch beyond `max.message.bytes` is refused, with a word on its size; a smaller one is not."""
    store.create_topic("t", max_message_bytes=2000)
    with pytest.raises(Exception, match=r"(?i)too.?large|larger than"):
        client.write("t", [Sent(0, b"k", os.urandom(1500).hex().encode(), _START_MS)])
    client.write("t", [Sent(0, b"k", b"small", _START_MS)])
    assert [one.value for one in by_library(store, "t")] == [b"small"]


def test_large_batches(client: Driver, store: LogStore) -> None:
    """A batch larger than what a client asks for at once comes all the same; the next ones follow."""
    store.create_topic("t", max_message_bytes=8 << 20, compression_type="none")
    partition = store.topic("t").partition(0)
    for number in range(3):
        partition.append([b"%d" % number * (3 << 20)])
    found = client.read("t", 3)
    assert [len(one.value or b"") for one in found] == [3 << 20] * 3
    assert found == by_library(store, "t")


@pytest.mark.parametrize("topic", ["__debezium-heartbeat.shop", "__"])
def test_a_name_with_two_underscores(client: Driver, store: LogStore, topic: str) -> None:
    """Debezium's heartbeats, Strimzi's canary: topics like any other. The store's own two are refused."""
    client.write(topic, [Sent(0, b"k", b"v", _START_MS)])
    assert [one.value for one in by_library(store, topic)] == [b"v"]
    assert [one.value for one in client.read(topic, 1)] == [b"v"]
    if client.has_admin:
        client.delete(topic)
        assert store.topics() == []
        client.create(topic, 1, {})
        with pytest.raises(Exception, match=r"(?i)invalid.*topic|topic.*(invalid|illegal|not valid)|InvalidTopic"):
            client.create("__consumer_offsets", 1, {})
    assert store.topics() == [topic]


def test_made_when_asked_for(client: Driver, store: LogStore) -> None:
    """A client that writes to an unknown topic creates it; an invalid name is rejected."""
    client.write("new.topic", [Sent(0, b"k", b"v", _START_MS)])
    assert [one.value for one in by_library(store, "new.topic")] == [b"v"]
    if client.has_admin:
        with pytest.raises(Exception, match=r"(?i)exists"):
            client.create("new.topic", 1, {})
        with pytest.raises(Exception, match=r"(?i)invalid.*topic|topic.*(invalid|illegal|not valid)|InvalidTopic"):
            client.create("no/topic", 1, {})
        with pytest.raises(Exception, match=r"(?i)config"):
            client.create("other", 1, {"no.such.key": "1"})
    assert store.topics() == ["new.topic"]
