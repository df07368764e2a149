"""A takeover, and the restart of each machine, read no segment again that was verified and synced before."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock, values
from objects.buckets import Memory
from objects.standby_machine import name_server

from segmentlog.format.manifest import Chunk
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.partition_snapshot import LocalPartition
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.standby.standby import Standby
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.takeover_decision import ProbeResult
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore

RECORDS = 40


class Reading(FileSystem):
    """Counts the bytes that are read of each kind of file, and where the others come from."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()
        self._paths: dict[int, str] = {}

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def _pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        data = os.pread(fd, size_bytes, position)
        self.read[os.path.splitext(self._paths.get(fd, ""))[1]] += len(data)
        return data

    pread = _pread  # type: ignore[assignment]


class Downloads(Memory):
    """Counts the bytes that are downloaded, except the manifest."""

    def __init__(self) -> None:
        super().__init__()
        self.downloaded: Counter[str] = Counter()

    def get(self, key: str) -> tuple[bytes, str]:
        found = super().get(key)
        self.downloaded[key.partition("/")[0]] += len(found[0])
        return found


class Machines:
    """An owner with sealed and active segments, and a standby that has all of them."""

    def __init__(self, folder: Path) -> None:
        self.bucket, self.clock = Downloads(), FakeClock()
        self.owner_path, self.path = str(folder / "m1"), str(folder / "m2")
        with LogStore(self.owner_path, background=False, clock=self.clock) as store:
            name_server(folder / "m1", "m1")
            log = store.create_topic("t", segment_bytes=3000, fsync="always").partition(0)
            for number in range(RECORDS):
                log.append([b"%d" % number * 100])
                if number % 5 == 3:
                    self.ship(store)
            self.ship(store)
        self.results = [ProbeResult.ALIVE]
        self.fs = Reading()

    def ship(self, store: LogStore) -> None:
        shipper = Shipper(store._topics, self.bucket, parallel=0)
        shipper.ship()
        shipper.close()

    def standby(self) -> Standby:
        """Start the process of the standby."""
        self.fs, self.bucket.downloaded = Reading(), Counter()
        bucket: Bucket = self.bucket
        standby = Standby(
            bucket.url, self.path, probe=lambda manifest: self.results, fence_store=lambda: None,
            nodes=(ServerNode(1, "m2", 9092),), parallel=0, bucket=bucket, fs=self.fs, clock=self.clock,
        )  # fmt: skip
        standby._watch.answered_owner = require_manifest(bucket)[0].owner.id
        return standby

    def cycles_until(self, standby: Standby, role: str) -> None:
        for _ in range(20):
            self.clock.advance(1000)
            if standby.run_cycle().role == role and not standby.status.error:
                return
        raise AssertionError(f"it never is {role}: {standby.status}")


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machines]:
    """Skip where the file system has no extended attributes."""
    try:
        os.setxattr(tmp_path, "user.test", b"x")
    except OSError as error:
        pytest.skip(f"no extended attributes: {error}")
    return Machines(tmp_path)


def _values(path: str) -> list[Any]:
    with LogStore(path, background=False, read_only=True) as store:
        return values(store.topic("t").partition(0))


def _files(path: str, suffix: str) -> set[str]:
    return {name.removesuffix(suffix) for name in os.listdir(f"{path}/t/0") if name.endswith(suffix)}


def _compared_by(machines: Machines, path: str, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Run a cycle of the owner at ``path``. Return the shipped segments of which it read anything."""
    shipped = {segment.base_offset for segment in require_manifest(machines.bucket)[0].topics[0].partitions[0].segments}
    read, contains_chunk, found = LocalPartition.read, LocalPartition._contains_chunk, set()

    def spied_read(self: LocalPartition, log: Any, segment: int, *rest: int) -> memoryview:
        found.update({segment} & shipped)  # the others are uploaded
        return read(self, log, segment, *rest)

    def spied_chunk(self: LocalPartition, chunk: Chunk) -> bool:
        found.add(chunk.segment)
        return contains_chunk(self, chunk)

    with LogStore(path, background=False, clock=machines.clock) as store, monkeypatch.context() as patch:
        patch.setattr(LocalPartition, "read", spied_read)
        patch.setattr(LocalPartition, "_contains_chunk", spied_chunk)
        shipper = Shipper(store._topics, machines.bucket, parallel=0)
        shipper.run_cycle()
        shipper.close()
    return found


def test_a_takeover_reads_and_downloads_no_segment(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the new owner, before its first upload. The sealed segments keep their indexes."""
    standby = machines.standby()
    machines.cycles_until(standby, "standby")
    before = _values(machines.path)
    assert len(before) == RECORDS
    sealed = _files(machines.path, ".index")
    assert len(sealed) > 2
    assert sealed < _files(machines.path, ".log")
    machines.fs.read.clear()
    machines.bucket.downloaded.clear()
    machines.results = [ProbeResult.REFUSED]
    machines.cycles_until(standby, "owner")
    standby.close()
    assert machines.fs.read[".log"] == 0
    assert machines.bucket.downloaded["segments"] == machines.bucket.downloaded["tails"] == 0
    assert _files(machines.path, ".index") == sealed
    assert not _compared_by(machines, machines.path, monkeypatch)
    assert _values(machines.path) == before


def test_a_restarted_standby_reads_only_the_active_segment(machines: Machines) -> None:
    """And downloads nothing."""
    for is_first in (True, False):
        standby = machines.standby()
        machines.cycles_until(standby, "standby")
        standby.close()
        assert bool(machines.bucket.downloaded["segments"]) == is_first
    active = max(_files(machines.path, ".log"))
    assert machines.fs.read[".log"] == os.path.getsize(f"{machines.path}/t/0/{active}.log")
    assert not machines.bucket.downloaded["tails"]


def test_a_restarted_owner_compares_only_the_active_segment(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has labelled the others when it uploaded them."""
    entry = require_manifest(machines.bucket)[0].topics[0].partitions[0]
    assert len(entry.segments) > 2
    assert _compared_by(machines, machines.owner_path, monkeypatch) == {chunk.segment for chunk in entry.chunks}


def test_an_owner_without_labels_compares_its_segments_once(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of an earlier release gets its labels when it is compared for the first time."""
    entry = require_manifest(machines.bucket)[0].topics[0].partitions[0]
    folder = f"{machines.owner_path}/t/0"
    for name in _files(machines.owner_path, ".log"):
        with contextlib.suppress(OSError):
            os.removexattr(f"{folder}/{name}.log", "user.segmentlog")
    every = {segment.base_offset for segment in entry.segments} | {chunk.segment for chunk in entry.chunks}
    assert _compared_by(machines, machines.owner_path, monkeypatch) == every
    assert _compared_by(machines, machines.owner_path, monkeypatch) == {chunk.segment for chunk in entry.chunks}


def test_a_takeover_downloads_only_what_the_replica_lacks(machines: Machines) -> None:
    """The owner has shipped more to the active segment: the takeover continues the file, and checks what it has."""
    standby = machines.standby()
    machines.cycles_until(standby, "standby")
    standby.close()
    active = f"{machines.path}/t/0/{max(_files(machines.path, '.log'))}.log"
    size_bytes = os.path.getsize(active)
    with LogStore(machines.owner_path, background=False, clock=machines.clock) as store:
        store.topic("t").partition(0).append([b"late" * 50])
        machines.ship(store)
    before = _values(machines.owner_path)
    machines.bucket.downloaded.clear()
    take_over(machines.bucket, machines.path, parallel=0, clock=machines.clock, fs=machines.fs)
    assert machines.bucket.downloaded["segments"] == 0
    assert machines.bucket.downloaded["tails"] < size_bytes
    assert os.path.getsize(active) > size_bytes
    assert _values(machines.path) == before


def test_a_damaged_active_segment_is_downloaded_again(machines: Machines) -> None:
    """A takeover without labels compares each chunk of it with its checksum."""
    standby = machines.standby()
    machines.cycles_until(standby, "standby")
    standby.close()
    active = f"{machines.path}/t/0/{max(_files(machines.path, '.log'))}.log"
    with open(active, "r+b") as file:
        file.seek(os.path.getsize(active) // 2)
        file.write(b"damage")
    before = _values(machines.owner_path)
    take_over(machines.bucket, machines.path, parallel=0, clock=machines.clock)
    assert _values(machines.path) == before
