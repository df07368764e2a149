"""The handlers of groups: requests in, responses out, in every version that there is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from server.groups.clients import SETTINGS, TestClock

from segmentlog.records import TopicPartition
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.server.ack_waiter import AckWaiter
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated import (
    delete_groups,
    describe_groups,
    find_coordinator,
    heartbeat,
    join_group,
    leave_group,
    list_groups,
    offset_commit,
    offset_delete,
    offset_fetch,
    sync_group,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.coordinator import GroupCoordinator
from segmentlog.server.groups.subscriptions import encode_partitions, encode_topics
from segmentlog.server.handlers import classic_group_handlers, group_admin_handlers, group_offsets
from segmentlog.server.request_context import DeferredResponse, RequestContext
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.topic_ids import TopicIds, wire_id
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore


class _Denying(OpenAuthorizer):
    """An authorizer that denies only the given operations."""

    denied: set[tuple[Operation, str]]

    def __init__(self) -> None:
        super().__init__()
        self.denied = set()

    def allows(self, principal: Any, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return (operation, name) not in self.denied


class _Later(DeferredResponse):
    """An answer that is completed later."""

    def __init__(self) -> None:
        self.is_complete = threading.Event()
        self.response: Any = None

    def complete(self, response: Any) -> None:
        self.response = response
        self.is_complete.set()


class _Call(RequestContext):
    """A call without a connection."""

    def defer_response(self) -> DeferredResponse:
        return _Later()


class _Door:
    """Asks a broker, through the bytes of both directions."""

    def __init__(self, store: LogStore, clock: TestClock) -> None:
        self.authorizer = _Denying()
        nodes = [WorkerNode(0, "localhost", 9093), WorkerNode(1, "localhost", 9094)]
        self.store = store
        self.both = WorkerCluster("c", nodes, 0)
        durability = AckWaiter()
        self.broker: Any = SimpleNamespace(
            store=store, cluster=WorkerCluster("c", nodes[:1], 0), authorizer=self.authorizer,
            topic_ids=TopicIds(store), fsync_waiter=durability, ack_waiter=durability, settings=ServerSettings(),
            groups=GroupCoordinator(store, clock, SETTINGS),
        )  # fmt: skip

    def close(self) -> None:
        self.broker.groups.close()
        self.broker.fsync_waiter.close()

    def ask(self, handler: Callable[..., Any], key: int, version: int, request: Any) -> Any:
        """Return the response as a client decodes it."""
        codec = APIS[key].codec
        data = b"".join(codec.encode_request(request, version))
        decoded = codec.decode_request(memoryview(data), 0, version)
        call = _Call(broker=self.broker, api_key=key, version=version, client_id="me", client_host="127.0.0.1")
        answer = handler(call, decoded)
        if isinstance(answer, _Later):
            assert answer.is_complete.wait(20)
            answer = answer.response
        response = b"".join(codec.encode_response(answer, version))
        return codec.decode_response(memoryview(response), 0, version)

    def join(self, version: int = 9, **options: Any) -> Any:
        """Send a JoinGroup, and repeat it with the id if the answer has one."""
        protocols = [join_group.JoinGroupRequestProtocol("range", encode_topics(("t",)))]
        request = join_group.JoinGroupRequest(
            options.setdefault("group_id", "g"),
            10_000,
            member_id=options.pop("member_id", ""),
            protocol_type="consumer",
            protocols=protocols,
            **{name: value for name, value in options.items() if name != "group_id"},
        )
        if version >= 1:
            request.rebalance_timeout_ms = 10_000
        answer = self.ask(classic_group_handlers.join_group, 11, version, request)
        if answer.error_code == ErrorCode.MEMBER_ID_REQUIRED:
            return self.join(version, member_id=answer.member_id, **options)
        return answer

    def sync(self, joined: Any, version: int = 5, group: str = "g") -> Any:
        """SyncGroup, of one that leads itself alone."""
        assignments = [sync_group.SyncGroupRequestAssignment(joined.member_id, encode_partitions({"t": [0, 1]}))]
        request = sync_group.SyncGroupRequest(group, joined.generation_id, joined.member_id, assignments=assignments)
        return self.ask(classic_group_handlers.sync_group, 14, version, request)

    def commit(self, offset: int, joined: Any = None, version: int = 9, **options: Any) -> int:
        """OffsetCommit of partition 0; its error."""
        partition = offset_commit.OffsetCommitRequestPartition(
            options.pop("partition", 0), offset, committed_metadata=options.pop("metadata", "m")
        )
        topic = offset_commit.OffsetCommitRequestTopic(name=options.pop("topic", "t"), partitions=[partition])
        if version >= 10:
            topic.name, topic.topic_id = "", options.pop("topic_id")
        request = offset_commit.OffsetCommitRequest(options.pop("group", "g"), topics=[topic])
        if joined is not None:
            request.generation_id_or_member_epoch, request.member_id = joined.generation_id, joined.member_id
        return self.ask(group_offsets.offset_commit, 8, version, request).topics[0].partitions[0].error_code

    def fetch(self, version: int = 9, topics: Any = None, **options: Any) -> Any:
        """OffsetFetch of several groups; the first one's answer."""
        request = offset_fetch.OffsetFetchRequest(
            groups=[offset_fetch.OffsetFetchRequestGroup(options.pop("group", "g"), topics=topics)], **options
        )
        return self.ask(group_offsets.offset_fetch, 9, version, request).groups[0]


@pytest.fixture
def door(tmp_path: Path) -> Iterator[_Door]:
    """Provide a broker over a store with topic ``t`` of three partitions."""
    clock = TestClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        store.create_topic("t", partitions=3, fsync="never")
        door = _Door(store, clock)
        with contextlib.closing(door):
            yield door


@pytest.mark.parametrize("version", range(10))
def test_join_sync_heartbeat_leave(door: _Door, version: int) -> None:
    """A member's life, in every version of its requests."""
    joined = door.join(version)
    assert joined.error_code == 0
    assert (joined.generation_id, joined.protocol_name, joined.leader) == (1, "range", joined.member_id)
    assert [member.member_id for member in joined.members] == [joined.member_id]
    assert joined.protocol_type == ("consumer" if version >= 7 else None)
    synced = door.sync(joined, min(version, 5))
    assert (synced.error_code, synced.assignment) == (0, encode_partitions({"t": [0, 1]}))
    beat = heartbeat.HeartbeatRequest("g", 1, joined.member_id)
    assert door.ask(classic_group_handlers.heartbeat, 12, min(version, 4), beat).error_code == 0
    leave_version = min(version, 5)
    leave = leave_group.LeaveGroupRequest("g")
    if leave_version < 3:
        leave.member_id = joined.member_id
    else:
        leave.members = [leave_group.MemberIdentity(joined.member_id), leave_group.MemberIdentity("who")]
    left = door.ask(classic_group_handlers.leave_group, 13, leave_version, leave)
    assert left.error_code == 0
    if leave_version >= 3:
        assert [member.error_code for member in left.members] == [0, ErrorCode.UNKNOWN_MEMBER_ID]
    assert door.ask(classic_group_handlers.heartbeat, 12, 0, beat).error_code == ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("version", range(2, 11))
def test_commit_and_fetch(door: _Door, version: int) -> None:
    """A committed position is what is fetched, in every version, with its metadata; and it is on disk."""
    topic_id = wire_id(door.store.topic("t").id)
    joined = door.join()
    door.sync(joined)
    assert door.commit(7, joined, version, topic_id=topic_id) == 0
    log = door.store.group_offsets.open_or_create_log()
    assert log.durable_offset == log.log_end_offset
    if version < 8:
        asked = [offset_fetch.OffsetFetchRequestTopic("t", [0, 1])]
        request = offset_fetch.OffsetFetchRequest("g", topics=asked)
        found = door.ask(group_offsets.offset_fetch, 9, max(version - 2, 1), request)
    else:
        wanted = offset_fetch.OffsetFetchRequestTopics("t" if version < 10 else "", partition_indexes=[0, 1])
        if version >= 10:
            wanted.topic_id = topic_id
        found = door.fetch(version, [wanted])
    first, second = found.topics[0].partitions
    assert (first.partition_index, first.committed_offset, first.metadata, first.error_code) == (0, 7, "m", 0)
    assert (second.committed_offset, second.error_code) == (-1, 0)
    everything = door.fetch(max(version, 8)).topics
    assert [[one.committed_offset for one in topic.partitions] for topic in everything] == [[7]]


def test_commits_that_are_refused(door: _Door) -> None:
    """Strangers, former generations, unknown partitions, too much metadata: none of it is written."""
    joined = door.join()
    assert door.commit(1, joined) == ErrorCode.REBALANCE_IN_PROGRESS
    door.sync(joined)
    assert door.commit(1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert door.commit(1, joined, partition=3) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert door.commit(1, joined, topic="nope") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert door.commit(1, joined, topic="__consumer_offsets") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert door.commit(1, joined, topic="not/a topic") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert door.commit(1, joined, version=10, topic_id=bytes(15) + b"1") == ErrorCode.UNKNOWN_TOPIC_ID
    for letter, most in (("m", 4096), ("日", 4096), ("😀", 2048)):
        assert door.commit(1, joined, metadata=letter * (most + 1)) == ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert door.commit(-3, joined) == ErrorCode.INVALID_COMMIT_OFFSET_SIZE
    joined.generation_id += 1
    assert door.commit(1, joined) == ErrorCode.ILLEGAL_GENERATION
    assert door.store.group_offsets.by_topic_id("g") == {}


def test_a_beginning_and_an_end_are_committed(door: _Door) -> None:
    """kafkajs commits "earliest" or "latest" if its offset is gone: the library finds the offsets."""
    partition = door.store.topic("t").partition(0)
    partition.append([b"%d" % number for number in range(10)])
    partition.trim(4)
    assert door.commit(-2, group="alone") == 0
    assert door.fetch(group="alone").topics[0].partitions[0].committed_offset == 4
    assert door.commit(-1, group="alone") == 0
    assert door.fetch(group="alone").topics[0].partitions[0].committed_offset == 10


@pytest.mark.parametrize("group", ["g" * 32_767, "é" * 16_383, "日" * 10_922], ids=len)
def test_the_longest_names_and_metadata_that_kafka_takes(door: _Door, group: str) -> None:
    """A group's id as long as a string of the protocol; 4,096 characters with a position, and not 4,096 bytes."""
    assert door.commit(5, group=group, metadata="日" * 4096) == 0
    found = door.fetch(group=group).topics[0].partitions[0]
    assert (found.committed_offset, found.metadata) == (5, "日" * 4096)
    assert door.commit(6, group=group, metadata="😀" * 2048) == 0
    joined = door.join(group_id=group)
    assert joined.error_code == 0
    door.sync(joined, group=group)
    assert door.commit(7, joined, group=group) == 0
    assert door.store.groups.names() == [group]
    with LogStore(door.store.path, read_only=True) as other:
        assert [one.offset for one in other.group_offsets.by_topic_id(group).values()] == [7]


def test_who_is_no_member_commits_to_an_empty_group(door: _Door) -> None:
    """Tools, and consumers with assigned partitions, may commit without joining while the group is empty."""
    assert door.commit(5, group="alone") == 0
    assert door.fetch(group="alone").topics[0].partitions[0].committed_offset == 5
    with door.store.consumer("t", group="alone"):
        assert door.commit(6, group="alone") == ErrorCode.UNKNOWN_MEMBER_ID
    assert door.commit(7, group="alone") == 0


def test_what_a_transaction_commits_is_unstable(door: _Door) -> None:
    """While a transaction has an undecided offset, a request for stable offsets must be repeated."""
    with door.store.consumer("t", group="g") as consumer, door.store.producer(name="p") as producer:
        door.store.topic("t").partition(0).append([b"x"])
        consumer.poll_group()
        with producer.transaction():
            producer.send("t", b"y", partition=1)
            producer.commit_offsets(consumer, {("t", 0): 1})
            producer.flush()
            found = door.fetch(require_stable=True).topics[0].partitions[0]
            assert found.error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
            assert door.fetch().topics == [] or door.fetch().topics[0].partitions[0].error_code == 0
        assert door.fetch(require_stable=True).topics[0].partitions[0].committed_offset == 1


@pytest.mark.parametrize("version", range(7))
def test_find_coordinator(door: _Door, version: int) -> None:
    """Each key has one worker, which every worker names; a client without permission gets an error."""
    door.authorizer.denied.add((Operation.DESCRIBE, "secret"))
    answers = []
    for key in ("g", "secret"):
        request = find_coordinator.FindCoordinatorRequest(key) if version < 4 else None
        if request is None:
            request = find_coordinator.FindCoordinatorRequest(coordinator_keys=[key])
        answer = door.ask(classic_group_handlers.find_coordinator, 10, version, request)
        answers.append(answer if version < 4 else answer.coordinators[0])
    good, bad = answers
    assert (good.node_id, good.host, good.port, good.error_code) == (0, "localhost", 9093, 0)
    assert (bad.node_id, bad.error_code) == (-1, ErrorCode.GROUP_AUTHORIZATION_FAILED)


def test_a_group_of_another_worker(door: _Door) -> None:
    """Every request about a group is refused by a worker that does not coordinate it."""
    door.broker.cluster = door.both
    other = next(f"g{n}" for n in range(100) if not door.both.is_coordinator(f"g{n}"))
    beat = heartbeat.HeartbeatRequest(other, 1, "m")
    assert door.ask(classic_group_handlers.heartbeat, 12, 4, beat).error_code == ErrorCode.NOT_COORDINATOR
    assert door.commit(1, group=other) == ErrorCode.NOT_COORDINATOR
    assert door.fetch(group=other).error_code == ErrorCode.NOT_COORDINATOR
    deleted = door.ask(group_admin_handlers.delete_groups, 42, 2, delete_groups.DeleteGroupsRequest([other]))
    assert deleted.results[0].error_code == ErrorCode.NOT_COORDINATOR


def test_who_may_not(door: _Door) -> None:
    """Without permission, a client can neither join a group nor see the topics in its offsets."""
    assert door.commit(1, group="alone") == 0
    door.authorizer.denied |= {(Operation.READ, "g"), (Operation.DESCRIBE, "t"), (Operation.READ, "t")}
    assert door.join().error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert door.commit(1, group="alone") == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert door.fetch(group="alone").topics == []
    wanted = [offset_fetch.OffsetFetchRequestTopics("t", partition_indexes=[0])]
    found = door.fetch(topics=wanted, group="alone").topics[0].partitions[0]
    assert (found.committed_offset, found.error_code) == (-1, ErrorCode.TOPIC_AUTHORIZATION_FAILED)


@pytest.mark.parametrize("version", range(7))
def test_describe_groups(door: _Door, version: int) -> None:
    """The description has members with their metadata and assignments, for clients and the library, or is empty."""
    joined = door.join()
    door.sync(joined)
    with door.store.consumer("t", group="library", client_id="lib") as consumer:
        consumer.poll_group()
        request = describe_groups.DescribeGroupsRequest(["g", "library", "nobody"])
        if version >= 3:
            request.include_authorized_operations = True
        ours, library, nobody = door.ask(group_admin_handlers.describe_groups, 15, version, request).groups
    assert (ours.group_state, ours.protocol_type, ours.protocol_data) == ("Stable", "consumer", "range")
    assert ours.members[0].member_assignment == encode_partitions({"t": [0, 1]})
    assert (library.group_state, library.protocol_type, library.protocol_data) == ("Stable", "consumer", "sticky")
    assert library.members[0].client_id == "lib"
    assert library.members[0].member_assignment == encode_partitions({"t": [0, 1, 2]})
    assert nobody.group_state == "Dead"
    assert nobody.error_code == (ErrorCode.GROUP_ID_NOT_FOUND if version >= 6 else 0)
    if version >= 3:
        assert ours.authorized_operations > 0


def test_list_groups(door: _Door) -> None:
    """Groups of either kind, and those with positions alone; by state and by type when that is asked for."""

    def listed(version: int = 5, **options: Any) -> dict[str, str]:
        found = door.ask(group_admin_handlers.list_groups, 16, version, list_groups.ListGroupsRequest(**options)).groups
        return {group.group_id: group.group_state for group in found}

    assert door.commit(5, group="alone") == 0
    joined = door.join()
    with door.store.consumer("t", group="library"):
        assert listed() == {"alone": "Empty", "g": "CompletingRebalance", "library": "Stable"}
        door.sync(joined)
        assert listed(states_filter=["stable"]) == {"g": "Stable", "library": "Stable"}
        assert listed(types_filter=["Consumer"]) == {}
        assert set(listed(types_filter=["classic"])) == set(listed(0)) == {"alone", "g", "library"}
        door.authorizer.denied |= {(Operation.DESCRIBE, "kafka-cluster"), (Operation.DESCRIBE, "alone")}
        assert set(listed()) == {"g", "library"}


@pytest.mark.parametrize("version", [2, 3])
def test_delete_groups(door: _Door, version: int) -> None:
    """A group without members goes with its positions; one that has some, of whatever kind, stays.

    From version 3 on each group that stays has a message that says why, and what to do.
    """
    assert door.commit(5, group="alone") == 0
    joined = door.join()
    door.sync(joined)
    with door.store.consumer("t", group="library"):
        door.authorizer.denied.add((Operation.DELETE, "secret"))
        request = delete_groups.DeleteGroupsRequest(["alone", "g", "library", "nobody", "secret", ""])
        results = door.ask(group_admin_handlers.delete_groups, 42, version, request).results
    expected = [
        (ErrorCode.NONE, None),
        (ErrorCode.NON_EMPTY_GROUP, "Stop the members first"),
        (ErrorCode.NON_EMPTY_GROUP, "stop them first"),
        (ErrorCode.GROUP_ID_NOT_FOUND, "does not exist"),
        (ErrorCode.GROUP_AUTHORIZATION_FAILED, "the right DELETE"),
        (ErrorCode.INVALID_GROUP_ID, "empty or too long"),
    ]
    assert [ErrorCode(result.error_code) for result in results] == [code for code, _ in expected]
    for result, (_, words) in zip(results, expected, strict=True):
        if words is None or version < 3:
            assert result.error_message is None
        else:
            assert words in result.error_message, result
    assert door.store.group_offsets.by_topic_id("alone") == {}


def test_delete_offsets(door: _Door) -> None:
    """Positions go, but for those in what a member subscribes to."""
    door.store.create_topic("other")
    for group in ("g", "library"):
        assert door.commit(5, group=group) == door.commit(6, group=group, topic="other") == 0
    joined = door.join()
    door.sync(joined)

    def delete(group: str) -> list[int]:
        topics = [
            offset_delete.OffsetDeleteRequestTopic(name, [offset_delete.OffsetDeleteRequestPartition(0)])
            for name in ("t", "other", "nope")
        ]
        request = offset_delete.OffsetDeleteRequest(group, topics)
        found = door.ask(group_offsets.offset_delete, 47, 0, request)
        return [found.error_code, *(topic.partitions[0].error_code for topic in found.topics)]

    with door.store.consumer("t", group="library"):
        for group in ("g", "library"):
            expected = [0, ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
            assert delete(group) == expected
            assert set(door.store.group_offsets.committed(group)) == {TopicPartition("t", 0)}
    assert delete("nobody")[0] == ErrorCode.GROUP_ID_NOT_FOUND
