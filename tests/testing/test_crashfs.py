"""A disk that forgets: its model, and the folder that it is mounted on."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashfs_mount import disk as disk

from segmentlog.storage.fs import FileSystem
from segmentlog.testing.crashfs import CrashFS
from segmentlog.testing.unsynced_model import PAGE, SECTOR, ForgetfulDisk

# ---------------------------------------------------------------- the model


def outcomes(prepare: Callable[[ForgetfulDisk], None], look: Callable[[ForgetfulDisk], Any]) -> set[Any]:
    """Return the results of ``look`` after crashes with many seeds, each on a new disk after ``prepare``."""
    found = set()
    for seed in range(300):
        disk = ForgetfulDisk()
        prepare(disk)
        disk.crash(random.Random(seed))
        found.add(look(disk))
    return found


def durable_file(disk: ForgetfulDisk, path: str, content: bytes) -> None:
    """Create a file in the root, and sync it with its name."""
    node = disk.create(path)
    disk.write(node, 0, content)
    node.sync_data()
    disk.sync_folder(disk.root)


def tree(disk: ForgetfulDisk) -> tuple[tuple[str, bytes], ...]:
    """Names in the root with what is in the files."""
    return tuple((name, node.content()) for name, node in sorted(disk.root.names.items()))


def test_what_was_not_synced_may_be_lost_and_what_was_is_kept() -> None:
    """A write without fsync survives some crashes and not others; what was synced before it survives all of them."""

    def prepare(disk: ForgetfulDisk) -> None:
        durable_file(disk, "/f", b"synced")
        disk.write(disk.find("/f"), 6, b"-more")

    found = outcomes(prepare, lambda disk: disk.find("/f").content())
    assert {b"synced", b"synced-more", b"synced\0\0\0\0\0"} <= found
    assert all(content.startswith(b"synced") for content in found)


def test_a_new_name_is_lost_without_its_folder() -> None:
    """fsync of a file does not save its name; fsync of the folder does not save what is in the file."""

    def only_file(disk: ForgetfulDisk) -> None:
        node = disk.create("/f")
        disk.write(node, 0, b"data")
        node.sync_data()

    def only_folder(disk: ForgetfulDisk) -> None:
        disk.write(disk.create("/f"), 0, b"data")
        disk.sync_folder(disk.root)

    assert outcomes(only_file, tree) == {(), (("f", b"data"),)}
    found = outcomes(only_folder, tree)
    assert {(("f", b""),), (("f", b"data"),), (("f", bytes(4)),)} <= found
    assert () not in found


def test_a_rename_is_atomic() -> None:
    """After a crash the old file is there under the name or the new one, whether or not the old one is open."""

    def prepare(disk: ForgetfulDisk, *, hidden: bool) -> None:
        durable_file(disk, "/f", b"old")
        durable_file(disk, "/f.new", b"new")
        if hidden:  # as libfuse does when a process has the file open
            disk.rename("/f", "/.fuse_hidden1")
        disk.rename("/f.new", "/f")
        if hidden:
            assert disk.find("/.fuse_hidden1").content() == b"old"

    either = {(("f", b"old"), ("f.new", b"new")), (("f", b"new"),)}
    assert outcomes(lambda disk: prepare(disk, hidden=False), tree) == either
    assert outcomes(lambda disk: prepare(disk, hidden=True), tree) == either


def test_a_rename_between_folders_is_atomic() -> None:
    """A file is in the one folder or the other, never in none or both, whichever of them is synced."""

    def prepare(disk: ForgetfulDisk) -> None:
        for folder in ("/a", "/b"):
            disk.mkdir(folder)
        disk.sync_folder(disk.root)
        disk.create("/a/f")
        disk.sync_folder(disk.find("/a"))
        disk.rename("/a/f", "/b/f")

    def look(disk: ForgetfulDisk) -> tuple[bool, bool]:
        return "f" in disk.find("/a").names, "f" in disk.find("/b").names

    assert outcomes(prepare, look) == {(True, False), (False, True)}
    for folder in ("/a", "/b"):

        def and_sync(disk: ForgetfulDisk, folder: str = folder) -> None:
            prepare(disk)
            disk.sync_folder(disk.find(folder))

        assert outcomes(and_sync, look) == {(False, True)}


def test_a_deleted_name_may_come_back() -> None:
    """It may come back until the folder is synced; a file that was renamed away is never lost to its replacement."""

    def deleted(disk: ForgetfulDisk) -> None:
        durable_file(disk, "/f", b"old")
        disk.unlink("/f")

    assert outcomes(deleted, tree) == {(), (("f", b"old"),)}

    def moved_away(disk: ForgetfulDisk) -> None:
        durable_file(disk, "/f", b"old")
        disk.rename("/f", "/kept")
        disk.create("/f")

    assert all(b"old" in dict(names).values() for names in outcomes(moved_away, tree))


def test_pages_survive_in_any_combination() -> None:
    """Each of two unsynced pages may survive without the other, and so may a part of one sector."""
    old, new = b"o" * 2 * PAGE, b"n" * 2 * PAGE

    def prepare(disk: ForgetfulDisk) -> None:
        durable_file(disk, "/f", old)
        disk.write(disk.find("/f"), 0, new)

    found = outcomes(prepare, lambda disk: disk.find("/f").content())
    assert {old, new, new[:PAGE] + old[PAGE:], old[:PAGE] + new[PAGE:]} <= found
    changes = [sum(a != b for a, b in itertools.pairwise(content)) for content in found]
    assert any(change >= 4 for change in changes), "sectors in any combination"
    torn = [content for content in found if any(len(set(part)) > 1 for part in sectors(content))]
    assert torn, "a sector that is half written"
    assert all(sum(len(set(part)) > 1 for part in sectors(content)) == 1 for content in torn)


def sectors(content: bytes) -> list[bytes]:
    """Return the content, 512 bytes each."""
    return [content[start : start + SECTOR] for start in range(0, len(content), SECTOR)]


def test_a_truncation_is_forgotten_and_leaves_nothing_behind() -> None:
    """An unsynced truncation may be undone; bytes that were cut off do not come back when the file grows again."""

    def cut(disk: ForgetfulDisk) -> None:
        durable_file(disk, "/f", b"x" * 5000)
        disk.truncate(disk.find("/f"), 10)

    found = outcomes(cut, lambda disk: disk.find("/f").content())
    assert {b"x" * 10, b"x" * 5000} <= found

    def cut_and_grown(disk: ForgetfulDisk) -> None:
        cut(disk)
        disk.find("/f").sync_data()
        disk.reserve(disk.find("/f"), 0, 5000)

    found = outcomes(cut_and_grown, lambda disk: disk.find("/f").content())
    assert found == {b"x" * 10, (b"x" * 10).ljust(5000, b"\0")}


def test_the_same_seed_loses_the_same() -> None:
    """A crash is repeatable."""

    def crashed(seed: int) -> tuple[list[str], object]:
        disk = ForgetfulDisk()
        for number in range(5):
            disk.write(disk.create(f"/{number}"), 0, b"x" * 9000)
        return disk.crash(random.Random(seed)), tree(disk)

    assert [crashed(seed) for seed in range(20)] == [crashed(seed) for seed in range(20)]


# ---------------------------------------------------------------- the mount


def sync_folder(path: Path) -> None:
    """Make the names in it durable."""
    FileSystem().sync_folder(str(path))


def test_backing_holds_what_survived(disk: CrashFS) -> None:
    """After a crash the backing folder and the mount show the same; at the end the folder holds everything."""
    (disk.path / "folder").mkdir()
    sync_folder(disk.path)
    with open(disk.path / "folder" / "synced", "wb") as file:
        file.write(b"data" * 3000)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(disk.path / "folder")
    (disk.path / "folder" / "not").write_bytes(b"gone")
    number = (disk.path / "folder" / "synced").stat().st_ino
    lost = disk.crash(1, keep="none")
    assert lost == ["not on disk: make /folder/not"]
    for root in (disk.path, disk.backing):
        assert [path.name for path in sorted(root.rglob("*"))] == ["folder", "synced"]
        assert (root / "folder" / "synced").read_bytes() == b"data" * 3000
    assert (disk.path / "folder" / "synced").stat().st_ino == number
    (disk.path / "late").write_bytes(b"late")
    disk.close()
    assert (disk.backing / "late").read_bytes() == b"late"
    assert not list(disk.path.iterdir()), "it is unmounted"


def test_what_a_folder_holds_at_the_start_is_durable(disk: CrashFS, tmp_path: Path) -> None:
    """A disk may be made from a folder, and again from what one left."""
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_bytes(b"here")
    with CrashFS(source, tmp_path / "second mount") as second:
        assert second.crash(3, keep="none") == []
        assert (second.path / "deep" / "file").read_bytes() == b"here"


def test_maps_arrive_when_they_are_synced(disk: CrashFS) -> None:
    """Stores through a shared map survive after msync and fsync, and other processes see them at once."""
    path = disk.path / "mapped"
    path.write_bytes(bytes(2 * PAGE))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 2 * PAGE) as memory:
        memory[10:16] = b"stored"
        seen = subprocess.run(["head", "-c", "16", str(path)], capture_output=True, check=True).stdout
        assert seen[10:] == b"stored"
        memory.flush()
        os.fsync(file.fileno())
        sync_folder(disk.path)
        memory[PAGE : PAGE + 5] = b"later"
    disk.crash(1, keep="none")
    content = path.read_bytes()
    assert content[10:16] == b"stored"
    assert content[PAGE : PAGE + 5] == bytes(5)


def test_open_files_outlive_their_names(disk: CrashFS) -> None:
    """A deleted or replaced file can be read and written as long as it is open, and is never listed."""
    (disk.path / "f").write_bytes(b"old")
    with open(disk.path / "f", "r+b", buffering=0) as file:
        number = os.fstat(file.fileno()).st_ino
        (disk.path / "g").write_bytes(b"new")
        os.replace(disk.path / "g", disk.path / "f")
        assert file.read() == b"old"
        file.write(b"er")
        assert os.fstat(file.fileno()).st_ino == number
        assert os.listdir(disk.path) == ["f"]
        with open(disk.path / "f", "rb") as other:
            os.unlink(disk.path / "f")
            assert other.read() == b"new"
            assert os.listdir(disk.path) == []
    assert disk.crash(0, keep="all") == []
    assert os.listdir(disk.path) == []


def test_a_disk_in_use_does_not_crash(disk: CrashFS) -> None:
    """A crash while a process still uses the mount raises an error, and loses nothing."""
    with open(disk.path / "f", "wb") as file:
        with pytest.raises(OSError, match="still uses the mount"):
            disk.crash(1)
        file.write(b"data")
    assert (disk.path / "f").read_bytes() == b"data"
    disk.crash(1, keep="none")
    assert os.listdir(disk.path) == []


def test_locks_sizes_and_preallocation_work(disk: CrashFS) -> None:
    """The calls that a log makes besides reading and writing work."""
    with open(disk.path / "f", "w+b") as one, open(disk.path / "f", "rb") as two:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(one.fileno(), 0, 10_000)
        assert os.fstat(two.fileno()).st_size == 10_000
        os.ftruncate(one.fileno(), 5)
        assert os.fstat(two.fileno()).st_size == 5
        os.truncate(disk.path / "f", 7)
        assert two.read() == bytes(7)
        assert os.statvfs(disk.path).f_bavail > 0


def test_a_second_name_is_lost_without_its_folder_and_shares_the_bytes() -> None:
    """A hard link: a change of the folder like any other; the file is one, by whatever name."""

    def prepare(disk: ForgetfulDisk) -> None:
        durable_file(disk, "/f", b"synced")
        disk.link("/f", "/second")
        disk.write(disk.find("/second"), 0, b"SYNCED")
        disk.find("/f").sync_data()

    found = outcomes(prepare, tree)
    assert found == {(("f", b"SYNCED"),), (("f", b"SYNCED"), ("second", b"SYNCED"))}
    disk = ForgetfulDisk()
    prepare(disk)
    with pytest.raises(FileExistsError):
        disk.link("/f", "/second")
    disk.unlink("/f")
    assert tree(disk) == (("second", b"SYNCED"),)


def test_links_and_times_work(disk: CrashFS) -> None:
    """`link` and `utime` as the engine calls them; both names outlive a crash once the folder was synced."""
    fs = FileSystem()
    source = disk.path / "source"
    source.write_bytes(b"bytes")
    fd = os.open(source, os.O_RDWR)
    fs.set_modified(fd, 1_700_000_000_000_000_000)
    os.fsync(fd)
    os.close(fd)
    fs.link(str(source), str(disk.path / "second"))
    fs.sync_folder(str(disk.path))
    assert source.stat().st_mtime_ns == 1_700_000_000_000_000_000
    disk.crash(1, "none")
    assert {path.name: path.read_bytes() for path in disk.path.iterdir()} == {"source": b"bytes", "second": b"bytes"}
