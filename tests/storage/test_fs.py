"""A file system says which boot it is, and finds a descriptor where one can be had."""

from __future__ import annotations

import errno
import os

import pytest

from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.interrupts import interrupt_at, list_points


def test_the_boot_has_a_name():
    """The boot id is the same for every process, and not empty."""
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
    """A lack of descriptors is an error.

    With a wrong boot id this process would recover a log that others have open.
    """

    def refused(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr("segmentlog.storage.fs._read_proc", refused)
    with pytest.raises(OSError, match=os.strerror(number)):
        FileSystem().boot_id()


def test_an_open_without_a_descriptor_is_tried_once_more_when_some_are_freed(tmp_path, monkeypatch):
    """The relief callbacks are asked to close files; if none is closed, the error is raised."""
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


def test_a_folder_is_removed_with_all_in_it_and_no_link_is_followed(tmp_path):
    """The targets of links stay; a link in place of the folder, and a missing folder, are errors."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").touch()
    (folder / "a" / "to file").symlink_to(elsewhere / "kept")
    (folder / "to folder").symlink_to(elsewhere)
    (folder / "to nothing").symlink_to(tmp_path / "nothing")
    FileSystem().remove_tree(str(folder))
    assert not folder.exists()
    folder.symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        FileSystem().remove_tree(str(folder))
    with pytest.raises(FileNotFoundError):
        FileSystem().remove_tree(str(tmp_path / "nothing"))
    assert os.listdir(elsewhere) == ["kept"]


def test_an_interrupt_of_a_removal_leaves_no_descriptor(tmp_path):
    """The interrupt may come anywhere; a second call removes the rest."""
    folder = tmp_path / "folder"

    def make() -> None:
        for number in range(2):
            (folder / str(number)).mkdir(parents=True)
            (folder / str(number) / "file").touch()

    make()
    before = len(os.listdir("/proc/self/fd"))
    points = len(list_points(lambda: FileSystem().remove_tree(str(folder))))
    assert points > 20
    for at in range(1, points + 1):
        make()
        interrupt_at(at, lambda: FileSystem().remove_tree(str(folder)))
        assert len(os.listdir("/proc/self/fd")) == before
        if folder.exists():
            FileSystem().remove_tree(str(folder))
        assert not folder.exists()
