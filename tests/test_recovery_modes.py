"""The recovery modes of `segmentlog.open`: with damage, with disks that refuse writes, and with other machines."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import opened
from logs import tree_bytes

import segmentlog
from segmentlog.errors import CorruptBatch, InvalidConfig, ReadOnlyStore, StoreVersionError
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.network import NetworkMark
from segmentlog.store import LogStore

FIRST = "00000000000000000000.log"


class OtherBoot(FileSystem):
    """A file system of a machine that was restarted."""

    def boot_id(self) -> str:
        return "another boot"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store whose partition t/0 has three segments of two batches each."""
    with segmentlog.open(tmp_path / "store") as store:
        log = store.create_topic("t", segment_records=20).partition(0)
        for number in range(6):
            log.append([b"%d-%d" % (number, index) for index in range(10)])
    return tmp_path / "store"


def _damage(folder: Path) -> None:
    """Flip a bit in the second batch of the first segment."""
    path = folder / "t" / "0" / FIRST
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _tear(folder: Path) -> Path:
    """Leave half a batch at the end, as a power cut does; the log was not closed."""
    store = opened(LogStore(folder, background=False))
    log = store.topic("t").partition(0)
    log.append([b"late" * 100])
    log.abandon()
    path = sorted((folder / "t" / "0").glob("*.log"))[-1]
    size = len(path.read_bytes().rstrip(b"\0"))
    os.truncate(path, size - 20)
    return path


def _values(store: LogStore) -> list[bytes | None]:
    log = store.topic("t").partition(0)
    return [value for batch in log.read(log.log_start_offset) for value in batch.values]


def test_a_sound_log_opens_alike_in_every_mode(folder: Path) -> None:
    """In every mode, a log without damage opens, new topics included, and the recovery changes nothing."""
    for mode in ("strict", "tail", "salvage"):
        with segmentlog.open(folder, recovery=mode) as store:
            assert len(_values(store)) == 60
            store.create_topic(f"new-{mode}").partition(0).append([b"x"])


def test_strict_refuses_damage_and_changes_nothing(folder: Path) -> None:
    """The first flipped byte raises when the partition is opened, with path and position."""
    _damage(folder)
    before = tree_bytes(folder)
    with segmentlog.open(folder, recovery="strict") as store, pytest.raises(CorruptBatch) as told:
        store.topic("t").partition(0)
    assert told.value.path.endswith(FIRST)
    assert told.value.position > 0
    assert tree_bytes(folder) == before


def test_strict_refuses_a_torn_tail_which_tail_cuts_off(folder: Path) -> None:
    """After a power cut, strict leaves the files as they are, and tail removes the half batch with a warning."""
    path = _tear(folder)
    before = tree_bytes(folder)
    store = LogStore(folder, recovery="strict", fs=OtherBoot(), background=False)
    with pytest.raises(CorruptBatch) as told:
        store.topic("t").partition(0)
    assert told.value.path == str(path)
    store.close()
    assert tree_bytes(folder) == before
    with LogStore(folder, fs=OtherBoot(), background=False) as store:
        log = store.topic("t").partition(0)
        assert log.recovery_report.truncated_bytes > 0
        assert log.recovery_report.lost is not None
        assert len(_values(store)) == 60


def test_tail_raises_where_damage_is_read(folder: Path) -> None:
    """Opening is quick and looks at nothing below the recovery point."""
    _damage(folder)
    with segmentlog.open(folder) as store:
        log = store.topic("t").partition(0)
        assert len([value for batch in log.read(20) for value in batch.values]) == 40
        with pytest.raises(CorruptBatch):
            _values(store)


def test_salvage_steps_over_damage_and_tells(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Partitions and consumers read everything else; one warning reports the skipped range."""
    _damage(folder)
    with segmentlog.open(folder, recovery="salvage") as store:
        with caplog.at_level(logging.WARNING, "segmentlog"):
            assert len(_values(store)) == len(_values(store)) == 50
            assert len(list(store.consumer("t"))) == 50
        (skipped,) = store.topic("t").partition(0).damage
        assert skipped[:2] == (10, 20)
        assert skipped[2].path.endswith(FIRST)
        assert len([line for line in caplog.messages if "reading skipped offsets 10 to 19" in line]) == 1


def test_an_unknown_mode_is_refused(folder: Path) -> None:
    """The error names the accepted ones."""
    with pytest.raises(InvalidConfig, match="'strict', 'tail' or 'salvage'"):
        segmentlog.open(folder, recovery="hopeful")  # type: ignore[arg-type]


def test_a_store_of_a_newer_format_is_refused(folder: Path) -> None:
    """The error has the version, and nothing is changed."""
    path = folder / "store.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    before = tree_bytes(folder)
    with pytest.raises(StoreVersionError, match="format 3"):
        segmentlog.open(folder)
    assert tree_bytes(folder) == before


# ---------------------------------------------------------------- a disk that cannot be written to


@pytest.fixture
def read_only_mount(folder: Path, tmp_path: Path) -> Iterator[Path]:
    """Yield the store on a file system that is mounted read-only; needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = tmp_path / "mounted"
    mount.mkdir()
    subprocess.run(["mount", "--bind", folder, mount], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", mount], check=True)
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)  # lazily, because mapped files may outlive the test


@pytest.mark.root
def test_a_store_on_a_read_only_file_system_opens_read_only(
    read_only_mount: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It happens automatically, with a warning; reading works, and appends raise the reason."""
    with caplog.at_level(logging.WARNING, "segmentlog"), segmentlog.open(read_only_mount) as store:
        assert store.read_only
        assert len(_values(store)) == 60
        with pytest.raises(ReadOnlyStore):
            store.topic("t").partition(0).append([b"x"])
    assert any("read-only file system" in line for line in caplog.messages)


# ---------------------------------------------------------------- a disk that other machines see


class NetworkDisk(FileSystem):
    """Reports that the store is on a network file system."""

    def kind_of_mount(self, path: str) -> str:
        return "nfs4"


def test_another_machine_that_writes_is_warned_about(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine writes its name into the store until it closes it; a machine that finds another name warns."""
    monkeypatch.setattr("platform.node", lambda: "alpha")
    first = LogStore(folder, fs=NetworkDisk(), background=False)
    assert any("network file system (nfs4)" in line for line in caplog.messages)
    assert not any("alpha" in line for line in caplog.messages)
    monkeypatch.setattr("platform.node", lambda: "beta")
    with LogStore(folder, fs=NetworkDisk(), background=False):
        assert any("the machine alpha" in line for line in caplog.messages)
    assert not (folder / NetworkMark.FILE).exists()
    first.close()
    caplog.clear()
    with LogStore(folder, fs=NetworkDisk(), background=False):
        assert not any("alpha" in line or "beta" in line for line in caplog.messages)
    with LogStore(folder, background=False):
        assert not (folder / NetworkMark.FILE).exists()


def test_the_kind_of_a_mount_is_that_of_the_innermost(tmp_path: Path) -> None:
    """A path below /proc has the kind of that mount, and not of the disk above it."""
    assert FileSystem().kind_of_mount("/proc/self") == "proc"
    assert FileSystem().kind_of_mount(str(tmp_path)) not in ("", "proc")


def test_the_kind_of_a_mount_whose_number_nobody_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subvolume of btrfs has a device number of its own: then the mount that the folder lies under counts."""
    folder = tmp_path / "a disk"
    folder.mkdir()
    place = str(folder).replace(" ", "\\040")
    mounts = f"1 1 0:9998 / / rw shared:1 - ext4 /dev/a rw\n2 1 0:9999 /sub {place} rw - btrfs /dev/b rw\n"
    monkeypatch.setattr("segmentlog.storage.fs._read_proc", lambda path: mounts.encode())
    assert FileSystem().kind_of_mount(str(folder)) == "btrfs"
    assert FileSystem().kind_of_mount(str(tmp_path)) == "ext4"


def test_nobody_can_tell_the_kind_of_a_mount_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other systems than Linux have no such list: the kind is empty, and the store counts as local."""

    def missing(path: str) -> bytes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr("segmentlog.storage.fs._read_proc", missing)
    assert FileSystem().kind_of_mount(str(tmp_path)) == ""
