"""Files without a name."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from segmentlog.errors import DiskFull
from segmentlog.storage.anonymous_file import AnonymousFile, free_bytes
from segmentlog.storage.fs import Buffer, FileSystem


class FullFileSystem(FileSystem):
    """Nothing can be written."""

    @staticmethod
    def pwritev(fd: int, buffers: Sequence[Buffer], position: int) -> int:
        """Fail as if the disk was full."""
        raise OSError(errno.ENOSPC, "no room")


def test_what_is_added_is_read(tmp_path: Path) -> None:
    """The bytes exist as long as a view of them, without a name in the folder; beyond the size, nothing is added."""
    file = AnonymousFile(FileSystem(), str(tmp_path), 100)
    one = file.add([b"one", b"", b"two"])
    assert one == [b"one", b"", b"two"]
    assert file.add([b"x" * 95]) is None
    assert file.add([b"x" * 94]) == [b"x" * 94]
    assert list(tmp_path.iterdir()) == []
    file.close()
    file.close()
    assert file.add([b""]) is None
    assert one == [b"one", b"", b"two"]


def test_no_room(tmp_path: Path) -> None:
    """A full disk raises an error from `add`."""
    file = AnonymousFile(FullFileSystem(), str(tmp_path), 100)
    with pytest.raises(DiskFull):
        file.add([b"one"])
    file.close()
    assert free_bytes(str(tmp_path)) > 0


def test_no_folder(tmp_path: Path) -> None:
    """A missing folder raises an error and leaves no descriptor open."""
    with pytest.raises(OSError, match="none"):
        AnonymousFile(FileSystem(), str(tmp_path / "none"), 100)


def test_of_no_use_in_a_child(tmp_path: Path) -> None:
    """A forked child adds nothing to its parent's file."""
    file = AnonymousFile(FileSystem(), str(tmp_path), 100)
    child = os.fork()
    if not child:
        os._exit(0 if file.add([b"child"]) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.add([b"parent"]) == [b"parent"]
    file.close()
