"""Groups of clients of a server: their file, the rule for its owner, and the view of the library."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.clock import Clock
from segmentlog.errors import GroupInUse, GroupNotEmpty
from segmentlog.groups.server_group_file import (
    DamagedGroupFile,
    SavedConsumerState,
    SavedGroup,
    SavedMember,
    WorkerIdentity,
    WorkerLiveness,
    decode_saved_group,
    encode_saved_group,
    is_held,
)
from segmentlog.groups.server_groups import OffsetCommit, ServerGroups
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

_MEMBER = SavedMember(
    "m-1", "i", "client", "10.0.0.1", 10_000, 60_000, (("range", b"\x00\xff"),), b"\x01", ("t",), {"t": [0, 2]}
)
_GROUP = SavedGroup(
    held=True, state="Stable", generation=5, protocol_type="consumer", protocol="range", leader="m-1",
    members=(_MEMBER,), session_timeout_ms=10_000,
)  # fmt: skip


class _Clock(Clock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def monotonic_ms(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> _Clock:
    """Return a time that stands still until a test moves it."""
    return _Clock()


@pytest.fixture
def store(tmp_path: Path, clock: _Clock) -> Iterator[LogStore]:
    """Provide a store with topic ``t`` of three partitions."""
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        store.create_topic("t", partitions=3, fsync="never")
        yield store


@pytest.fixture
def worker(store: LogStore) -> Iterator[ServerGroups]:
    """Provide a worker of a running server."""
    with contextlib.closing(store.groups.server_groups(0)) as worker:
        assert worker.lock_worker()
        yield worker


def _file(store: LogStore, group: str = "g") -> Path:
    return Path(store.path) / "@groups" / group / "remote"


def _hold(worker: ServerGroups, group: str = "g") -> None:
    worker.claim(group, SavedGroup(session_timeout_ms=10_000))
    worker.save(group, _GROUP)


# ------------------------------------------------------------ the file


def test_a_file_says_what_was_written() -> None:
    """A file contains bytes, numbers and names unchanged, and omits defaults."""
    assert decode_saved_group(encode_saved_group(_GROUP)) == _GROUP
    assert decode_saved_group(encode_saved_group(SavedGroup())) == SavedGroup()
    assert encode_saved_group(SavedGroup()).endswith(b"\n{}\n")
    consumer = SavedConsumerState(epoch=7, assigned={"id": [0, 1]}, since={5: {"id": [1]}})
    group = SavedGroup(members=(SavedMember("m", consumer=consumer),))
    assert b'"since":{"5":{"id":[1]}}' in encode_saved_group(group)
    assert decode_saved_group(encode_saved_group(group)) == group


def test_no_bit_of_a_file_changes_unnoticed() -> None:
    """Every changed bit, and every truncation, of a file is noticed."""
    data = encode_saved_group(_GROUP)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(DamagedGroupFile):
                decode_saved_group(bytes(damaged))
        with pytest.raises(DamagedGroupFile):
            decode_saved_group(data[:position])


@pytest.mark.parametrize(
    ("is_alive", "worker_boot", "seen_ms", "file_boot", "now_ms", "expected"),
    [
        (True, "here", 0, "here", 10**9, True),  # it is alive while its lock is held, however long ago it was last seen
        (False, "here", 5_000, "here", 15_000, True),
        (False, "here", 5_000, "here", 15_001, False),
        (False, "here", 0, "here", 11_000, True),  # the file was written after its last sign of life
        (False, "before", 999_999, "before", 10_000, True),  # the machine has been up for that long
        (False, "before", 999_999, "before", 10_001, False),
        (None, "", 0, "here", 11_000, True),
        (None, "", 0, "here", 11_001, False),
        (None, "", 0, "before", 10_000, True),
    ],
)
def test_when_a_group_is_held(
    is_alive: bool | None, worker_boot: str, seen_ms: int, file_boot: str, now_ms: int, expected: bool
) -> None:
    """Clients hold a group while their worker runs, and for a session time-out after its last heartbeat."""
    group = SavedGroup(held=True, session_timeout_ms=10_000, alive_ms=1_000, boot_id=file_boot)
    worker = None if is_alive is None else WorkerLiveness(is_alive, WorkerIdentity(1, "h", worker_boot), seen_ms)
    assert is_held(group, worker, "here", now_ms) is expected
    assert not is_held(SavedGroup(), worker, "here", now_ms)


# ------------------------------------------------------------ two kinds


def test_a_worker_has_its_number_alone(store: LogStore, worker: ServerGroups) -> None:
    """A second process with the same number waits until the first is gone; another number does not."""
    with (
        contextlib.closing(store.groups.server_groups(0)) as second,
        contextlib.closing(store.groups.server_groups(1)) as other,
    ):
        assert not second.lock_worker()
        assert other.lock_worker()
        worker.close()
        assert second.lock_worker()


def test_the_library_waits_for_clients_to_go(store: LogStore, worker: ServerGroups, clock: _Clock) -> None:
    """Members of the library cannot join a group of clients, also while its server restarts."""
    _hold(worker)
    with pytest.raises(GroupInUse, match=r"held by 1 member of the server with pid \d+ on "):
        store.consumer("t", group="g")
    clock.ms += 100_000
    with pytest.raises(GroupInUse):
        store.consumer("t", group="g")
    worker.close()
    clock.ms += 10_000
    with pytest.raises(GroupInUse, match=r"a server that does not run .* may still return"):
        store.consumer("t", group="g")


def test_a_server_that_is_gone_keeps_nobody_out(
    store: LogStore, worker: ServerGroups, clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """After the sessions of its clients have expired, the library takes a group over in a later generation."""
    _hold(worker)
    worker.close()
    clock.ms += 10_001
    with store.consumer("t", group="g") as consumer:
        consumer.poll_group()
        assert consumer.generation > _GROUP.generation
        assert worker.lock_worker()
        assert worker.load("g").members == ()
        with pytest.raises(GroupInUse):
            worker.claim("g", SavedGroup())
    assert "taken over from 1 member of a server that no longer runs" in caplog.text
    assert worker.claim("g", SavedGroup()) > _GROUP.generation


def test_clients_wait_for_the_library_to_go(store: LogStore, worker: ServerGroups) -> None:
    """Clients cannot join a group with members of the library; the generation continues afterwards."""
    with store.consumer("t", group="g") as consumer:
        consumer.poll_group()
        generation = consumer.generation
        with pytest.raises(GroupInUse, match=r"1 member of the library \(process \d+ on "):
            worker.claim("g", SavedGroup())
    assert worker.claim("g", SavedGroup()) >= generation


def test_generations_go_on_from_kind_to_kind(store: LogStore, worker: ServerGroups) -> None:
    """Whichever kind takes over a group, its generation is higher than all before."""
    highest = 0
    for _ in range(3):
        generation = worker.claim("g", SavedGroup()) + 1
        assert generation > highest
        worker.save("g", SavedGroup(generation=generation + 10))
        with store.consumer("t", group="g") as consumer:
            consumer.poll_group()
            assert consumer.generation > generation + 10
            highest = consumer.generation


def test_a_group_that_another_worker_had(store: LogStore, worker: ServerGroups, clock: _Clock) -> None:
    """With another number of workers, a group belongs to the worker that coordinates it then."""
    _hold(worker)
    with contextlib.closing(store.groups.server_groups(1)) as other:
        assert other.lock_worker()
        assert other.load("g").members == (_MEMBER,)
        worker.close()
        clock.ms += 100_000
        with pytest.raises(GroupInUse):
            store.consumer("t", group="g")


# ------------------------------------------------------------ damage


@pytest.mark.parametrize("data", [b"", b"garbage", encode_saved_group(_GROUP)[:-7], bytes(100)])
def test_a_damaged_file(store: LogStore, worker: ServerGroups, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """After damage, members join again in a generation that never existed; committed offsets stay."""
    _hold(worker)
    worker.commit_offsets("g", [OffsetCommit("t", store.topic("t").id, 1, 7)], 5, "m-1")
    _file(store).write_bytes(data)
    with pytest.raises(GroupInUse):  # a server runs, and it may be the one that owns the file
        store.consumer("t", group="g")
    loaded = worker.load("g")
    assert (loaded.members, loaded.held) == ((), False)
    assert loaded.generation > 5
    assert "is damaged" in caplog.text
    with store.consumer("t", group="g") as consumer:
        committed = consumer.committed("t", 1)
        assert committed is not None
        assert committed.offset == 7


def test_a_damaged_file_and_no_server(store: LogStore, worker: ServerGroups) -> None:
    """A damaged file of a server that does not run blocks no member of the library."""
    _hold(worker)
    worker.close()
    _file(store).write_bytes(b"garbage")
    with store.consumer("t", group="g"):
        assert store.groups.describe("g").state != "Empty"


# ------------------------------------------------------------ administration


def test_clients_are_shown(store: LogStore, worker: ServerGroups, capfd: pytest.CaptureFixture[str]) -> None:
    """`describe` returns clients with their subscriptions and progress."""
    store.topic("t").partition(2).append([b"x"] * 9)
    _hold(worker)
    worker.commit_offsets("g", [OffsetCommit("t", store.topic("t").id, 2, 4, metadata="so far")], 5, "m-1")
    assert store.groups.names() == ["g"]
    found = store.groups.describe("g")
    assert (found.state, found.generation, found.strategy) == ("Stable", 5, "range")
    (member,) = found.members
    assert (member.id, member.client_id, member.host, member.instance_id) == ("m-1", "client", "10.0.0.1", "i")
    assert member.partitions == (TopicPartition("t", 0), TopicPartition("t", 2))
    first, second = found.partitions
    assert (first.member, first.committed, second.lag) == ("m-1", None, 5)
    assert run(cli, ["--dir", store.path, "groups", "describe", "g"]) == 0
    shown = capfd.readouterr().out
    assert "held by 1 member of the server" in shown
    assert "m-1" in shown
    assert run(cli, ["--dir", store.path, "groups", "describe", "g", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["members"][0]["partitions"] == ["t/0", "t/2"]
    assert run(cli, ["--dir", store.path, "groups", "list"]) == 0
    assert "Stable" in capfd.readouterr().out


def test_what_clients_read_is_not_reset(
    store: LogStore, worker: ServerGroups, clock: _Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    """Offsets of a group that clients hold are not reset, deleted or expired."""
    _hold(worker)
    worker.commit_offsets("g", [OffsetCommit("t", store.topic("t").id, 2, 4)], 5, "m-1")
    with pytest.raises(GroupNotEmpty, match="held by 1 member of the server"):
        store.groups.reset("g", {("t", 2): 0})
    with pytest.raises(GroupNotEmpty):
        store.groups.delete("g")
    late_ms = clock.now_ms() + 8 * 86_400_000
    assert store.groups.expire(late_ms) == []
    for command in (["reset", "g", "--to-earliest"], ["delete", "g", "--yes"]):
        assert run(cli, ["--dir", store.path, "groups", *command]) != 0
        assert "held by 1 member of the server" in capfd.readouterr().err
    worker.save("g", SavedGroup(generation=6))
    assert store.groups.expire(late_ms) == ["g"]
    assert store.group_offsets.by_topic_id("g") == {}


def test_a_group_that_is_gone_is_not_held(store: LogStore, worker: ServerGroups) -> None:
    """A deleted group can be created again by either kind."""
    _hold(worker)
    worker.save("g", SavedGroup(generation=6))
    worker.commit_offsets("g", [OffsetCommit("t", store.topic("t").id, 2, 4)], 5, "m-1")
    store.groups.delete("g")
    assert worker.load("g") == SavedGroup()
    assert worker.claim("g", SavedGroup()) == 0
    assert worker.held_groups() == ["g"]
