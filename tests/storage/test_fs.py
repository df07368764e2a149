"""A file system says which boot it is, and finds a descriptor where one can be had."""

from __future__ import annotations

import errno
import os

import pytest

from segmentlog.storage.files import read_file
from segmentlog.storage.fs import FileSystem


def test_the_boot_has_a_name():
    """The name of a boot is the same whoever asks, and not empty."""
    first, second = FileSystem().boot_id(), FileSystem().boot_id()
    assert first == second
    assert first


def test_where_there_is_no_proc_the_boot_has_a_name_too(monkeypatch):
    """Without Linux's boot id the boot still has a name that stays."""

    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr("segmentlog.storage.fs._read_proc", missing)
    assert FileSystem().boot_id() == FileSystem().boot_id()
    assert FileSystem().boot_id().startswith("init-")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_a_process_that_cannot_ask_for_the_boot_takes_it_for_no_other(monkeypatch, number):
    """A want of descriptors is told: under another boot's name a log that others have open would be recovered."""

    def refused(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("segmentlog.storage.fs._read_proc", refused)
    with pytest.raises(OSError, match=os.strerror(number)):
        FileSystem().boot_id()


def test_an_open_without_a_descriptor_is_tried_once_more_when_some_are_freed(tmp_path, monkeypatch):
    """Whoever can close files that are opened again on use is asked; with nothing to close the error is told."""
    (tmp_path / "file").write_bytes(b"some bytes")
    real, failures, asked = os.open, [errno.EMFILE], []

    def short(path, *rest):
        if failures:
            raise OSError(failures.pop(), "no descriptor", path)
        return real(path, *rest)

    monkeypatch.setattr("os.open", short)
    monkeypatch.setattr("segmentlog.storage.fs.relief", [lambda: asked.append(1) or True])
    assert read_file(FileSystem(), str(tmp_path / "file")) == b"some bytes"
    assert asked == [1]
    failures += [errno.EMFILE, errno.EMFILE]
    with pytest.raises(OSError, match="no descriptor"):
        read_file(FileSystem(), str(tmp_path / "file"))
    failures[:] = [errno.EACCES]
    with pytest.raises(OSError, match="no descriptor"):
        read_file(FileSystem(), str(tmp_path / "file"))
    assert asked == [1, 1]
