"""A `Trial` in which standbys follow the owner and take over by themselves, at any step, right or wrong.

    hasty standbys     take over as soon as a probe fails; the trial makes probes fail although the owner works
    owner dies         its processes end; it may come back, as the owner or as a former owner
    cut off            the owner cannot reach the object store, and its programs append more
    former returns     a former owner becomes a standby, while local programs still have its store open

In the end the owner dies, and one of the standbys must become the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from objects.faulty_bucket import FaultyBucket
from objects.shipping_machine import Machine
from objects.shipping_trial import KINDS, Trial
from objects.standby_machine import StandbyMachine, name_server

from segmentlog.errors import ObjectStoreError, ShippingRefused, StoreFenced
from segmentlog.format.manifest import MANIFEST_KEY, decode_manifest
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.takeover_decision import ProbeResult
from segmentlog.topics.topic_registry import Topics

_STANDBY_KINDS = {
    "standby cycle": 40, "kill standby": 2, "new standby": 2, "lose standby": 1, "owner dies": 2, "owner returns": 3,
    "cut off": 2, "former returns": 6, "use former store": 5,
}  # fmt: skip
STANDBY_KINDS = tuple(_STANDBY_KINDS)
_WITHOUT_OWNER = frozenset(
    {*STANDBY_KINDS, "gc", "restore", "damaged restore", "takeover", "follow", "kill follower"}
    - {"owner dies", "cut off"}
)
"""Steps that can happen while the owner's machine is dead."""
_STANDBYS_MAX = 3
_CYCLES_MAX = 1000


class StandbyTrial(Trial):
    """See `Trial`."""

    def __init__(self, *args: Any, often: Mapping[str, int] | None = None, **options: Any) -> None:
        super().__init__(*args, often={**_STANDBY_KINDS, **(often or {})}, **options)
        self.standbys: list[StandbyMachine] = []

    def new_shipper(self, topics: Topics, bucket: FaultyBucket) -> Shipper:
        """Create the shipper of another process."""
        return self._new_shipper(topics, bucket)

    def machine(self, label: str) -> Machine:
        """Create a machine like `Trial.machine`, with the address of its server."""
        machine = super().machine(label)
        name_server(machine.path, label)
        return machine

    def run(self, steps: int) -> None:
        """Run the trial like `Trial.run`, and close the standbys."""
        try:
            super().run(steps)
        finally:
            for standby in self.standbys:
                standby.close()

    def _begin(self) -> None:
        super()._begin()
        for _ in range(self.rng.choice((1, 2))):
            self._new_standby(self.owner)

    def _do(self, kind: str, what: Callable[[Machine], object], machine: Machine) -> None:
        if machine.is_dead and kind not in _WITHOUT_OWNER:
            return
        super()._do(kind, what, machine)

    # ------------------------------------------------------------ what standbys see and do

    def probe(self, host: str, epoch: int, *, calm: bool) -> ProbeResult:
        """Return what a standby finds when it connects to the server of the owner."""
        named = [machine for machine in self.machines if machine.label == host and machine.epoch == epoch]
        is_alive = bool(named) and not named[0].is_dead
        if not calm and self.rng.random() < 0.1:
            self.seen["wrong probe"] += 1
            return self.rng.choice((ProbeResult.REFUSED, ProbeResult.SILENT))
        return ProbeResult.ALIVE if is_alive else self.rng.choice((ProbeResult.REFUSED, ProbeResult.SILENT))

    def add_owner(self, standby: StandbyMachine) -> None:
        """Make a standby that has taken over a machine with a store."""
        self.standbys.remove(standby)
        machine = Machine(
            standby.label, standby.path, self.clock, self.note, lambda: self.new_bucket(standby.label),
            self._new_shipper, apart=self.rng.random() < 0.3,
        )  # fmt: skip
        self.machines.append(machine)
        self.machines.sort(key=lambda one: one.epoch)  # another one may have taken over since
        self.note("owns", standby.label, machine.epoch)
        self._restores.note_found(standby.label, "takeover", machine.store)
        self.seen["standby took over"] += 1

    def _new_standby(self, machine: Machine) -> None:
        if len(self.standbys) < _STANDBYS_MAX:
            label = f"standby-{self.next_number()}"
            self.standbys.append(StandbyMachine(self, label, self.folder / label))

    def _standby_cycle(self, machine: Machine) -> None:
        if self.standbys:
            self.clock.advance(self.rng.choice((100, 1000, 1000, 2500)))
            self.rng.choice(self.standbys).cycle()

    def _kill_standby(self, machine: Machine) -> None:
        for standby in self._idle():
            standby.kill()

    def _lose_standby(self, machine: Machine) -> None:
        """Remove a standby for good, with all that it has begun."""
        for standby in self._idle():
            standby.close()
            self.standbys.remove(standby)

    def _idle(self) -> list[StandbyMachine]:
        """Return a standby that is not within a cycle, if there is one."""
        idle = [standby for standby in self.standbys if not standby.is_busy]
        return [self.rng.choice(idle)] if idle else []

    # ------------------------------------------------------------ what happens to owners

    def _owner_dies(self, machine: Machine) -> None:
        if machine.is_busy:
            return
        if self.rng.random() < 0.5:
            machine.power_cut(self.rng)
            self._restores.note_found(machine.label, "restart", machine.store)
        machine.bucket.calm = True
        machine.observe()
        machine.close()
        machine.is_dead = True

    def _owner_returns(self, machine: Machine) -> None:
        """Start the owner's server again; a former owner may also return as a standby."""
        if machine.is_dead:
            machine.open()
            machine.is_dead = False

    def _cut_off(self, machine: Machine) -> None:
        machine.bucket.is_cut_off = not machine.bucket.is_cut_off

    def _former_returns(self, machine: Machine) -> None:
        former = [
            one for one in self.machines
            if not one.is_busy and not one.is_dead and one.epoch and one.epoch < self.shelf.owner_epoch()
        ]  # fmt: skip
        if not former or len(self.machines) < 2 or len(self.standbys) > _STANDBYS_MAX:
            return
        one = self.rng.choice(former)
        self._follow_as_standby(one)

    def _follow_as_standby(self, one: Machine) -> StandbyMachine:
        self.machines.remove(one)
        one.bucket.calm = True
        one.shipper.close()
        standby = StandbyMachine(self, f"standby-{self.next_number()}", one.path, one)
        self.standbys.append(standby)
        if self.rng.random() < 0.5:
            standby.drop_former_processes()
        return standby

    def _use_former_store(self, machine: Machine) -> None:
        for standby in self.standbys:
            standby.use_former_store()

    # ------------------------------------------------------------ in the end

    def _end(self) -> None:
        self._depth = 1
        self.shelf.arrive(self.rng, self.seen, everything=True)
        if MANIFEST_KEY not in self.shelf.objects:
            self.owner.is_dead or self._owner_dies(self.owner)
            self._owner_returns(self.owner)
            self.owner.bucket.calm = True
            self.owner.shipper.ship()
        if not self.standbys:
            self._new_standby(self.owner)
        self._some_standby_takes_over()
        for machine in self.machines:
            self._owner_returns(machine)
            machine.bucket.is_cut_off = False
        super()._end()
        for standby in list(self.standbys):
            for _ in range(3):
                is_handed_over = self.shelf.is_handed_over()
                role = standby.cycle(calm=True)
                if role == "owner":
                    if not is_handed_over:
                        self.note("error", standby.label, "it has taken over though the owner answers")
                    return
            if role != "standby":
                self.note("error", standby.label, f"it is {role or 'nothing'} in the end, and not a standby")

    def _some_standby_takes_over(self) -> None:
        """Let the owner die, and the standbys work without faults until one of them has taken over."""
        owner = [one for one in self.machines if one.epoch == self.shelf.owner_epoch()]
        for machine in owner:
            if not machine.is_dead:
                machine.bucket.calm = True
                with suppress(ObjectStoreError, ShippingRefused, StoreFenced):  # of uploads that failed before
                    machine.shipper.run_cycle()
                for standby in list(self.standbys):
                    is_handed_over = self.shelf.is_handed_over()
                    if standby.cycle(calm=True) == "owner":
                        if not is_handed_over:
                            self.note("error", standby.label, "it has taken over though the owner answers")
                        return
                self._owner_dies(machine)
        if not decode_manifest(self.shelf.objects[MANIFEST_KEY][0]).owner.nodes:
            self.seen["owner without a server"] += 1  # after a manual takeover, no standby takes over by itself
            return
        for cycle in range(_CYCLES_MAX):
            for standby in list(self.standbys):
                self.clock.advance(1000)
                if standby.cycle(calm=True) == "owner":
                    self.seen["standby took over in the end"] += 1
                    return
                if standby.has_never_been_answered and cycle > 20:
                    self.seen["standby that no owner ever answered"] += 1
                    return
        self.note("error", "standbys", "nobody becomes the owner, though the owner is dead")


__all__ = ["KINDS", "STANDBY_KINDS", "StandbyTrial"]
