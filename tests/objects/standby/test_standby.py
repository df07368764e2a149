"""A standby over its whole life: it waits, follows, takes over, and follows again after it was replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from logs import FakeClock, values_by_offset
from objects.buckets import Memory

from segmentlog.errors import ObjectStoreError, ShippingRefused, StoreFenced
from segmentlog.format.hand_over import HandOver
from segmentlog.format.manifest import Manifest
from segmentlog.format.server_file import ServerFile, ServerNode, encode_server_file
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.standby import standby as standby_module
from segmentlog.objects.standby.roles import Role, find_role
from segmentlog.objects.standby.standby import Standby
from segmentlog.objects.standby.status import StandbyStatus, read_standby_status
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.takeover_decision import ProbeResult, TakeoverSettings
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.hand_over_file import write_hand_over
from segmentlog.store import LogStore

ALIVE, REFUSED, SILENT = ProbeResult.ALIVE, ProbeResult.REFUSED, ProbeResult.SILENT


class Machine:
    """A folder, and the process on it: a store that is shipped, or a standby."""

    def __init__(self, bucket: Memory, folder: Path, clock: FakeClock, port: int) -> None:
        self.bucket, self.folder, self.clock = bucket, folder, clock
        self.node = ServerNode(1, folder.name, port)
        self.probe_result = ALIVE
        """Result of this machine's probes of the owner."""
        self.can_create = False
        self.store: LogStore | None = None
        self.standby: Standby | None = None

    def serve(self) -> LogStore:
        """Open the store as its server would."""
        self.folder.mkdir(exist_ok=True)
        store = self.store = LogStore(self.folder, background=False, clock=self.clock)
        (self.folder / "@server").write_bytes(encode_server_file(ServerFile(1, "x", (self.node,))))
        self.ship()
        return store

    def ship(self) -> None:
        """Ship what is on disk. Raise StoreFenced if another machine owns the store."""
        assert self.store is not None
        shipper = Shipper(self.store._topics, self.bucket, parallel=0)
        try:
            shipper.ship()
        finally:
            shipper.close()

    def stop(self) -> None:
        """End all processes of the machine."""
        if self.store is not None:
            self.store.close()
        if self.standby is not None:
            self.standby.close()
        self.store = self.standby = None

    def fence(self) -> None:
        """Do as the server of a former owner: open the store, and notice the new owner."""
        with LogStore(self.folder, background=False, clock=self.clock) as store:
            shipper = Shipper(store._topics, self.bucket, parallel=0)
            try:
                shipper.run_cycle()
            except StoreFenced:
                pass
            finally:
                shipper.close()

    def cycle(self) -> StandbyStatus:
        """Run one cycle of this machine's standby, a second after the last."""
        if self.standby is None:
            self.folder.mkdir(exist_ok=True)
            self.standby = Standby(
                "memory://", str(self.folder), probe=self._probe, fence_store=self.fence, nodes=(self.node,),
                can_create=self.can_create, bucket=self.bucket, clock=self.clock, parallel=0,
            )  # fmt: skip
        self.clock.advance(1000)
        return self.standby.run_cycle()

    def cycles_until(self, role: str, limit: int = 30) -> int:
        """Run cycles until the machine has this role, and return their number."""
        for count in range(1, limit):
            if self.cycle().role == role:
                return count
        raise AssertionError(f"it never is {role}: {self.standby and self.standby.status}")

    def _probe(self, manifest: Manifest) -> list[ProbeResult]:
        return [self.probe_result for _ in manifest.owner.nodes]


@pytest.fixture
def bucket() -> Memory:
    """Provide the object store."""
    return Memory()


@pytest.fixture
def machine(tmp_path: Path, bucket: Memory) -> Iterator[Callable[[str], Machine]]:
    """Return a function that creates a machine."""
    clock, machines = FakeClock(), []

    def create(name: str) -> Machine:
        machines.append(Machine(bucket, tmp_path / name, clock, 9092 + len(machines)))
        return machines[-1]

    yield create
    for one in machines:
        one.stop()


def values(store: LogStore, topic: str = "t") -> list[bytes | None]:
    """Return all values of partition 0."""
    return list(values_by_offset(store.topic(topic).partition(0)).values())


@pytest.mark.parametrize(
    ("names", "role"),
    [((), "owner"), (("@server", "@standby-status", "@users.json"), "owner"), (("@former",), "waiting")],
)
def test_the_first_machine_creates_a_store_in_an_empty_folder(
    machine: Callable[[str], Machine], names: tuple[str, ...], role: str
) -> None:
    """Files of the machine may be there; a former store is not replaced."""
    first = machine("m1")
    first.can_create = True
    first.folder.mkdir()
    for name in names:
        (first.folder / name).touch()
    assert first.cycle().role == role
    assert (first.folder / "store.json").exists() == (role == "owner")


def test_a_machine_that_could_create_a_store_follows_a_shipped_one(machine: Callable[[str], Machine]) -> None:
    """Its folder is empty, for example after its disk was replaced."""
    first, second = machine("m1"), machine("m2")
    first.serve()
    second.can_create = True
    assert second.cycle().role == "standby"


def test_a_standby_follows_and_takes_over(machine: Callable[[str], Machine]) -> None:
    """Everything that was shipped is there, the old owner is fenced, and offsets continue after its grant."""
    first, second = machine("m1"), machine("m2")
    log = first.serve().create_topic("t", fsync="always").partition(0)
    log.append([b"1", b"2"])
    first.ship()
    status = second.cycle()
    assert (status.role, status.reason, status.nodes) == ("standby", "the owner answers", (first.node,))
    log.append([b"3"])
    first.ship()
    log.append([b"lost"])
    second.probe_result = REFUSED
    assert second.cycles_until("owner") == 4
    second.stop()
    store = second.serve()
    assert values(store) == [b"1", b"2", b"3"]
    grant = require_manifest(second.bucket)[0].topics[0].partitions[0]
    assert store.topic("t").partition(0).append([b"4"]) >= 1000 <= grant.offset_grant
    with pytest.raises(StoreFenced):
        first.ship()
    with pytest.raises(StoreFenced):
        log.append([b"5"])


def test_a_handed_over_store_is_taken_over_in_the_next_cycle(machine: Callable[[str], Machine]) -> None:
    """The owner still answers. The new owner leaves out no offset, and the former owner becomes a standby."""
    first, second = machine("m1"), machine("m2")
    store = first.serve()
    log = store.create_topic("t").partition(0)
    log.append([b"1", b"2"])
    first.ship()
    assert second.cycle().role == "standby"
    log.append([b"3"])
    shipper = Shipper(store._topics, first.bucket, parallel=0)
    binding = read_binding(store._topics.fs, store.path)
    assert binding is not None
    until_ms = first.clock.now_ms() + 60_000
    wanted = HandOver(stage="requested", owner_id=binding.owner_id, wait_ms=10_000, until_ms=until_ms)
    write_hand_over(store._topics.fs, store.path, wanted)
    while not require_manifest(first.bucket)[0].is_handed_over:
        shipper.run_cycle()
    status = second.cycle()
    assert (status.role, status.reason) == ("owner", "the owner hands the store over")
    with pytest.raises(StoreFenced):
        shipper.run_cycle()
    shipper.close()
    second.stop()
    taken = second.serve().topic("t").partition(0)
    assert taken.append([b"4"]) == 3
    assert taken.lost_ranges() == []
    assert values_by_offset(taken) == {0: b"1", 1: b"2", 2: b"3", 3: b"4"}
    second.ship()
    first.stop()
    assert first.cycle().role == "standby"


def test_it_waits_for_the_first_machine(machine: Callable[[str], Machine]) -> None:
    """A standby that starts first does not become a store of its own."""
    first, second = machine("m1"), machine("m2")
    status = second.cycle()
    assert (status.role, "--ship" in status.reason) == ("waiting", True)
    first.serve()
    assert second.cycle().role == "standby"


def test_a_former_owner_follows(machine: Callable[[str], Machine], bucket: Memory) -> None:
    """Its shipped files are linked and not downloaded; unshipped records are set aside, and readable there."""
    first, second = machine("m1"), machine("m2")
    log = first.serve().create_topic("t", fsync="always", segment_bytes=1000).partition(0)
    for number in range(50):
        log.append([b"%d" % number * 50])
    first.ship()
    second.cycle()
    log.append([b"never shipped"])
    first.stop()
    second.probe_result = REFUSED
    second.cycles_until("owner")
    second.stop()
    second.serve().topic("t").partition(0).append([b"new"])
    second.ship()
    sealed = sorted((first.folder / "t" / "0").glob("*.log"))[:-1]
    inodes = {path.name: path.stat().st_ino for path in sealed}
    status = first.cycle()
    assert (status.role, status.error, status.nodes) == ("standby", "", (second.node,))
    assert len(inodes) > 3
    assert {
        path.name: path.stat().st_ino for path in (first.folder / "t" / "0").glob("*.log")
    }.items() >= inodes.items()
    with LogStore(first.folder, background=False, read_only=True) as store:
        assert values(store)[-1] == b"new"
    with LogStore(first.folder / "@former" / "1", background=False, read_only=True) as former:
        assert values(former)[-1] == b"never shipped"


def test_it_goes_back_and_forth(machine: Callable[[str], Machine]) -> None:
    """Each machine owns the store in turn; every shipped record stays, at one offset."""
    machines = [machine("m1"), machine("m2")]
    machines[0].serve().create_topic("t", fsync="always").partition(0).append([b"0"])
    machines[0].ship()
    for turn in range(1, 6):
        owner, standby = machines[(turn - 1) % 2], machines[turn % 2]
        standby.probe_result = ALIVE
        assert standby.cycle().role == "standby"
        owner.stop()
        standby.probe_result = SILENT
        assert standby.cycles_until("owner") in (8, 9)
        standby.stop()
        standby.serve().topic("t").partition(0).append([b"%d" % turn])
        standby.ship()
        assert standby.store is not None
        assert values(standby.store) == [b"%d" % number for number in range(turn + 1)]
    assert sorted(os.listdir(machines[0].folder / "@former")) == ["1", "3"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_former_first_owner_takes_over_again(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """The new owner dies before it serves. The first owner has never watched an owner, and takes over after long."""
    first, second = machine("m1"), machine("m2")
    first.serve().create_topic("t", fsync="always").partition(0).append([b"1"])
    first.ship()
    second.cycle()
    first.stop()
    second.probe_result = first.probe_result = REFUSED
    second.cycles_until("owner")
    second.stop()
    if is_killed:
        with monkeypatch.context() as patched:
            patched.setattr(standby_module, "link_former_segments", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                first.cycle()
    else:
        assert first.cycle().role == "standby"
    first.stop()
    assert first.cycles_until("owner", 310) > 295
    first.stop()
    assert values(first.serve()) == [b"1"]


def test_a_standby_whose_first_cycle_fails(machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was restarted while the object store was away. Later processes still know that the owner has answered."""
    first, second = machine("m1"), machine("m2")
    first.serve()
    answered = second.cycle().answered_owner
    second.stop()
    with monkeypatch.context() as patched:
        patched.setattr(second.bucket, "get", Mock(side_effect=ObjectStoreError("memory://", "m", "timed out", True)))
        assert second.cycle().error
    second.stop()
    second.probe_result = REFUSED
    assert (second.cycle().answered_owner, bool(answered)) == (answered, True)
    assert second.cycles_until("owner") == 3


def test_two_standbys(machine: Callable[[str], Machine]) -> None:
    """One becomes the owner; the other one follows it, and takes over from it later."""
    first, second, third = machine("m1"), machine("m2"), machine("m3")
    first.serve().create_topic("t", fsync="always").partition(0).append([b"1"])
    first.ship()
    for standby in (second, third):
        standby.cycle()
    first.stop()
    second.probe_result = third.probe_result = REFUSED
    roles: list[str] = []
    while "owner" not in roles:
        roles = [standby.cycle().role for standby in (second, third)]
    assert roles == ["owner", "standby"]
    second.stop()
    second.serve().topic("t").partition(0).append([b"2"])
    second.ship()
    third.probe_result = ALIVE
    assert third.cycle().nodes == (second.node,)
    third.probe_result = REFUSED
    third.cycles_until("owner")
    third.stop()
    assert values(third.serve()) == [b"1", b"2"]


def test_the_loser_of_a_race_stays_a_standby(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine takes over between this one's decision and its conditional put."""
    first, second, third = machine("m1"), machine("m2"), machine("m3")
    first.serve().create_topic("t", fsync="always").partition(0).append([b"1"])
    first.ship()
    for standby in (second, third):
        standby.cycle()
    first.stop()
    second.probe_result = third.probe_result = REFUSED
    swap, is_first = second.bucket.compare_and_swap, True

    def beaten(*arguments: object) -> str:
        nonlocal is_first
        if is_first:
            is_first = False
            third.cycles_until("owner")
        return swap(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(second.bucket, "compare_and_swap", beaten)
    for _ in range(5):
        status = second.cycle()
    assert (status.role, status.owner_epoch) == ("standby", 2)
    third.stop()
    third.serve().topic("t").partition(0).append([b"2"])
    third.ship()
    second.cycle()
    with LogStore(second.folder, background=False, read_only=True) as store:
        assert values(store) == [b"1", b"2"]


def test_an_unreachable_object_store_stops_no_owner(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby cannot know whether the owner ships; it reports that, and continues when it can read again."""
    first, second = machine("m1"), machine("m2")
    first.serve().create_topic("t", fsync="always").partition(0).append([b"1"])
    first.ship()
    second.cycle()
    second.probe_result = REFUSED
    with monkeypatch.context() as patched:

        def fail(key: str) -> tuple[bytes, str]:
            raise ObjectStoreError("memory://", key, "timed out", True)

        patched.setattr(second.bucket, "get", fail)
        for _ in range(30):
            status = second.cycle()
        assert (status.role, "timed out" in status.error) == ("standby", True)
    assert second.cycles_until("owner") == 4


def test_the_status_file(machine: Callable[[str], Machine]) -> None:
    """The workers of the server read it in each cycle."""
    first, second = machine("m1"), machine("m2")
    first.serve()
    status = second.cycle()
    assert read_standby_status(FileSystem(), str(second.folder)) == status
    (second.folder / "@standby-status").write_bytes(b"{")
    assert read_standby_status(FileSystem(), str(second.folder)) is None


def test_folders_that_are_something_else(machine: Callable[[str], Machine], tmp_path: Path, bucket: Memory) -> None:
    """A standby refuses another store's folder, and changes nothing there."""
    first, second = machine("m1"), machine("m2")
    first.serve()
    with LogStore(second.folder, background=False) as other:
        other.create_topic("mine", fsync="always").partition(0).append([b"1"])
    with pytest.raises(ShippingRefused, match="is another store"):
        find_role(bucket, FileSystem(), str(second.folder))
    status = second.cycle()
    assert (status.role, "is another store" in status.error) == ("waiting", True)
    with LogStore(second.folder, background=False) as other:
        assert values(other, "mine") == [b"1"]


def test_roles_of_the_first_machine(machine: Callable[[str], Machine], bucket: Memory) -> None:
    """A store that exists becomes the owner if nothing is shipped yet; an empty folder waits."""
    first = machine("m1")
    fs = FileSystem()
    assert find_role(bucket, fs, str(first.folder)) is Role.WAITING
    with LogStore(first.folder, background=False):
        assert find_role(bucket, fs, str(first.folder)) is Role.OWNER
    status = first.cycle()
    assert (status.role, status.error) == ("owner", "")
    first.stop()
    first.serve()
    assert find_role(bucket, fs, str(first.folder)) is Role.OWNER


@pytest.mark.parametrize("has_heartbeat", [True, False])
def test_an_idle_owner_that_cannot_be_reached_keeps_the_store(
    machine: Callable[[str], Machine], has_heartbeat: bool
) -> None:
    """Only the link between the machines is cut. Without heartbeats, a standby cannot tell this from a failure."""
    first, second = machine("m1"), machine("m2")
    store = first.serve()
    assert second.cycle().reason == "the owner answers"
    shipper = Shipper(store._topics, first.bucket, parallel=0)
    shipper.heartbeat_ms = TakeoverSettings().heartbeat_ms if has_heartbeat else 0
    shipper.run_cycle()
    first_sequence = require_manifest(first.bucket)[0].sequence
    second.probe_result = SILENT
    roles = []
    with contextlib.suppress(StoreFenced):
        for _ in range(60):
            roles.append(second.cycle().role)
            shipper.run_cycle()
    shipper.close()
    puts = require_manifest(first.bucket)[0].sequence - first_sequence
    assert ("owner" in roles) == (not has_heartbeat)
    if has_heartbeat:
        assert puts == len(roles) / 4
        assert second.cycles_until("owner") <= 10  # the shipper has ended


@pytest.mark.parametrize(("silence_s", "heartbeat_ms"), [(8, 4000), (3, 1500), (60, 4000), (0, 1)])
def test_a_heartbeat_is_shorter_than_the_silence(silence_s: float, heartbeat_ms: int) -> None:
    """A standby sees two heartbeats in the time after which it would take over."""
    assert TakeoverSettings(silence_s=silence_s).heartbeat_ms == heartbeat_ms
