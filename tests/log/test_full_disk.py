"""A file system that is really full: no data is lost, no process dies, and appends continue once there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import values

import segmentlog
from segmentlog.errors import DiskFull

SIZE = 4 << 20


def _mount(tmp_path: Path) -> tuple[Path | None, str]:
    """Mount a small file system, ext4 if possible, and return its path; otherwise return the reason."""
    if os.geteuid() != 0:
        return None, "mounting a small file system needs root"
    target = tmp_path / "disk"
    target.mkdir()
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(SIZE)
    why = ""
    for commands in (
        [["mkfs.ext4", "-q", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(target)]],
        [["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(target)]],
    ):
        try:
            for command in commands:
                subprocess.run(command, check=True, capture_output=True, timeout=30)
            return target, ""
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
    return None, f"neither a loop device nor a tmpfs can be mounted here: {why}"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Provide the root of a file system of 4 MiB."""
    target, why = _mount(tmp_path)
    if target is None:
        if os.environ.get("CI") == "true" and os.geteuid() == 0:
            pytest.fail(why)
        pytest.skip(why)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True, timeout=30)


def _fill_up(disk: Path) -> None:
    """Fill the disk to its last byte."""
    with (disk / "filler-2").open("ab", buffering=0) as file:
        for size in (1 << 16, 4096, 512, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue


@pytest.mark.root
@pytest.mark.parametrize("ack", ["written", "durable"])
def test_a_full_disk_loses_nothing(disk: Path, ack: str) -> None:
    """Appends fail with `DiskFull`, every acknowledged record is read, and after making room appends work again."""
    filler = disk / "filler"
    filler.write_bytes(os.urandom(1 << 20))
    with segmentlog.open(disk / "store", background=False) as store:
        store.create_topic("t", segment_bytes=300_000, compression_type="none", fsync="never")
        partition = store.topic("t").partition(0)
        acknowledged: dict[int, bytes] = {}
        number = 0
        full = 0
        while full < 3:
            value = (b"%d:" % number).ljust(5000 if full == 0 else 50, b".")
            number += 1
            assert number < 100_000, "the disk never gets full"
            try:
                acknowledged[partition.append([value], ack=ack)] = value  # type: ignore[arg-type]
            except DiskFull:
                full += 1
        assert partition.log_end_offset == len(acknowledged) > 100
        assert values(partition) == [acknowledged[offset] for offset in range(len(acknowledged))]
        assert partition.failed is None
        filler.unlink()
        for _ in range(20):
            value = b"after %d" % number
            number += 1
            acknowledged[partition.append([value], ack=ack)] = value  # type: ignore[arg-type]
        assert values(partition) == [acknowledged[offset] for offset in range(len(acknowledged))]
    with segmentlog.open(disk / "store", background=False) as store:
        partition = store.topic("t").partition(0)
        assert partition.recovery_report.verdict == "clean"
        assert values(partition) == [acknowledged[offset] for offset in range(len(acknowledged))]


@pytest.mark.root
def test_a_full_disk_kills_no_process(disk: Path) -> None:
    """Opening, creating topics and appending without a byte of room raise errors; mapped pages are no SIGBUS."""
    (disk / "filler").write_bytes(bytes(1 << 20))
    with segmentlog.open(disk / "store", background=False) as store:
        store.create_topic("used")
        store.create_topic("new", partitions=3)
        store.topic("used").partition(0).append([b"a"])
    _fill_up(disk)
    script = (
        "import os, sys, segmentlog\n"
        "store = segmentlog.open(sys.argv[1], background=False)\n"
        "def attempt(call):\n"
        "    try:\n"
        "        call()\n"
        "    except OSError as error:\n"
        "        return error.errno\n"
        "raised = [attempt(lambda number=number: store.topic('new').partition(number)) for number in range(3)]\n"
        "raised += [attempt(lambda: store.create_topic(f'more-{number}')) for number in range(40)]\n"
        "used = store.topic('used').partition(0)\n"
        "raised += [attempt(lambda: used.append([os.urandom(100_000)])) for _ in range(3)]\n"
        "assert [value for batch in used.read(0) for value in batch.values] == [b'a'], 'unreadable'\n"
        "print(sorted(set(raised), key=str), sum(one == 28 for one in raised))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(disk / "store")], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    kinds, count = done.stdout.rsplit(" ", 1)
    assert kinds in ("[28]", "[28, None]")
    assert int(count) > 3
    (disk / "filler").unlink()
    with segmentlog.open(disk / "store", background=False) as store:
        for number in range(3):
            assert store.topic("new").partition(number).append([b"c"]) == 0
        assert store.topic("used").partition(0).append([b"d"]) == 1
        assert store.topics()[-2:] == ["new", "used"]
