"""Damaged files: reports name the position, intact records are still read, and none is invented."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import Kept, contents, delete_indexes, log_files, machine_dies, open_log, tree_bytes, values

import segmentlog
from segmentlog.errors import CorruptBatch, InvalidConfig, SegmentlogError, StoreVersionError
from segmentlog.format.file_names import CHECKPOINT_FILE, STATE_FILE
from segmentlog.log.partition import Partition

SETTINGS: dict[str, Any] = {"index_interval_bytes": 1, "compression_type": "none"}


def _fill(partition: Partition, batch_count: int = 4) -> list[Kept]:
    """Return some small batches of two records, with keys, timestamps and headers."""
    for number in range(batch_count):
        partition.append(
            [b"value %d" % number, None], keys=[b"k%d" % number, b""], timestamps=[1000 + number, 5000 + number],
            headers=[[("h", b"%d" % number)], None],
        )  # fmt: skip
    return contents(partition)


def _batches(partition: Partition) -> list[tuple[Path, int, int, int, int]]:
    """(file, position, size, base offset, next offset) of every batch."""
    return [
        (Path(batch._path), batch._position, batch.size_bytes, batch.base_offset, batch.next_offset)
        for batch in partition.read(partition.log_start_offset)
    ]


def _flipped(path: Path, step: int = 1) -> Iterator[int]:
    """Flip a byte of the file at every ``step``-th position in turn, and restore the file at the end."""
    original = path.read_bytes()
    for position in range(0, len(original), step):
        with path.open("r+b") as file:  # in place: the same inode, as a disk's fault would have it
            file.seek(position)
            file.write(bytes([original[position] ^ (1 << position % 8)]))
        yield position
        with path.open("r+b") as file:
            file.write(original)
            file.truncate(len(original))


# ---------------------------------------------------------------- a machine died


def test_a_tail_cut_at_any_byte_leaves_a_prefix(tmp_path: Path) -> None:
    """However much of the last batches is on disk, complete batches stay, and the rest is reported and quarantined."""
    made = tmp_path / "made"
    partition = open_log(made, **SETTINGS)
    _fill(partition, 2)
    partition.flush()
    partition.close()
    partition = open_log(made, **SETTINGS)
    partition.append([b"unsynced 1"])
    partition.append([b"unsynced 2", b"unsynced 3"])
    records, batches = contents(partition), _batches(partition)
    ceiling = partition.handle.page.log.read().offset_ceiling
    end = batches[-1][1] + batches[-1][2]
    machine_dies(partition)
    assert ceiling > len(records)
    durable_end = batches[2][1]
    for cut in range(durable_end, end + 1):
        folder = tmp_path / "cut"
        shutil.copytree(made, folder)
        with log_files(folder)[0].open("r+b") as file:
            file.truncate(cut)
        again = open_log(folder, **SETTINGS)
        whole = [batch for batch in batches if batch[1] + batch[2] <= cut]
        kept_end = whole[-1][4]
        report = again.recovery_report
        assert report.verdict == "machine death"
        assert contents(again) == records[:kept_end]
        assert again.log_end_offset == ceiling
        assert report.lost is not None
        assert (report.lost.base_offset, report.lost.end_offset) == (kept_end, ceiling)
        assert again.lost_ranges() == [report.lost]
        torn = cut - (whole[-1][1] + whole[-1][2])
        assert (report.quarantine_path is not None) == (torn > 0)
        if report.quarantine_path is not None:
            torn_bytes = (made / log_files(made)[0].name).read_bytes()[cut - torn : cut].rstrip(b"\0")
            assert Path(report.quarantine_path).read_bytes() == torn_bytes
            assert report.truncated_bytes == len(torn_bytes)
        assert again.append([b"after"]) == ceiling
        assert values(again)[-1] == b"after"
        again.close()
        reopened = open_log(folder, **SETTINGS)
        assert values(reopened) == [record.value for record in records[:kept_end]] + [b"after"]
        reopened.close()
        shutil.rmtree(folder)


def test_crash_after_crash_loses_range_after_range(tmp_path: Path) -> None:
    """Crashes that take everything since the one before leave ranges that touch, and a log that reads over them."""
    partition = open_log(tmp_path)
    partition.append([b"first"], ack="durable")
    for number in range(3):
        kept = log_files(tmp_path)[-1].read_bytes()
        last = log_files(tmp_path)[-1]
        size = partition.segments()[-1].size_bytes
        assert partition.append([b"lost %d" % number]) >= partition.lost_ranges()[-1].end_offset if number else 1
        machine_dies(partition)
        last.write_bytes(kept[:size])
        partition = open_log(tmp_path)
    ranges = partition.lost_ranges()
    assert len(ranges) == 3
    assert [one.end_offset for one in ranges[:-1]] == [two.base_offset for two in ranges[1:]]
    assert values(partition) == [b"first"]
    base_offset = partition.append([b"after"])
    assert base_offset == ranges[-1].end_offset
    assert values(partition, 0) == [b"first", b"after"]
    for checkpoint in (True, False):
        partition.close()
        (tmp_path / STATE_FILE).unlink()
        if not checkpoint:
            (tmp_path / CHECKPOINT_FILE).unlink()
        partition = open_log(tmp_path)
        assert values(partition, 0) == [b"first", b"after"]
        assert partition.log_end_offset > base_offset


def test_a_trimmed_log_is_readable_after_a_crash_that_takes_all_of_it(tmp_path: Path) -> None:
    """Reading from the log start works even if the crash lost the offset at which the log starts."""
    partition = open_log(tmp_path)
    partition.append([b"a", b"b", b"c"])
    partition.trim(2)
    machine_dies(partition)
    log_files(tmp_path)[0].write_bytes(b"")
    partition = open_log(tmp_path)
    assert values(partition) == []
    after = partition.append([b"after"])
    assert contents(partition, partition.log_start_offset)[0].offset == after
    with pytest.raises(SegmentlogError):
        partition.read(partition.log_start_offset + 1)


def test_a_copy_of_a_live_folder_opens_on_its_own(tmp_path: Path) -> None:
    """A folder copied while in use opens as after a machine's death, and shares nothing with the original."""
    partition = open_log(tmp_path / "original", **SETTINGS)
    records = _fill(partition)
    before = tree_bytes(tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    copy = open_log(tmp_path / "copy", **SETTINGS)
    assert copy.recovery_report.verdict == "machine death"
    assert contents(copy) == records
    resumed = copy.append([b"only in the copy"])
    assert resumed > partition.log_end_offset
    assert tree_bytes(tmp_path / "original") == before
    assert partition.append([b"only in the original"]) == len(records)
    assert values(copy)[-1] == b"only in the copy"
    assert values(partition)[-1] == b"only in the original"


def test_a_restored_folder_does_not_believe_its_state(tmp_path: Path) -> None:
    """An old copy restored in place of the folder is recovered, although the machine never stopped."""
    folder = tmp_path / "log"
    partition = open_log(folder)
    partition.append([b"a"])
    shutil.copytree(folder, tmp_path / "backup")
    partition.append([b"b"])
    partition.close()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    restored = open_log(folder)
    assert restored.recovery_report.verdict == "machine death"
    assert values(restored) == [b"a"]
    assert restored.append([b"c"]) > 1, "offset 1 was b's"


# ---------------------------------------------------------------- bytes that changed


def test_a_wrong_byte_anywhere_in_the_log_is_told(tmp_path: Path) -> None:
    """Every byte of a batch is covered: a flip raises with path and position, skipping loses that batch alone."""
    partition = open_log(tmp_path, segment_records=4, **SETTINGS)
    records = _fill(partition)
    batches = _batches(partition)
    partition.close()
    assert len(log_files(tmp_path)) == 2
    for file in log_files(tmp_path):
        for position in _flipped(file):
            hit = next(one for one in batches if one[0].name == file.name and one[1] <= position < one[1] + one[2])
            again = open_log(tmp_path, segment_records=4, **SETTINGS)
            assert again.recovery_report.verdict == "clean"
            before: list[Kept] = []
            with pytest.raises(CorruptBatch) as caught:  # noqa: PT012 what came before it counts
                for batch in again.read(0):
                    before += [Kept(one.offset, one.key, one.value, one.timestamp, one.headers) for one in batch]
            assert before == records[: hit[3]]
            assert Path(caught.value.path) == file
            assert hit[1] <= caught.value.position < hit[1] + hit[2]
            skipped: list[tuple[int, int]] = []
            found = contents(again, 0, on_skip=lambda base, end, damage, skipped=skipped: skipped.append((base, end)))
            assert found == records[: hit[3]] + records[hit[4] :]
            assert skipped == [(hit[3], hit[4])]
            assert contents(again, hit[4]) == records[hit[4] :], "neighbours are read without a word"
            again.close()
    assert contents(open_log(tmp_path, segment_records=4, **SETTINGS)) == records


def test_a_wrong_byte_below_the_recovery_point_is_never_cut_off(tmp_path: Path) -> None:
    """Reading reports corruption of durable bytes; a recovery removes nothing after it."""
    partition = open_log(tmp_path, **SETTINGS)
    records = _fill(partition)
    partition.close()
    (tmp_path / STATE_FILE).unlink()
    file = log_files(tmp_path)[0]
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    again = open_log(tmp_path, **SETTINGS)
    assert again.recovery_report.truncated_bytes == 0
    assert file.read_bytes() == data
    with pytest.raises(CorruptBatch):
        contents(again, 0)
    assert contents(again, 2) == records[2:]
    assert again.append([b"next"]) == len(records)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("name", ["index", "timeindex", CHECKPOINT_FILE, STATE_FILE])
def test_a_wrong_byte_in_any_other_file_makes_up_nothing(tmp_path: Path, name: str, clean: bool) -> None:
    """With any byte of index, checkpoint or state wrong, records and lookups stay right, and no offset is reused."""
    made = tmp_path / "made"
    partition = open_log(made, segment_records=6, **SETTINGS)
    records = _fill(partition, 5)
    partition.flush()
    if clean:
        partition.close()
    else:
        partition.abandon()
    files = [file.name for file in made.iterdir() if file.name.endswith(name)]
    assert files or not clean
    for file_name in files:
        size = (made / file_name).stat().st_size
        # Most of the state page and of the checkpoint's slots is empty.
        positions = [at for at in range(size) if size < 1000 or (made / file_name).read_bytes()[at] or at % 199 == 0]
        for position in positions:
            # A copy would be another folder: the state of this one must be believed.
            saved = {path.name: path.read_bytes() for path in made.iterdir() if path.is_file()}
            with (made / file_name).open("r+b") as file:
                file.seek(position)
                file.write(bytes([saved[file_name][position] ^ (1 << position % 8)]))
            again = open_log(made, segment_records=6, **SETTINGS)
            assert contents(again) == records, (file_name, position)
            for offset in range(len(records)):
                assert contents(again, offset, max_bytes=1)[0] == records[offset]
            for wanted in (1000, 1003, 4000, 5002, 5004):
                oracle = next(record.offset for record in records if record.timestamp >= wanted)
                assert again.offset_for_timestamp(wanted) == oracle
            assert again.append([b"new"]) >= len(records)
            again.abandon()
            for path in made.iterdir():
                if path.name not in saved and path.is_file():
                    path.unlink()
            for restored, data in saved.items():
                fd = os.open(made / restored, os.O_RDWR | os.O_CREAT)  # not rebuilt: the same inode
                os.ftruncate(fd, os.pwrite(fd, data, 0))
                os.close(fd)
            shutil.rmtree(made / "quarantine", ignore_errors=True)


def test_a_wrong_byte_in_a_topic_file_is_told(tmp_path: Path) -> None:
    """A damaged ``topic.json`` raises an error that names it, or reads as another valid one; records stay."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", segment_bytes=5000)
        store.topic("t").partition(0).append([b"a", b"b"])
    refused = 0
    for _ in _flipped(tmp_path / "store" / "t" / "topic.json"):
        with segmentlog.open(tmp_path / "store", background=False, read_only=True) as store:
            try:
                partition = store.topic("t").partition(0)
            except StoreVersionError as error:
                assert "topic.json" in str(error)  # noqa: PT017 either outcome is right
                refused += 1
            except InvalidConfig as error:
                pytest.fail(f"damage is not the caller's configuration: {error}")
            else:
                assert values(partition) == [b"a", b"b"]
    assert refused > 20


# ---------------------------------------------------------------- files that are gone


def test_indexes_are_only_a_cache(tmp_path: Path) -> None:
    """Delete all of them: the next reader rebuilds the same bytes, and every read is as before."""
    partition = open_log(tmp_path, segment_bytes=600, **SETTINGS)
    records = _fill(partition, 20)
    partition.close()
    before = tree_bytes(tmp_path)
    assert delete_indexes(tmp_path) > 4
    again = open_log(tmp_path, segment_bytes=600, **SETTINGS)
    for offset in range(0, len(records), 3):
        assert contents(again, offset) == records[offset:]
    assert again.offset_for_timestamp(5010) == next(one.offset for one in records if one.timestamp >= 5010)
    rebuilt = tree_bytes(tmp_path)
    sealed = [one for one in before if one.endswith("index") and not one.startswith(log_files(tmp_path)[-1].stem)]
    assert sealed
    assert {name: rebuilt[name] for name in sealed} == {name: before[name] for name in sealed}


def test_without_its_checkpoint_a_log_goes_on_far_above(tmp_path: Path) -> None:
    """A scan finds all records; new offsets start where none can have been assigned."""
    partition = open_log(tmp_path, segment_records=4, **SETTINGS)
    records = _fill(partition)
    partition.close()
    for _ in range(2):
        (tmp_path / CHECKPOINT_FILE).unlink()
        (tmp_path / STATE_FILE).unlink()
        again = open_log(tmp_path, segment_records=4, **SETTINGS)
        assert again.recovery_report.verdict == "no checkpoint"
        assert contents(again) == records
        assert again.log_end_offset >= records[-1].offset + (1 << 32)
        end = again.log_end_offset
        again.close()
    assert end >= records[-1].offset + (2 << 32), "the first jump's offsets may have been handed out as well"


def test_a_missing_segment_is_an_error_that_can_be_stepped_over(tmp_path: Path) -> None:
    """Reading the missing segment raises an error with its path; with ``on_skip`` exactly its offsets are reported."""
    partition = open_log(tmp_path, segment_records=4, **SETTINGS)
    records = _fill(partition, 6)
    partition.close()
    gone = log_files(tmp_path)[1]
    gone.unlink()
    again = open_log(tmp_path, segment_records=4, **SETTINGS)
    with pytest.raises(CorruptBatch) as caught:
        contents(again, 0)
    assert caught.value.offset == 4
    skipped: list[tuple[int, int]] = []
    found = contents(again, 0, on_skip=lambda base, end, damage: skipped.append((base, end)))
    assert found == records[:4] + records[8:]
    assert skipped == [(4, 8)]
    assert contents(again, 8) == records[8:]
