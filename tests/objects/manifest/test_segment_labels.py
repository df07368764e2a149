"""A label of a segment file counts only while the file is the one that was compared, and unchanged."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from segmentlog.objects.manifest.segment_labels import Checksums, has_label, sync_and_label
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.fault_injection import FaultyFileSystem

CHECKSUMS: Checksums = ((0, 6, "aa"), (6, 4, "bb"))
OTHER: Checksums = ((0, 6, "aa"), (6, 4, "cc"))


@pytest.fixture
def fs() -> FileSystem:
    """Return the real file system."""
    return FileSystem()


@pytest.fixture
def path(tmp_path: Path, fs: FileSystem) -> str:
    """Return a labelled file; skip where the file system has no extended attributes."""
    path = str(tmp_path / "segment.log")
    Path(path).write_bytes(b"0123456789")
    try:
        os.setxattr(path, "user.test", b"x")
    except OSError as error:
        pytest.skip(f"no extended attributes: {error}")
    sync_and_label(fs, path, CHECKSUMS)
    return path


def test_a_label_holds_for_its_checksums(fs: FileSystem, path: str) -> None:
    """Also under another name of the file; not for other checksums, and not for a file that is missing."""
    assert has_label(fs, path, CHECKSUMS)
    assert not has_label(fs, path, OTHER)
    assert not has_label(fs, path, CHECKSUMS[:1])
    assert not has_label(fs, path, ())
    assert not has_label(fs, path + "~", CHECKSUMS)
    os.link(path, path + ".link")
    os.rename(path, path + ".moved")
    assert has_label(fs, path + ".link", CHECKSUMS)
    assert has_label(fs, path + ".moved", CHECKSUMS)


def test_a_changed_file_has_no_label(fs: FileSystem, path: str) -> None:
    """Whether it was extended, truncated, or overwritten with as many bytes; the label can be renewed."""
    for change in (
        lambda: os.truncate(path, 9),
        lambda: Path(path).write_bytes(b"0123456789-"),
        lambda: Path(path).write_bytes(b"9876543210"),
        lambda: os.truncate(path, 10),
    ):
        os.utime(path, ns=(1, 1))  # so that the change has another time
        Path(path).write_bytes(b"0123456789")
        os.utime(path, ns=(1, 1))
        sync_and_label(fs, path, CHECKSUMS)
        assert has_label(fs, path, CHECKSUMS)
        change()
        assert not has_label(fs, path, CHECKSUMS)


def test_a_copy_has_no_label(fs: FileSystem, path: str) -> None:
    """Even if the copy keeps attributes and times."""
    copy = shutil.copy2(path, path + ".copy")
    assert os.getxattr(copy, "user.segmentlog") == os.getxattr(path, "user.segmentlog")
    assert os.stat(copy).st_mtime_ns == os.stat(path).st_mtime_ns
    assert not has_label(fs, copy, CHECKSUMS)


def test_a_file_of_another_size_gets_no_label(fs: FileSystem, path: str) -> None:
    """Nothing is known of the bytes after the last checksum."""
    Path(path).write_bytes(b"0123456789 and more")
    sync_and_label(fs, path, CHECKSUMS)
    assert not has_label(fs, path, CHECKSUMS)


def test_a_label_needs_a_sync(tmp_path: Path) -> None:
    """If the sync fails, the file gets no label."""
    path = str(tmp_path / "segment.log")
    Path(path).write_bytes(b"0123456789")
    fs = FaultyFileSystem()
    fs.fail("fdatasync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_and_label(fs, path, CHECKSUMS)
    assert not has_label(fs, path, CHECKSUMS)


def test_without_extended_attributes_there_are_no_labels(
    path: str, fs: FileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither writing nor reading one raises: the caller compares the file."""

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "setxattr", refuse)
    monkeypatch.setattr(os, "getxattr", refuse)
    sync_and_label(fs, path, CHECKSUMS)
    assert not has_label(fs, path, CHECKSUMS)
