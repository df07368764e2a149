"""The power is cut while a group is at work: what clients were told is there, and no generation comes twice."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any
from unittest import mock

import pytest
from delivery_trial import PATH, simulated_paths
from logs import FakeClock
from seeds import seeds
from server.groups.clients import SETTINGS, Client

from segmentlog.groups.coordinating import NewPosition
from segmentlog.server.codec.errors import ErrorCode
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.deadlines import Deadlines
from segmentlog.storage.fs import replace_file
from segmentlog.store import LogStore
from segmentlog.testing import SimulatedDisk
from segmentlog.testing.disk import CrashPoint

_STEPS = 12
_VARIANTS = 4
_MOMENTS = 5


def _note(moments: list[CrashPoint], disk: SimulatedDisk) -> None:
    moments.append(disk.point())


class _Trial:
    """One seeded life: a client that joins, works, leaves, comes again; and a machine that dies during or after it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.disk = SimulatedDisk()
        self.states = 0

    def open(self, disk: SimulatedDisk) -> tuple[LogStore, GroupCoordinator]:
        """A machine that was started."""
        self.disk = disk
        store = LogStore(PATH, fs=disk.process(), clock=self.clock, background=False)
        return store, GroupCoordinator(store, self.clock, SETTINGS)

    def run(self) -> None:
        """Live, and look at what each power cut leaves."""
        self.disk.make_folders(PATH)
        replace_file(self.disk.process(), f"{PATH}/store.json", json.dumps({"format": 1, "store_id": "00"}).encode())
        with simulated_paths(lambda: self.disk), mock.patch.object(Deadlines, "start"):
            store, coordinator = self.open(self.disk)
            topic_id = store.create_topic("t").id
            client = Client(coordinator, "c", instance_id="i")
            committed = 0
            for _ in range(_STEPS):
                alive = self.disk
                before = client.generation, committed
                moments: list[CrashPoint] = []
                alive.on_effect = partial(_note, moments, alive)
                committed = self._step(client, store, topic_id, committed)
                alive.on_effect = None
                for point in self.rng.sample(moments, min(len(moments), _MOMENTS)):
                    for disk in point.crashes(self.rng, 1):
                        self._check_middle(disk, *before)
                for disk in alive.point().crashes(self.rng, _VARIANTS):
                    self._check(disk, client, committed)
                self.disk = alive
            coordinator.close()
            store.close()

    def _step(self, client: Client, store: LogStore, topic_id: str, committed: int) -> int:
        what = self.rng.randrange(5) if client.id else 0
        if what == 0:
            before = client.generation
            assert client.join().error is ErrorCode.NONE
            assert client.generation >= before
        elif what == 1:
            client.sync()
        elif what == 2:
            client.join(member_id="")  # started again
        elif what == 3 and client.assignment:
            committed += 1
            position = NewPosition("t", topic_id, 0, committed)
            error, appended = client.coordinator.commit(
                "g", [position], member_id=client.id, generation=client.generation, instance_id="i"
            )
            if appended is None:
                assert error is ErrorCode.REBALANCE_IN_PROGRESS
                return committed - 1
            log, base_offset, end_offset = appended
            log.sync_upto(end_offset, base_offset)
        elif what == 4 and self.rng.randrange(3) == 0:
            assert client.leave() is ErrorCode.NONE
            client.id, client.assignment = "", b""
        return committed

    def _check_middle(self, disk: SimulatedDisk, generation: int, committed: int) -> None:
        """Of what was under way nobody knows; what was told before is as it was, or has gone on."""
        self.states += 1
        store, coordinator = self.open(disk)
        with coordinator.looking_at("g") as group:
            assert group.generation >= generation
        found = [one.offset for one in store.group_offsets.committed("g").values()]
        assert (max(found, default=0)) - committed in (0, 1)
        new = Client(coordinator, "c", instance_id="i")
        assert new.join().error is ErrorCode.NONE
        assert new.generation >= generation
        coordinator.close()
        store.close()

    def _check(self, disk: SimulatedDisk, client: Client, committed: int) -> None:
        self.states += 1
        store, coordinator = self.open(disk)
        after = Client(coordinator, "c", instance_id="i")
        after.id, after.generation, after.members = client.id, client.generation, client.members
        if client.id:
            assert after.heartbeat() is ErrorCode.NONE
            with coordinator.looking_at("g") as group:
                assert group.leader == client.id
                if client.assignment:
                    assert group.members[client.id].assignment in (client.assignment, b"")
        elif client.generation > 0:
            after.join()
            assert after.generation > client.generation
        positions: Any = store.group_offsets.committed("g")
        assert [one.offset for one in positions.values()] == ([committed] if committed else [])
        coordinator.close()
        store.close()


@pytest.mark.parametrize("seed", seeds("group power cuts"))
def test_what_clients_were_told_survives_power_cuts(seed: int) -> None:
    """Member ids, generations, leaders, assignments, positions: in every state a disk may be in then."""
    for number in range(4):
        trial = _Trial(seed + number)
        trial.run()
        assert trial.states > _STEPS
