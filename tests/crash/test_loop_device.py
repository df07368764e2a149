"""Real file systems on loop devices: ext4 that goes away and comes back within one boot, btrfs that is full.

Each writer is a process of its own, since a file system that is in use cannot be unmounted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import segmentlog
from segmentlog.errors import LogTruncated

_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = struct.pack("I", 2)
# Shuts the file system down as if its disk were pulled: what the journal has not written is lost too.

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system takes root"),
]

_APPEND = """
import os, sys, segmentlog
first, count, after = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = segmentlog.open(sys.argv[1], background=False)
log = store.topic("t").partition(0)
for number in range(first, first + count):
    print(log.append([b"%d" % number], ack="durable"), flush=True)
fd = os.open(log.folder + "/state", os.O_RDWR)
if after == "write back the page":
    os.fsync(fd)
if after == "close":
    store.close()
os._exit(0)
"""


def _cannot(why: str) -> NoReturn:
    """Skip the test; in CI, where it must run, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


class Volume:
    """A small file system in a file."""

    def __init__(self, folder: Path, make: str, size_bytes: int) -> None:
        self.image, self.mount_point = folder / "image", folder / "mounted"
        self.mount_point.mkdir()
        tool = make.split()[0]
        if shutil.which(tool) is None:
            _cannot(f"{tool} is not installed")
        with self.image.open("wb") as image:
            image.truncate(size_bytes)
        subprocess.run([*make.split(), self.image], check=True, capture_output=True, stdin=subprocess.DEVNULL)

    @property
    def store(self) -> Path:
        return self.mount_point / "data"

    def mount(self) -> None:
        done = subprocess.run(["mount", "-o", "loop", self.image, self.mount_point], capture_output=True, text=True)
        if done.returncode:
            _cannot(f"a loop device cannot be mounted here: {done.stderr.strip()}")

    def unmount(self) -> None:
        subprocess.run(["umount", self.mount_point], check=True)

    def shut_down(self) -> None:
        """Cut it off from its device."""
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(fd)

    def append(self, first: int, count: int, after: str = "die") -> list[int]:
        """Durable appends of a process that then leaves without a word; their offsets."""
        command = [sys.executable, "-c", _APPEND, self.store, str(first), str(count), after]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return [int(line) for line in done.stdout.split()]


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    """Yield a mounted file system with a store whose topic syncs only on request."""
    with _mounted(Volume(tmp_path, "mkfs.ext4 -q -F", 48 << 20)) as made:
        with segmentlog.open(made.store, background=False) as store:
            store.create_topic("t", fsync="never")
        yield made


@contextlib.contextmanager
def _mounted(volume: Volume) -> Iterator[Volume]:
    volume.mount()
    try:
        yield volume
    finally:
        subprocess.run(["umount", "--lazy", volume.mount_point], check=False, capture_output=True)


def _read(store: segmentlog.LogStore) -> dict[int, bytes | None]:
    log = store.topic("t").partition(0)
    return {
        offset: value
        for batch in log.read(log.log_start_offset)
        for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
    }


def test_an_old_page_that_comes_back_is_not_believed(volume: Volume) -> None:
    """Twenty durable appends, the page written back half way, the disk gone and back: all are there, none twice."""
    first = volume.append(0, 10, "write back the page")
    second = volume.append(10, 10)
    assert [*first, *second] == list(range(20))
    volume.shut_down()
    volume.unmount()
    volume.mount()
    with segmentlog.open(volume.store, background=False) as store:
        assert _read(store) == {number: b"%d" % number for number in range(20)}
        log = store.topic("t").partition(0)
        assert log.recovery_report.verdict == "machine death"
        assert "the disk may have been detached" in log.recovery_report.why
        assert log.append([b"next"]) >= 20
        with pytest.raises(LogTruncated):
            log.read(21)


def test_what_was_not_synced_is_told(volume: Volume) -> None:
    """Records of a process that only wrote go with the disk: in a lost range, and under numbers not used again."""
    assert volume.append(0, 1) == [0]
    script = _APPEND.replace(', ack="durable"', "")
    command = [sys.executable, "-c", script, volume.store, "1", "50", "write back the page"]
    subprocess.run(command, check=True, capture_output=True)
    volume.shut_down()
    volume.unmount()
    volume.mount()
    with segmentlog.open(volume.store, background=False) as store:
        log = store.topic("t").partition(0)
        found = _read(store)
        assert found[0] == b"0"
        (lost,) = log.lost_ranges()
        assert lost.base_offset == len(found) <= 51 <= lost.end_offset == log.log_end_offset
        assert log.append([b"next"]) == lost.end_offset


def test_the_death_of_every_process_costs_no_number(volume: Volume) -> None:
    """While the file system stays mounted, the state page is trusted: no record is lost, and no offset is skipped."""
    assert volume.append(0, 10) == list(range(10))
    assert volume.append(10, 10) == list(range(10, 20))
    with segmentlog.open(volume.store, background=False) as store:
        log = store.topic("t").partition(0)
        assert log.recovery_report.verdict == "live"
        assert log.append([b"next"]) == 20
        assert log.lost_ranges() == []


def test_the_mark_stands_in_for_the_mount(volume: Volume) -> None:
    """Seen through another mount of the same file system, as from another container, the page is believed too."""
    assert volume.append(0, 10) == list(range(10))
    other = volume.mount_point.parent / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", volume.mount_point, other], check=True)
    try:
        with segmentlog.open(other / "data", background=False) as store:
            log = store.topic("t").partition(0)
            assert log.recovery_report.verdict == "live"
            assert log.append([b"next"]) == 10
    finally:
        subprocess.run(["umount", "--lazy", other], check=True)


def test_a_clean_close_needs_no_witness(volume: Volume) -> None:
    """After a close, an unmount and a mount, the log continues at its end."""
    assert volume.append(0, 10, "close") == list(range(10))
    volume.unmount()
    volume.mount()
    assert volume.append(10, 5, "close") == list(range(10, 15))
    with segmentlog.open(volume.store, background=False) as store:
        assert store.topic("t").partition(0).lost_ranges() == []


_FILL = """
import os, sys, segmentlog
from segmentlog.errors import DiskFull
store = segmentlog.open(sys.argv[1], background=False)
log = store.create_topic("t", fsync="never").partition(0)
log.append([b"first"], ack="durable")
rest = os.open(sys.argv[1] + "/../rest", os.O_RDWR | os.O_CREAT)
for size in (1 << 16, 512, 512, 512):
    try:
        while os.write(rest, os.urandom(size)):
            pass
    except OSError:
        os.sync()
page = os.open(log.folder + "/state", os.O_RDWR)
refused = 0
for number in range(300):
    os.fsync(page)  # clean: the next store to it is one that the file system hears of
    try:
        log.append([os.urandom(100)])
    except DiskFull:
        refused += 1
assert refused, "the disk was not full"
print("values", sum(len(batch) for batch in log.read(0)) + refused)
"""


def test_a_full_disk_that_copies_on_write_kills_nobody(tmp_path: Path) -> None:
    """On btrfs, a write to the mapped state page needs free space; without any, it would raise SIGBUS."""
    with _mounted(Volume(tmp_path, "mkfs.btrfs -q -f", 300 << 20)) as volume:
        command = [sys.executable, "-c", _FILL, volume.store]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "values 301\n"), done.stderr
