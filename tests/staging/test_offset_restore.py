"""Records come back at the offsets that they had, whatever was between them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from leftovers import opened

import segmentlog
from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, DiskFull, RecordTooLarge
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.append.batch_encoding import CheckedColumns
from segmentlog.log.partition import Partition
from segmentlog.staging.offset_restore import OffsetStager, OffsetTaken, Restorer, restore_staged
from segmentlog.staging.staged_files import Staged
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem

FS = FileSystem()
Row = tuple[int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


def rows_at(offsets: Sequence[int]) -> list[Row]:
    """Return records at these offsets, with unordered timestamps and some missing keys, values and headers."""
    return [
        (
            offset,
            1_000_000 - offset % 1000,
            None if offset % 3 == 0 else b"key %d" % offset,
            None if offset % 5 == 0 else b"value %d" % offset,
            (("name", b"x"), ("name", None)) if offset % 2 else (),
        )
        for offset in offsets
    ]


def stage(path: Path, rows: Sequence[Row], *, size_bytes: int = 100, config: TopicConfig | None = None) -> Staged:
    """Return the rows in a file, as batches of partition 0."""
    stager = OffsetStager(FS, str(path), 0, "t", config or TopicConfig())
    if rows:
        offsets, timestamps, keys, values, headers = zip(*rows, strict=True)
        columns = CheckedColumns(list(values), list(keys), np.array(timestamps), list(headers))
        try:
            stager.add(0, np.array(offsets), columns, size_bytes)
        except BaseException:
            stager.discard()
            raise
    return stager.finish()


def read(log: Partition) -> list[Row]:
    """Return all records of the log."""
    found: list[Row] = []
    for batch in log.read(log.log_start_offset):
        found += zip(
            batch.offsets.tolist(), batch.timestamps.tolist(), batch.keys, batch.values, batch.headers, strict=True
        )
    return found


def restored(log: Partition, staged: Staged) -> int:
    """Append it all; how many records."""
    restorer = Restorer(log)
    count = restore_staged(FS, {0: restorer}, staged)
    restorer.flush()
    return count


@pytest.fixture
def log(tmp_path: Path) -> Partition:
    """Return an empty partition."""
    store = opened(segmentlog.open(tmp_path / "store", background=False))
    return store.create_topic("t", retention_ms=-1, segment_bytes=1 << 20).partition(0)


@pytest.mark.parametrize(
    "offsets",
    [
        range(1000),
        range(0, 3000, 3),
        [0, 1, 5, 7, 2**31 - 1, 2**31, 2**31 + 1],
        [3, 2**32 + 3, 2**32 + 4, 3 * 2**32 + 17],
        [0, 2**32 - 2, 2**32 - 1, 2**32],
        [2**40, 2**40 + 1],
    ],
)
def test_every_record_lands_at_its_offset(log: Partition, tmp_path: Path, offsets: Sequence[int]) -> None:
    """Every record is unchanged at its offset, with any gaps; appends continue, and verify finds no damage."""
    if offsets[0] > 2**36:
        offsets = [one - 2**40 + 2**34 for one in offsets]
    rows = rows_at(offsets)
    assert restored(log, stage(tmp_path / "staged", rows, size_bytes=3 << 20)) == len(rows)
    assert read(log) == rows
    assert log.log_end_offset == rows[-1][0] + 1
    assert log.append([b"behind"]) == rows[-1][0] + 1
    for offset, timestamp, *_ in rows[:20]:
        (first, *_) = log.read(offset, max_bytes=1)
        assert (int(first.offsets[0]), int(first.timestamps[0])) == (offset, timestamp)
    store_path = tmp_path / "store"
    log.close()
    assert list(inspect_store(str(store_path), "t")) == []
    with segmentlog.open(store_path, background=False) as store:
        assert read(store.topic("t").partition(0))[:-1] == rows


def test_a_leading_gap_can_be_trimmed_away(log: Partition, tmp_path: Path) -> None:
    """The log then starts where the records do, in a segment of its own."""
    restorer = Restorer(log)
    restorer.fill_to(5000)
    assert log.trim(5000) == 5000
    restore_staged(FS, {0: restorer}, stage(tmp_path / "staged", rows_at(range(5000, 5010))))
    assert (log.log_start_offset, log.log_end_offset) == (5000, 5010)
    assert [one.base_offset for one in log.segments()] == [5000]
    assert read(log) == rows_at(range(5000, 5010))


def test_what_cannot_be_appended_keeps_later_batches_from_its_offsets(tmp_path: Path) -> None:
    """A write finds no room, and the next one does: every record lands at its offset all the same."""
    fs = FaultyFileSystem()
    store = opened(LogStore(tmp_path / "store", background=False, fs=fs))
    log = store.create_topic("t", retention_ms=-1).partition(0)
    restorer = Restorer(log)
    restore_staged(FS, {0: restorer}, stage(tmp_path / "first", rows_at(range(10))))
    fs.fail("pwritev", errno.ENOSPC)
    with pytest.raises(DiskFull):
        restore_staged(FS, {0: restorer}, stage(tmp_path / "second", rows_at(range(10, 20))))
    restore_staged(FS, {0: restorer}, stage(tmp_path / "third", rows_at(range(20, 30))))
    assert read(log) == rows_at(range(30))


def test_a_trailing_gap_moves_the_end(log: Partition, tmp_path: Path) -> None:
    """The next record gets the offset that it would have had."""
    restorer = Restorer(log)
    restore_staged(FS, {0: restorer}, stage(tmp_path / "staged", rows_at(range(10))))
    restorer.fill_to(20)
    restorer.flush()
    assert log.log_end_offset == 20
    assert log.append([b"next"]) == 20
    assert [row[0] for row in read(log)] == [*range(10), 20]


def test_going_on_at_the_log_end(log: Partition, tmp_path: Path) -> None:
    """Missing records are appended; existing ones cannot be appended again."""
    restored(log, stage(tmp_path / "first", rows_at(range(0, 100, 2))))
    with pytest.raises(OffsetTaken, match=r"t/0: offset 0 cannot be restored, because the log already ends at 99"):
        restored(log, stage(tmp_path / "again", rows_at(range(0, 200, 2))))
    assert read(log) == rows_at(range(0, 100, 2))
    restored(log, stage(tmp_path / "rest", rows_at(range(100, 200, 2))))
    assert read(log) == rows_at(range(0, 200, 2))


def test_somebody_else_appends(log: Partition, tmp_path: Path) -> None:
    """It is detected before any record gets a wrong offset."""
    restorer = Restorer(log)
    log.append([b"other"])
    with pytest.raises(OffsetTaken):
        restore_staged(FS, {0: restorer}, stage(tmp_path / "staged", rows_at(range(3))))
    assert [batch.values for batch in log.read(0)] == [[b"other"]]


def test_batches_keep_to_the_limits_of_the_topic(log: Partition, tmp_path: Path) -> None:
    """Large batches are split, `segment.records` is respected; a record that is too large causes an error."""
    config = TopicConfig(max_message_bytes=1000, segment_records=50)
    rows = [(at, 1, None, bytes(100), ()) for at in range(120)]
    staged = stage(tmp_path / "staged", rows, config=config)
    restored(log, staged)
    assert max(len(batch) for batch in log.read(0)) < 10
    assert read(log) == rows
    staged = stage(tmp_path / "small", rows_at(range(120)), config=TopicConfig(segment_records=50))
    assert staged.runs[0].batch_count >= 3
    with pytest.raises(RecordTooLarge):
        stage(tmp_path / "large", [(0, 1, None, bytes(2000), ())], config=config)


def test_a_damaged_file_is_not_appended(log: Partition, tmp_path: Path) -> None:
    """A byte that changed between the task and the driver is found by its checksum."""
    path = tmp_path / "staged"
    staged = stage(path, rows_at(range(100)))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptBatch):
        restored(log, staged)
    assert log.log_end_offset == 0


def test_a_failed_task_leaves_nothing(tmp_path: Path) -> None:
    """The file and its descriptor are gone."""
    stager = OffsetStager(FS, str(tmp_path / "staged"), 0, "t", TopicConfig())
    stager.discard()
    assert list(tmp_path.iterdir()) == []
    assert stage(tmp_path / "empty", []).runs == ()
