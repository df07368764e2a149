"""Read the state of a partition from outside: what the processes that have it open share, and nothing invented."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

from logs import open_log

from segmentlog.errors import LogTruncated, OffsetOutOfRange
from segmentlog.format.file_names import STATE_FILE
from segmentlog.log.state_peek import count_lost_offsets, find_lost_range_end, read_state, sealed_size
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.state_page import PAGE_SIZE

FS = FileSystem()


def test_it_sees_what_others_wrote(tmp_path: Path) -> None:
    """Each call returns the current state: sealed segments with their bytes, and the lost offsets."""
    with closing(open_log(tmp_path / "log")) as log:
        log.append([b"one", b"two"])
        log.flush()
        log.append([b"three"])
        seen = read_state(FS, log.folder, FS.boot_id())
        assert seen is not None
        assert (seen.log.log_end_offset, seen.sync.durable_offset, seen.unsynced_count) == (3, 2, 1)
        assert not seen.has_failed
        assert sealed_size(FS, log.folder, seen.log) == (0, 0)
        log.roll()
        log.append([b"four"])
        seen = read_state(FS, log.folder, FS.boot_id())
        assert seen is not None
        assert sealed_size(FS, log.folder, seen.log) == (1, log.segments()[0].size_bytes)
        lost = log.truncate(3)
        assert lost is not None
        assert count_lost_offsets(FS, log.folder, log.handle.page.log.read()) == lost.end_offset - lost.base_offset
        log.handle.ledger.mark_failed()
        seen = read_state(FS, log.folder, FS.boot_id())
        assert seen is not None
        assert seen.has_failed
        log.handle.ledger.unmark_failed()


def test_where_history_resumes(tmp_path: Path) -> None:
    """History resumes at the end of adjacent ranges, as in `check_position`, also without a state page of this boot."""
    with closing(open_log(tmp_path / "log")) as log:
        log.append([b"1", b"2", b"3", b"4"])
        assert find_lost_range_end(FS, log.folder, 2) is None
        for at in (2, log.log_end_offset):
            log.append([b"gone"])
            log.truncate(at)
        log.append([b"5"])
        log.trim(1)
        end, offsets = log.log_end_offset, [*range(1, 9), log.log_end_offset - 1, log.log_end_offset]
        wanted = {}
        for offset in offsets:
            with suppress(LogTruncated, OffsetOutOfRange):
                wanted[offset] = log.check_position(offset)
        assert wanted[2] == end - 1
        for offset in offsets:
            resumed = None if wanted.get(offset, offset) == offset else (wanted[offset], log.epoch)
            assert find_lost_range_end(FS, log.folder, offset) == resumed
    (tmp_path / "log" / STATE_FILE).unlink()
    assert find_lost_range_end(FS, log.folder, 2) == (end - 1, log.epoch)
    assert find_lost_range_end(FS, log.folder, 1) is None


def test_it_believes_no_page_of_another_time_or_place(tmp_path: Path) -> None:
    """A page of an earlier boot or a copied folder, a half, damaged or missing page: nothing is returned."""
    with closing(open_log(tmp_path / "log")) as log:
        log.append([b"one"])
        folder = log.folder
    assert read_state(FS, folder, FS.boot_id()) is not None
    assert read_state(FS, folder, "00000000-0000-0000-0000-000000000001") is None
    page = (Path(folder) / STATE_FILE).read_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    for data in (page, page[: PAGE_SIZE // 2], b""):
        (copy / STATE_FILE).write_bytes(data)
        assert read_state(FS, str(copy), FS.boot_id()) is None
    for at in (8 * 17, 8 * 66):
        damaged = bytearray(page)
        damaged[at : at + 80] = b"\xff" * 80
        (Path(folder) / STATE_FILE).write_bytes(damaged)
        assert read_state(FS, folder, FS.boot_id()) is None, "both copies of a block"
        (Path(folder) / STATE_FILE).write_bytes(page)
    assert read_state(FS, str(tmp_path / "missing"), FS.boot_id()) is None
