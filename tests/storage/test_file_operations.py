"""Writes are whole or an error, and a file that is replaced is the old one or the new one, never half."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import DiskFull
from segmentlog.storage.file_operations import make_folders_durably, read_file, replace_file, try_fallocate, write_all
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

OLD, NEW = b"old " * 1000, b"the new one " * 700


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """Provide a file to write to."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def content(fd: int) -> bytes:
    """Return the content of a small file."""
    return os.pread(fd, 1 << 20, 0)


# ---------------------------------------------------------------- write_all, read_file


@given(buffers=st.lists(st.binary(max_size=50), max_size=8), at_most=st.integers(1, 60), position=st.integers(0, 20))
def test_short_writes_are_gone_on_with(tmp_path_factory, buffers, at_most, position):
    """With writes of any size, every byte arrives in order, at its place."""
    fs = FaultyFileSystem()
    fs.short_writes(at_most)
    fd = os.open(tmp_path_factory.getbasetemp() / "short", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fs, fd, buffers, position)
        data = b"".join(buffers)
        assert content(fd) == (bytes(position) + data if data else b"")
    finally:
        os.close(fd)


def test_a_write_that_takes_nothing_is_an_error(fd):
    """A file system that writes nothing and reports success must not cause an endless loop."""
    fs = FaultyFileSystem()
    fs.short_writes(0)
    with pytest.raises(OSError, match="wrote nothing") as caught:
        write_all(fs, fd, [b"data"], 0)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_any_number_of_buffers_is_written(fd, count):
    """More buffers than one system call takes (1,024) are written all the same."""
    buffers = [b"%d," % number for number in range(count)]
    write_all(FileSystem(), fd, buffers, 7)
    assert content(fd) == bytes(7) + b"".join(buffers)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_of_any_write_comes_through(fd, call):
    """An error after a short write is raised unchanged; a lack of room raises `DiskFull`."""
    for code, error in ((errno.EDQUOT, DiskFull), (errno.EIO, OSError)):
        fs = FaultyFileSystem()
        fs.short_writes(10)
        fs.fail("pwritev", code, call=call)
        with pytest.raises(error) as told:
            write_all(fs, fd, [b"x" * 100], 0)
        assert type(told.value) is error
    assert len(content(fd)) == 10 * (call - 1)


def test_a_file_is_read_whole_though_reads_are_short(tmp_path):
    """Reading continues to the end of the file, however few bytes a read returns."""
    (tmp_path / "file").write_bytes(NEW)
    fs = FaultyFileSystem()
    real = fs.pread
    fs.pread = lambda fd, size, position: real(fd, min(size, 999), position)
    assert read_file(fs, str(tmp_path / "file")) == NEW


# ---------------------------------------------------------------- replace_file


def names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


STEPS = ["open", "flock", "fstat", "stat", "ftruncate", "pwritev", "fsync", "replace"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=["EIO", "ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("exists", [True, False], ids=["replaced", "made"])
def test_a_replacement_that_fails_leaves_the_old_file(tmp_path, step, number, exists):
    """Whichever call fails, the old file is complete, no other file is left, and a full disk raises DiskFull."""
    path = tmp_path / "file"
    if exists:
        path.write_bytes(OLD)
    fs = FaultyFileSystem()
    fs.fail(step, number)
    with pytest.raises(OSError) as caught:  # noqa: PT011
        replace_file(fs, str(path), NEW)
    assert isinstance(caught.value, DiskFull) == (number != errno.EIO)
    if exists:
        assert path.read_bytes() == OLD
    # If one of these fails, the temporary file may be another process's, and stays.
    if step not in ("flock", "fstat", "stat"):
        assert names(tmp_path) == ["file"] * exists
    replace_file(fs, str(path), NEW)
    assert names(tmp_path) == ["file"]
    assert path.read_bytes() == NEW


def test_a_replacement_cut_short_by_a_full_disk_leaves_the_old_file(tmp_path):
    """Half of the new file fitted on the disk: it is removed, so that its room is free again."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    fs = FaultyFileSystem()
    fs.room_bytes = len(NEW) // 2
    with pytest.raises(DiskFull) as caught:
        replace_file(fs, str(path), NEW)
    assert (caught.value.path, caught.value.size_bytes) == (str(path), len(NEW))
    assert (names(tmp_path), path.read_bytes()) == (["file"], OLD)


def test_a_failed_sync_of_the_folder_is_told(tmp_path):
    """If the new name may not be durable, the caller gets an error; the file is the new one, complete."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    fs = FaultyFileSystem()
    fs.fail("fsync", errno.EIO, call=2)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        replace_file(fs, str(path), NEW)
    assert (names(tmp_path), path.read_bytes()) == (["file"], NEW)


def test_the_data_is_synced_before_the_rename_and_the_name_after_it(tmp_path):
    """The order survives a power cut at any point: data on disk, rename, folder on disk."""
    fs = FaultyFileSystem()
    replace_file(fs, str(tmp_path / "file"), NEW)
    order = [name for name, _ in fs.calls if name in ("pwritev", "fsync", "replace", "sync_folder")]
    assert order == ["pwritev", "fsync", "replace", "sync_folder", "fsync"]


def test_a_process_that_dies_while_replacing_leaves_the_old_file_or_the_new_one(tmp_path):
    """After a kill at any call the file is complete, and the next replacement succeeds and leaves no other file."""
    path = tmp_path / "file"
    call, seen = 0, set()
    while True:
        call += 1
        path.write_bytes(OLD)
        fs = FaultyFileSystem()
        fs.die_at(call)
        try:
            replace_file(fs, str(path), NEW)
        except Died:
            seen.add(path.read_bytes())
            replace_file(FileSystem(), str(path), OLD)
            assert (names(tmp_path), path.read_bytes()) == (["file"], OLD)
        else:
            break
    assert call > len(STEPS)
    assert seen == {OLD, NEW}


def test_writers_that_replace_one_file_at_once_do_not_meet(tmp_path):
    """While several writers replace a file, every reader gets a complete file of one writer."""
    path = tmp_path / "file"
    contents = [bytes([65 + number]) * 20_000 for number in range(4)]
    path.write_bytes(contents[0])
    failures: list[BaseException] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(60):
                replace_file(FileSystem(), str(path), data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_bytes() in contents
    assert not failures
    assert names(tmp_path) == ["file"]


def test_a_second_writer_does_not_empty_the_first_ones_file(tmp_path):
    """Two processes replace a file; the second starts when the first is about to rename.

    The first file stays complete.
    """
    path = tmp_path / "file"
    fs = FaultyFileSystem()
    second = FaultyFileSystem()
    second.fail("replace", Died())  # it has written, and gets no further

    def other_process() -> None:
        with pytest.raises(Died):
            replace_file(second, str(path), b"short")

    fs.before("replace", other_process)
    replace_file(fs, str(path), NEW)
    assert path.read_bytes() == NEW


# ---------------------------------------------------------------- fallocate


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV]
)
def test_preallocation_is_a_wish(fd, number):
    """Without room, or without support for preallocation, the call returns False."""
    fs = FaultyFileSystem()
    fs.fail("fallocate", number)
    assert try_fallocate(fs, fd, 0, 4096) is False
    assert try_fallocate(fs, fd, 0, 4096) is True
    assert os.fstat(fd).st_size == 4096


def test_a_disk_that_fails_is_no_missing_wish(fd):
    """An I/O error while preallocating is an error."""
    fs = FaultyFileSystem()
    fs.fail("fallocate", errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        try_fallocate(fs, fd, 0, 4096)


def test_folders_are_made_below_what_nobody_may_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parents that cannot be read are skipped; a file in place of a folder is an error; a bare name is relative."""
    synced: list[str] = []

    class Strict(FileSystem):
        def sync_folder(self, path: str) -> None:
            synced.append(path)
            if path == str(tmp_path / "a"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            super().sync_folder(path)

    make_folders_durably(Strict(), str(tmp_path / "a/b/c"))
    assert (tmp_path / "a/b/c").is_dir()
    assert synced[:3] == [str(tmp_path / "a/b"), str(tmp_path / "a"), str(tmp_path)]
    monkeypatch.chdir(tmp_path)
    make_folders_durably(Strict(), "d/e")
    assert (tmp_path / "d/e").is_dir()
    (tmp_path / "file").touch()
    for path in ("file", str(tmp_path / "file")):
        with pytest.raises(FileExistsError):
            make_folders_durably(FileSystem(), path)
    with pytest.raises(NotADirectoryError):
        make_folders_durably(FileSystem(), "file/below")
