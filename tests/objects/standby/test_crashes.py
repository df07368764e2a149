"""Takeovers, their undoing and the move of a former store, interrupted at every call, with and without a power cut.

The machine is simulated, so that each state is made without waiting. After each crash the machine starts again, finds
its role, and has all records.

SEGMENTLOG_STANDBY_STATES_EVERY  check the crash states of every n-th call; 1 for all
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from delivery_trial import PATH, simulated_paths
from logs import FakeClock, values_by_offset
from objects.buckets import Memory
from objects.standby_machine import name_server
from seeds import seeds

from segmentlog.errors import StoreFenced
from segmentlog.format.manifest import MANIFEST_KEY, Manifest
from segmentlog.format.server_file import ServerFile, ServerNode, encode_server_file
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.standby.standby import Standby
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.takeover_decision import ProbeResult
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing.simulated_disk import CrashPoint, SimulatedDisk

EVERY = int(os.environ.get("SEGMENTLOG_STANDBY_STATES_EVERY", "8"))
_SHIPPED = [b"%d" % number * 30 for number in range(30)]
_CYCLES_MAX = 20


class Moment(NamedTuple):
    """The machine between two of its calls, and the objects in the object store."""

    point: CrashPoint
    objects: dict[str, Any]


class World:
    """A simulated machine, the object store, and other machines on real disks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.bucket = Memory()
        self.disk = self.current = SimulatedDisk()
        self.disk.make_folders(PATH)
        self.disk.find(PATH).sync()
        self.disk.root.sync()
        self.moments: list[Moment] = []

    def create_store(self, fs: FileSystem, path: str) -> LogStore:
        """Create a shipped store, with the address of its server."""
        store = LogStore(path, background=False, fs=fs, clock=self.clock)
        replace_file(fs, f"{path}/@server", encode_server_file(ServerFile(1, "x", (ServerNode(1, "owner", 9092),))))
        for name, config in (("t", {"segment_bytes": 700}), ("u", {})):
            log = store.create_topic(name, fsync="always", **config).partition(0)
            for value in _SHIPPED:
                log.append([value])
        store.groups.reset("g", {("t", 0): 7})
        self.ship(store)
        return store

    def ship(self, store: LogStore, bucket: Memory | None = None) -> None:
        """Ship everything once. Raise StoreFenced if another machine owns the store."""
        shipper = Shipper(store._topics, bucket or self.bucket, parallel=0)
        try:
            shipper.ship()
        finally:
            shipper.close()

    def standby(self, disk: SimulatedDisk, bucket: Memory, result: ProbeResult) -> Standby:
        """Start a new process of the simulated machine."""
        self.current = disk
        fs = disk.process()

        def probe(manifest: Manifest) -> list[ProbeResult]:
            return [result]

        def fence() -> None:
            with LogStore(PATH, background=False, fs=fs, clock=self.clock) as store, suppress(StoreFenced):
                self.ship(store, bucket)

        standby = Standby(
            bucket.url, PATH, probe=probe, fence_store=fence, nodes=(ServerNode(1, "simulated", 9092),), parallel=0,
            bucket=bucket, fs=fs, clock=self.clock,
        )  # fmt: skip
        standby._watch.answered_owner = require_manifest(bucket)[0].owner.id
        return standby

    def cycles_until(self, standby: Standby, role: str) -> None:
        """Run cycles until the machine has this role."""
        for _ in range(_CYCLES_MAX):
            self.clock.advance(1000)
            if standby.run_cycle().role == role and not standby.status.error:
                return
        raise AssertionError(f"it never is {role}: {standby.status}")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep a moment for each call that changes the disk or the object store."""

        def record() -> None:
            self.moments.append(Moment(self.disk.point(), dict(self.bucket._objects)))

        swap = self.bucket.compare_and_swap

        def recorded_swap(*args: Any) -> str:
            record()
            tag = swap(*args)
            record()
            return tag

        self.disk.on_effect = record
        with mock.patch.object(self.bucket, "compare_and_swap", recorded_swap):
            yield
        self.disk.on_effect = None

    def crashes(self, rng: random.Random) -> Iterator[tuple[SimulatedDisk, Memory, str]]:
        """Yield the machine after each crash, and the object store."""
        start = rng.randrange(EVERY)
        for number, moment in list(enumerate(self.moments))[start::EVERY]:
            for how, disk in [
                ("a kill", moment.point.process_death()),
                *(("a power cut", disk) for disk in moment.point.crashes(rng, 3)),
            ]:
                bucket = Memory()
                bucket._objects, bucket._numbers = dict(moment.objects), itertools.count(10**6)
                yield disk, bucket, f"{how} after call {number} of {len(self.moments)}"

    def read(self, disk: SimulatedDisk, path: str = PATH, *, read_only: bool = False) -> dict[str, list[bytes | None]]:
        """Return all values, by topic."""
        self.current = disk
        with LogStore(path, background=False, fs=disk.process(), clock=self.clock, read_only=read_only) as store:
            return {name: list(values_by_offset(store.topic(name).partition(0)).values()) for name in store.topics()}


@pytest.fixture
def world(memory_path: Path) -> Iterator[World]:
    """Create a world in which `os.path` asks the simulated disk."""
    made = World(memory_path)
    with simulated_paths(lambda: made.current):
        yield made


@pytest.fixture
def replicated(world: World) -> World:
    """Record the takeover of the simulated machine, which has a replica of a store whose owner is dead."""
    world.create_store(FileSystem(), str(world.folder / "m1")).close()
    standby = world.standby(world.disk, world.bucket, ProbeResult.REFUSED)
    world.clock.advance(1000)
    assert standby.run_cycle().role == "standby"
    with world.recorded():
        world.cycles_until(standby, "owner")
    assert len(world.moments) > 50
    return world


def _checked(world: World, seed: int, check: Callable[[SimulatedDisk, Memory], None]) -> None:
    count = 0
    for disk, bucket, how in world.crashes(random.Random(seed)):
        try:
            check(disk, bucket)
        except BaseException as error:
            error.add_note(f"{how}, seed {seed}")
            raise
        count += 1
    print(f"{count} states")
    assert count > 10


@pytest.mark.parametrize("seed", seeds("standby crashes"))
def test_a_takeover_is_resumed(replicated: World, seed: int) -> None:
    """The owner stays dead: the machine is the owner in the end, with all records, and appends at new offsets."""

    def check(disk: SimulatedDisk, bucket: Memory) -> None:
        standby = replicated.standby(disk, bucket, ProbeResult.REFUSED)
        replicated.cycles_until(standby, "owner")
        standby.close()
        assert replicated.read(disk) == {"t": _SHIPPED, "u": _SHIPPED}
        fs = disk.process()
        with LogStore(PATH, background=False, fs=fs, clock=replicated.clock) as store:
            replicated.ship(store, bucket)
            assert store.topic("t").partition(0).append([b"new"]) >= 1000
            replicated.ship(store, bucket)
        assert require_manifest(bucket)[0].owner.epoch == 2

    _checked(replicated, seed, check)


@pytest.mark.parametrize("seed", seeds("standby crashes"))
def test_a_takeover_is_undone(replicated: World, seed: int) -> None:
    """The owner works again, or the put of the takeover was refused: the machine follows, and takes over later."""

    def check(disk: SimulatedDisk, bucket: Memory) -> None:
        manifest = require_manifest(bucket)[0]
        standby = replicated.standby(disk, bucket, ProbeResult.ALIVE)
        if manifest.owner.epoch == 2:  # too late: it resumes
            replicated.cycles_until(standby, "owner")
            return
        replicated.cycles_until(standby, "standby")
        standby.close()
        assert replicated.read(disk, read_only=True) == {"t": _SHIPPED, "u": _SHIPPED}
        standby = replicated.standby(disk, bucket, ProbeResult.REFUSED)
        replicated.cycles_until(standby, "owner")
        assert replicated.read(disk) == {"t": _SHIPPED, "u": _SHIPPED}

    _checked(replicated, seed, check)


@pytest.mark.parametrize("seed", seeds("standby crashes"))
def test_a_takeover_that_another_machine_has_overtaken(replicated: World, seed: int) -> None:
    """The machine follows the other one: it keeps its downloads, or sets aside the store that it had completed."""
    number = itertools.count()

    def check(disk: SimulatedDisk, bucket: Memory) -> None:
        path = replicated.folder / f"other-{next(number)}"
        take_over(bucket, str(path), parallel=0, clock=replicated.clock, nodes=(ServerNode(1, "other", 9092),))
        with LogStore(path, background=False, clock=replicated.clock) as store:
            replicated.ship(store, bucket)
            store.topic("t").partition(0).append([b"other"])
            replicated.ship(store, bucket)
        standby = replicated.standby(disk, bucket, ProbeResult.ALIVE)
        replicated.cycles_until(standby, "standby")
        standby.close()
        assert replicated.read(disk, read_only=True) == {"t": [*_SHIPPED, b"other"], "u": _SHIPPED}

    _checked(replicated, seed, check)


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("standby crashes"))
def test_a_former_store_is_set_aside(world: World, seed: int) -> None:
    """Records that were never shipped stay in the folder of the former store; the replica has the new owner's."""
    with world.create_store(world.disk.process(), PATH) as store:
        store.topic("t").partition(0).append([b"never shipped"])
        path = world.folder / "m2"
        take_over(world.bucket, str(path), parallel=0, clock=world.clock, nodes=(ServerNode(1, "m2", 9092),))
        name_server(path, "m2")
        with LogStore(path, background=False, clock=world.clock) as other:
            world.ship(other)
            other.topic("t").partition(0).append([b"new"])
            world.ship(other)
    standby = world.standby(world.disk, world.bucket, ProbeResult.ALIVE)
    with world.recorded():
        world.cycles_until(standby, "standby")
    assert len(world.moments) > 50

    def check(disk: SimulatedDisk, bucket: Memory) -> None:
        standby = world.standby(disk, bucket, ProbeResult.ALIVE)
        world.cycles_until(standby, "standby")
        standby.close()
        assert world.read(disk, read_only=True) == {"t": [*_SHIPPED, b"new"], "u": _SHIPPED}
        former = world.read(disk, f"{PATH}/@former/1", read_only=True)
        assert former == {"t": [*_SHIPPED, b"never shipped"], "u": _SHIPPED}
        assert MANIFEST_KEY in bucket._objects
        standby = world.standby(disk, bucket, ProbeResult.REFUSED)
        world.cycles_until(standby, "owner")
        assert world.read(disk) == {"t": [*_SHIPPED, b"new"], "u": _SHIPPED}

    _checked(world, seed, check)


@pytest.mark.parametrize("is_uploaded", [False, True])
@pytest.mark.parametrize("is_served", [False, True])
def test_a_power_cut_after_a_takeover(world: World, is_served: bool, is_uploaded: bool) -> None:
    """A sealed segment that the replica downloaded as chunks is durable, although the takeover did not download it.

    Also if the replica compared it with the upload of the whole segment, and labelled it.
    """
    values = [random.Random(number).randbytes(900) for number in range(14)]
    _replicate_chunks(world, values, is_uploaded=is_uploaded)
    standby = world.standby(world.disk, world.bucket, ProbeResult.REFUSED)
    world.cycles_until(standby, "owner")
    standby.close()
    if is_served:
        with LogStore(PATH, background=False, fs=world.disk.process(), clock=world.clock) as store:
            world.ship(store)
            store.topic("t").partition(0).append([b"new"], ack="durable")
    for disk in world.disk.point().crashes(random.Random(1), 10):
        found = [value for value in world.read(disk)["t"] if value]
        assert found == ([*values, b"new"] if is_served else values)


def _replicate_chunks(world: World, values: list[bytes], *, is_uploaded: bool) -> None:
    """Ship a store so often that the object store has chunks only, and follow it with the simulated machine.

    No segment is uploaded as a whole: these uploads wait until the last value is shipped. ``is_uploaded``: then they
    end, and the machine follows them, too.
    """
    is_shipped, put = threading.Event(), world.bucket.put

    def put_late(key: str, data: Any) -> None:
        if key.startswith("segments"):
            is_shipped.wait(20)
        put(key, data)

    path = str(world.folder / "m1")
    with mock.patch.object(world.bucket, "put", put_late), LogStore(path, background=False, clock=world.clock) as store:
        name_server(Path(path), "m1")
        log = store.create_topic("t", segment_bytes=4000, fsync="always").partition(0)
        shipper = Shipper(store._topics, world.bucket, parallel=1)
        shipper.run_cycle()
        standby = world.standby(world.disk, world.bucket, ProbeResult.ALIVE)
        for number, value in enumerate(values):
            log.append([value])
            shipper.run_cycle()
            world.clock.advance(100)
            if number % 4 == 1:
                assert standby.run_cycle().role == "standby"
        partition = require_manifest(world.bucket)[0].topics[0].partitions[0]
        assert min(chunk.segment for chunk in partition.chunks) < partition.active_base
        is_shipped.set()
        if is_uploaded:
            shipper.ship()
            assert standby.run_cycle().role == "standby"
            assert require_manifest(world.bucket)[0].topics[0].partitions[0].segments
        standby.close()
        shipper.close()
