"""Power cuts while a group works: the state that clients have seen survives, and no generation comes twice.

This holds in the classic protocol and in that of consumers (KIP-848), where no partition has two owners, either.
"""

from __future__ import annotations

import contextlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast
from unittest import mock

import pytest
from delivery_trial import PATH, simulated_paths
from logs import FakeClock
from seeds import seeds
from server.groups.clients import SETTINGS, Client

from segmentlog.groups.server_groups import OffsetCommit
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.consumer_types import (
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    HeartbeatFields,
    Partitions,
    partition_set,
)
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.timer_thread import TimerThread
from segmentlog.storage.file_operations import replace_file
from segmentlog.store import LogStore
from segmentlog.testing import SimulatedDisk
from segmentlog.testing.simulated_disk import CrashPoint

_STEPS = 12
_VARIANTS = 4
_MOMENTS = 5


def _note(moments: list[CrashPoint], disk: SimulatedDisk) -> None:
    moments.append(disk.point())


class _Life(ABC):
    """One seeded life: clients that join, work, leave, come again; and a machine that dies during or after it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.disk = SimulatedDisk()
        self.states = 0
        self.topic_id = ""
        self.committed = 0

    def open(self, disk: SimulatedDisk) -> tuple[LogStore, GroupCoordinator]:
        """Start a machine on this disk."""
        self.disk = disk
        store = LogStore(PATH, fs=disk.process(), clock=self.clock, background=False)
        return store, GroupCoordinator(store, self.clock, SETTINGS)

    @contextlib.contextmanager
    def after(self, disk: SimulatedDisk) -> Iterator[tuple[LogStore, GroupCoordinator]]:
        """Start a machine on the disk after a power cut."""
        self.states += 1
        store, coordinator = self.open(disk)
        yield store, coordinator
        coordinator.close()
        store.close()

    def run(self) -> None:
        """Live, and look at what each power cut leaves."""
        self.disk.make_folders(PATH)
        replace_file(self.disk.process(), f"{PATH}/store.json", json.dumps({"format": 1, "store_id": "00"}).encode())
        with simulated_paths(lambda: self.disk), mock.patch.object(TimerThread, "start"):
            store, coordinator = self.open(self.disk)
            self.topic_id = store.create_topic("t", self.partitions).id
            for _ in range(_STEPS):
                alive = self.disk
                before, committed = self.told(), self.committed
                moments: list[CrashPoint] = []
                alive.on_effect = partial(_note, moments, alive)
                self.step(coordinator)
                alive.on_effect = None
                for point in self.rng.sample(moments, min(len(moments), _MOMENTS)):
                    for disk in point.crashes(self.rng, 1):
                        self._check_middle(disk, before, committed)
                for disk in alive.point().crashes(self.rng, _VARIANTS):
                    self._check(disk)
                self.disk = alive
            coordinator.close()
            store.close()

    def _check_middle(self, disk: SimulatedDisk, before: Any, committed: int) -> None:
        """Check a power cut within a step: earlier answers still hold, and the step is done or not."""
        with self.after(disk) as (store, coordinator):
            assert _position(store) - committed in (0, 1)
            self.check_middle(coordinator, before)

    def _check(self, disk: SimulatedDisk) -> None:
        with self.after(disk) as (store, coordinator):
            self.check(coordinator)
            assert _position(store) == self.committed

    def commit(
        self, coordinator: GroupCoordinator, number: int, member_id: str, generation: int, **options: Any
    ) -> bool:
        """Commit the next offset; return whether it is durable now, or False during a rebalance."""
        position = OffsetCommit("t", self.topic_id, number, self.committed + 1)
        error, appended = coordinator.commit_offsets(
            "g", [position], member_id=member_id, generation=generation, **options
        )
        if appended is None:
            assert error is ErrorCode.REBALANCE_IN_PROGRESS
            return False
        log, base_offset, end_offset = appended
        log.sync_upto(end_offset, base_offset)
        self.committed += 1
        return True

    partitions = 1

    @abstractmethod
    def told(self) -> Any:
        """Return a copy of the clients' state."""

    @abstractmethod
    def step(self, coordinator: GroupCoordinator) -> None:
        """Do one random step."""

    @abstractmethod
    def check_middle(self, coordinator: GroupCoordinator, before: Any) -> None:
        """Check the state after a power cut within a step."""

    @abstractmethod
    def check(self, coordinator: GroupCoordinator) -> None:
        """Check the state after a power cut between two steps."""


def _position(store: LogStore) -> int:
    """Return the farthest of all."""
    return max((one.offset for one in store.group_offsets.committed("g").values()), default=0)


class _Classic(_Life):
    """A client whose leader assigns."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.client = Client(cast("GroupCoordinator", None), "c", instance_id="i")

    def told(self) -> int:
        return self.client.generation

    def step(self, coordinator: GroupCoordinator) -> None:
        client = self.client
        client.coordinator = coordinator
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
            self.commit(coordinator, 0, client.id, client.generation, instance_id="i")
        elif what == 4 and self.rng.randrange(3) == 0:
            assert client.leave() is ErrorCode.NONE
            client.id, client.assignment = "", b""

    def check_middle(self, coordinator: GroupCoordinator, before: int) -> None:
        with coordinator.locked_group("g") as group:
            assert group.generation >= before
        new = Client(coordinator, "c", instance_id="i")
        assert new.join().error is ErrorCode.NONE
        assert new.generation >= before

    def check(self, coordinator: GroupCoordinator) -> None:
        client = self.client
        after = Client(coordinator, "c", instance_id="i")
        after.id, after.generation, after.members = client.id, client.generation, client.members
        if client.id:
            assert after.heartbeat() is ErrorCode.NONE
            with coordinator.locked_group("g") as group:
                assert group.leader == client.id
                if client.assignment:
                    assert group.members[client.id].assignment in (client.assignment, b"")
        elif client.generation > 0:
            after.join()
            assert after.generation > client.generation


class _Told(NamedTuple):
    """The state of a member of the consumer protocol; without an epoch it has not joined."""

    epoch: int | None = None
    owned: Partitions = frozenset()


class _Consumers(_Life):
    """Three clients whose server assigns; one has an instance id and steps out at times."""

    partitions = 6
    _INSTANCES: ClassVar[dict[str, str | None]] = {"a": None, "b": None, "static": "i"}

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.members = dict.fromkeys(self._INSTANCES, _Told())
        self.epoch = 0

    def told(self) -> tuple[int, dict[str, _Told]]:
        return self.epoch, dict(self.members)

    def step(self, coordinator: GroupCoordinator) -> None:
        name = self.rng.choice(sorted(self.members))
        told = self.members[name]
        what = self.rng.randrange(8)
        if told.epoch is None:
            self.members[name] = self._beat(coordinator, name, told)
        elif what == 0:
            steps_out = self._INSTANCES[name] is not None and self.rng.random() < 0.7
            request = self._request(name, epoch=STATIC_LEAVE_EPOCH if steps_out else LEAVE_EPOCH)
            assert coordinator.consumer_heartbeat("g", request).error is ErrorCode.NONE
            self.members[name] = _Told()
        elif what <= 2 and told.owned:
            number = min(told.owned).partition
            self.commit(coordinator, number, name, told.epoch, instance_id=self._INSTANCES[name])
        else:
            self.members[name] = self._beat(coordinator, name, told)
        self.epoch = max([self.epoch, *(one.epoch for one in self.members.values() if one.epoch is not None)])
        _has_one_owner_each(self.members)

    def _request(self, name: str, **options: Any) -> HeartbeatFields:
        return HeartbeatFields(member_id=name, instance_id=self._INSTANCES[name], **options)

    def _beat(self, coordinator: GroupCoordinator, name: str, told: _Told) -> _Told:
        """Send a heartbeat with the owned partitions, and release those that are not assigned."""
        if told.epoch is None:
            request = self._request(name, topics=("t",), owned=frozenset(), rebalance_timeout_ms=5_000)
        else:
            request = self._request(name, epoch=told.epoch, owned=told.owned)
        answer = coordinator.consumer_heartbeat("g", request)
        assert answer.error is ErrorCode.NONE, answer
        return _Told(answer.epoch, told.owned if answer.assigned is None else partition_set(answer.assigned))

    def check_middle(self, coordinator: GroupCoordinator, before: tuple[int, dict[str, _Told]]) -> None:
        epoch, members = before
        with coordinator.locked_group("g") as group:
            assert group.generation >= epoch
        # The client whose request had no answer repeats it; the others have not noticed the power cut.
        asking = [name for name, told in members.items() if told != self.members[name]]
        assert len(asking) <= 1
        others = {name: told for name, told in members.items() if name not in asking}
        self._go_on(coordinator, others)
        for name in asking:
            told = members[name]
            if told.epoch is not None and self.members[name].epoch is None:
                continue  # it leaves, and may have left
            if told.epoch is None and self._INSTANCES[name]:
                coordinator.consumer_heartbeat(
                    "g", self._request(name, epoch=STATIC_LEAVE_EPOCH)
                )  # it gave up, and another begins
            others[name] = self._beat(coordinator, name, told)
        if len(others) == len(members):
            self._go_on(coordinator, others)

    def check(self, coordinator: GroupCoordinator) -> None:
        """Check that all members continue, and that the partitions reach them."""
        with coordinator.locked_group("g") as group:
            assert group.generation >= self.epoch
        members = dict(self.members)
        self._go_on(coordinator, members)
        there = [told for told in members.values() if told.epoch is not None]
        has_a_place_kept = any(
            one.id == "static" and members["static"].epoch is None for one in self._shown(coordinator)
        )
        if there and not has_a_place_kept:
            assert sum(len(told.owned) for told in there) == self.partitions

    @staticmethod
    def _shown(coordinator: GroupCoordinator) -> list[Any]:
        with coordinator.locked_group("g") as group:
            return list(group.members.values())

    def _go_on(self, coordinator: GroupCoordinator, members: dict[str, _Told]) -> None:
        for _ in range(4):
            for name, told in members.items():
                if told.epoch is not None:
                    members[name] = self._beat(coordinator, name, told)
                    _has_one_owner_each(members)


def _has_one_owner_each(members: dict[str, _Told]) -> None:
    owned = [one for told in members.values() for one in told.owned]
    assert len(owned) == len(set(owned)), "a partition has two owners"


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("group power cuts"))
@pytest.mark.parametrize("life", [_Classic, _Consumers])
def test_what_clients_were_told_survives_power_cuts(life: type[_Life], seed: int) -> None:
    """Member ids, generations, leaders, assignments, positions: in every state a disk may be in then."""
    for number in range(4):
        trial = life(seed + number)
        trial.run()
        assert trial.states > _STEPS
