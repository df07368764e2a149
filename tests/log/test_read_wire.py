"""Reads for a server use cached positions of verified batches, and never return deleted or truncated ones."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from logs import log_files, machine_dies, open_log
from wire import Sent, foreign

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import HEADER_SIZE
from segmentlog.format.wire import Buffer
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.format.wire_run import WireRun
from segmentlog.log.partition import Partition
from segmentlog.log.read import open_segments

FEW_BYTES = 3000


def append(log: Partition, count: int, start: int = 0) -> None:
    """Append ``count`` batches of one record, of several lengths."""
    for number in range(start, start + count):
        log.append_wire(foreign([Sent(b"k%d" % (number % 7), b"%d-" % number + b"v" * (number * 37 % 90))]))


def fetched(log: Partition, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
    """Return all batches of Kafka's clients from ``offset`` on, fetch by fetch, up to the first other batch."""
    found: list[Buffer] = []
    while True:
        run, reached, _ = log.read_wire(offset, log.log_end_offset, max_bytes)
        assert sum(map(len, run)) <= max_bytes
        if not run:
            return b"".join(found)
        assert reached > offset
        found += run
        offset = reached


def served(log: Partition, offset: int = 0) -> bytes:
    """Return everything that a server reads, without the run objects."""
    found: list[Buffer] = []
    while offset < log.log_end_offset:
        run, reached, _ = log.read_wire(offset, log.log_end_offset, FEW_BYTES)
        if not run:
            batch = next(iter(log.read(offset)))
            run, reached = to_wire_batches(batch), batch.header.next_offset
        found += run
        offset = reached
    return b"".join(found)


def read(log: Partition, offset: int = 0) -> bytes:
    """Read the same with the library, which caches no positions."""
    return b"".join(wire for batch in log.read(offset) for wire in to_wire_batches(batch))


def kept(log: Partition) -> int:
    """Batches of which this process knows where they lie."""
    return sum(segment.checked.count for segment in log._open_segments._open.values())


@pytest.mark.parametrize("segment_bytes", ["1mb", "4kb"])
def test_what_was_checked_is_found_again(tmp_path: Path, segment_bytes: str) -> None:
    """A fetch of any position and size returns the stored bytes, the first time and every later time."""
    log = open_log(tmp_path, **{"segment.bytes": segment_bytes})
    append(log, 300)
    expected = [wire for batch in log.read(0) for wire in to_wire_batches(batch)]
    chosen = random.Random(1)
    for _ in range(40):
        offset = chosen.randrange(300)
        assert fetched(log, offset, chosen.choice((300, FEW_BYTES, 1 << 20))) == b"".join(expected[offset:])
    assert kept(log) > 200


def test_small_runs_at_the_end_are_not_kept(tmp_path: Path) -> None:
    """A consumer that is at the end fetches a batch at a time: that costs no table."""
    log = open_log(tmp_path)
    for number in range(40):
        append(log, 1, number)
        assert fetched(log, number) == read(log, number)
    assert kept(log) == 0
    assert fetched(log) == read(log)
    assert kept(log) == 40
    append(log, 1, 40)
    assert fetched(log, 40) == read(log, 40)
    assert kept(log) == 41  # it extends a cached run
    for number in range(41, 1000):
        append(log, 1, number)
        assert fetched(log, number) == read(log, number)
    assert kept(log) == 1000
    assert fetched(log) == read(log)


def test_following_joins_no_large_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch of one batch does not copy the positions of all earlier batches."""
    joined: list[int] = []

    def join(run: WireRun, other: WireRun, join: Callable[[WireRun, WireRun], WireRun] = WireRun.joined) -> WireRun:
        joined.append(run.batch_count)
        return join(run, other)

    monkeypatch.setattr(WireRun, "joined", join)
    log = open_log(tmp_path)
    append(log, 40)
    assert fetched(log) == read(log)
    for number in range(40, 1000):
        append(log, 1, number)
        assert fetched(log, number) == read(log, number)
    assert 200 < max(joined) < 300
    assert sum(joined) < 1000 * 150


def test_another_process_appends_and_rolls(tmp_path: Path) -> None:
    """Appends and rolls of other processes are seen; cached positions of the segment stay valid."""
    log, other = open_log(tmp_path), open_log(tmp_path)
    append(other, 100)
    assert fetched(log) == read(other)
    append(other, 50, 100)
    assert fetched(log) == read(other)
    assert other.roll()
    append(other, 20, 150)
    assert fetched(log) == read(other)
    assert kept(log) == 170


def test_batches_of_both_layouts(tmp_path: Path) -> None:
    """A run ends before a batch of the library, and the next run begins after it."""
    log = open_log(tmp_path)
    append(log, 20)
    log.append([b"own"])
    append(log, 20, 20)
    for _ in range(2):
        run, reached, _ = log.read_wire(0, 100, 1 << 20)
        assert run
        assert reached == 20
        assert log.read_wire(20, 100, 1 << 20) == ([], 20, False)
        run, reached, _ = log.read_wire(21, 100, 1 << 20)
        assert run
        assert reached == 41
    assert kept(log) == 40


def test_truncated_by_another_process(tmp_path: Path) -> None:
    """After a truncation, the same positions may belong to other batches: no former batch is sent."""
    log, other = open_log(tmp_path), open_log(tmp_path)
    append(other, 100)
    assert fetched(log) == read(other)
    other.truncate(40)
    append(other, 100, 1000)
    first = log.check_position(40)
    assert first > 40
    assert fetched(log) + fetched(log, first) == read(other)
    assert fetched(log, first).count(b"1000-") == 1


def test_compacted_by_another_process(tmp_path: Path) -> None:
    """A segment that was replaced is another file: where the batches of the old one lay says nothing of it."""
    settings = {"cleanup.policy": "compact", "segment.bytes": "4kb"}
    log, other = open_log(tmp_path, **settings), open_log(tmp_path, **settings)
    append(other, 300)
    before = fetched(log)
    assert before == read(log)
    other.roll()
    append(other, 10, 300)
    other.compact()
    for _ in range(2):
        assert served(log) == read(other)
    assert len(served(log)) < len(before) / 2


def test_the_front_is_deleted(tmp_path: Path) -> None:
    """Batches below the log start are not sent, although their positions are cached."""
    log = open_log(tmp_path)
    append(log, 100)
    assert fetched(log) == read(log)
    log.trim(50)
    assert log.read_wire(49, 100, 1 << 20) == ([], 49, False)
    assert fetched(log, 50) == read(log, 50)


def test_recovered_after_a_death(tmp_path: Path) -> None:
    """The recovered server sends only records that survived, and no later batches in place of the lost ones."""
    log = open_log(tmp_path)
    append(log, 60)
    log.flush()
    append(log, 40, 60)
    assert fetched(log) == read(log)
    machine_dies(log)
    (file,) = log_files(tmp_path)
    os.truncate(file, file.stat().st_size // 2)
    log = open_log(tmp_path)
    append(log, 30, 2000)
    start = max(lost.end_offset for lost in log.lost_ranges())
    assert fetched(log, start) == read(log, start)
    assert fetched(log, start).count(b"2000-") == 1


def test_damage_is_told_by_who_checks(tmp_path: Path) -> None:
    """A fetch ends before a bad batch. If a batch goes bad after it was verified, the next verification reports it."""
    log = open_log(tmp_path)
    append(log, 60)
    (file,) = log_files(tmp_path)
    *_, batch = log.read(0, max_bytes=3000)
    bad = batch.header.base_offset
    with file.open("r+b") as data:
        data.seek(batch._position + HEADER_SIZE + batch.header.payload_size - 3)
        data.write(b"\xff")
    for _ in range(2):
        run, reached, _ = log.read_wire(0, 60, 1 << 20)
        assert run
        assert reached == bad
        assert log.read_wire(bad, 60, 1 << 20) == ([], bad, False)
    assert fetched(log, bad + 1) == read(log, bad + 1)
    with pytest.raises(CorruptBatch):
        read(log)
    with file.open("r+b") as data:  # one that was checked
        data.seek(HEADER_SIZE + 70)
        data.write(b"\xff")
    assert log.read_wire(0, 60, 1 << 20)[1] == bad
    with pytest.raises(CorruptBatch):
        next(iter(log.read(0)))
    again = open_log(tmp_path)
    assert again.read_wire(0, 60, 1 << 20) == ([], 0, False)


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the positions used last are cached, of many segments and of a long one."""
    monkeypatch.setattr(open_segments, "_in_process", weakref.WeakSet())
    monkeypatch.setattr(open_segments, "_CHECKED_IN_PROCESS", 100)
    log = open_log(tmp_path, **{"segment.bytes": "4kb"})
    append(log, 300)
    for max_bytes in (1 << 20, 700):
        assert fetched(log, 0, max_bytes) == read(log)
        assert 0 < kept(log) <= 100
    long = open_log(tmp_path / "long")
    append(long, 300)
    for max_bytes in (1 << 20, 1500):
        assert fetched(long, 0, max_bytes) == read(long)
        assert kept(long) <= 100


def test_what_others_leave_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single busy log may cache all its positions while other logs are idle; the others keep theirs."""
    monkeypatch.setattr(open_segments, "_in_process", weakref.WeakSet())
    idle = [open_log(tmp_path / str(number)) for number in range(9)]
    monkeypatch.setattr(open_segments, "_CHECKED_IN_PROCESS", 320)
    log = open_log(tmp_path / "read")
    append(log, 300)
    assert fetched(log) == read(log)
    assert kept(log) == 300
    append(idle[0], 100)
    assert fetched(idle[0], 0, 3000) == read(idle[0])
    assert 0 < kept(idle[0]) <= 32
