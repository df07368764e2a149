"""Compaction of Kafka clients' batches: the same records stay as with columns, with unchanged bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import NOW_MS, FakeClock, contents, machine_dies, open_log
from wire import CODECS, Sent, append_sent, append_unchecked, foreign, forged, read_foreign

from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import PLACE_SIZE, WIRE_HEADER_SIZE
from segmentlog.format.wire import pack_wire_batch, parse_wire_batch
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.format.wire_records import decode_records, varint
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.store_inspection import Tally
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.storage.fs import FileSystem

COMPACTED = {"cleanup.policy": "compact", "delete.retention.ms": 1000}
RECORDS = [Sent(b"k%d" % n, b"value %d" % n, NOW_MS + n) for n in range(5)]

records = st.lists(
    st.tuples(
        st.sampled_from([b"", b"a", b"b", b"c", b"a key of more than sixteen bytes"]),
        st.none() | st.binary(max_size=9),
        st.integers(-90, 90),
        st.sampled_from([(), (("h", b"1"), ("n", None))]),
    ),
    min_size=1,
    max_size=6,
)


def findings(log: Partition) -> list[str]:
    """Return the findings of `verify` for the partition."""
    config = TopicConfig.from_mapping({**COMPACTED})
    found = inspect_partition(FileSystem(), log.folder, "t", 0, config, Tally())
    return [str(one) for one in found.findings if one.severity != "note"]


def served(log: Partition) -> list[tuple[int, Sent]]:
    """Yield every record as a Kafka client reads it, from the first offset to the last, without a gap."""
    found: list[tuple[int, Sent]] = []
    expected = log.log_start_offset
    for batch in log.read(expected):
        for wire in to_wire_batches(batch):
            header = parse_wire_batch(wire)
            assert header.base_offset >= expected
            expected = header.base_offset + header.last_offset_delta + 1
            found += read_foreign(bytes(wire))
    return found


def seen(log: Partition) -> list[tuple[int, Sent]]:
    """Return every record as the library reads it."""
    return [(one.offset, Sent(one.key, one.value, one.timestamp, one.headers)) for one in contents(log)]


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.tuples(records, st.booleans(), st.integers(-1, 1)), min_size=1, max_size=8),
    codec=st.sampled_from(list(CODECS.values())),
    keep_last=st.sampled_from([1, 1, 2]),
    log_append_time=st.booleans(),
    buffer_bytes=st.sampled_from([34, 120, 10_000]),
    cut=st.none() | st.integers(0, 10),
)
def test_the_same_history_leaves_the_same_records(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Any], codec: int, keep_last: int, log_append_time: bool,
    buffer_bytes: int, cut: int | None,
) -> None:  # fmt: skip
    """Written by the library or by clients: keys, tombstones, producers, any codec, over passes and a recovery."""
    config = {**COMPACTED, "compaction.keep.last": keep_last}
    config |= {"message.timestamp.type": "LogAppendTime"} if log_append_time else {}
    clock = FakeClock()
    folder = tmp_path_factory.mktemp("both")
    logs = [open_log(folder / name, clock=clock, **config) for name in ("columns", "kafka")]
    sequences = {0: 0, 1: 0}
    for drawn, rolls, producer in batches:
        columns = [list(column) for column in zip(*drawn, strict=True)]
        keys, values, times, headers = columns
        times = [clock.now_ms() + ago for ago in times]
        stamp = None if producer < 0 else ProducerStamp(producer, 0, sequences[producer])
        logs[0].append(values, keys, times, headers, producer=stamp)
        numbers = (-1, -1, -1) if stamp is None else (producer, 0, stamp.sequence)
        sent = [Sent(*one) for one in zip(keys, values, times, headers, strict=True)]
        logs[1].append_wire(foreign(sent, codec, producer=numbers))
        if producer >= 0:
            sequences[producer] += len(drawn)
        if rolls:
            for log in logs:
                log.roll()
    for log in logs:
        log.roll()
    for wait_ms in (0, 500, 600, 70_000):
        clock.advance(wait_ms)
        reports = [log.compact(buffer_bytes=buffer_bytes) for log in logs]
        # With several maps to a pass a small batch of columns may lose its horizon again, and tombstones stay longer.
        kept = [[one for one in seen(log) if one[1].value is not None or buffer_bytes == 10_000] for log in logs]
        assert kept[0] == kept[1]
        assert reports[0].records_before == reports[1].records_before or buffer_bytes < 10_000
        assert [served(log) for log in logs] == [seen(log) for log in logs]
        assert [entry.runs for entry in logs[0].producers()] == [entry.runs for entry in logs[1].producers()]
    if cut is not None:
        for log in logs:
            log.truncate(min(cut, log.log_end_offset))
        assert [served(log) for log in logs] == [seen(log) for log in logs]
    left = seen(logs[1])
    assert buffer_bytes < 10_000 or left == seen(logs[0])
    machine_dies(logs[1])
    again = open_log(folder / "kafka", clock=clock, **config)
    assert seen(again) == left == served(again)
    logs[0].close()
    assert findings(again) == []


def sealed(tmp_path: Path, *batches: bytes, **settings: Any) -> Partition:
    """Return a log in which each batch has a segment of its own."""
    log = open_log(tmp_path, **{**COMPACTED, **settings})
    for data in batches:
        log.append_wire(data)
        log.roll()
    return log


def wires(log: Partition) -> list[bytes]:
    """Return the stored batches in Kafka's format."""
    return [bytes(batch.payload) for batch in log.read(0) if batch.header.is_kafka]


def test_what_stays_whole_stays_as_it_was_sent(tmp_path: Path) -> None:
    """Every byte is unchanged, except position and end, which change when the batch extends over removed records."""
    first, gone, last = (
        foreign(RECORDS, 4),
        foreign([Sent(b"x", b"old")]),
        foreign([Sent(b"x", b"new"), Sent(b"y", b"z")], 1),
    )
    log = sealed(tmp_path, first, gone, last)
    log.compact()
    found = wires(log)
    assert [parse_wire_batch(data).last_offset_delta for data in found] == [5, 1]
    assert found[0][WIRE_HEADER_SIZE:] == first[WIRE_HEADER_SIZE:]
    assert found[1][PLACE_SIZE:] == last[PLACE_SIZE:]
    assert findings(log) == []


def test_a_record_without_a_timestamp_has_no_end(tmp_path: Path) -> None:
    """`record.ttl.ms` counts from a record's timestamp. A record with the timestamp -1 ("none") does not expire."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, **COMPACTED, **{"record.ttl.ms": 1000})
    log.append_wire(foreign([Sent(b"none", b"v", -1)]))
    log.append_wire(foreign([Sent(b"some", b"v", NOW_MS)]))
    log.roll()
    clock.advance(1000)
    log.compact()
    assert [one.key for one in contents(log)] == [b"none"]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_what_stays_of_a_batch_is_a_batch_of_its_codec(tmp_path: Path, codec: int) -> None:
    """The bytes of the remaining records are unchanged, at their offsets, also header names that are not UTF-8."""
    strange = b"\0\0" + varint(2 * 5 // 2) + varint(2) + b"kx" + varint(1) + b"v"
    strange += varint(1) + varint(2) + b"\xff\xfe" + varint(-1)
    raw = decode_records(memoryview(foreign(RECORDS)), 0, 5).kept(None) + varint(len(strange)) + strange
    data = forged(foreign(RECORDS))
    data = pack_wire_batch(
        raw, base_offset=0, leader_epoch=0, attributes=0, last_offset_delta=5, base_timestamp=NOW_MS,
        max_timestamp=NOW_MS + 4, record_count=6,
    )  # fmt: skip
    if codec:
        data = foreign(RECORDS, codec)
    log = sealed(tmp_path, data, foreign([Sent(b"k1", b"n"), Sent(b"k3", b"n"), Sent(b"k4", b"n")]))
    log.compact()
    found = wires(log)[0]
    header = parse_wire_batch(found)
    assert header.codec == codec
    assert [at for at, _ in read_foreign(forged(found))] == [0, 2] if codec else [0, 2, 5]
    if not codec:
        assert found.endswith(varint(len(strange)) + strange)
    assert findings(log) == []


def test_a_delete_horizon_is_in_both_headers(tmp_path: Path) -> None:
    """After the horizon the tombstones are removed, and the other records keep their timestamps."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, **COMPACTED)
    log.append_wire(foreign([Sent(b"a", None, NOW_MS - 5), Sent(b"b", b"v", NOW_MS - 3)], 3))
    log.roll()
    log.compact()
    (data,) = wires(log)
    header = parse_wire_batch(data)
    assert header.attributes == 3 | 1 << 6
    assert header.base_timestamp == next(iter(log.read(0))).header.base_timestamp == NOW_MS + 1000
    assert seen(log) == served(log) == [(0, Sent(b"a", None, NOW_MS - 5)), (1, Sent(b"b", b"v", NOW_MS - 3))]
    clock.advance(1001)
    log.compact()
    assert seen(log) == served(log) == [(1, Sent(b"b", b"v", NOW_MS - 3))]
    assert parse_wire_batch(wires(log)[0]).attributes == 3
    assert findings(log) == []


def test_records_that_cannot_be_read_stay_and_are_told(tmp_path: Path) -> None:
    """Unreadable batches of earlier versions stay and are reported; no tombstone after them is removed."""
    clock = FakeClock()
    bad = [forged(foreign(RECORDS), record_count=4, last_offset_delta=3), forged(foreign(RECORDS, 4), attributes=1)]
    log = open_log(tmp_path, clock=clock)
    log.append([b"old"], [b"k"])
    for data in bad:
        append_unchecked(log, data)
    log.append([b"new", None], [b"k", b"gone"])
    log.close()
    log = open_log(tmp_path, clock=clock, **COMPACTED)
    log.roll()
    for _ in range(3):
        report = log.compact()
        clock.advance(100_000)
    assert len(report.unreadable) == 2
    assert "cannot be read" in log.cleaner_note().unreadable
    assert [data[WIRE_HEADER_SIZE:] for data in wires(log)] == [data[WIRE_HEADER_SIZE:] for data in bad]
    skipped: list[tuple[int, int]] = []
    found = []
    for batch in log.read(0):
        try:
            found += [(one.offset, one.key, one.value) for one in batch]
        except CorruptBatch:
            skipped.append((batch.header.base_offset, batch.header.record_count))
    assert found == [(10, b"k", b"new"), (11, b"gone", None)]
    assert skipped == [(1, 4), (5, 5)]


def test_what_is_larger_compressed_anew(tmp_path: Path) -> None:
    """A client's compressor may be better than ours: the rest of a batch never exceeds the batch limit."""
    draw = random.Random(7)
    words = [draw.randbytes(4).hex().encode() for _ in range(300)]
    values = [b" ".join(draw.choices(words, k=12)) for _ in range(400)]
    sent = [Sent(b"%d" % n, value) for n, value in enumerate(values)]
    raw = bytes(decode_records(memoryview(foreign(sent)), 0, 400).kept(None))
    data = pack_wire_batch(
        bytes(cramjam.zstd.compress(raw, level=22)), base_offset=0, leader_epoch=0, attributes=4,
        last_offset_delta=399, base_timestamp=NOW_MS, max_timestamp=NOW_MS, record_count=400,
    )  # fmt: skip
    log = sealed(tmp_path, data, foreign([Sent(b"7", b"n")]))
    log.handle.batch_limit = len(data)
    log.handle._load_batch_limit = lambda: len(data)
    log.compact()
    expected = [(n, one) for n, one in enumerate(sent) if n != 7]
    assert seen(log) == served(log) == [*expected, (400, Sent(b"7", b"n"))]
    assert all(batch.header.raw_size <= len(data) for batch in log.read(0))
    assert not next(iter(log.read(0))).header.is_kafka
    assert findings(log) == []


def test_a_batch_of_which_only_a_producers_numbers_stay(tmp_path: Path) -> None:
    """Its offsets still exist, also for Kafka's clients, and its producer continues its sequence."""
    log = sealed(tmp_path, foreign(RECORDS, 2, producer=(9, 0, 0)), foreign(RECORDS))
    log.compact()
    assert [at for at, _ in seen(log)] == [at for at, _ in served(log)] == [5, 6, 7, 8, 9]
    log.close()
    log = open_log(tmp_path, **COMPACTED)
    assert log.append_wire(foreign(RECORDS, 2, producer=(9, 0, 0))).base_offset == 0
    assert log.append_wire(foreign(RECORDS, 2, producer=(9, 0, 5))).base_offset == 10


def test_a_truncation_goes_through_a_batch(tmp_path: Path) -> None:
    """The records below the truncation stay a batch with the client's codec, also after reopening."""
    log = open_log(tmp_path)
    append_sent(log, [b"v%d" % n for n in range(9)], codec=4)
    log.truncate(4)
    log.close()
    log = open_log(tmp_path)
    assert [one.value for _, one in seen(log)] == [one.value for _, one in served(log)] == [b"v0", b"v1", b"v2", b"v3"]
    assert parse_wire_batch(wires(log)[0]).codec == 4
    assert findings(log) == []


def test_a_truncation_goes_through_a_batch_that_cannot_be_read(tmp_path: Path) -> None:
    """The log opens all the same: the batch keeps its offsets, and loses its records."""
    log = open_log(tmp_path)
    log.append([b"before"])
    append_unchecked(log, forged(foreign(RECORDS, 4), attributes=1))
    log.truncate(3)
    log.close()
    log = open_log(tmp_path)
    assert [one.value for one in contents(log)] == [b"before"]
    log.append([b"after"])
    assert [one.value for one in contents(log)] == [b"before", b"after"]


def test_what_a_compaction_leaves_stays_within_what_readers_decompress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers bound a batch by its stored size, which is smaller after a compaction: then it stays uncompressed."""
    monkeypatch.setattr("segmentlog.format.batch._WIRE_RAW_MAX", 2048)
    sent = [Sent(b"%d" % n, bytes(300), NOW_MS) for n in range(40)]
    frame = b"\x50\x2a\x4d\x18" + (20_000).to_bytes(4, "little") + bytes(20_000)  # which zstd skips
    made = foreign(sent, CODECS["zstd"]) + frame
    log = sealed(tmp_path, forged(made, batch_length=len(made) - 12), foreign([Sent(b"7", b"n", NOW_MS)]))
    log.compact()
    assert [one for _, one in seen(log)] == [one for one in sent if one.key != b"7"] + [Sent(b"7", b"n", NOW_MS)]
    assert findings(log) == []
