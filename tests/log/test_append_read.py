"""Append to and read from one partition: reading returns each record at its assigned offset."""

from __future__ import annotations

import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leftovers import files_open_below
from logs import NOW_MS, FakeClock, Kept, contents, log_files, open_log, values
from seeds import seeds

import segmentlog
from segmentlog.errors import (
    InvalidConfig,
    InvalidRecord,
    OffsetOutOfRange,
    RecordTooLarge,
    SegmentlogError,
    StoreClosed,
)
from segmentlog.format.batch import HEADER_SIZE
from segmentlog.log.append.batch_encoding import MAX_BATCH_RECORDS
from segmentlog.log.partition import Partition
from segmentlog.storage.fs import FileSystem

# ---------------------------------------------------------------- what comes out


def test_every_column_comes_back(tmp_path: Path) -> None:
    """Keys, values, nulls, empty bytes, headers and timestamps are read as they were appended."""
    partition = open_log(tmp_path)
    base_offset = partition.append(
        [b"one", None, b"", b"\x00\xff" * 300],
        keys=[b"k", b"", None, b"\xff"],
        timestamps=[5, 0, 2**40, 7],
        headers=[[("trace", b"1"), ("trace", None)], None, [("ü", b"")], []],
    )
    assert base_offset == 0
    assert contents(partition) == [
        Kept(0, b"k", b"one", 5, (("trace", b"1"), ("trace", None))),
        Kept(1, b"", None, 0),
        Kept(2, None, b"", 2**40, (("ü", b""),)),
        Kept(3, b"\xff", b"\x00\xff" * 300, 7),
    ]


def test_records_without_a_timestamp_get_the_clocks(tmp_path: Path) -> None:
    """Without timestamps, records get the current time; without keys and headers, they have none."""
    clock = FakeClock()
    partition = open_log(tmp_path, clock=clock)
    partition.append([b"a"])
    clock.advance(17)
    assert partition.append([b"b"]) == 1
    assert contents(partition) == [Kept(0, None, b"a", NOW_MS), Kept(1, None, b"b", NOW_MS + 17)]


def test_append_takes_any_sequence_of_bytes_likes(tmp_path: Path) -> None:
    """Tuples, generators, bytearrays, memoryviews and numpy timestamps are accepted; reading returns bytes."""
    partition = open_log(tmp_path)
    mutable = bytearray(b"mutable")
    sent: Any = (mutable, memoryview(b"viewed")[1:4])
    keys: Any = (memoryview(b"k"), None)
    partition.append(sent, keys=keys)
    mutable[:] = b"changed"
    partition.append((bytes([byte]) for byte in range(3)), timestamps=np.arange(3, dtype=np.uint32))  # type: ignore[arg-type]
    assert [(record.key, record.value) for record in contents(partition)] == [
        (b"k", b"mutable"), (None, b"iew"), (None, b"\x00"), (None, b"\x01"), (None, b"\x02"),
    ]  # fmt: skip
    assert [record.timestamp for record in contents(partition, 2)] == [0, 1, 2]
    assert all(type(value) is bytes for value in values(partition))


def test_an_empty_list_appends_nothing(tmp_path: Path) -> None:
    """An empty append returns the offset that the next record gets, and leaves the log as it is."""
    partition = open_log(tmp_path)
    assert partition.append([]) == 0
    partition.append([b"a", b"b"])
    before = log_files(tmp_path)[0].read_bytes()
    assert partition.append([], keys=[], timestamps=[], headers=[]) == 2
    assert partition.append([], ack="durable") == 2
    assert partition.log_end_offset == 2
    assert log_files(tmp_path)[0].read_bytes() == before


def test_compression_is_the_topics_choice(tmp_path: Path) -> None:
    """With ``none`` the file has the bytes unchanged, with ``lz4`` fewer bytes; both read the same."""
    sent: list[bytes | None] = [b"compressible " * 100]
    for kind in ("none", "lz4"):
        partition = open_log(tmp_path / kind, compression_type=kind)
        partition.append(sent)
        assert values(partition) == sent
        stored = log_files(tmp_path / kind)[0].read_bytes()
        assert (b"compressible " * 100 in stored) == (kind == "none")
        assert (partition.segments()[0].size_bytes < 300) == (kind == "lz4")


def test_log_append_time_overrules_the_sender(tmp_path: Path) -> None:
    """Under LogAppendTime a record has the time it was appended, also for looking up by time."""
    clock = FakeClock()
    partition = open_log(
        tmp_path, clock=clock, message_timestamp_type="LogAppendTime", segment_records=2, index_interval_bytes=1
    )
    partition.append([b"a", b"b"], timestamps=[5, 2**50])
    clock.advance(10)
    partition.append([b"c"], timestamps=[7])
    partition.append([b"d"])
    assert [record.timestamp for record in contents(partition)] == [NOW_MS, NOW_MS, NOW_MS + 10, NOW_MS + 10]
    assert partition.offset_for_timestamp(NOW_MS) == 0
    assert partition.offset_for_timestamp(NOW_MS + 1) == 2
    assert partition.offset_for_timestamp(NOW_MS + 11) is None
    assert [segment.max_timestamp for segment in partition.segments()] == [NOW_MS, NOW_MS + 10]


# ---------------------------------------------------------------- what is refused


def _released() -> memoryview:
    view = memoryview(b"gone")
    view.release()
    return view


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"values": ["text"]}, InvalidRecord),
        ({"values": [b"a", 1]}, InvalidRecord),
        ({"values": b"bytes"}, InvalidRecord),
        ({"values": "text"}, InvalidRecord),
        ({"values": bytearray(b"bytes")}, InvalidRecord),
        ({"values": {b"a": b"b"}}, InvalidRecord),
        ({"values": None}, InvalidRecord),
        ({"values": 7}, InvalidRecord),
        ({"values": [[b"nested"]]}, InvalidRecord),
        ({"values": [np.zeros(3)]}, InvalidRecord),
        ({"values": [memoryview(b"abcdef")[::2]]}, InvalidRecord),
        ({"values": [_released()]}, InvalidRecord),
        ({"keys": [b"only one"]}, InvalidRecord),
        ({"keys": [b"a", b"b", b"c"]}, InvalidRecord),
        ({"keys": ["a", "b"]}, InvalidRecord),
        ({"keys": b"ab"}, InvalidRecord),
        ({"timestamps": [1]}, InvalidRecord),
        ({"timestamps": [1, -(2**62)]}, InvalidRecord),
        ({"timestamps": [1, 2.5]}, InvalidRecord),
        ({"timestamps": ["1", "2"]}, InvalidRecord),
        ({"timestamps": [1, 2**63]}, InvalidRecord),
        ({"timestamps": [1, 2**200]}, InvalidRecord),
        ({"timestamps": [True, False]}, InvalidRecord),
        ({"timestamps": [[1, 2], [3, 4]]}, InvalidRecord),
        ({"timestamps": np.array([1, 2**63], np.uint64)}, InvalidRecord),
        ({"headers": [[("a", b"1")]]}, InvalidRecord),
        ({"headers": [[("a", "text")], None]}, InvalidRecord),
        ({"headers": [[(b"a", b"1")], None]}, InvalidRecord),
        ({"headers": [["a"], None]}, InvalidRecord),
        ({"headers": [[("\udcff", b"")], None]}, InvalidRecord),
        ({"ack": "all"}, InvalidConfig),
        ({"ack": True}, InvalidConfig),
    ],
)
def test_what_a_record_cannot_hold_is_refused(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    """A wrong type raises an error of this library that names the expected type, and nothing is appended."""
    partition = open_log(tmp_path)
    partition.append([b"before"])
    for ack in (None, "durable"):
        call: dict[str, Any] = {"values": [b"a", b"b"], "ack": ack, **arguments}
        with pytest.raises(error) as caught:
            partition.append(**call)
        assert isinstance(caught.value, SegmentlogError)
        assert len(str(caught.value)) > 20
        assert partition.log_end_offset == 1
    assert partition.append([b"after"]) == 1
    assert values(partition) == [b"before", b"after"]


def test_a_record_above_the_limit_appends_nothing(tmp_path: Path) -> None:
    """`RecordTooLarge` names the record; the other records of the call are not appended either."""
    partition = open_log(tmp_path, max_message_bytes=1000)
    for ack in ("written", "durable"):
        with pytest.raises(RecordTooLarge) as caught:
            partition.append([b"small", b"x" * 1000, b"small"], ack=ack)
        assert caught.value.index == 1
        assert caught.value.limit_bytes == 1000
        assert partition.log_end_offset == 0
    assert partition.append([b"x" * 900]) == 0


def test_a_closed_partition_says_so(tmp_path: Path) -> None:
    """After `close` every call raises `StoreClosed`; closing again does nothing."""
    partition = open_log(tmp_path)
    partition.append([b"a"])
    partition.close()
    partition.close()
    for call in (
        lambda: partition.append([b"b"]),
        lambda: partition.read(0),
        partition.flush,
        lambda: partition.trim(1),
        lambda: partition.truncate(0),
        lambda: partition.offset_for_timestamp(0),
    ):
        with pytest.raises(StoreClosed):
            call()


# ---------------------------------------------------------------- where reading starts and ends


def _mixed(folder: Path, **settings: Any) -> tuple[Partition, list[Kept]]:
    """Return a log of batches of many sizes, and its records."""
    rng = random.Random(7)
    partition = open_log(folder, **settings)
    for number in range(40):
        count = rng.choice((1, 2, 5, 30))
        partition.append([f"{number}:{index}".encode() + b"." * rng.randrange(60) for index in range(count)])
    return partition, contents(partition)


@pytest.mark.parametrize("settings", [{}, {"segment_bytes": 700, "index_interval_bytes": 100}], ids=["one", "rolls"])
def test_reading_starts_exactly_where_it_is_asked_to(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Reading from any offset returns that record first, also within a batch, and then all later ones."""
    partition, records = _mixed(tmp_path, **settings)
    assert [record.offset for record in records] == list(range(partition.log_end_offset))
    assert (len(log_files(tmp_path)) > 5) == bool(settings)
    for offset in range(len(records) + 1):
        assert contents(partition, offset) == records[offset:]
    for outside in (-1, len(records) + 1):
        with pytest.raises(OffsetOutOfRange) as caught:
            partition.read(outside)  # at once, before anything is taken from it
        assert (caught.value.log_start_offset, caught.value.log_end_offset) == (0, len(records))


def test_max_bytes_ends_reading_but_never_starves_it(tmp_path: Path) -> None:
    """Reading ends after ``max_bytes`` of batches; the first batch is returned however large it is."""
    partition, records = _mixed(tmp_path, segment_bytes=2000)
    batches = list(partition.read(0))
    assert [len(list(partition.read(0, max_bytes))) for max_bytes in (1, batches[0].size_bytes)] == [1, 1]
    assert len(list(partition.read(0, batches[0].size_bytes + 1))) == 2
    offset, seen = 0, []
    while offset < partition.log_end_offset:
        fetched = list(partition.read(offset, 500))
        assert sum(batch.size_bytes for batch in fetched[:-1]) < 500
        seen += [record for batch in fetched for record in batch.values]
        offset = fetched[-1].next_offset
    assert seen == [record.value for record in records]


def test_durable_only_ends_at_the_durable_offset(tmp_path: Path) -> None:
    """Such a reader gets only records that survive a power cut, and no part of a batch that does not."""
    partition = open_log(tmp_path)
    partition.append([b"a", b"b"])
    assert values(partition, durable_only=True) == []
    assert partition.flush() == 2
    partition.append([b"c"])
    assert values(partition, durable_only=True) == [b"a", b"b"]
    assert partition.end_offset(durable_only=True) == partition.durable_offset == 2
    assert values(partition) == [b"a", b"b", b"c"]
    partition.append([b"d"], ack="durable")
    assert values(partition, durable_only=True) == [b"a", b"b", b"c", b"d"]


def test_a_read_ends_where_the_log_ended_when_it_began(tmp_path: Path) -> None:
    """Records appended during an iteration are left to the next one."""
    partition = open_log(tmp_path)
    partition.append([b"a"])
    partition.append([b"b"])
    seen: list[bytes | None] = []
    for batch in partition.read(0):
        seen += batch.values
        partition.append([b"later"])
    assert seen == [b"a", b"b"]


def test_an_isolation_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """A typo must not read as the weaker isolation."""
    partition = open_log(tmp_path)
    with pytest.raises(InvalidConfig):
        partition.read(0, isolation="committed")  # type: ignore[arg-type]


# ---------------------------------------------------------------- batches and segments


def test_a_huge_list_becomes_batches_without_a_gap(tmp_path: Path) -> None:
    """More records than a batch takes are several batches with consecutive offsets, visible at once."""
    partition = open_log(tmp_path)
    count = MAX_BATCH_RECORDS * 2 + 5
    sent: list[bytes | None] = [b"%d" % number for number in range(count)]
    assert partition.append(sent, timestamps=np.arange(count)) == 0
    batches = list(partition.read(0))
    assert [len(batch) for batch in batches] == [MAX_BATCH_RECORDS, MAX_BATCH_RECORDS, 5]
    assert [value for batch in batches for value in batch.values] == sent
    assert np.concatenate([batch.offsets for batch in batches]).tolist() == list(range(count))
    assert np.concatenate([batch.timestamps for batch in batches]).tolist() == list(range(count))


def test_a_list_above_max_message_bytes_is_split(tmp_path: Path) -> None:
    """No batch is larger than ``max.message.bytes``, and all columns stay in step when a list is split."""
    partition = open_log(tmp_path, max_message_bytes=2000, segment_bytes=5000)
    count = 300
    partition.append(
        [b"%03d" % number + b"v" * (number % 50) for number in range(count)],
        keys=[None if number % 3 else b"%d" % number for number in range(count)],
        timestamps=list(range(count)),
        headers=[[("n", b"%d" % number)] if number % 7 == 0 else None for number in range(count)],
    )
    batches = list(partition.read(0))
    assert len(batches) > 3
    assert max(batch.header.raw_size for batch in batches) <= 2000
    assert contents(partition) == [
        Kept(
            number,
            None if number % 3 else b"%d" % number,
            b"%03d" % number + b"v" * (number % 50),
            number,
            (("n", b"%d" % number),) if number % 7 == 0 else (),
        )
        for number in range(count)
    ]


def test_segments_roll_by_size(tmp_path: Path) -> None:
    """No segment of several batches outgrows ``segment.bytes``, and files are named by their first offset."""
    partition, records = _mixed(tmp_path, segment_bytes=1000, compression_type="none")
    segments = partition.segments()
    assert len(segments) > 3
    assert [int(file.stem) for file in log_files(tmp_path)] == [segment.base_offset for segment in segments]
    for segment in segments[:-1]:
        batch_count = sum(
            1 for batch in partition.read(0) if segment.base_offset <= batch.base_offset < segment.end_offset
        )
        assert segment.size_bytes <= 1000 or batch_count == 1
        assert Path(segment.path).stat().st_size == segment.size_bytes, "the preallocated end was not given back"
    assert [segment.active for segment in segments] == [False] * (len(segments) - 1) + [True]
    assert [segment.end_offset for segment in segments[:-1]] == [segment.base_offset for segment in segments[1:]]
    assert segments[-1].end_offset == len(records)


def test_a_batch_larger_than_a_segment_gets_one_to_itself(tmp_path: Path) -> None:
    """``segment.bytes`` bounds segments, not records."""
    partition = open_log(tmp_path, segment_bytes=300, compression_type="none")
    partition.append([b"a"])
    partition.append([b"b" * 1000])
    partition.append([b"c"])
    assert [segment.base_offset for segment in partition.segments()] == [0, 1, 2]
    assert values(partition) == [b"a", b"b" * 1000, b"c"]


def test_segments_roll_by_record_count(tmp_path: Path) -> None:
    """With ``segment.records`` every sealed segment of a bulk append holds exactly that many (kafkaesque's pages)."""
    partition = open_log(tmp_path, segment_records=10)
    partition.append([b"%d" % number for number in range(35)])
    assert [segment.base_offset for segment in partition.segments()] == [0, 10, 20, 30]
    for number in range(35, 45):
        partition.append([b"%d" % number])
    assert [segment.base_offset for segment in partition.segments()] == [0, 10, 20, 30, 40]
    assert values(partition) == [b"%d" % number for number in range(45)]


def test_segments_roll_by_age(tmp_path: Path) -> None:
    """A segment is sealed by the first append after ``segment.ms``, counted from its first record."""
    clock = FakeClock()
    partition = open_log(tmp_path, clock=clock, segment_ms=1000)
    clock.advance(5000)  # an empty segment does not age
    partition.append([b"a"])
    clock.advance(999)
    partition.append([b"b"])
    clock.advance(1)
    partition.append([b"c"])
    clock.advance(999)
    partition.append([b"d"])
    assert [segment.base_offset for segment in partition.segments()] == [0, 2]
    clock.advance(1)
    partition.append([b"e"])
    assert [segment.base_offset for segment in partition.segments()] == [0, 2, 4]


def test_a_reopened_log_reads_the_same(tmp_path: Path) -> None:
    """Closing truncates preallocated space, and the next open finds every record and appends after them."""
    partition, records = _mixed(tmp_path, segment_bytes=1500)
    partition.close()
    assert log_files(tmp_path)[-1].stat().st_size < 1500
    again = open_log(tmp_path, segment_bytes=1500)
    assert again.recovery_report.verdict == "clean"
    assert again.recovery_report.scanned_bytes == 0
    assert contents(again) == records
    assert again.append([b"next"]) == len(records)


# ---------------------------------------------------------------- by time


@pytest.mark.parametrize("settings", [{}, {"segment_bytes": 600, "index_interval_bytes": 1}], ids=["one", "rolls"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", seeds("timestamps", (11,)))
def test_offset_for_timestamp_is_the_first_at_or_after(
    tmp_path: Path, ordered: bool, settings: dict[str, Any], seed: int
) -> None:
    """The first record in offset order whose timestamp is at or after the one asked for, ordered or not."""
    rng = random.Random(seed)
    partition = open_log(tmp_path, **settings)
    stamps: list[int] = []
    for number in range(60):
        count = rng.choice((1, 1, 4))
        fresh = [number * 10 + 3 * index if ordered else rng.randrange(600) for index in range(count)]
        stamps += fresh
        partition.append([b"v" * rng.randrange(30)] * count, timestamps=fresh)
    if ordered:
        assert stamps == sorted(stamps)
    trimmed = 0
    for _ in range(2):
        for wanted in range(0, 640, 3):
            oracle = next((at for at in range(trimmed, len(stamps)) if stamps[at] >= wanted), None)
            assert partition.offset_for_timestamp(wanted) == oracle
        trimmed = partition.trim(len(stamps) // 2)
    assert partition.offset_for_timestamp(0) == trimmed == len(stamps) // 2


# ---------------------------------------------------------------- shapes


def test_batches_turn_into_arrow(tmp_path: Path) -> None:
    """`to_arrow` has the offsets, timestamps, keys, values and headers of the part that was read."""
    pytest.importorskip("pyarrow")
    partition = open_log(tmp_path)
    partition.append(
        [b"a", None, b"c"], keys=[b"k", None, b""], timestamps=[1, 2, 3], headers=[[("h", b"1")], None, [("i", None)]]
    )
    (batch,) = partition.read(1)
    table = batch.to_arrow().to_pydict()
    assert table["offset"] == [1, 2]
    assert table["value"] == [None, b"c"]
    assert table["key"] == [None, b""]
    assert table["headers"] == [[], [{"key": "i", "value": None}]]
    assert [round(stamp.timestamp() * 1000) for stamp in table["timestamp"]] == [2, 3]


def test_records_say_where_they_come_from(tmp_path: Path) -> None:
    """A `Record` knows its topic, partition, offset and epoch; a batch is iterated as its records."""
    partition = open_log(tmp_path)
    partition.append([b"a", b"b"])
    partition.truncate(1)
    assert partition.append([b"c"]) == 3
    found = [record for batch in partition.read(0) for record in batch]
    assert [(record.topic, record.partition, record.offset, record.epoch) for record in found] == [
        ("t", 0, 0, 0), ("t", 0, 3, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["trim", "truncate", "compact"])
def test_what_was_deleted_is_not_held_open(tmp_path: Path, how: str) -> None:
    """Otherwise its space would stay in use until the next append, synced or not."""
    for number in range(2):
        options = {"cleanup_policy": "compact"} if how == "compact" else {}
        partition = open_log(tmp_path / f"{number}", segment_records=3, file_delete_delay_ms=0, **options)
        for _ in range(4):
            partition.append([b"v"] * 8, [b"k"] * 8, ack="durable" if number else "written")
        before = len(log_files(tmp_path / f"{number}"))
        if how == "trim":
            partition.trim(partition.log_end_offset)
        elif how == "truncate":
            partition.truncate(5)
        else:
            partition.roll()
            partition.compact()
        assert len(log_files(tmp_path / f"{number}")) < before
        assert [path for path in files_open_below(tmp_path) if not Path(path).exists()] == []


def test_batches_outlive_their_segment(tmp_path: Path) -> None:
    """A batch that was read stays readable when its segment is deleted and the partition closed."""
    partition = open_log(tmp_path, segment_records=5, compression_type="none")
    sent: list[bytes | None] = [b"%d" % number for number in range(20)]
    partition.append(sent)
    batches = list(partition.read(0))
    partition.trim(20)
    partition.close()
    assert len(log_files(tmp_path)) == 1
    assert [value for batch in batches for value in batch.values] == sent


@pytest.mark.parametrize("seed", seeds("cut at both ends", (3,)))
def test_a_reader_goes_on_while_the_log_is_cut_at_both_ends(tmp_path: Path, seed: int) -> None:
    """Trims, truncations and rolls under a running reader: it gets right records or an error that says why."""
    partition = open_log(tmp_path, segment_bytes=600, index_interval_bytes=100)
    stop = threading.Event()
    failures: list[BaseException] = []
    reads = [0]

    def follow() -> None:
        try:
            while not stop.is_set():
                start = partition.log_start_offset
                previous = -1
                try:
                    for batch in partition.read(start):
                        for record in batch.records():
                            assert record.value == b"%d" % record.timestamp
                            assert record.offset > previous
                            previous = record.offset
                            reads[0] += 1
                except LookupError as error:  # OffsetOutOfRange, LogTruncated
                    assert isinstance(error, SegmentlogError)  # noqa: PT017 either outcome is right
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    rng = random.Random(seed)
    number = 0
    handed_out: set[int] = set()
    try:
        for _ in range(300):
            count = rng.choice((1, 3, 9))
            base = partition.append(
                [b"%d" % (number + index) for index in range(count)],
                timestamps=[number + index for index in range(count)],
            )
            fresh = set(range(base, base + count))
            assert not fresh & handed_out
            handed_out |= fresh
            number += count
            if rng.random() < 0.1:
                partition.trim(max(partition.log_start_offset, partition.log_end_offset - 60))
            if rng.random() < 0.05:
                partition.truncate(max(partition.log_start_offset, partition.log_end_offset - 7))
        deadline = time.monotonic() + 60
        while reads[0] <= 100 and not failures and time.monotonic() < deadline:  # on a busy machine they hardly ran
            time.sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, [str(one) for one in failures] + [
        str(partition.lost_ranges()),
        str([(s.base_offset, s.end_offset, s.size_bytes) for s in partition.segments()]),
    ]
    assert reads[0] > 100


def test_the_smallest_batch_is_a_header_and_a_few_bytes(tmp_path: Path) -> None:
    """One record costs the header and its MessagePack; nothing is padded."""
    partition = open_log(tmp_path)
    partition.append([b"x"])
    assert partition.segments()[0].size_bytes == HEADER_SIZE + len(b"\x91\xc4\x01x")


class CountingMaps(FileSystem):
    """Counts the files that are mapped."""

    count = 0

    def map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
        self.count += 1
        return super().map_file(fd, size_bytes, writable=writable)


def test_segments_that_a_reader_jumps_to_again_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps up to a thousand segments mapped; with many readers each keeps sixty-four."""
    monkeypatch.setattr("segmentlog.log.read.open_segments._in_process", weakref.WeakSet())
    fs = CountingMaps()
    partition = open_log(tmp_path, fs=fs, segment_records=1)
    for number in range(200):
        partition.append([b"%d" % number])
    for turn in range(2):
        before = fs.count
        for number in range(200):
            batch = next(partition.read(number * 77 % 200, max_bytes=1))
            assert batch.values == [b"%d" % (number * 77 % 200)]
        assert (fs.count == before) == (turn == 1)
    others = [open_log(tmp_path / str(number), segment_records=1) for number in range(30)]
    assert next(partition.read(3, max_bytes=1)).values == [b"3"]
    partition.append([b"and one more"])
    assert partition.read(200)
    assert next(partition.read(200, max_bytes=1)).values == [b"and one more"]
    assert len(partition._open_segments._open) == 64
    assert len(others) == 30


def deleted_maps(folder: Path) -> list[str]:
    """Return the deleted files below the folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(folder) in line and line.endswith("(deleted)")]


def test_what_others_deleted_is_let_go_of(tmp_path: Path) -> None:
    """A reader that is idle keeps no disk space of segments that retention deleted."""
    config = {"segment.records": 1, "file.delete.delay.ms": 0}
    with (
        segmentlog.open(tmp_path / "store", background=False) as store,
        segmentlog.open(tmp_path / "store", background=False) as other,
    ):
        log = store.create_topic("t", config=config).partition(0)
        log.append([b"%d" % number for number in range(9)])
        for number in (5, 3, 7):
            assert next(log.read(number, max_bytes=1)).values == [b"%d" % number]
        elsewhere = other.topic("t").partition(0)
        elsewhere.trim(8)
        elsewhere.apply_retention()
        assert deleted_maps(tmp_path)
        store.flush_tick()
        assert not deleted_maps(tmp_path)
        assert values(log) == [b"8"]


@pytest.mark.parametrize("main_too", [False, True], ids=["threads", "main and threads"])
def test_no_wake_up_is_lost_among_durable_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main_too: bool
) -> None:
    """Without interrupts no thread relies on polling: the test sets its interval to an hour."""
    monkeypatch.setattr("segmentlog.log.append.group_commit.POLL_INTERVAL_S", 3600.0)
    log = open_log(tmp_path)
    offsets: list[int] = []

    def work(name: int) -> None:
        for number in range(150):
            count = 1 + (number % 40 == 7) * 30  # some are not merged
            offsets.append(log.append([b"%d/%d" % (name, number)] * count, ack="durable"))
            if number % 10 == name % 10:
                time.sleep(0.001)  # so that groups of all sizes occur, also empty ones

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in range(7)]
    for thread in threads:
        thread.start()
    if main_too:
        work(99)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for a wake-up that does not come"
    assert len(set(offsets)) == 150 * (7 + main_too)
    assert log.durable_offset == log.log_end_offset == len(values(log))
