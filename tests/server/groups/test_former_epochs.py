"""Commits under an epoch older than the member's (KIP-1251).

The server has raised the member's epoch, and the client does not know it yet. The server accepts the commit for
partitions that the member has held since the older epoch, and for no other partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server.groups.clients import SETTINGS, Client, TestClock

from segmentlog.groups.server_group_file import decode_saved_group, encode_saved_group
from segmentlog.groups.server_groups import OffsetCommit
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.consumer_types import LEAVE_EPOCH, STATIC_LEAVE_EPOCH, HeartbeatFields, partition_set
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.subscriptions import partitions_of
from segmentlog.store import LogStore

_PARTITIONS = 4
_NONE, _STALE = ErrorCode.NONE, ErrorCode.STALE_MEMBER_EPOCH


class _Group:
    """A group at its coordinator. After each request, ``next_worker`` names the worker that takes over the group."""

    def __init__(self, store: LogStore, next_worker: dict[int, int]) -> None:
        self.store = store
        self.topic_id = store.topic("t").id
        self._next_worker = next_worker
        self._clock = TestClock()
        self._worker = 0
        self.coordinator = GroupCoordinator(store, self._clock, SETTINGS)
        self._offset = 0

    def restart(self, worker: int = 0) -> None:
        """Replace the coordinator. The new one loads the group from its file."""
        self.coordinator.close()
        self._worker = worker
        self.coordinator = GroupCoordinator(self.store, self._clock, SETTINGS, worker=worker)

    def _hand_over(self) -> None:
        if self._worker in self._next_worker:
            self.restart(self._next_worker[self._worker])

    def beat(self, member: str, epoch: int, owned: list[int] | None = None, instance_id: str | None = None) -> Any:
        """Send a heartbeat. With epoch 0 the member joins."""
        is_joining = epoch == 0
        held = partition_set({self.topic_id: owned or []}) if owned is not None or is_joining else None
        answer = self.coordinator.consumer_heartbeat("g", HeartbeatFields(
            member_id=member, epoch=epoch, instance_id=instance_id, owned=held,
            topics=("t",) if is_joining else None, rebalance_timeout_ms=5_000 if is_joining else -1,
        ))  # fmt: skip
        assert answer.error is _NONE, answer
        self._hand_over()
        return answer

    def join(self, member: str, instance_id: str | None = None) -> int:
        """Join and return the member's epoch."""
        return int(self.beat(member, 0, instance_id=instance_id).epoch)

    def leave(self, member: str, epoch: int = LEAVE_EPOCH, instance_id: str | None = None) -> None:
        """Leave: with `STATIC_LEAVE_EPOCH` for a while, otherwise for good."""
        request = HeartbeatFields(member_id=member, epoch=epoch, instance_id=instance_id)
        assert self.coordinator.consumer_heartbeat("g", request).error is _NONE
        self._hand_over()

    def commit(self, member: str, epoch: int, *numbers: int, instance_id: str | None = None) -> ErrorCode:
        """Commit these partitions in one request. Check that the server has stored all of them, or none."""
        self._offset += 1
        before = self.committed()
        error, _ = self.coordinator.commit_offsets(
            "g", [OffsetCommit("t", self.topic_id, number, self._offset) for number in numbers],
            member_id=member, generation=epoch, instance_id=instance_id,
        )  # fmt: skip
        stored = dict.fromkeys(numbers, self._offset) if error is _NONE else {}
        assert self.committed() == {**before, **stored}
        self._hand_over()
        return error

    def committed(self) -> dict[int, int]:
        """Return committed offsets by partition."""
        return {tp.partition: one.offset for tp, one in self.store.group_offsets.committed("g").items()}

    def share(self) -> tuple[int, int]:
        """Let ``a`` join, then ``b``: ``a`` keeps partitions 0 and 1, ``b`` gets 2 and 3. Return both epochs."""
        first = self.join("a")
        second = self.join("b")
        assert self.beat("a", first).assigned == {self.topic_id: [0, 1]}
        assert self.beat("a", first, owned=[0, 1]).epoch == second
        assert self.beat("b", second).assigned == {self.topic_id: [2, 3]}
        return first, second


@pytest.fixture(params=[{}, {0: 0}, {0: 1, 1: 0}], ids=["stays", "restarts", "moves"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Group]:
    """Provide a group at one worker, at a worker that restarts after each request, or at two that take turns."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=_PARTITIONS, fsync="never")
        group = _Group(store, request.param)
        yield group
        group.coordinator.close()


def test_a_kept_partition(group: _Group) -> None:
    """A member may commit a partition under each epoch since it received the partition."""
    first, second = group.share()
    group.leave("b")
    third = group.beat("a", second).epoch  # the answer is lost
    assert third == second + 1
    assert group.commit("a", second, 0, 1) is _NONE
    assert group.commit("a", first, 1) is _NONE
    assert group.commit("a", second, 2) is _STALE, "a received partition 2 in the third epoch"
    assert group.commit("a", second, 0, 2) is _STALE, "one partition refuses the whole request"
    assert group.commit("a", third, 0, 1, 2, 3) is _NONE
    for never in (third + 1, first - 1, 0, -1):
        assert group.commit("a", never, 0) is _STALE


def test_a_partition_to_release(group: _Group) -> None:
    """A member may commit a partition until it has confirmed that it has released the partition."""
    first = group.join("a")
    group.join("b")
    group.beat("a", first)
    assert group.commit("a", first, 0, 1, 2, 3) is _NONE
    third = group.join("c")
    assert group.beat("a", first).epoch == first, "a must release partitions first"
    assert group.commit("a", first, 0, 3) is _NONE
    assert group.beat("a", first, owned=[0, 1]).epoch == first + 1 < third, "a must release another partition"
    assert group.commit("a", first, 0, 1) is _NONE, "the answer may have been lost"
    assert group.commit("a", first, 2) is _STALE


def test_a_partition_of_another_member(group: _Group) -> None:
    """A late commit of a released partition is refused, before and after its next owner commits."""
    first = group.join("a")
    second = group.join("b")
    group.beat("a", first)
    group.beat("a", first, owned=[0, 1])
    assert group.commit("a", first, 2) is _STALE, "no member holds partition 2"
    group.beat("b", second)
    assert group.commit("a", first, 2) is _STALE
    assert group.commit("b", second, 2) is _NONE
    assert group.commit("a", first, 2) is _STALE
    assert group.commit("a", first, 0) is _NONE
    assert group.commit("b", first, 2) is _STALE, "b received partition 2 in the second epoch"


def test_a_partition_that_returns(group: _Group) -> None:
    """If another member held the partition meanwhile, epochs before its return are refused."""
    first, second = group.share()
    assert group.commit("b", second, 2, 3) is _NONE
    group.leave("b")
    third = group.beat("a", second).epoch
    for former in (first, second):
        assert group.commit("a", former, 2) is _STALE
        assert group.commit("a", former, 0) is _NONE
    assert group.commit("a", third, 2, 3) is _NONE
    fourth = group.join("c")
    group.beat("a", third)
    assert group.beat("a", third, owned=[0, 1]).epoch == fourth
    assert group.commit("a", third, 0, 1) is _NONE
    assert group.commit("a", third, 2) is _STALE


def test_a_partition_released_in_vain(group: _Group) -> None:
    """A partition that the member has released and receives in the same answer counts as received in the new epoch."""
    first = group.join("a")
    group.join("b")
    group.beat("a", first)
    group.leave("b")
    again = group.beat("a", first, owned=[0, 1])
    assert again.assigned == {group.topic_id: [0, 1, 2, 3]}
    assert group.commit("a", first, 0) is _NONE
    assert group.commit("a", first, 2) is _STALE
    assert group.commit("a", again.epoch, 2) is _NONE


def test_a_removed_member(group: _Group) -> None:
    """A removed member that joins again, under the same id, cannot commit under an epoch of its former membership."""
    first, second = group.share()
    group.leave("a")
    assert group.commit("a", second, 0) is ErrorCode.UNKNOWN_MEMBER_ID
    assert group.commit("a", first, 0) is ErrorCode.UNKNOWN_MEMBER_ID
    again = group.join("a")
    assert again > second
    for former in (first, second):
        assert group.commit("a", former, 0) is _STALE


def test_a_member_that_joins_again(group: _Group) -> None:
    """A member that joins again before it is removed keeps its partitions, so its late commits are accepted."""
    first, second = group.share()
    again = group.beat("a", 0)
    assert (again.epoch, again.assigned) == (second, {group.topic_id: [0, 1]})
    assert group.commit("a", first, 0, 1) is _NONE


def test_static_members(group: _Group) -> None:
    """The former process of a static member cannot commit. Its new process can, since the epoch in which it joined."""
    first = group.join("a", "i")
    second = group.join("b")
    group.beat("a", first, instance_id="i")
    group.beat("a", first, owned=[0, 1], instance_id="i")
    group.leave("a", STATIC_LEAVE_EPOCH, "i")
    for former in (first, second):
        assert group.commit("a", former, 0, instance_id="i") is _STALE
    assert group.join("a2", "i") == second
    for former in (first, second):
        assert group.commit("a", former, 0, instance_id="i") is ErrorCode.FENCED_INSTANCE_ID
        assert group.commit("a", former, 0) is ErrorCode.UNKNOWN_MEMBER_ID
    group.leave("b")
    assert group.beat("a2", second, instance_id="i").epoch == second + 1
    assert group.commit("a2", second, 0, 1, instance_id="i") is _NONE
    assert group.commit("a2", first, 0, instance_id="i") is _STALE


def test_a_static_member_that_returns_under_its_id(group: _Group) -> None:
    """It cannot commit a partition under an epoch before another member held the partition."""
    first = group.join("a", "i")
    second = group.join("b")
    group.beat("a", first, instance_id="i")
    group.beat("a", first, owned=[0, 1], instance_id="i")
    group.beat("b", second)
    assert group.commit("b", second, 2) is _NONE
    group.leave("b")
    third = group.beat("a", second, instance_id="i").epoch
    group.leave("a", STATIC_LEAVE_EPOCH, "i")
    assert group.join("a", "i") == third
    for former in (first, second):
        assert group.commit("a", former, 2, instance_id="i") is _STALE
    assert group.commit("a", third, 0, 1, 2, 3, instance_id="i") is _NONE


def test_a_recreated_topic(group: _Group) -> None:
    """A member holds partitions of the deleted topic, not of a new topic of the same name."""
    first = group.join("a")
    group.join("b")
    group.beat("a", first)
    group.beat("a", first, owned=[0, 1])
    assert group.commit("a", first, 0) is _NONE
    group.store.delete_topic("t")
    group.topic_id = group.store.create_topic("t", partitions=_PARTITIONS, fsync="never").id
    assert group.commit("a", first, 0) is _STALE


def test_classic_members(group: _Group) -> None:
    """The rule applies to members of the classic protocol, too, as long as the group uses the consumer protocol."""
    classic = Client(group.coordinator, "c")
    classic.join()
    classic.sync()
    assert partitions_of("consumer", classic.assignment) == {"t": [0]}
    former = classic.generation
    group.join("a")
    assert group.commit(classic.id, former, 0) is _NONE
    classic.coordinator = group.coordinator
    assert classic.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS
    classic.join()
    classic.sync()
    assert classic.generation > former
    kept, new = partitions_of("consumer", classic.assignment)["t"]
    assert kept == 0
    group.restart()
    assert group.commit(classic.id, former, 0) is _NONE
    for wrong, number in ((former, new), (former - 1, 0), (classic.generation + 1, 0)):
        assert group.commit(classic.id, wrong, number) is ErrorCode.ILLEGAL_GENERATION
    group.leave("a")
    assert group.commit(classic.id, former, 0) is ErrorCode.ILLEGAL_GENERATION, "the group is classic again"


def test_a_file_of_an_earlier_version(group: _Group) -> None:
    """Without stored epochs, each partition counts as received in the epoch of the file."""
    _, second = group.share()
    group.leave("b")
    third = group.beat("a", second).epoch
    group.coordinator.close()
    path = Path(group.store.path) / "@groups" / "g" / "remote"
    saved = decode_saved_group(path.read_bytes())
    (member,) = saved.members
    assert member.consumer is not None
    assert member.consumer.since
    earlier = msgspec.structs.replace(member, consumer=msgspec.structs.replace(member.consumer, since={}))
    path.write_bytes(encode_saved_group(msgspec.structs.replace(saved, members=(earlier,))))
    group.restart()
    assert group.commit("a", second, 0) is _STALE
    assert group.commit("a", third, 0) is _NONE
    fourth = group.join("c")
    group.beat("a", third)
    assert group.beat("a", third, owned=[0, 1]).epoch == fourth
    assert group.commit("a", second, 0) is _STALE
    assert group.commit("a", third, 0, 1) is _NONE
