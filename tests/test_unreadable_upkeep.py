"""A batch whose checksum is right and whose records do not decode: background work on its log continues."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batches import Columns, batch_bytes, forge
from broken import command, findings
from leftovers import opened
from logs import FakeClock, NoSyncFileSystem, contents, log_files, machine_dies, open_log
from objects.tiering import TIERED
from unreadable import COUNT, KINDS, NOW_MS, ONE_OF_EACH, append_around, append_unreadable
from wire import append_sent

import segmentlog
from segmentlog import UnreadableBatch
from segmentlog.format.stored_batch import read_stored_batch
from segmentlog.log.partition import Partition
from segmentlog.store import LogStore

each_layout = pytest.mark.parametrize("kind", ONE_OF_EACH)
every_kind = pytest.mark.parametrize("kind", KINDS)
KEYS: list[bytes | None] = [b"k", b"l", b"m"]
COMPACTED = {"cleanup.policy": "compact", "delete.retention.ms": 1000}


def readable(log: Partition) -> list[tuple[int, bytes | None]]:
    """Offset and value of what is around unreadable batches."""
    return [(one.offset, one.value) for one in contents(log, on_skip=lambda *_: None)]


def payloads(log: Partition) -> list[bytes]:
    """Return the payloads of unreadable batches, without what depends on their place."""
    found = []
    for batch in log.read(log.log_start_offset):
        try:
            batch.check()
        except UnreadableBatch:
            found.append(bytes(batch.payload)[16 if batch.header.is_kafka else 0 :])
    return found


# ---------------------------------------------------------------- compaction


@every_kind
@pytest.mark.parametrize("append", [Partition.append, append_sent], ids=["columns", "kafka"])
def test_compaction_keeps_it_and_cleans_the_rest(tmp_path: Path, kind: str, append: Any) -> None:
    """Byte for byte, in every pass, alone in a segment or beside others; the report and `details` name it."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock)
    append(log, [b"old", b"once"], keys=[b"k", b"o"])
    span = append_unreadable(log, kind)
    append(log, [b"new", b"x", None], keys=[b"k", b"x", b"gone"])
    log.roll()
    second = append_unreadable(log, kind)
    log.roll()
    append(log, [b"y"], keys=[b"x"])
    log.close()
    log = open_log(tmp_path, clock=clock, **COMPACTED)
    log.roll()
    before = payloads(log)
    assert len(before) == 2
    for _ in range(4):
        report = log.compact()
        for one, said in zip((span, second), report.unreadable, strict=True):
            assert f"offsets [{one.base}, {one.end})" in said
        clock.advance(100_000)
    assert payloads(log) == before
    assert readable(log) == [(1, b"once"), (5, b"new"), (7, None), (11, b"y")]
    assert "cannot be read" in log.cleaner_note().unreadable
    assert log.cleaner_note().uncleanable == ""
    machine_dies(log)
    assert readable(open_log(tmp_path, clock=clock)) == [(1, b"once"), (5, b"new"), (7, None), (11, b"y")]


def _values_alone(whole: bytes) -> bytes:
    """Return the batch with one value less than announced; keys, headers and timestamps are right."""
    at = whole.rindex(b"\x93")
    return forge(whole, payload=whole[96:at] + b"\x92" + whole[at + 1 :])


def _headers_alone(whole: bytes) -> bytes:
    size = len(whole) - 96
    return forge(whole, payload=whole[96:] + b"x", raw_size=size + 1, payload_size=size + 1, headers_size=1)


def _timestamps_alone(whole: bytes) -> bytes:
    size = len(whole) - 96
    return forge(whole, payload=b"abc" + whole[96:], raw_size=size + 3, payload_size=size + 3, timestamps_size=3)


@pytest.mark.parametrize("break_column", [_values_alone, _headers_alone, _timestamps_alone])
@pytest.mark.parametrize("is_dry", [False, True])
def test_any_column_may_be_the_one_that_does_not_decode(
    tmp_path: Path, break_column: Callable[[bytes], bytes], is_dry: bool
) -> None:
    """This also holds if keys decode and values do not: the pass begins again, and completes."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, **COMPACTED)
    log.append([b"old", b"other"], keys=[b"x", b"o"])
    log.append_batches(
        [read_stored_batch(memoryview(break_column(batch_bytes(Columns([b"ab", b"cde", b"f"], KEYS)))), 0)]
    )
    log.append([b"new", b"newer", None], keys=[b"o", b"n", b"x"])
    log.roll()
    before = payloads(log)
    assert len(before) == 1
    for _ in range(3):
        report = log.compact(dry_run=is_dry)
        assert len(report.unreadable) == 1
        assert report.keyless == 0
        clock.advance(100_000)
    assert payloads(log) == before
    assert (b"other" in [value for _, value in readable(log)]) == is_dry
    assert readable(log)[-3:] == [(5, b"new"), (6, b"newer"), (7, None)]


def test_the_command_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`compact` cleans the rest and exits with 0; it and `details` say which batch stays, and why."""
    store = tmp_path / "store"
    with segmentlog.open(store, background=False) as opened_store:
        log = opened_store.create_topic("t", config=COMPACTED).partition(0)
        log.append([b"old", b"new"], keys=[b"k", b"k"])
        span = append_unreadable(log, "columns")
        log.roll()
    assert command(store, "compact", "t") == 0
    assert f"t/0: left unchanged: {store}/t/0/" in capfd.readouterr().out
    assert command(store, "describe", "t") == 0
    assert f"offsets [{span.base}, {span.end})" in capfd.readouterr().out
    assert command(store, "retain", "t") == 0


def test_statistics_count_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`compact --stats` counts the records of all other batches, names this one, and exits with 0 as `compact` does."""
    store = tmp_path / "store"
    with segmentlog.open(store, background=False) as opened_store:
        log = opened_store.create_topic("t", config=COMPACTED).partition(0)
        log.append([b"old", b"new"], keys=[b"a:k", b"a:k"])
        append_unreadable(log, "columns")
        append_unreadable(log)
        log.append([b"x"], keys=[b"a:l"])
        log.roll()
    assert command(store, "compact", "--stats", "--json", "t") == 0
    out, err = capfd.readouterr()
    group, total = map(json.loads, out.splitlines())
    assert (group["prefix"], group["records"], group["would_go"]) == ("a", 3, 1)
    assert (total["records"], total["unreadable_batches"]) == (3, 2)
    assert err.count("t/0: not counted, and left unchanged: ") == 2
    assert "offsets [2, 5)" in err
    assert command(store, "compact", "--stats", "t") == 0


def test_the_cleaner_does_not_give_a_partition_up(tmp_path: Path) -> None:
    """The background cleaner cleans it again and again; `health` is empty."""
    store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    log = store.create_topic("t", config=COMPACTED).partition(0)
    for number in range(3):
        log.append([b"%d" % number] * 3, keys=[b"k"] * 3)
        append_unreadable(log, ONE_OF_EACH[number % 2])
        log.roll()
        store.cleaner_tick(int(time.time() * 1000) + 100_000_000 * (number + 1))
    assert [value for _, value in readable(log)] == [b"2"]
    assert store.health() == {}


def test_a_group_sees_no_tombstone_go_before_it(tmp_path: Path) -> None:
    """A tombstone after it stays, because the batch may hold the deleted record; a tombstone before it is deleted."""
    clock = FakeClock()
    log = open_log(tmp_path, clock=clock, **COMPACTED)
    log.append([None], keys=[b"early"])
    append_unreadable(log, "columns")
    log.append([None], keys=[b"late"])
    log.roll()
    for _ in range(3):
        log.compact()
        clock.advance(100_000)
    assert [offset for offset, _ in readable(log)] == [4]


# ---------------------------------------------------------------- retention, truncation, recovery


@each_layout
def test_retention_deletes_it_with_its_segment(tmp_path: Path, kind: str) -> None:
    """Time (from its header), size, and a trim into its middle delete it."""
    clock = FakeClock()
    log = open_log(tmp_path / "time", clock=clock, **{"retention.ms": 10_000})
    append_around(log, kind)
    log.roll()
    append_unreadable(log, kind)
    clock.advance(60_000)
    log.roll()
    assert len(log.apply_retention().removed) == 2
    assert log.log_start_offset == 8
    log = open_log(tmp_path / "size", **{"retention.bytes": 1})
    append_around(log, kind)
    log.roll()
    log.append([b"kept"])
    log.apply_retention()
    assert readable(log) == [(5, b"kept")]
    log = open_log(tmp_path / "trim")
    append_around(log, kind)
    log.trim(2)
    assert log.log_start_offset == 2
    assert readable(log) == [(4, b"after")]
    with pytest.raises(UnreadableBatch) as caught:
        contents(log, 2)
    assert caught.value.next_offset == 4


@each_layout
@pytest.mark.parametrize("offset", range(6))
def test_truncation_anywhere(tmp_path: Path, kind: str, offset: int) -> None:
    """At its borders, the batch is kept or removed.

    An offset inside of it removes the whole batch: its records are unreadable.
    """
    log = open_log(tmp_path)
    append_around(log, kind)
    log.truncate(offset)
    assert readable(log) == [(0, b"before"), (4, b"after")][: (offset > 0) + (offset > 4)]
    assert len(payloads(log)) == (offset >= 4)
    assert log.append([b"new"]) >= 5
    log.close()
    log = open_log(tmp_path)
    assert readable(log)[-1][1] == b"new"


@each_layout
@pytest.mark.parametrize("is_last", [False, True])
def test_a_recovery_keeps_it(tmp_path: Path, kind: str, is_last: bool) -> None:
    """It is not a torn tail, because its checksum is right. Its offsets are not assigned again."""
    log = open_log(tmp_path)
    if is_last:
        log.append([b"before"])
        append_unreadable(log, kind)
    else:
        append_around(log, kind)
    before = payloads(log)
    machine_dies(log)
    again = open_log(tmp_path)
    assert again.recovery_report is not None
    assert again.recovery_report.truncated_bytes == 0
    assert payloads(again) == before
    assert again.append([b"new"]) >= 4


# ---------------------------------------------------------------- shipping


@each_layout
def test_shipping_and_back(tmp_path: Path, kind: str) -> None:
    """Byte for byte: shipped, checked, read there, restored as a whole, to a time and to an offset, and followed."""
    url = (tmp_path / "bucket").as_uri()
    path = tmp_path / "store"
    with segmentlog.open(path, background=False) as store:
        log = store.create_topic("t", fsync="never").partition(0)
        append_around(log, kind)
        log.roll()
        append_unreadable(log, kind)
        log.append([b"last"], timestamps=[NOW_MS + 2000])
        before = payloads(log)
        store.ship(url)
        store.ship(url)
    assert command(path, "objects", "verify", url) == 0
    assert command(path, "objects", "gc", url) == 0

    def check(at: Path | str, expected: list[tuple[int, bytes]], count: int) -> None:
        with segmentlog.open(at, read_only=True, background=False) as found:
            log = found.topic("t").partition(0)
            assert readable(log) == expected
            assert payloads(log) == before[:count]

    everything = [(0, b"before"), (4, b"after"), (8, b"last")]
    check(url, everything, 2)
    assert command(path, "restore", url, str(tmp_path / "whole")) == 0
    check(tmp_path / "whole", everything, 2)
    assert {one.severity for one in findings(tmp_path / "whole")} == {"unreadable"}
    # The header's largest timestamp is all that says when its records were.
    assert command(path, "restore", url, str(tmp_path / "time"), "--at", f"@{NOW_MS - 500}") == 0
    check(tmp_path / "time", everything[:1], 0)
    assert command(path, "restore", url, str(tmp_path / "later"), "--at", f"@{NOW_MS + 1500}") == 0
    check(tmp_path / "later", everything[:2], 2)
    assert command(path, "replica", url, str(tmp_path / "replica"), "--once") == 0
    check(tmp_path / "replica", everything, 2)


@each_layout
def test_a_segment_that_is_in_the_object_store_alone(tmp_path: Path, kind: str) -> None:
    """It is read, compacted and checked there like one on the local disk."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", **{**TIERED, "segment_records": 100}).partition(0)
        append_around(log, kind)
        log.roll()
        log.append([b"last"])
        for _ in range(2):
            store.ship((tmp_path / "bucket").as_uri())
        assert log_files(Path(log.folder))[0].stat().st_blocks == 0
        assert readable(log) == [(0, b"before"), (4, b"after"), (5, b"last")]
        with pytest.raises(UnreadableBatch) as caught:
            contents(log)
        assert caught.value.offset == 1
    assert command(tmp_path / "store", "verify") == 4


def test_the_helper_makes_what_it_says(tmp_path: Path) -> None:
    """Each kind takes as many offsets as it announces, in one segment, under right checksums."""
    log = open_log(tmp_path)
    for kind in KINDS:
        span = append_unreadable(log, kind)
        assert span.end - span.base == COUNT
    assert len(payloads(log)) == len(KINDS)
    assert len(log_files(tmp_path)) == 1
