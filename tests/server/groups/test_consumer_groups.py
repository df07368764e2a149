"""Groups of the consumer protocol over a store: requests in, responses out, restarts, and both ways of a migration."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server.groups.clients import TestClock

from segmentlog.groups.server_groups import OffsetCommit
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import TopicPartition
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated import consumer_group_describe as described
from segmentlog.server.codec.generated import consumer_group_heartbeat as beats
from segmentlog.server.codec.generated import (
    delete_groups,
    describe_groups,
    heartbeat,
    join_group,
    leave_group,
    list_groups,
    offset_delete,
    offset_fetch,
    sync_group,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.subscriptions import encode_partitions, encode_topics, partitions_of
from segmentlog.server.handlers import (
    classic_group_handlers,
    consumer_group_heartbeat,
    group_admin_handlers,
    group_offsets,
)
from segmentlog.server.request_context import RequestContext
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.topic_ids import TopicIds, wire_id
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

_SETTINGS = GroupSettings(
    initial_rebalance_delay_ms=0, min_session_timeout_ms=10, consumer_session_timeout_ms=10_000,
    consumer_heartbeat_interval_ms=3_000,
)  # fmt: skip


class _Denying(OpenAuthorizer):
    """An authorizer that denies only the given operations."""

    denied: set[tuple[Operation, str]]

    def __init__(self) -> None:
        super().__init__()
        self.denied = set()

    def allows(self, principal: Any, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return (operation, name) not in self.denied


class _Door:
    """Asks a broker, through the bytes of both directions."""

    def __init__(self, store: LogStore, clock: TestClock, settings: GroupSettings = _SETTINGS) -> None:
        self.authorizer = _Denying()
        self.store, self.clock, self.settings = store, clock, settings
        self.broker: Any = SimpleNamespace(
            store=store, cluster=WorkerCluster("c", [WorkerNode(0, "localhost", 9093)], 0), authorizer=self.authorizer,
            topic_ids=TopicIds(store), groups=GroupCoordinator(store, clock, settings), settings=ServerSettings(),
        )  # fmt: skip

    def restart(self) -> None:
        """Replace the worker by another one."""
        self.broker.groups.close()
        self.broker.groups = GroupCoordinator(self.store, self.clock, self.settings)

    def ask(self, handler: Callable[..., Any], key: int, version: int, request: Any) -> Any:
        """Return the response as a client decodes it."""
        codec = APIS[key].codec
        decoded = codec.decode_request(memoryview(b"".join(codec.encode_request(request, version))), 0, version)
        call = RequestContext(broker=self.broker, api_key=key, version=version, client_id="me", client_host="127.0.0.1")
        response = b"".join(codec.encode_response(handler(call, decoded), version))
        return codec.decode_response(memoryview(response), 0, version)

    def beat(self, member: str, epoch: int, *, version: int = 1, group: str = "g", **options: Any) -> Any:
        """ConsumerGroupHeartbeat; ``owned`` are numbers of partitions of ``t``."""
        owned = options.pop("owned", None)
        if owned is not None:
            topic_id = wire_id(self.store.topic("t").id)
            options["topic_partitions"] = [beats.TopicPartitions(topic_id, owned)] if owned else []
        request = beats.ConsumerGroupHeartbeatRequest(group, member, epoch, **options)
        return self.ask(consumer_group_heartbeat.consumer_group_heartbeat, 68, version, request)

    def join(self, member: str, **options: Any) -> Any:
        """Return the first of them."""
        given = {"rebalance_timeout_ms": 5_000, "subscribed_topic_names": ["t"], "owned": []}
        return self.beat(member, 0, **{**given, **options})

    def describe(self, group: str = "g", version: int = 1) -> Any:
        """ConsumerGroupDescribe."""
        request = described.ConsumerGroupDescribeRequest([group], True)
        return self.ask(consumer_group_heartbeat.consumer_group_describe, 69, version, request).groups[0]

    def tick(self, ms: int) -> None:
        """Time passes."""
        self.clock.ms += ms
        self.broker.groups.run_due()

    # ------------------------------------------------------------ of the classic protocol

    def classic_join(self, member: str = "", **options: Any) -> Any:
        """Send a JoinGroup, and repeat it with the id if the answer has one."""
        protocols = [join_group.JoinGroupRequestProtocol("range", encode_topics(("t",)))]
        request = join_group.JoinGroupRequest(
            "g", 10_000, 10_000, member_id=member, protocol_type="consumer", protocols=protocols, **options
        )
        answer = self.ask(classic_group_handlers.join_group, 11, 9, request)
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            return self.classic_join(answer.member_id, **options)
        return answer

    def classic_sync(self, joined: Any, **options: Any) -> Any:
        """SyncGroup; the partitions of ``t``, or the error."""
        request = sync_group.SyncGroupRequest("g", joined.generation_id, joined.member_id, **options)
        answer = self.ask(classic_group_handlers.sync_group, 14, 5, request)
        return ErrorCode(answer.error_code) or partitions_of("consumer", bytes(answer.assignment)).get("t", [])

    def classic_beat(self, joined: Any) -> ErrorCode:
        """Heartbeat."""
        request = heartbeat.HeartbeatRequest("g", joined.generation_id, joined.member_id)
        return ErrorCode(self.ask(classic_group_handlers.heartbeat, 12, 4, request).error_code)


def _numbers(answer: Any) -> Any:
    """Return the assigned partitions of the only topic; None if the answer has no assignment."""
    if answer.assignment is None:
        return None
    return [number for topic in answer.assignment.topic_partitions for number in topic.partitions]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[_Door]:
    """Provide a broker over a store with topic ``t`` of four partitions."""
    clock = TestClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        store.create_topic("t", partitions=4, fsync="never")
        door = _Door(store, clock)
        try:
            yield door
        finally:
            door.broker.groups.close()


def test_joining_sharing_leaving(door: _Door) -> None:
    """A partition goes to its next owner when the former one has said that it let go of it, or has left."""
    first = door.join("a")
    assert (first.error_code, first.member_id, first.heartbeat_interval_ms) == (0, "a", 3_000)
    assert _numbers(first) == [0, 1, 2, 3]
    quiet = door.beat("a", first.member_epoch)
    assert (quiet.error_code, quiet.member_epoch, quiet.assignment) == (0, first.member_epoch, None)
    second = door.join("b")
    assert second.member_epoch == first.member_epoch + 1
    assert _numbers(second) == []
    told = door.beat("a", first.member_epoch)
    kept = _numbers(told)
    assert (len(kept), told.member_epoch) == (2, first.member_epoch), "it is to let go of half of them"
    assert _numbers(door.beat("b", second.member_epoch)) is None, "which it has still"
    assert _numbers(door.beat("a", first.member_epoch, owned=[0, 1, 2, 3])) is None
    assert door.beat("a", first.member_epoch, owned=kept).member_epoch == second.member_epoch
    assert sorted(_numbers(door.beat("b", second.member_epoch)) + kept) == [0, 1, 2, 3]
    left = door.beat("a", -1)
    assert (left.error_code, left.member_epoch) == (0, -1)
    third = door.beat("b", second.member_epoch)
    assert (_numbers(third), third.member_epoch) == ([0, 1, 2, 3], second.member_epoch + 1)
    assert door.beat("a", second.member_epoch).error_code == ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("version", [0, 1])
def test_versions(door: _Door, version: int) -> None:
    """Before version 1 the server makes the member's id; afterwards the member does."""
    joined = door.join("" if version == 0 else "a", version=version)
    assert joined.error_code == 0
    assert joined.member_id == "a" if version else uuid.UUID(joined.member_id)
    assert door.describe(version=version).members[0].member_id == joined.member_id
    assert door.join("", version=1).error_code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    "options",
    [
        {"group": ""}, {"owned": [1]}, {"topic_partitions": None, "owned": None}, {"rebalance_timeout_ms": -1},
        {"subscribed_topic_names": None}, {"instance_id": ""}, {"rack_id": ""},
    ],
)  # fmt: skip
def test_joins_that_make_no_sense(door: _Door, options: dict[str, Any]) -> None:
    """They are refused before any lookup."""
    assert door.join("a", **options).error_code == ErrorCode.INVALID_REQUEST
    assert door.beat("a", -2).error_code == ErrorCode.INVALID_REQUEST
    assert door.beat("a", -3).error_code == ErrorCode.INVALID_REQUEST
    assert door.broker.groups._entries == {}


def test_fencing(door: _Door) -> None:
    """Epochs that are not the member's are refused, except the previous one, whose end may be unknown to the client."""
    assert door.beat("a", 3).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    epoch = door.join("a").member_epoch
    assert door.beat("a", epoch + 1).error_code == ErrorCode.FENCED_MEMBER_EPOCH
    second = door.join("b").member_epoch
    door.beat("a", epoch)
    assert door.beat("a", epoch, owned=[0, 1]).member_epoch == second
    assert door.beat("a", epoch).error_code == ErrorCode.FENCED_MEMBER_EPOCH, "it does not say what it has"
    assert door.beat("a", epoch, owned=[3]).error_code == ErrorCode.FENCED_MEMBER_EPOCH, "what it has is not its"
    assert door.beat("a", epoch, owned=[0, 1]).member_epoch == second
    again = door.join("a")
    assert (again.error_code, _numbers(again)) == (0, [0, 1]), "who was fenced joins again under its id"


def test_time_outs(door: _Door) -> None:
    """A silent member is removed, and so is one that does not release partitions in time."""
    epoch = door.join("a").member_epoch
    door.tick(6_000)
    other = door.join("b").member_epoch
    door.beat("a", epoch)
    for _ in range(4):
        door.tick(1_500)
        door.beat("a", epoch)
        told = door.beat("b", other)
    assert [member.member_id for member in door.describe().members] == ["b"], "five seconds to let go of something"
    assert _numbers(told) == [0, 1, 2, 3]
    door.tick(10_001)
    assert (door.describe().group_state, door.describe().members) == ("Empty", [])
    assert door.join("c").member_epoch > other + 1, "epochs go on"


def test_static_members(door: _Door) -> None:
    """A static member finds its place under another id; other clients cannot take it."""
    first = door.join("a", instance_id="i")
    assert door.join("b", instance_id="i").error_code == ErrorCode.UNRELEASED_INSTANCE_ID
    assert door.beat("b", 1, instance_id="i").error_code == ErrorCode.FENCED_INSTANCE_ID
    assert door.beat("a", 1, instance_id="j").error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert door.beat("a", -2, instance_id="i").member_epoch == -2
    other = door.join("other")
    assert _numbers(other) == [], "it keeps its partitions"
    again = door.join("b", instance_id="i")
    assert (again.error_code, again.member_epoch) == (0, other.member_epoch)
    assert _numbers(again) == [0, 1]
    assert len(_numbers(door.beat("other", other.member_epoch))) == 2
    assert door.beat("a", first.member_epoch, instance_id="i").error_code == ErrorCode.FENCED_INSTANCE_ID
    door.beat("b", -2, instance_id="i")
    door.tick(9_000)
    door.beat("other", other.member_epoch)
    door.tick(1_001)
    assert _numbers(door.beat("other", other.member_epoch)) == [0, 1, 2, 3], "its place is kept for a session"


def test_expressions(door: _Door) -> None:
    """A member gets new topics by their names, except hidden ones; an invalid expression is refused."""
    door.store.create_topic("secret", fsync="never")
    door.authorizer.denied.add((Operation.DESCRIBE, "secret"))
    bad = door.join("a", subscribed_topic_names=None, subscribed_topic_regex="(")
    assert (bad.error_code, "missing" in bad.error_message) == (ErrorCode.INVALID_REGULAR_EXPRESSION, True)
    joined = door.join("a", subscribed_topic_names=None, subscribed_topic_regex="t.*|secret")
    assert _numbers(joined) == [0, 1, 2, 3]
    assert door.describe().members[0].subscribed_topic_regex == "t.*|secret"
    door.store.create_topic("t2", fsync="never")
    door.tick(2_500)
    told = door.beat("a", joined.member_epoch)
    assert told.member_epoch == joined.member_epoch + 1
    ids = {wire_id(door.store.topic(name).id) for name in ("t", "t2")}
    assert {topic.topic_id for topic in told.assignment.topic_partitions} == ids
    door.store.delete_topic("t2")
    door.tick(2_500)
    assert _numbers(door.beat("a", told.member_epoch)) == [0, 1, 2, 3]


def test_assignors(door: _Door) -> None:
    """Members vote for one of two assignors."""
    assert door.join("a", server_assignor="mine").error_code == ErrorCode.UNSUPPORTED_ASSIGNOR
    epoch = door.join("a").member_epoch
    assert door.describe().assignor_name == "uniform"
    door.join("b", server_assignor="range")
    assert door.describe().assignor_name == "range"
    targets = [member.target_assignment.topic_partitions[0].partitions for member in door.describe().members]
    assert targets == [[0, 1], [2, 3]]
    assert door.beat("a", epoch).error_code == 0


def test_partitions_that_are_added(door: _Door) -> None:
    """They are assigned soon."""
    joined = door.join("a")
    door.store.alter_topic("t", partitions=6)
    door.tick(1_500)
    assert _numbers(door.beat("a", joined.member_epoch)) == list(range(6))


def test_a_full_group(door: _Door) -> None:
    """It refuses new members, and its members are not affected."""
    door.settings = GroupSettings(max_size=1)
    door.restart()
    epoch = door.join("a").member_epoch
    assert door.join("b").error_code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert door.beat("a", epoch).error_code == 0


def test_who_may_not(door: _Door) -> None:
    """Groups and topics that one may not read or see."""
    door.authorizer.denied.add((Operation.DESCRIBE, "t"))
    assert door.join("a").error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    door.authorizer.denied.clear()
    door.join("a")
    door.authorizer.denied.add((Operation.DESCRIBE, "t"))
    assert door.describe().error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    door.authorizer.denied |= {(Operation.READ, "g"), (Operation.DESCRIBE, "g")}
    assert door.join("b").error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert door.describe().error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED


def test_the_library_has_the_group(door: _Door) -> None:
    """Members of the library and those of this protocol keep each other out, and follow each other."""
    with door.store.consumer("t", group="g"):
        refused = door.join("a")
        assert refused.error_code == ErrorCode.GROUP_ID_NOT_FOUND
        assert "library" in refused.error_message
        assert door.describe().error_code == ErrorCode.GROUP_ID_NOT_FOUND
    epoch = door.join("a").member_epoch
    shown = door.store.groups.describe("g")
    assert (shown.state, shown.generation, shown.strategy) == ("Stable", epoch, "uniform")
    assert shown.members[0].partitions == tuple(TopicPartition("t", number) for number in range(4))
    door.beat("a", -1)
    with door.store.consumer("t", group="g") as consumer:
        consumer.poll_group()
    assert door.join("a").member_epoch > epoch


def test_a_restart(door: _Door) -> None:
    """In each state of a reassignment, members keep their epochs and partitions, and none has to move."""
    epoch = door.join("a", instance_id="i").member_epoch
    other = door.join("b", subscribed_topic_names=None, subscribed_topic_regex="t").member_epoch
    kept = _numbers(door.beat("a", epoch))
    before = door.describe()
    door.restart()
    assert door.describe() == before
    assert before.group_state == "Reconciling"
    assert _numbers(door.beat("b", other)) is None
    door.restart()
    assert door.beat("a", epoch, owned=kept).member_epoch == other
    door.restart()
    assert sorted(_numbers(door.beat("b", other)) + kept) == [0, 1, 2, 3]
    settled = door.describe()
    assert settled.group_state == "Stable"
    door.restart()
    for member in ("a", "b"):
        quiet = door.beat(member, other)
        assert (quiet.error_code, quiet.member_epoch, quiet.assignment) == (0, other, None)
    assert door.describe() == settled
    door.restart()
    door.tick(0)
    door.tick(10_001)
    assert door.describe().group_state == "Empty", "who does not come again is given up"


def test_what_cannot_be_saved_is_not_told(door: _Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, members get no new state, and the group continues with the saved one."""
    epoch = door.join("a").member_epoch
    before = door.describe()

    def full(*args: Any) -> None:
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(door.broker.groups._server_groups, "save", full)
        assert door.join("b").error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert door.describe() == before
    with monkeypatch.context() as patched:
        patched.setattr(door.broker.groups._catalog, "shapes", full)
        assert door.join("b").error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert door.describe() == before
    assert door.beat("a", epoch).error_code == 0


# ---------------------------------------------------------------- positions and tools


def test_positions(door: _Door) -> None:
    """A member in its epoch may commit and fetch offsets, and any client may if the group is empty."""
    epoch = door.join("a").member_epoch
    commits = door.broker.groups.commit_offsets
    where = [OffsetCommit("t", door.store.topic("t").id, 0, 1)]
    assert commits("g", where, member_id="a", generation=epoch)[0] is ErrorCode.NONE
    for stale in (epoch - 1, epoch + 1):
        assert commits("g", where, member_id="a", generation=stale)[0] is ErrorCode.STALE_MEMBER_EPOCH
    stamp = ProducerStamp(1, 0, -1, True)
    refused = commits("g", where, member_id="a", generation=epoch - 1, stamp=stamp)
    assert refused[0] is ErrorCode.STALE_MEMBER_EPOCH, "which TxnOffsetCommit has other words for before version 6"
    assert commits("g", [], member_id="b", generation=epoch)[0] is ErrorCode.UNKNOWN_MEMBER_ID
    assert commits("g", [])[0] is ErrorCode.UNKNOWN_MEMBER_ID

    def fetch(member: str | None, member_epoch: int) -> int:
        group = offset_fetch.OffsetFetchRequestGroup("g", member, member_epoch)
        request = offset_fetch.OffsetFetchRequest(groups=[group])
        return int(door.ask(group_offsets.offset_fetch, 9, 9, request).groups[0].error_code)

    assert (fetch("a", epoch), fetch(None, -1)) == (0, 0)
    assert fetch("a", epoch - 1) == ErrorCode.STALE_MEMBER_EPOCH
    assert fetch("b", epoch) == ErrorCode.UNKNOWN_MEMBER_ID
    door.beat("a", -1)
    assert commits("g", [])[0] is ErrorCode.NONE


@pytest.mark.parametrize("version", [0, 1])
def test_describing(door: _Door, version: int) -> None:
    """The description has the current and the target assignment of each member."""
    door.join("a", instance_id="i", rack_id="r")
    door.join("b")
    found = door.describe(version=version)
    assert (found.group_state, found.assignor_name) == ("Reconciling", "uniform")
    assert found.group_epoch == found.assignment_epoch
    assert found.authorized_operations > 0
    a, b = found.members
    assert (a.instance_id, a.rack_id, a.client_id, a.client_host) == ("i", "r", "me", "127.0.0.1")
    assert (a.subscribed_topic_names, a.member_type) == (["t"], 1 if version else -1)
    (has,), (is_to_have,) = a.assignment.topic_partitions, a.target_assignment.topic_partitions
    assert (has.topic_name, has.partitions, len(is_to_have.partitions)) == ("t", [0, 1, 2, 3], 2)
    assert b.assignment.topic_partitions == []
    assert door.describe("nobody").error_code == ErrorCode.GROUP_ID_NOT_FOUND


def test_other_tools(door: _Door) -> None:
    """Groups are listed with their type, described in classic terms, and cannot be deleted while they have members."""
    door.join("a")

    def listed(**options: Any) -> list[tuple[str, str, str]]:
        found = door.ask(group_admin_handlers.list_groups, 16, 5, list_groups.ListGroupsRequest(**options)).groups
        return [(group.group_id, group.group_type, group.group_state) for group in found]

    assert listed() == listed(types_filter=["Consumer"]) == [("g", "consumer", "Stable")]
    assert listed(types_filter=["classic"]) == []
    request = describe_groups.DescribeGroupsRequest(["g"])
    (shown,) = door.ask(group_admin_handlers.describe_groups, 15, 6, request).groups
    assert (shown.error_code, shown.group_state, shown.protocol_data) == (0, "Stable", "uniform")
    assert partitions_of("consumer", bytes(shown.members[0].member_assignment)) == {"t": [0, 1, 2, 3]}
    topic = offset_delete.OffsetDeleteRequestTopic("t", [offset_delete.OffsetDeleteRequestPartition(0)])
    gone = door.ask(group_offsets.offset_delete, 47, 0, offset_delete.OffsetDeleteRequest("g", [topic]))
    assert gone.topics[0].partitions[0].error_code == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC

    def delete() -> int:
        asked = delete_groups.DeleteGroupsRequest(["g"])
        return int(door.ask(group_admin_handlers.delete_groups, 42, 2, asked).results[0].error_code)

    assert delete() == ErrorCode.NON_EMPTY_GROUP
    door.beat("a", -1)
    assert door.describe().group_state == "Empty"
    assert delete() == 0
    assert door.describe().error_code == ErrorCode.GROUP_ID_NOT_FOUND


# ---------------------------------------------------------------- from one protocol to the other


def test_there_and_back(door: _Door) -> None:
    """A group of classic members takes one of the new protocol, whose leaving makes it classic again."""
    classic = door.classic_join()
    mine = [sync_group.SyncGroupRequestAssignment(classic.member_id, encode_partitions({"t": [0, 1, 2, 3]}))]
    assert door.classic_sync(classic, assignments=mine) == [0, 1, 2, 3]
    new = door.join("new")
    assert (new.error_code, _numbers(new)) == (0, [])
    assert new.member_epoch > classic.generation_id
    assert {member.member_id: member.member_type for member in door.describe().members} == {
        classic.member_id: 0, "new": 1,
    }  # fmt: skip
    door.restart()
    assert door.classic_sync(classic) is ErrorCode.REBALANCE_IN_PROGRESS
    assert door.classic_beat(classic) is ErrorCode.REBALANCE_IN_PROGRESS
    again = door.classic_join(classic.member_id)
    assert (again.member_id, again.generation_id, again.leader) == (classic.member_id, new.member_epoch, "")
    share = door.classic_sync(again)
    assert len(share) == 2
    assert door.classic_beat(again) is ErrorCode.NONE
    assert sorted(_numbers(door.beat("new", new.member_epoch)) + share) == [0, 1, 2, 3]
    door.restart()
    assert door.classic_beat(again) is ErrorCode.NONE
    where = [OffsetCommit("t", door.store.topic("t").id, share[0], 1)]
    refused = door.broker.groups.commit_offsets("g", where, member_id=again.member_id, generation=0)
    assert refused[0] is ErrorCode.ILLEGAL_GENERATION
    door.beat("new", -1)
    assert door.describe().error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert door.classic_beat(again) is ErrorCode.REBALANCE_IN_PROGRESS
    alone = door.classic_join(classic.member_id)
    assert (alone.leader, alone.generation_id > new.member_epoch) == (classic.member_id, True)
    assert door.beat("new", new.member_epoch).error_code == ErrorCode.UNKNOWN_MEMBER_ID


def test_a_classic_member_joins_a_new_group(door: _Door) -> None:
    """It may leave, or is removed if it does not join again in time."""
    epoch = door.join("new").member_epoch
    classic = door.classic_join()
    assert (classic.error_code, classic.protocol_name, classic.members) == (0, "range", [])
    assert door.classic_sync(classic) == []
    kept = _numbers(door.beat("new", epoch))
    assert door.classic_beat(classic) is ErrorCode.NONE, "what it lacks is not free"
    door.beat("new", epoch, owned=kept)
    assert door.classic_beat(classic) is ErrorCode.REBALANCE_IN_PROGRESS
    rest = door.classic_sync(door.classic_join(classic.member_id))
    assert sorted(kept + rest) == [0, 1, 2, 3]
    leave = leave_group.LeaveGroupRequest("g", members=[leave_group.MemberIdentity(classic.member_id)])
    assert door.ask(classic_group_handlers.leave_group, 13, 5, leave).members[0].error_code == 0
    second = door.classic_join()
    assert door.classic_sync(second) == [2, 3]
    epoch = door.beat("new", epoch + 1).member_epoch
    door.store.alter_topic("t", partitions=6)
    door.tick(1_500)
    epoch = door.beat("new", epoch).member_epoch
    for _ in range(8):
        assert door.classic_beat(second) in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.UNKNOWN_MEMBER_ID)
        door.tick(1_500)
        door.beat("new", epoch)
    assert [member.member_id for member in door.describe().members] == ["new"]


def test_one_after_the_other(door: _Door) -> None:
    """The next protocol takes an empty group, and its epochs continue."""
    epoch = door.join("a").member_epoch
    door.beat("a", -1)
    classic = door.classic_join()
    assert (classic.error_code, classic.leader) == (0, classic.member_id)
    assert classic.generation_id > epoch
    leave = leave_group.LeaveGroupRequest("g", members=[leave_group.MemberIdentity(classic.member_id)])
    door.ask(classic_group_handlers.leave_group, 13, 5, leave)
    assert door.join("a").member_epoch > classic.generation_id


@pytest.mark.parametrize(("policy", "up", "down"), [("disabled", 0, 0), ("upgrade", 1, 0), ("downgrade", 0, 1)])
def test_policies(door: _Door, policy: Any, up: int, down: int) -> None:
    """Which way a group may go is a setting."""
    door.settings = GroupSettings(
        initial_rebalance_delay_ms=0, min_session_timeout_ms=10, consumer_session_timeout_ms=10_000, migration=policy
    )
    door.restart()
    classic = door.classic_join()
    door.classic_sync(classic, assignments=[])
    assert door.join("new").error_code == (0 if up else ErrorCode.GROUP_ID_NOT_FOUND)
    leave = leave_group.LeaveGroupRequest("g", members=[leave_group.MemberIdentity(classic.member_id)])
    door.ask(classic_group_handlers.leave_group, 13, 5, leave)
    door.join("new")
    door.classic_join()
    door.beat("new", -1)
    assert door.describe().error_code == (ErrorCode.GROUP_ID_NOT_FOUND if down else 0)


# ---------------------------------------------------------------- many members


def test_a_heartbeat_looks_at_nobody_else(door: _Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of members send theirs: what each costs must not grow with the others."""
    members = [f"m{number}" for number in range(40)]
    epochs = {member: door.join(member).member_epoch for member in members}
    for _ in range(3):  # until partitions have changed hands
        door.tick(1_000)
        for member in members:
            epochs[member] = door.beat(member, epochs[member], owned=None).member_epoch
    door.tick(1)
    looked = []
    monkeypatch.setattr(ConsumerGroup, "all", lambda self: looked.append(self) or self.members.values())
    for member in members:
        answer = door.beat(member, epochs[member])
        assert (answer.error_code, answer.member_epoch) == (ErrorCode.NONE, epochs[member])
    # The first to come looks whether all of them do not speak the classic protocol: at one.
    assert len(looked) <= len(members) + 1


def test_who_is_silent_among_many_is_given_up(door: _Door) -> None:
    """Only the silent member is removed, although a heartbeat does not check all members."""
    members = [f"m{number}" for number in range(10)]
    epochs = {member: door.join(member).member_epoch for member in members}
    for _ in range(12):
        door.tick(1_000)
        for member in members[1:]:
            epochs[member] = door.beat(member, epochs[member]).member_epoch
    assert door.beat(members[0], epochs[members[0]]).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert len(door.describe().members) == len(members) - 1
