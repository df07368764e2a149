"""An append to a segment's file is all or nothing, and maps of the file show what was appended."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest
from leftovers import opened

from segmentlog.errors import CorruptBatch, DiskFull
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import ActiveSegment, MappedSegment, list_segments, segment_stem
from segmentlog.testing.fault_injection import FaultyFileSystem

KIB = 1024
LIMIT = 64 << 20


def active_in(folder: Path, fs: FileSystem, limit: int = LIMIT, *, create: bool = True) -> ActiveSegment:
    """Return the segment of a folder that takes appends."""
    return opened(ActiveSegment(fs, str(folder), 0, limit, create=create))


def size_of(segment: ActiveSegment) -> int:
    """Return the size of the file, preallocated space included."""
    return os.path.getsize(segment.path)


def test_segments_are_listed_by_their_offsets(tmp_path):
    """Only segment files are listed, oldest first, whatever other files the folder contains."""
    for base in (300, 0, 5, 10**15):
        Path(segment_stem(str(tmp_path), base) + ".log").touch()
        Path(segment_stem(str(tmp_path), base) + ".index").touch()
    for name in ("checkpoint", "state", "lock", "5.log", "0" * 20 + ".log.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "quarantine").mkdir()
    assert list_segments(FileSystem(), str(tmp_path)) == [0, 5, 300, 10**15]


def test_a_segment_that_is_not_there_is_not_made_in_passing(tmp_path):
    """Only the process that begins a segment creates its file; for all others a missing file is an error."""
    with pytest.raises(FileNotFoundError):
        active_in(tmp_path, FileSystem(), create=False)
    assert os.listdir(tmp_path) == []


def test_space_is_allocated_ahead_in_growing_steps(tmp_path):
    """The file is longer than the data, in steps that double from 64 KiB to 8 MiB, and zero there."""
    segment = active_in(tmp_path, FaultyFileSystem())
    sizes, position = [], 0
    for step in (100, 64 * KIB, 64 * KIB, 128 * KIB, 4 << 20, 9 << 20, 9 << 20):
        segment.write([b"x" * step], step, position)
        position += step
        sizes.append(size_of(segment))
    assert sizes[:4] == [64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB]
    assert all(before < after <= before + (9 << 20) for before, after in pairwise(sizes))
    assert sizes[-1] >= position
    data = Path(segment.path).read_bytes()
    assert data == b"x" * position + bytes(len(data) - position)
    segment.close()


def test_writing_where_space_is_allocated_asks_for_nothing(tmp_path):
    """An append into allocated space is one system call."""
    fs = FaultyFileSystem()
    segment = active_in(tmp_path, fs)
    segment.write([b"x" * 100], 100, 0)
    fs.calls.clear()
    segment.write([b"y" * 50, b"z" * 50], 100, 100)
    assert [name for name, _ in fs.calls] == ["pwritev"]


def writes_of(fs: FaultyFileSystem) -> int:
    """Return the number of writes since the previous call."""
    count = sum(name == "pwritev" for name, _ in fs.calls)
    fs.calls.clear()
    return count


@pytest.mark.parametrize(("every", "writes"), [(1, 122), (10, 122), (60, 120), (None, 120)])
def test_zeros_are_written_ahead_where_it_is_synced_often(tmp_path, every, writes):
    """Zeros are written from the second 128 KiB on, if the first had four fsyncs or more; the data is unchanged."""
    fs, syncs = FaultyFileSystem(), [0]
    segment = opened(ActiveSegment(fs, str(tmp_path), 0, 64 << 20, create=True, count_syncs=lambda: syncs[0]))
    segment.write([b"x" * 128 * KIB], 128 * KIB, 0)  # so that much more is allocated
    position = 128 * KIB
    fs.calls.clear()
    for number in range(120):
        segment.write([b"%03d" % number * KIB], 3 * KIB, position)
        position += 3 * KIB
        if every is not None and number % every == 0:
            syncs[0] += 1
    assert writes_of(fs) == writes
    expected = b"x" * 128 * KIB + b"".join(b"%03d" % number * KIB for number in range(120))
    data = Path(segment.path).read_bytes()
    assert data.rstrip(b"\0") == expected
    assert len(data) == size_of(segment) == 512 * KIB


def test_zeros_that_cannot_be_written_keep_no_append_out(tmp_path):
    """They are for speed alone: a disk without room for them, or that fails, may have some for the records."""
    fs, syncs = FaultyFileSystem(), [0]
    segment = opened(ActiveSegment(fs, str(tmp_path), 0, 64 << 20, create=True, count_syncs=lambda: syncs[0]))
    segment.write([b"x" * 128 * KIB], 128 * KIB, 0)
    syncs[0] = 10
    fs.fail("pwritev", errno.ENOSPC)
    segment.write([b"y" * KIB], KIB, 128 * KIB)
    assert Path(segment.path).read_bytes().rstrip(b"\0") == b"x" * 128 * KIB + b"y" * KIB


def test_no_more_is_allocated_than_a_segment_may_hold(tmp_path):
    """Preallocation stops at the segment's limit; a larger batch gets exactly the space that it needs."""
    segment = active_in(tmp_path, FileSystem(), limit=10_000)
    segment.write([b"x" * 100], 100, 0)
    assert size_of(segment) == 10_000
    segment.write([b"x" * 30_000], 30_000, 100)
    assert size_of(segment) == 30_100


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("short", [None, 60], ids=["at once", "after a short write"])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, number, short):
    """An append without room raises DiskFull, removes its bytes, and works again once there is room."""
    fs = FaultyFileSystem()
    segment = active_in(tmp_path, fs)
    segment.write([b"a" * 100], 100, 0)
    fs.short_writes(short)
    fs.fail("pwritev", number, call=2 if short else 1)
    with pytest.raises(DiskFull) as caught:
        segment.write([b"b" * 70, b"c" * 70], 140, 100)
    assert (caught.value.path, caught.value.size_bytes) == (segment.path, 140)
    assert Path(segment.path).read_bytes() == b"a" * 100
    fs.heal()
    segment.write([b"d" * 200], 200, 100)
    assert Path(segment.path).read_bytes()[:300] == b"a" * 100 + b"d" * 200
    assert size_of(segment) > 300, "and space is allocated ahead again"


def test_a_disk_that_fills_up_is_used_to_its_last_byte(tmp_path):
    """Without room to preallocate, appends continue while they fit; the first that does not fit leaves no bytes."""
    fs = FaultyFileSystem()
    segment = active_in(tmp_path, fs)
    fs.room_bytes = 1000
    for position in (0, 300, 600):
        segment.write([b"x" * 300], 300, position)
    with pytest.raises(DiskFull):
        segment.write([b"x" * 300], 300, 900)
    assert Path(segment.path).read_bytes() == b"x" * 900
    fs.heal()
    segment.write([b"y" * 300], 300, 900)
    assert size_of(segment) > 1200


def test_a_disk_that_fails_is_told_as_it_is(tmp_path):
    """An I/O error is not reported as a full disk; the file is truncated all the same."""
    fs = FaultyFileSystem()
    segment = active_in(tmp_path, fs)
    segment.write([b"a" * 100], 100, 0)
    fs.fail("pwritev", errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        segment.write([b"b" * 100], 100, 100)
    assert not isinstance(caught.value, DiskFull)
    assert size_of(segment) == 100


def test_a_cut_that_fails_is_told_before_what_made_it_necessary(tmp_path):
    """If the half-written bytes cannot be truncated, that is the error, and the error of the write is its context."""
    fs = FaultyFileSystem()
    segment = active_in(tmp_path, fs)
    fs.fail("pwritev", errno.ENOSPC)
    fs.fail("ftruncate", errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        segment.write([b"b" * 100], 100, 0)
    assert not isinstance(caught.value, DiskFull)
    assert isinstance(caught.value.__context__, OSError)
    assert caught.value.__context__.errno == errno.ENOSPC


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_appends_work_where_space_cannot_be_allocated(tmp_path, number):
    """A file system that cannot preallocate, or lacks the room, still accepts what fits."""
    fs = FaultyFileSystem()
    fs.fail("fallocate", number, times=None)
    segment = active_in(tmp_path, fs)
    segment.write([b"a" * 100], 100, 0)
    segment.write([b"b" * 100], 100, 100)
    assert Path(segment.path).read_bytes() == b"a" * 100 + b"b" * 100


def test_processes_take_turns_in_one_file(tmp_path):
    """Two processes append in turns, after the other preallocated or truncated: no write overwrites another."""
    fs = FaultyFileSystem()
    first, second = active_in(tmp_path, fs), active_in(tmp_path, FileSystem(), create=False)
    position = 0
    for turn in range(40):
        writer, byte = ((first, b"1"), (second, b"2"))[turn % 2]
        if turn == 20:
            fs.fail("pwritev", errno.ENOSPC)
            with pytest.raises(DiskFull):
                first.write([b"?" * 9000], 9000, position)
        writer.write([byte * 7000], 7000, position)
        position += 7000
    data = Path(first.path).read_bytes()
    assert data.rstrip(b"\0") == (b"1" * 7000 + b"2" * 7000) * 20


def test_a_mapped_segment_grows_with_its_file(tmp_path):
    """A map of a short segment sees what is appended later, and earlier views stay valid."""
    fs = FileSystem()
    active = active_in(tmp_path, fs)
    mapped = MappedSegment(fs, str(tmp_path), 0)
    assert len(mapped.view_to(0)) == 0
    active.write([b"a" * 100], 100, 0)
    first = mapped.view_to(100)
    assert first == b"a" * 100
    active.write([b"b" * (1 << 20)], 1 << 20, 100)
    assert mapped.view_to(100 + (1 << 20))[100:] == b"b" * (1 << 20)
    assert first == b"a" * 100


def test_a_mapping_shows_what_is_written_into_it(tmp_path):
    """Appends into space that was mapped already are seen without mapping again."""
    fs = FaultyFileSystem()
    active = active_in(tmp_path, FileSystem())
    active.write([b"a" * 100], 100, 0)
    mapped = MappedSegment(fs, str(tmp_path), 0)
    before = fs.count("map_file")
    active.write([b"b" * 100], 100, 100)
    assert mapped.view_to(200)[100:] == b"b" * 100
    assert fs.count("map_file") == before


def test_a_file_shorter_than_the_log_is_damage(tmp_path):
    """A segment that lost its end is reported with where it ends now, and never read beyond it."""
    Path(segment_stem(str(tmp_path), 0) + ".log").write_bytes(b"x" * 50)
    mapped = MappedSegment(FileSystem(), str(tmp_path), 0)
    with pytest.raises(CorruptBatch) as caught:
        mapped.view_to(51)
    assert (caught.value.path, caught.value.position) == (mapped.path, 50)
    assert mapped.view_to(50) == b"x" * 50


def test_a_segment_that_was_deleted_stays_readable_to_who_has_it(tmp_path):
    """Retention does not invalidate a reader's map; reading what was never mapped raises an error."""
    Path(segment_stem(str(tmp_path), 0) + ".log").write_bytes(b"x" * 50)
    mapped = MappedSegment(FileSystem(), str(tmp_path), 0)
    os.unlink(mapped.path)
    assert mapped.view_to(50) == b"x" * 50
    with pytest.raises(CorruptBatch):
        mapped.view_to(60)
    with pytest.raises(FileNotFoundError):
        MappedSegment(FileSystem(), str(tmp_path), 0)
