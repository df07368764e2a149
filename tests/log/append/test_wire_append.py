"""Batches of Kafka's that are appended: as they came, once, and among others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from logs import NOW_MS, FakeClock, open_log
from wire import CODECS, Sent, foreign, forged, read_foreign

from segmentlog.errors import (
    InvalidRecord,
    InvalidWireBatch,
    OutOfOrderSequence,
    ProducerFenced,
    ReadOnlyStore,
    RecordTooLarge,
)
from segmentlog.format.batch import PLACE_SIZE
from segmentlog.format.wire import WireHeader, parse_wire_batch
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.log.append.wire_append import SMALL_RAW_BYTES, SMALL_STORED_BYTES
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp

RECORDS = [Sent(b"k%d" % n, b"value %d" % n, NOW_MS + n, (("h", b"%d" % n),)) for n in range(5)]


def seen(log: Partition, **options: Any) -> list[tuple[int, Sent]]:
    """Return every record as the library reads it."""
    return [
        (one.offset, Sent(one.key, one.value, one.timestamp, one.headers))
        for batch in log.read(log.log_start_offset, **options)
        for one in batch.records()
    ]


def served(log: Partition, **options: Any) -> list[tuple[int, Sent]]:
    """Yield every record as a Kafka client reads it from the served bytes."""
    return [
        one
        for batch in log.read(log.log_start_offset, **options)
        for wire in to_wire_batches(batch)
        for one in read_foreign(bytes(wire))
    ]


def test_both_layouts_in_one_log(tmp_path: Path) -> None:
    """Batches of clients and of the library are read in one order, by the library and by clients."""
    log = open_log(tmp_path)
    expected: list[tuple[int, Sent]] = []
    for codec in CODECS.values():
        data = foreign(RECORDS, codec)
        told = log.append_wire(memoryview(data))
        assert (told.base_offset, told.next_offset) == (len(expected), len(expected) + 5)
        assert (told.log_append_time_ms, told.log_start_offset, told.epoch) == (-1, 0, log.epoch)
        expected += [(told.base_offset + at, one) for at, one in enumerate(RECORDS)]
        at = log.append([b"own", None], [None, b"key"], timestamps=[NOW_MS, NOW_MS - 9], headers=[(("x", None),), ()])
        expected += [(at, Sent(None, b"own", NOW_MS, (("x", None),))), (at + 1, Sent(b"key", None, NOW_MS - 9))]
    assert seen(log) == served(log) == expected
    log.close()
    log = open_log(tmp_path)
    assert seen(log) == served(log) == expected
    assert log.offset_for_timestamp(NOW_MS + 4) == 4
    for start in range(log.log_end_offset):
        assert next(iter(log.read(start))).base_offset == start


def test_what_is_served_is_what_was_sent(tmp_path: Path) -> None:
    """The bytes after our header, including the client's CRC, are the client's."""
    log = open_log(tmp_path)
    log.append([b"first"])
    data = foreign(RECORDS, 4)
    log.append_wire(data)
    *_, batch = log.read(0)
    (wire,) = to_wire_batches(batch)
    assert bytes(wire)[PLACE_SIZE:] == data[PLACE_SIZE:]


def test_log_append_time(tmp_path: Path) -> None:
    """With LogAppendTime every record has the time of its append, and the result contains it."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, **{"message.timestamp.type": "LogAppendTime"})
    clock.advance(777)
    told = log.append_wire(foreign(RECORDS, 3))
    assert told.log_append_time_ms == NOW_MS + 777
    expected = [(at, one._replace(timestamp=NOW_MS + 777)) for at, one in enumerate(RECORDS)]
    assert seen(log) == served(log) == expected


def test_a_batch_that_is_sent_again(tmp_path: Path) -> None:
    """A repeated batch is not appended again: the result is its existing offset, also after reopening the log."""
    log = open_log(tmp_path)
    first = foreign(RECORDS, producer=(9, 0, 0))
    second = foreign(RECORDS, 1, producer=(9, 0, 5))
    assert log.append_wire(first).base_offset == 0
    assert log.append_wire(second).base_offset == 5
    for _ in range(2):
        assert log.append_wire(first).base_offset == 0
        again = log.append_wire(second)
        assert (again.base_offset, again.next_offset) == (5, 10)
        log.close()
        log = open_log(tmp_path)
    assert log.log_end_offset == 10
    with pytest.raises(OutOfOrderSequence):
        log.append_wire(foreign(RECORDS, producer=(9, 0, 12)))
    assert log.append_wire(foreign(RECORDS, producer=(9, 1, 0))).base_offset == 10
    with pytest.raises(ProducerFenced):
        log.append_wire(foreign(RECORDS, producer=(9, 0, 10)))
    with pytest.raises(OutOfOrderSequence):
        log.append_wire(foreign(RECORDS, producer=(9, 2, 3)))


@pytest.mark.parametrize("refusal", ["message.timestamp.before.max.ms", "cleanup.policy"])
def test_a_batch_that_is_sent_again_after_the_topic_changed(tmp_path: Path, refusal: str) -> None:
    """The topic's settings are checked before duplicates are found, as in Kafka: a resent batch may be refused.

    Nothing is appended twice. The client gets the old offset once the topic accepts the batch again.
    """
    clock = FakeClock()
    batch = foreign([Sent(None, b"v", clock.now_ms())], producer=(9, 0, 0))
    log = open_log(tmp_path, clock=clock)
    assert log.append_wire(batch).base_offset == 0
    log.close()
    clock.advance(10_000)
    changed = {refusal: 1_000 if refusal.startswith("message") else "compact"}
    log = open_log(tmp_path, clock=clock, **changed)
    with pytest.raises((InvalidWireBatch, InvalidRecord)):
        log.append_wire(batch)
    assert log.log_end_offset == 1
    log.close()
    log = open_log(tmp_path, clock=clock)
    assert log.append_wire(batch).base_offset == 0
    assert log.log_end_offset == 1


def test_a_producer_that_nobody_knows(tmp_path: Path) -> None:
    """A producer unknown to the log may begin with any sequence, as in Kafka: its earlier batches may be deleted."""
    log = open_log(tmp_path)
    assert log.append_wire(foreign(RECORDS, producer=(9, 3, 1000))).base_offset == 0
    assert log.append_wire(foreign(RECORDS, producer=(9, 3, 1005))).base_offset == 5


def test_sequences_come_round(tmp_path: Path) -> None:
    """After 2^31 - 1 the sequence continues with 0, as in Kafka, within a batch and between two batches."""
    log = open_log(tmp_path)
    assert log.append_wire(foreign(RECORDS, producer=(9, 0, 2**31 - 8))).base_offset == 0
    assert log.append_wire(foreign(RECORDS, producer=(9, 0, 2**31 - 3))).base_offset == 5
    assert log.append_wire(foreign(RECORDS, producer=(9, 0, 2))).base_offset == 10
    assert log.append_wire(foreign(RECORDS, producer=(9, 0, 2**31 - 3))).base_offset == 5
    log.close()
    log = open_log(tmp_path)
    assert log.append_wire(foreign(RECORDS, producer=(9, 0, 7))).base_offset == 15


def test_transactions_begin_elsewhere(tmp_path: Path) -> None:
    """A transactional batch needs an open transaction of its producer; then its marker decides it, too."""
    log = open_log(tmp_path)
    data = foreign(RECORDS, producer=(9, 0, 1), transactional=True)
    with pytest.raises(InvalidWireBatch) as told:
        log.append_wire(data)
    assert told.value.reason == "transaction"
    assert log.log_end_offset == 0
    log.append([b"begin"], producer=ProducerStamp(9, 0, 0, transactional=True))
    assert log.append_wire(data).base_offset == 1
    assert log.append_wire(data).base_offset == 1
    assert log.last_stable_offset == 0
    assert seen(log, isolation="read_committed") == []
    log.end_transaction(9, 0, committed=True)
    assert [at for at, _ in seen(log, isolation="read_committed")] == list(range(6))


def test_aborted_transactions(tmp_path: Path) -> None:
    """The aborted transactions of a range are listed by their first offset, and clients skip them."""
    log = open_log(tmp_path)
    log.append([b"a0", b"a1"], producer=ProducerStamp(8, 0, 0, transactional=True))
    log.append([b"b2"], producer=ProducerStamp(7, 0, 0, transactional=True))
    log.append_wire(foreign(RECORDS, producer=(8, 0, 2), transactional=True))
    assert log.end_transaction(8, 0, committed=False) == 8
    assert log.end_transaction(7, 0, committed=False) == 9
    log.append([b"plain"])
    log.append([b"c"], producer=ProducerStamp(8, 0, 7, transactional=True))
    log.end_transaction(8, 0, committed=True)
    assert log.aborted_transactions(0, 100) == [(8, 0), (7, 2)]
    assert log.aborted_transactions(0, 2) == [(8, 0)]
    assert log.aborted_transactions(9, 10) == [(7, 2)]
    assert log.aborted_transactions(10, 100) == []
    batches = [bytes(wire) for batch in log.read(0, control=True) for wire in to_wire_batches(batch)]
    kinds = [record.key for data in batches for _, record in read_foreign(data) if data[22] & 1 << 5]
    assert kinds == [b"\0\0\0\0", b"\0\0\0\0", b"\0\0\0\1"]


def test_what_a_compacted_topic_needs(tmp_path: Path) -> None:
    """Keys for all records: a batch that lacks one, or whose records cannot be read, is refused as a whole."""
    log = open_log(tmp_path, **{"cleanup.policy": "compact"})
    assert log.append_wire(foreign(RECORDS, 2)).base_offset == 0
    with pytest.raises(InvalidRecord) as told:
        log.append_wire(foreign([*RECORDS, Sent(None, b"v")], 2))
    assert told.value.index == 5
    with pytest.raises(InvalidWireBatch) as refused:
        log.append_wire(forged(foreign(RECORDS), record_count=4, last_offset_delta=3))
    assert refused.value.reason == "records"
    assert log.log_end_offset == 5


def test_records_are_checked(tmp_path: Path) -> None:
    """A client's header may count other records than there are, or name a codec that is not theirs."""
    log = open_log(tmp_path)
    for lie in ({"record_count": 4, "last_offset_delta": 3}, {"attributes": 4}):
        with pytest.raises(InvalidWireBatch) as told:
            log.append_wire(forged(foreign(RECORDS), **lie))
        assert told.value.reason == "records"
    assert log.append_wire(foreign(RECORDS)).next_offset == 5


def test_the_largest_timestamp_is_corrected(tmp_path: Path) -> None:
    """Header, its CRC and our hash agree afterwards; the client's bytes are not changed."""
    log = open_log(tmp_path)
    right = [foreign(RECORDS, codec) for codec in CODECS.values()]  # once: gzip writes the time into its header
    for one in right:
        data = forged(one, max_timestamp=NOW_MS + 99)
        given = bytearray(data)
        log.append_wire(given)
        assert given == data
    for one, batch in zip(right, log.read(0), strict=True):
        assert batch.header.max_timestamp == NOW_MS + 4
        (wire,) = to_wire_batches(batch)
        assert bytes(wire)[PLACE_SIZE:] == one[PLACE_SIZE:]
    assert {segment.max_timestamp for segment in log.segments()} == {NOW_MS + 4}


@pytest.mark.parametrize("size_bytes", [SMALL_RAW_BYTES - 5000, SMALL_RAW_BYTES + 5000, 4 * SMALL_RAW_BYTES])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_only_what_is_large_waits_for_a_place(tmp_path: Path, codec: int, size_bytes: int) -> None:
    """A batch that is not compressed, or small, is checked at once; every other one enters ``unpacking`` once."""
    log, entered = open_log(tmp_path, **{"max.message.bytes": 16 << 20}), [0]

    @contextmanager
    def unpacking() -> Iterator[None]:
        entered[0] += 1
        yield

    records = [Sent(b"k", b"v" * 1000, NOW_MS + at) for at in range(size_bytes // 1000)]
    assert log.append_wire(foreign(records, codec), unpacking=unpacking).base_offset == 0
    assert entered[0] == (1 if codec and size_bytes > SMALL_RAW_BYTES else 0)
    noise = [Sent(b"k", Random(at).randbytes(1000), NOW_MS) for at in range(2 * SMALL_STORED_BYTES // 1000)]
    log.append_wire(foreign(noise, codec), unpacking=unpacking)
    assert entered[0] == (1 if codec and size_bytes > SMALL_RAW_BYTES else 0) + (1 if codec else 0)


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({}, 0),
        ({"compression.type": "lz4"}, 0),
        ({"compression.type": "zstd", "compression.level": 3}, 0),
        ({"compression.type": "zstd", "compression.level": 19}, 1),
        ({"compression.type": "gzip"}, 1),
    ],
    ids=str,
)
def test_a_small_batch_waits_for_a_place_where_a_slow_codec_compresses_it(
    tmp_path: Path, options: dict[str, Any], places: int
) -> None:
    """The highest levels take half a second for 256 KiB, in the thread that serves all connections."""
    log, entered = open_log(tmp_path, **options), [0]

    @contextmanager
    def unpacking() -> Iterator[None]:
        entered[0] += 1
        yield

    log.append_wire(foreign(RECORDS, CODECS["snappy"]), unpacking=unpacking)
    assert entered[0] == places
    assert len(seen(log)) == len(RECORDS)


def test_what_is_recompressed_stays_within_what_readers_decompress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers bound a batch by its stored size, which compression makes smaller: then it stays uncompressed."""
    monkeypatch.setattr("segmentlog.format.batch._WIRE_RAW_MAX", 2048)
    log = open_log(tmp_path, **{"compression.type": "zstd"})
    zeros = [Sent(b"k", bytes(300), NOW_MS) for _ in range(40)]
    log.append_wire(foreign(zeros))
    assert [one for _, one in seen(log)] == zeros


def test_what_is_refused_is_not_appended(tmp_path: Path) -> None:
    """Refused batches take no offsets: batches above max.message.bytes, damaged ones, and any in a read-only log."""
    data = foreign(RECORDS)
    log = open_log(tmp_path, **{"max.message.bytes": len(data)})
    assert log.append_wire(data).base_offset == 0
    with pytest.raises(RecordTooLarge):
        log.append_wire(foreign([*RECORDS, Sent(None, b"")]))
    with pytest.raises(InvalidWireBatch):
        log.append_wire(data[:-1])
    assert log.append_wire(data).base_offset == 5
    log.close()
    with pytest.raises(ReadOnlyStore):
        open_log(tmp_path, read_only=True).append_wire(data)


def test_segments_roll_before_a_batch(tmp_path: Path) -> None:
    """A batch is never split: one that has no room, by bytes or by records, begins a segment."""
    log = open_log(tmp_path, **{"segment.records": 7})
    for n in range(4):
        assert log.append_wire(foreign(RECORDS)).base_offset == 5 * n
    assert [one.base_offset for one in log.segments()] == [0, 5, 10, 15]
    assert [at for at, _ in seen(log)] == list(range(20))


def header_of(log: Partition, index: int = 0) -> WireHeader:
    """Return the header of Kafka's of a stored batch."""
    (wire,) = to_wire_batches(list(log.read(0))[index])
    return parse_wire_batch(bytes(wire))


@pytest.mark.parametrize("wanted", [*CODECS, "producer"])
@pytest.mark.parametrize("sent", CODECS)
def test_the_topic_decides_on_the_codec(tmp_path: Path, wanted: str, sent: str) -> None:
    """The records are the client's, and all else that its header says; with producer, or that codec, every byte is."""
    log = open_log(tmp_path, **{"compression.type": wanted})
    data = foreign(RECORDS, CODECS[sent], producer=(9, 1, 0))
    log.append_wire(memoryview(data))
    assert seen(log) == served(log) == list(enumerate(RECORDS))
    (wire,) = to_wire_batches(next(iter(log.read(0))))
    before, after = parse_wire_batch(data), parse_wire_batch(bytes(wire))
    assert after.codec == CODECS.get(wanted, CODECS[sent])
    assert (bytes(wire)[PLACE_SIZE:] == data[PLACE_SIZE:]) == (wanted in ("producer", sent))
    for field in before._fields:
        if field not in ("base_offset", "leader_epoch", "batch_length", "crc", "attributes"):
            assert getattr(before, field) == getattr(after, field), field
    again = log.append_wire(data)
    assert (again.base_offset, log.log_end_offset) == (0, len(RECORDS))
    log.close()
    log = open_log(tmp_path, **{"compression.type": wanted})
    assert seen(log) == list(enumerate(RECORDS))


def test_the_level_is_the_topics(tmp_path: Path) -> None:
    """A batch is as large as the codec makes it at that level."""
    records = [Sent(None, b'{"page": "/%d", "user": %d}' % (at * 7919 % 1000, at), NOW_MS) for at in range(3000)]
    sizes = []
    for level in (-5000, 19):
        log = open_log(tmp_path / str(level), **{"compression.type": "zstd", "compression.level": level})
        log.append_wire(foreign(records))
        sizes.append(header_of(log).size_bytes)
        assert seen(log) == list(enumerate(records))
    assert sizes[1] < sizes[0] * 0.9


def test_recompressed_under_log_append_time(tmp_path: Path) -> None:
    """The log's clock stamps the records, whatever the client claims about its own."""
    log = open_log(tmp_path, **{"compression.type": "gzip", "message.timestamp.type": "LogAppendTime"})
    told = log.append_wire(forged(foreign(RECORDS, 4), attributes=4 | 8))
    assert told.log_append_time_ms == NOW_MS
    assert seen(log) == served(log) == [(at, one._replace(timestamp=NOW_MS)) for at, one in enumerate(RECORDS)]
    log = open_log(tmp_path / "own", **{"compression.type": "gzip"})
    assert log.append_wire(forged(foreign(RECORDS, 4), attributes=4 | 8)).log_append_time_ms == -1
    assert seen(log) == served(log) == list(enumerate(RECORDS))


def test_too_large_once_recompressed(tmp_path: Path) -> None:
    """The limit applies to the client's bytes and to the stored bytes, as in Kafka."""
    log = open_log(tmp_path, **{"compression.type": "none", "max.message.bytes": 1000})
    with pytest.raises(RecordTooLarge) as caught:
        log.append_wire(foreign([Sent(None, b"x" * 5000)], CODECS["zstd"]))
    assert caught.value.limit_bytes == 1000 < 5000 < caught.value.size_bytes
    assert log.log_end_offset == 0
    log.append_wire(foreign([Sent(None, b"x" * 500)], CODECS["zstd"]))
    assert header_of(log).codec == CODECS["none"]


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "gzip"])
def test_what_cannot_be_recompressed_is_refused(tmp_path: Path, codec: str) -> None:
    """Records that do not decode: nothing of them is stored."""
    log = open_log(tmp_path, **{"compression.type": "gzip"})
    data = forged(foreign(RECORDS, CODECS["none"])[:61] + b"\xff" * 40, attributes=CODECS[codec], batch_length=89)
    with pytest.raises(InvalidWireBatch, match="records"):
        log.append_wire(data)
    assert log.log_end_offset == 0


@pytest.mark.parametrize("wanted", ["producer", "gzip"])
def test_a_decompressed_record_has_a_limit(tmp_path: Path, wanted: str) -> None:
    """As in Kafka, this applies to the content of records in compressed batches; each larger one is named."""
    records = [Sent(None, b"x" * size) for size in (10, 200, 10, 201)]
    body = len(foreign(records[1:2])) - 61 - 2  # after the header and the length of two bytes
    log = open_log(tmp_path, **{"max.decompressed.message.bytes": body, "compression.type": wanted})
    with pytest.raises(InvalidRecord, match=rf"max\.decompressed\.message\.bytes = {body}") as caught:
        log.append_wire(foreign(records, CODECS["zstd"]))
    assert caught.value.indices == (3,)
    assert log.log_end_offset == 0
    log.append_wire(foreign(records[:3], CODECS["zstd"]))
    log.append_wire(foreign(records))  # not compressed
    assert log.log_end_offset == 7
