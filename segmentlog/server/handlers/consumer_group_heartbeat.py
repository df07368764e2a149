"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: groups whose server assigns (KIP-848)."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from functools import partial
from typing import Final

from segmentlog.errors import SegmentlogError
from segmentlog.records import PartitionId
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated import consumer_group_heartbeat as beats
from segmentlog.server.codec.generated.consumer_group_describe import (
    Assignment,
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    DescribedGroup,
    Member,
    TopicPartitions,
)
from segmentlog.server.codec.generated.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of
from segmentlog.server.groups.cached_group import Unavailable
from segmentlog.server.groups.consumer_types import JOINS, STEPS_OUT, Beat, Heartbeat
from segmentlog.server.groups.describe import ShownConsumer, describe_consumer
from segmentlog.server.handlers.classic_group_handlers import refusal
from segmentlog.server.request_context import TOO_MUCH, Call
from segmentlog.server.topic_ids import wire_id

_MAKES_ITS_ID: Final = 1
_CLASSIC, _CONSUMER = 0, 1
"""Types of members."""


def consumer_group_heartbeat(call: Call, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
    """A member joins, lives, tells what it has, hears what it is to have, or leaves."""
    error = refusal(call, request.group_id, Operation.READ)
    if error is not ErrorCode.NONE:
        return ConsumerGroupHeartbeatResponse(error_code=error)
    problem = _problem_of(call, request)
    if problem is not None:
        return ConsumerGroupHeartbeatResponse(error_code=ErrorCode.INVALID_REQUEST, error_message=problem)
    names = request.subscribed_topic_names
    if names is not None and not all(call.may_see(Thing.TOPIC, name) for name in names):
        return ConsumerGroupHeartbeatResponse(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    try:
        return _told(call.broker.groups.beat(request.group_id, _heartbeat(call, request)))
    except Unavailable as unavailable:
        return ConsumerGroupHeartbeatResponse(error_code=unavailable.code)


def _problem_of(call: Call, request: ConsumerGroupHeartbeatRequest) -> str | None:
    """Why it is no request that makes sense, if so."""
    epoch = request.member_epoch
    if not request.group_id:
        return "a group has a name"
    if not request.member_id and (epoch != JOINS or call.version >= _MAKES_ITS_ID):
        return "a member has an id"
    if request.instance_id == "" or request.rack_id == "":
        return "an instance id and a rack are not empty"
    if epoch < STEPS_OUT:
        return f"{epoch} is no epoch of a member"
    if epoch == STEPS_OUT and request.instance_id is None:
        return "only a member with an instance id leaves its place to itself"
    if epoch != JOINS:
        return None
    if request.rebalance_timeout_ms < 0:
        return "who joins says how long it takes to let go of partitions"
    if request.topic_partitions is None or request.topic_partitions:
        return "who joins says that it has no partitions"
    if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
        return "who joins says what it subscribes to"
    return None


def _heartbeat(call: Call, request: ConsumerGroupHeartbeatRequest) -> Heartbeat:
    names, owned = request.subscribed_topic_names, request.topic_partitions
    return Heartbeat(
        member_id=request.member_id or str(uuid.uuid4()),
        epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        client_id=call.client_id,
        client_host=call.client_host,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        topics=None if names is None else tuple(names),
        regex=request.subscribed_topic_regex,
        assignor=request.server_assignor,
        owned=None if owned is None else _ids(owned),
        may_see=partial(call.may_see, Thing.TOPIC),
    )


def _ids(owned: Iterable[beats.TopicPartitions]) -> frozenset[PartitionId]:
    return frozenset(
        PartitionId(topic_id, number)
        for one in owned
        for topic_id in (str(uuid.UUID(bytes=bytes(one.topic_id))),)
        for number in one.partitions
    )


def _told(answer: Beat) -> ConsumerGroupHeartbeatResponse:
    response = ConsumerGroupHeartbeatResponse(
        error_code=answer.error, error_message=answer.message, member_id=answer.member_id, member_epoch=answer.epoch,
        heartbeat_interval_ms=answer.heartbeat_ms,
    )  # fmt: skip
    if answer.assigned is not None:
        response.assignment = beats.Assignment(
            [beats.TopicPartitions(wire_id(topic_id), numbers) for topic_id, numbers in answer.assigned.items()]
        )
    return response


def consumer_group_describe(call: Call, request: ConsumerGroupDescribeRequest) -> ConsumerGroupDescribeResponse:
    """Members of groups, what each has and what it is to have."""
    groups = [_describe(call, group, request) for group in call.once(request.group_ids)]
    return ConsumerGroupDescribeResponse(groups=groups)


def _describe(call: Call, group: str, request: ConsumerGroupDescribeRequest) -> DescribedGroup:
    error = refusal(call, group, Operation.DESCRIBE)
    if error is not ErrorCode.NONE:
        return DescribedGroup(group_id=group, error_code=error)
    store = call.broker.store
    try:
        found = describe_consumer(call.broker.groups, store, group)
        if found is None:
            message = call.words(f"Group {group} is not a consumer group.")
            return DescribedGroup(group_id=group, error_code=ErrorCode.GROUP_ID_NOT_FOUND, error_message=message)
        names = store.topic_names({topic_id for one in found.members for topic_id in (*one.assigned, *one.target)})
    except Unavailable as unavailable:
        return DescribedGroup(group_id=group, error_code=unavailable.code)
    except (SegmentlogError, OSError) as problem:
        return DescribedGroup(group_id=group, error_code=code_of(problem))
    shown = {*names.values(), *(name for one in found.members for name in one.topics)}
    if not all(call.may_see(Thing.TOPIC, name) for name in shown):
        return DescribedGroup(group_id=group, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    sizes = [_size_of(one, names) for one in found.members]
    if not call.takes_room(sum(elements for elements, _ in sizes), sum(size_bytes for _, size_bytes in sizes)):
        return DescribedGroup(group_id=group, error_code=TOO_MUCH)
    told = DescribedGroup(
        group_id=group, group_state=found.state, group_epoch=found.epoch, assignment_epoch=found.epoch,
        assignor_name=found.assignor, members=[_member(one, names) for one in found.members],
    )  # fmt: skip
    if request.include_authorized_operations:
        told.authorized_operations = call.broker.authorizer.authorized_operations(
            call.principal, call.client_host, ResourceType.GROUP, group
        )
    return told


def _size_of(one: ShownConsumer, names: dict[str, str]) -> tuple[int, int]:
    """(elements, bytes of text) that a member takes in an answer."""
    told = [names[topic_id] for topic_id in (*one.assigned, *one.target) if topic_id in names]
    numbers = sum(map(len, (*one.assigned.values(), *one.target.values())))
    return 1 + len(one.topics) + len(told) + numbers, sum(map(len, (*one.topics, *told, one.regex or "")))


def _member(one: ShownConsumer, names: dict[str, str]) -> Member:
    return Member(
        member_id=one.id, instance_id=one.instance_id, rack_id=one.rack_id, member_epoch=one.epoch,
        client_id=one.client_id, client_host=one.client_host, subscribed_topic_names=list(one.topics),
        subscribed_topic_regex=one.regex or None, assignment=_assignment(one.assigned, names),
        target_assignment=_assignment(one.target, names), member_type=_CLASSIC if one.is_classic else _CONSUMER,
    )  # fmt: skip


def _assignment(partitions: dict[str, list[int]], names: dict[str, str]) -> Assignment:
    return Assignment(
        [
            TopicPartitions(wire_id(topic_id), names[topic_id], numbers)
            for topic_id, numbers in partitions.items()
            if topic_id in names
        ]
    )
