"""A disk that forgets what was not synced: that it does, and what a log on it keeps of its promises.

    SEGMENTLOG_CRASHFS_ROUNDS=200 SEGMENTLOG_SEED=42 pytest tests/crash/test_crashfs.py

A seed repeats what the writers do, when they are killed and which choice a crash makes; how
far the writers had come when they were killed is up to the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from segmentlog.errors import LogTruncated
from segmentlog.partition.partition import Partition
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing import History
from segmentlog.testing.crashfs import CrashFS, CrashFSUnavailable
from segmentlog.testing.forgetful import PAGE, SECTOR, ForgetfulDisk

ROUNDS = int(os.environ.get("SEGMENTLOG_CRASHFS_ROUNDS", "12"))
SEED = int(os.environ.get("SEGMENTLOG_SEED", str(random.randrange(1 << 30))))

# ---------------------------------------------------------------- the model


def outcomes(prepare: Callable[[ForgetfulDisk], None], look: Callable[[ForgetfulDisk], Any]) -> set[Any]:
    """What ``look`` finds after crashes of many seeds, each on a new disk that was prepared in the same way."""
    found = set()
    for seed in range(300):
        disk = ForgetfulDisk()
        prepare(disk)
        disk.crash(random.Random(seed))
        found.add(look(disk))
    return found


def durable_file(disk: ForgetfulDisk, path: str, content: bytes) -> None:
    """A file in the root, synced with its name."""
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
        if hidden:  # as libfuse does when somebody has the file open
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
    """Until the folder is synced; but what was renamed away is never lost to the file that took its place."""

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
    """Of two unsynced pages each may survive without the other, and of one sector a part."""
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
    """The content, 512 bytes each."""
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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[CrashFS]:
    """A mounted disk; without FUSE a skip, but not where everything has to be tested."""
    try:
        mounted = CrashFS(tmp_path / "disk", tmp_path / "mount")
    except CrashFSUnavailable as why:
        if os.environ.get("CI"):
            pytest.fail(f"CrashFS: {why}")
        pytest.skip(f"CrashFS: {why}")
    with mounted:
        yield mounted


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
    """Whoever forgot to kill a process is told so, and nothing is lost."""
    with open(disk.path / "f", "wb") as file:
        with pytest.raises(OSError, match="still uses it"):
            disk.crash(1)
        file.write(b"data")
    assert (disk.path / "f").read_bytes() == b"data"
    disk.crash(1, keep="none")
    assert os.listdir(disk.path) == []


def test_locks_sizes_and_preallocation_work(disk: CrashFS) -> None:
    """What a log needs besides reading and writing."""
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


# ---------------------------------------------------------------- a log on it


class OneBoot(FileSystem):
    """The real file system of a machine that was started at a time of our choosing."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    def boot_id(self) -> str:
        return self._boot


class Machine:
    """Runs processes on the disk and kills them: a process that forks, so that each starts in a millisecond."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.boots = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *jobs: tuple[str, list[object]], seconds: float | None = None) -> list[list[Any]]:
        """Run jobs at the same time, to their end or for so long; what they told."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"path": str(self.path), "boot": f"boot-{self.boots}", "jobs": jobs, "seconds": seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        told = []
        for line in self._process.stdout:
            if line == "done\n":
                return told
            told.append(json.loads(line))
        raise AssertionError("the process that starts the others ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("fsync", ["always", "20ms", "50records", "8192bytes", "never"])
def test_promises_survive_power_cuts(disk: CrashFS, fsync: str, writers: int) -> None:
    """What was durable is there whole, no offset names two records, and all that is gone lies in a lost range."""
    rng = random.Random(f"{SEED} {fsync} {writers}")
    history = History()
    story: list[str] = []
    machine = Machine(disk.path / "store")
    with contextlib.closing(machine):
        machine.run(("make", [fsync]))
        for number in range(ROUNDS):
            machine.boots += 1
            jobs: list[tuple[str, list[object]]] = [
                ("write", [f"w{number}.{writer}", rng.randrange(1 << 30), fsync == "always"])
                for writer in range(writers)
            ]
            jobs.append(("follow", [f"r{number}"]))
            seconds = rng.uniform(0.01, 0.06)
            learn(history, machine.run(*jobs, seconds=seconds), story)
            seed = rng.randrange(1 << 30)
            story.append(f"round {number}: {len(history)} records; crash({seed})")
            story += [f"    {line}" for line in disk.crash(seed)]
            # Now and then it is the next writers that recover, and may be killed while they do.
            if rng.random() < 0.3 and number < ROUNDS - 1:
                continue
            machine.boots += 1
            check(history, machine.run(("look", [f"c{number}", rng.random() < 0.5])), story)
    assert len(history) > 0, "the writers did not write: this proves nothing"


def learn(history: History, told: list[list[Any]], story: list[str]) -> None:
    """Enter what processes of one boot told.

    Below the durable offset of that boot everything told in it is durable, told early or late;
    not what was told in earlier ones, which a crash that nobody has looked at yet may have taken.
    """
    durable_offset = max((what[0] for kind, *what in told if kind == "durable"), default=0)
    for kind, *what in told:
        if kind == "acknowledged":
            base_offset, names, durable = what
            for offset, name in enumerate(names, base_offset):
                history.acknowledged(offset, [name.encode()], durable=durable or offset < durable_offset)
        elif kind == "handed":
            reader, offset, name, durable = what
            history.handed(reader, offset, name.encode(), durable_only=durable or offset < durable_offset)
        elif kind == "failed":
            fail(story, f"a process failed:\n{what[0]}")


def check(history: History, told: list[list[Any]], story: list[str]) -> None:
    """Compare with what a process found after the crash, and enter what it did besides."""
    contents = {what[0]: what[1].encode() for kind, *what in told if kind == "is"}
    ranges = [(what[0], what[1]) for kind, *what in told if kind == "lost"]
    verdict = [what[0] for kind, *what in told if kind == "verdict"]
    story.append(f"    recovery: {verdict}, lost ranges {ranges}, {len(contents)} records")
    learn(history, [line for line in told if line[0] == "failed"], story)
    if conflicts := history.check(contents, ranges):
        fail(story, "\n".join(map(str, conflicts[:10])))
    learn(history, told, story)


def fail(story: list[str], what: str) -> None:
    """Fail with what happened before, and how to repeat it."""
    tail = "\n".join(story[-60:])
    pytest.fail(f"{what}\n\nSEGMENTLOG_SEED={SEED} SEGMENTLOG_CRASHFS_ROUNDS={ROUNDS}\n{tail}", pytrace=False)


# ---------------------------------------------------------------- in the machine's processes


def tell(*what: object) -> None:
    """One line in one write: a pipe takes up to 4096 bytes whole or not at all, also from a process that is killed."""
    line = json.dumps(what).encode() + b"\n"
    assert len(line) <= 4096
    os.write(1, line)


def value_of(name: str) -> bytes:
    """The record of that name; the name tells the length of it, so that one half overwritten is seen."""
    return name.encode() + b":" + b"x" * int(name.rpartition(":")[2])


def name_of(value: bytes | None) -> str:
    """The name in a record, if the record is whole."""
    assert value is not None
    name = value.rpartition(b":")[0].decode()
    return name if value_of(name) == value else f"damaged {value!r}"


def make(store: LogStore, fsync: str) -> None:
    """Make the topic, with small segments so that crashes meet rolls."""
    store.create_topic("t", fsync=fsync, segment_bytes=20_000, index_interval_bytes=512)


def write(store: LogStore, writer: str, seed: int, always: bool) -> None:
    """Append for ever and tell what was acknowledged."""
    rng = random.Random(seed)
    partition: Partition = store.topic("t").partition(0)
    number = 0
    while True:
        count = rng.choice((1, 1, 2, 7, 50))
        padding = rng.choice((0, 10, 300))
        names = [f"{writer}:{number + index}:{padding}" for index in range(count)]
        ack: Any = rng.choice(("durable", "written", "written", None))
        base_offset = partition.append([value_of(name) for name in names], ack=ack)
        tell("acknowledged", base_offset, names, always or ack == "durable")
        if rng.random() < 0.02:
            tell("durable", partition.flush())
        number += count
        time.sleep(rng.choice((0, 0, 0.001, 0.003)))


def follow(store: LogStore, reader: str) -> None:
    """Read for ever, in turns what is durable and what is there, and tell what was handed."""
    partition = store.topic("t").partition(0)
    positions = {True: 0, False: 0}
    while True:
        for durable_only, position in positions.items():
            try:
                for batch in partition.read(position, durable_only=durable_only):
                    for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                        tell("handed", reader, offset, name_of(value), durable_only)
                        positions[durable_only] = offset + 1
            except LogTruncated as error:
                positions[durable_only] = error.lost.end_offset
        tell("durable", partition.durable_offset)
        time.sleep(0.002)


def look(store: LogStore, writer: str, cleanly: bool) -> None:
    """Tell everything that is there, append, and go with or without closing."""
    partition = store.topic("t").partition(0)
    tell("verdict", partition.recovery_report.verdict)
    for batch in partition.read(partition.log_start_offset):
        for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
            tell("is", offset, name_of(value))
    for lost in partition.lost_ranges():
        tell("lost", lost.base_offset, lost.end_offset)
    names = [f"{writer}:0:5"]
    tell("acknowledged", partition.append([value_of(names[0])], ack="durable"), names, True)
    if cleanly:
        store.close()


_JOBS: dict[str, Callable[..., None]] = {"make": make, "write": write, "follow": follow, "look": look}


def start_processes() -> None:
    """Fork the jobs that stdin orders, kill them when their time is over, and say when they are dead."""
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for job, options in order["jobs"]:
            child = os.fork()
            if child == 0:
                try:
                    _JOBS[job](LogStore(order["path"], fs=OneBoot(order["boot"])), *options)
                except BaseException:
                    tell("failed", traceback.format_exc()[-3000:])
                os._exit(0)
            children.append(child)
        if order["seconds"] is not None:
            time.sleep(order["seconds"])
            for child in children:
                os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        os.write(1, b"done\n")


if __name__ == "__main__":
    start_processes()
