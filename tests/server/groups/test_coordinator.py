"""The coordinator with callers that wait, and what a restart of it leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from server.groups.clients import SETTINGS, Client, TestClock, Waiting, settle
from waiting import wait_until

from segmentlog.errors import DiskFull, GroupInUse
from segmentlog.groups import group_folder
from segmentlog.groups.server_group_file import read_saved_group, write_saved_group
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.cached_group import GroupUnavailable
from segmentlog.server.groups.classic_types import ClassicMember, GroupState
from segmentlog.server.groups.consumer_types import HeartbeatFields
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.subscriptions import encode_topics
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore


@pytest.fixture
def clock() -> TestClock:
    """Return a time that stands still until a test moves it."""
    return TestClock()


@pytest.fixture
def store(tmp_path: Path, clock: TestClock) -> Iterator[LogStore]:
    """Provide a store with topic ``t`` of three partitions, in a time that stands still."""
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        store.create_topic("t", partitions=3, fsync="never")
        yield store


@pytest.fixture
def start(store: LogStore, clock: TestClock) -> Iterator[Callable[..., GroupCoordinator]]:
    """Yield a function that starts coordinators, and close them at the end."""
    started: list[GroupCoordinator] = []

    def start_coordinator(settings: Any = SETTINGS, **options: Any) -> GroupCoordinator:
        started.append(GroupCoordinator(store, clock, settings, **options))
        return started[-1]

    yield start_coordinator
    for coordinator in started:
        coordinator.close()


def test_three_members_share(start: Callable[..., GroupCoordinator]) -> None:
    """Three members are in one generation with one leader, whose assignment each of them gets."""
    coordinator = start()
    clients = [Client(coordinator, name) for name in "abc"]
    settle(*clients)
    assert len({client.generation for client in clients}) == 1
    assert len({client.leader for client in clients}) == 1
    assert len({client.assignment for client in clients}) == 3
    assert all(client.heartbeat() is ErrorCode.NONE for client in clients)


def test_a_dead_member_is_given_up(start: Callable[..., GroupCoordinator], clock: TestClock) -> None:
    """A member that is silent for its session timeout is removed, and the others share its partitions."""
    coordinator = start()
    a, b, dead = clients = [Client(coordinator, name) for name in "abc"]
    settle(*clients)
    generation = a.generation
    clock.ms += 9_000
    assert a.heartbeat() is b.heartbeat() is ErrorCode.NONE
    clock.ms += 2_000
    coordinator.run_due()
    assert a.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS
    settle(a, b)
    assert a.generation > generation
    assert dead.heartbeat() is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_restart_goes_on_without_a_rebalance(start: Callable[..., GroupCoordinator], clock: TestClock) -> None:
    """A restarted coordinator has the same members in the same generation, with new sessions."""
    first = start()
    clients = [Client(first, name) for name in "abc"]
    settle(*clients)
    clock.ms += 9_000
    first.close()
    clock.ms += 9_000
    second = start()
    for client in clients:
        client.coordinator = second
        assert client.heartbeat() is ErrorCode.NONE
    clock.ms += 9_000
    second.run_due()
    for client in clients:
        before = client.assignment
        assert client.heartbeat() is ErrorCode.NONE
        assert client.sync().assignment == before


def test_closing_wakes_all_who_wait(start: Callable[..., GroupCoordinator]) -> None:
    """Clients do not wait for a closed coordinator."""
    coordinator = start()
    a, b, c = (Client(coordinator, name) for name in "abc")
    settle(a)
    waiting = Waiting(b.join)
    wait_until(lambda: a.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS)
    coordinator.close()
    assert waiting.result().error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    with pytest.raises(GroupUnavailable):
        c.join()


def test_the_last_to_leave_empties_the_group(start: Callable[..., GroupCoordinator]) -> None:
    """A group that all have left is empty at once, and its next generation is a higher one."""
    coordinator = start()
    a = Client(coordinator, "a")
    settle(a)
    generation = a.generation
    assert a.leave() is ErrorCode.NONE
    with coordinator.locked_group("g") as group:
        assert group.state is GroupState.EMPTY
    b = Client(coordinator, "b")
    settle(b)
    assert b.generation > generation


# ------------------------------------------------------------ restarts and failures


def test_nobody_is_told_what_is_not_on_disk(start: Callable[..., GroupCoordinator], store: LogStore) -> None:
    """The file has the generation and the member before JoinGroup answers, the assignment before SyncGroup does."""
    coordinator = start()
    a = Client(coordinator, "a")
    for _ in range(3):
        a.join()
        saved = read_saved_group(store.groups._fs, f"{store.path}/@groups/g")
        assert saved is not None
        assert (saved.generation, saved.state) == (a.generation, "CompletingRebalance")
        assert [member.id for member in saved.members] == [a.id]
        a.sync()
        saved = read_saved_group(store.groups._fs, f"{store.path}/@groups/g")
        assert saved is not None
        assert (saved.state, saved.members[0].assignment) == ("Stable", a.assignment)
        assert saved.members[0].partitions == {"t": [0]}
        assert saved.members[0].topics == ("t",)


@pytest.mark.parametrize("step", ["joining", "joined", "syncing", "synced", "rejoining", "left"])
def test_a_restart_in_the_middle(start: Callable[..., GroupCoordinator], step: str) -> None:
    """At any step of a rebalance, members and generations continue, and waiting clients must join again."""
    first = start()
    a, b, c = clients = [Client(first, name) for name in "abc"]
    settle(a, b)
    generation = a.generation
    waiting = []
    if step in ("joining", "joined", "syncing"):
        waiting = [Waiting(c.join)]
        wait_until(lambda: a.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS)
    if step in ("joined", "syncing"):
        joins = [Waiting(client.join) for client in (a, b)]
        assert all(join.result().error is ErrorCode.NONE for join in (*joins, *waiting))
        waiting = []
        generation += 1
    if step == "syncing":
        follower = next(client for client in clients if not client.members)
        waiting = [Waiting(follower.sync)]
        wait_until(lambda: any(member.sync_token for member in _members(first)))
    if step == "rejoining":
        waiting = [Waiting(c.join)]
        wait_until(lambda: a.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS)
        waiting.append(Waiting(a.join))
        wait_until(lambda: sum(member.is_joining for member in _members(first)) == 2)
    if step == "left":
        assert b.leave() is ErrorCode.NONE
    first.close()
    for call in waiting:
        assert call.result().error is ErrorCode.COORDINATOR_NOT_AVAILABLE
    second = start()
    for client in clients:
        client.coordinator = second
    expected = ErrorCode.REBALANCE_IN_PROGRESS if step == "left" else ErrorCode.NONE
    assert a.heartbeat() is expected
    assert a.generation == generation
    with second.locked_group("g") as group:
        assert group.generation == generation
        members = set(group.members)
    assert members == {client.id for client in clients if client.generation == generation} - (
        {b.id} if step == "left" else set()
    )
    alive = [a, c] if step == "left" else clients
    for client in alive:
        client.assignment = b""
    settle(*alive)
    assert a.generation >= generation


def _members(coordinator: GroupCoordinator) -> list[ClassicMember]:
    with coordinator.locked_group("g") as group:
        return list(group.members.values())


def test_a_static_member_is_restarted(start: Callable[..., GroupCoordinator]) -> None:
    """It returns under its instance id, also after a restart of the coordinator; others need not join again."""
    coordinator = start()
    a, static = Client(coordinator, "a"), Client(coordinator, "s", instance_id="i")
    settle(a, static)
    for _ in range(2):
        coordinator.close()
        coordinator = start()
        a.coordinator = coordinator
        former, static = static, Client(coordinator, "s", instance_id="i")
        former.coordinator = coordinator
        assert static.join().generation == a.generation
        assert static.sync().assignment == former.assignment
        assert a.heartbeat() is static.heartbeat() is ErrorCode.NONE
        assert former.heartbeat() is ErrorCode.FENCED_INSTANCE_ID


class _FullDisk(FileSystem):
    """A file system that has no room for replacing a file, on request."""

    is_full = False

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if self.is_full and "/remote" in path and flags & os.O_CREAT:
            raise DiskFull(path)
        return super().open(path, flags, mode)


def test_what_cannot_be_saved_is_told_to_nobody(
    tmp_path: Path, clock: TestClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Waiting clients get an error, the state in the file counts, and the group continues once there is room."""
    fs = _FullDisk()
    with LogStore(tmp_path / "store", background=False, clock=clock, fs=fs) as store:
        store.create_topic("t")
        with closing(GroupCoordinator(store, clock, SETTINGS)) as coordinator:
            a, b = Client(coordinator, "a"), Client(coordinator, "b")
            settle(a)
            waiting = Waiting(b.join)
            wait_until(lambda: a.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS)
            fs.is_full = True
            with pytest.raises(GroupUnavailable) as refused:
                a.join()
            assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
            assert waiting.result().error is ErrorCode.COORDINATOR_NOT_AVAILABLE
            assert a.heartbeat() is ErrorCode.NONE
            other = Client(coordinator, "c", "other")
            with pytest.raises(GroupUnavailable):
                other.join()
            assert "cannot be saved" in caplog.text
            fs.is_full = False
            generation = a.generation
            a.assignment = b""
            settle(a, b)
            assert a.generation > generation
            settle(other)


def test_two_workers_of_one_number(start: Callable[..., GroupCoordinator]) -> None:
    """While the former worker runs, clients of the next one must wait; then it continues."""
    first, second = start(), start()
    a = Client(first, "a")
    settle(a)
    a.coordinator = second
    with pytest.raises(GroupUnavailable) as refused:
        a.heartbeat()
    assert refused.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    first.close()
    assert a.heartbeat() is ErrorCode.NONE


def test_a_restarted_worker_gives_up_who_does_not_come(
    start: Callable[..., GroupCoordinator], clock: TestClock, store: LogStore
) -> None:
    """This happens without a request for the group, and then the library may take it. Groups of other workers stay."""
    first = start()
    for group in ("g", "other"):
        settle(Client(first, "a", group))
    first.close()
    second = start(is_coordinator_of=lambda group: group == "g")
    assert Client(second, "x", "another").heartbeat() is ErrorCode.UNKNOWN_MEMBER_ID
    assert store.groups.describe("g").members

    def is_given_up() -> bool:
        clock.ms += 10_000  # since the file was read: a member has at most a session timeout
        second.run_due()
        return store.groups.describe("g").state == "Empty"

    wait_until(is_given_up)
    with store.consumer("t", group="g"), pytest.raises(GroupInUse):
        store.consumer("t", group="other")


def test_a_group_is_another_workers_than_before(store: LogStore, clock: TestClock) -> None:
    """With more workers than before, a client that does not return is removed, also without a request."""
    nodes = [WorkerNode(1, "localhost", 9093), WorkerNode(2, "localhost", 9094)]
    settings = ServerSettings(groups=SETTINGS)
    with closing(Broker(store, WorkerCluster("c", nodes[:1], 1), settings, OpenAuthorizer(), clock)) as alone:
        moved = next(name for name in map(str, range(100)) if WorkerCluster("c", nodes, 2).is_coordinator(name))
        settle(Client(alone.groups, "a", moved))
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                closing(Broker(store, WorkerCluster("c", nodes, number), settings, OpenAuthorizer(), clock))
            )
            for number in (1, 2)
        )
        first.resume_groups()
        second.resume_groups()
        Client(first.groups, "x", "another").heartbeat()  # so that the worker that had the group before is seen to live
        with pytest.raises(GroupInUse):
            store.consumer("t", group=moved)

        def is_given_up() -> bool:
            clock.ms += 5_000
            return store.groups.describe(moved).state == "Empty"

        wait_until(is_given_up)
        store.consumer("t", group=moved).close()


@pytest.mark.parametrize("kind", ["classic", "consumer"])
def test_a_disk_that_takes_longer_than_a_session(
    start: Callable[..., GroupCoordinator], clock: TestClock, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """While a group is saved, its members' heartbeats wait: that time does not count."""
    coordinator = start()
    a = Client(coordinator, "a")
    if kind == "classic":
        settle(a)
    else:
        joins = HeartbeatFields(member_id="a", rebalance_timeout_ms=10_000, topics=("t",), owned=frozenset())
        a.id, a.generation = "a", coordinator.consumer_heartbeat("g", joins).epoch
    save = coordinator._server_groups.save

    def save_slowly(*args: Any) -> None:
        save(*args)
        clock.ms += 60_000

    def lives() -> bool:
        if kind == "classic":
            return a.heartbeat() is ErrorCode.NONE
        return (
            coordinator.consumer_heartbeat("g", HeartbeatFields(member_id="a", epoch=a.generation)).error
            is ErrorCode.NONE
        )

    with monkeypatch.context() as patched:
        patched.setattr(coordinator._server_groups, "save", save_slowly)
        if kind == "classic":  # a rebalance, saved twice
            assert a.join(protocols=(("range", encode_topics(("t", "u"))),)).error is ErrorCode.NONE
            coordinator.run_due()
            assert a.sync().error is ErrorCode.NONE
        else:
            changed = HeartbeatFields(member_id="a", epoch=a.generation, topics=("t", "u"), owned=frozenset())
            a.generation = coordinator.consumer_heartbeat("g", changed).epoch
        coordinator.run_due()
    assert lives()
    clock.ms += 9_000
    coordinator.run_due()
    assert lives()
    clock.ms += 60_000
    coordinator.run_due()
    assert not lives()


@pytest.mark.parametrize("worker", [0, 1])
def test_the_library_comes_while_a_worker_takes_up_the_group(
    start: Callable[..., GroupCoordinator], clock: TestClock, store: LogStore, monkeypatch: pytest.MonkeyPatch,
    worker: int,
) -> None:  # fmt: skip
    """Clients that were away for too long are removed from the group, whether it is this worker's or another's."""
    a = Client(start(), "a")
    settle(a)
    a.coordinator.close()
    clock.ms += 20_000
    a.coordinator = start(worker=worker)
    heartbeats: list[Waiting] = []

    def write_when_the_worker_is_at_it(*args: Any) -> None:
        heartbeats.append(Waiting(a.heartbeat))
        wait_until(lambda: heartbeats[0].is_done or a.group in a.coordinator._entries)
        heartbeats[0]._thread.join(0.2)
        write_saved_group(*args)

    monkeypatch.setattr(group_folder, "write_saved_group", write_when_the_worker_is_at_it)
    with store.consumer("t", group="g"):
        assert heartbeats[0].result() is ErrorCode.UNKNOWN_MEMBER_ID
        assert a.heartbeat() is ErrorCode.UNKNOWN_MEMBER_ID
        remote = read_saved_group(store.fs, f"{store.path}/@groups/g")
        assert remote is not None
        assert not remote.held


def test_a_deadline_wakes_the_thread(start: Callable[..., GroupCoordinator], store: LogStore) -> None:
    """A real clock: a silent member is removed without any request."""
    coordinator = GroupCoordinator(store, settings=SETTINGS)
    with closing(coordinator):
        a = Client(coordinator, "a", session_timeout_ms=100)
        settle(a)
        wait_until(lambda: store.groups.describe("g").state == "Empty")


def test_a_forked_child_coordinates_nothing(start: Callable[..., GroupCoordinator]) -> None:
    """The groups are its parent's, and so are their locks."""
    coordinator = start()
    a = Client(coordinator, "a")
    settle(a)
    child = os.fork()
    if not child:
        try:
            a.heartbeat()
        except GroupUnavailable:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert a.heartbeat() is ErrorCode.NONE


def test_groups_that_are_gone_take_no_memory(start: Callable[..., GroupCoordinator]) -> None:
    """Names that strangers make up, and groups that all have left."""
    coordinator = start()
    for number in range(100):
        assert Client(coordinator, "x", f"made up {number}").heartbeat() is ErrorCode.UNKNOWN_MEMBER_ID
    a = Client(coordinator, "a")
    settle(a)
    a.leave()
    assert coordinator._entries == {}
    with pytest.raises(GroupUnavailable) as refused:
        Client(coordinator, "x", "n" * 32_768).join()
    assert refused.value.code is ErrorCode.INVALID_GROUP_ID
    assert Client(coordinator, "x", "").join().error is ErrorCode.INVALID_GROUP_ID
