"""Facts that the kernel knows about a file and its content cannot show."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from segmentlog.storage import inode_mark
from segmentlog.storage.fs import FileSystem


def test_a_mark_stays_with_the_file_and_not_with_the_descriptor(tmp_path: Path) -> None:
    """Every process that opens the file sees the mark, under any name; a copy has none."""
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        assert not inode_mark.has_mark(fd)
        inode_mark.set_mark(fd)
        os.link(path, tmp_path / "other name")
        (tmp_path / "copy").write_bytes(path.read_bytes())
        assert [_is_marked(tmp_path / name) for name in ("file", "other name", "copy")] == [True, True, False]
    finally:
        os.close(fd)


def _is_marked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return inode_mark.has_mark(fd)
    finally:
        os.close(fd)


def test_a_kernel_without_hints_vouches_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is not trusted, and no error is raised."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "no hints")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        inode_mark.set_mark(fd)
        assert not inode_mark.has_mark(fd)
    finally:
        os.close(fd)


def test_files_of_one_mount_have_its_number(tmp_path: Path) -> None:
    """Files of one mount have the same id, and files elsewhere another (Linux 6.8 or later; otherwise 0)."""
    numbers = set()
    for path in (tmp_path / "a", tmp_path / "b"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        numbers.add(FileSystem().mount_id(fd))
        os.close(fd)
    assert len(numbers) == 1
    fd = os.open("/proc/self/stat", os.O_RDONLY)
    other = FileSystem().mount_id(fd)
    os.close(fd)
    assert other not in numbers or other == 0


def test_what_is_not_a_file_has_no_mount() -> None:
    """A closed descriptor gives 0 instead of a crash."""
    fd = os.open("/", os.O_RDONLY)
    os.close(fd)
    assert inode_mark.mount_id(fd) == 0
    assert not inode_mark.has_mark(fd)
