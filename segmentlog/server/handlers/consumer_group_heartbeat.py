"""ConsumerGroupHeartbeat and ConsumerGroupDescribe: groups with server-side assignment (KIP-848)."""

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
from segmentlog.server.groups.cached_group import GroupUnavailable
from segmentlog.server.groups.consumer_types import JOIN_EPOCH, STATIC_LEAVE_EPOCH, HeartbeatAnswer, HeartbeatFields
from segmentlog.server.groups.describe import ConsumerDescription, describe_consumer_group
from segmentlog.server.handlers.classic_group_handlers import refusal
from segmentlog.server.request_context import TOO_MUCH, RequestContext
from segmentlog.server.topic_ids import wire_id

_MAKES_ITS_ID: Final = 1
_CLASSIC, _CONSUMER = 0, 1
"""Member types."""


def consumer_group_heartbeat(
    call: RequestContext, request: ConsumerGroupHeartbeatRequest
) -> ConsumerGroupHeartbeatResponse:
    """Handle a heartbeat: a member joins, renews its session, reports its partitions and gets its assignment, or
    leaves.
    """
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
        return _response(call.broker.groups.consumer_heartbeat(request.group_id, _heartbeat(call, request)))
    except GroupUnavailable as unavailable:
        return ConsumerGroupHeartbeatResponse(error_code=unavailable.code)


def _problem_of(call: RequestContext, request: ConsumerGroupHeartbeatRequest) -> str | None:
    """Return the reason why the request is invalid; None if it is valid."""
    epoch = request.member_epoch
    if not request.group_id:
        return "the group id must not be empty"
    if not request.member_id and (epoch != JOIN_EPOCH or call.version >= _MAKES_ITS_ID):
        return "the member id must not be empty"
    if request.instance_id == "" or request.rack_id == "":
        return "the instance id and the rack id must not be empty"
    if epoch < STATIC_LEAVE_EPOCH:
        return f"{epoch} is not a valid member epoch"
    if epoch == STATIC_LEAVE_EPOCH and request.instance_id is None:
        return f"only a static member, with an instance id, may leave with epoch {epoch}"
    if epoch != JOIN_EPOCH:
        return None
    if request.rebalance_timeout_ms < 0:
        return "a joining member must send its rebalance timeout"
    if request.topic_partitions is None or request.topic_partitions:
        return "a joining member must send an empty list of owned partitions"
    if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
        return "a joining member must send topic names or a regular expression to subscribe to"
    return None


def _heartbeat(call: RequestContext, request: ConsumerGroupHeartbeatRequest) -> HeartbeatFields:
    names, owned = request.subscribed_topic_names, request.topic_partitions
    return HeartbeatFields(
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
        for topic in owned
        for topic_id in (str(uuid.UUID(bytes=bytes(topic.topic_id))),)
        for number in topic.partitions
    )


def _response(answer: HeartbeatAnswer) -> ConsumerGroupHeartbeatResponse:
    response = ConsumerGroupHeartbeatResponse(
        error_code=answer.error, error_message=answer.message, member_id=answer.member_id, member_epoch=answer.epoch,
        heartbeat_interval_ms=answer.heartbeat_ms,
    )  # fmt: skip
    if answer.assigned is not None:
        response.assignment = beats.Assignment(
            [beats.TopicPartitions(wire_id(topic_id), numbers) for topic_id, numbers in answer.assigned.items()]
        )
    return response


def consumer_group_describe(
    call: RequestContext, request: ConsumerGroupDescribeRequest
) -> ConsumerGroupDescribeResponse:
    """Return the members of groups with their current and target assignments."""
    groups = [_describe(call, group, request) for group in call.distinct(request.group_ids)]
    return ConsumerGroupDescribeResponse(groups=groups)


def _describe(call: RequestContext, group: str, request: ConsumerGroupDescribeRequest) -> DescribedGroup:
    error = refusal(call, group, Operation.DESCRIBE)
    if error is not ErrorCode.NONE:
        return DescribedGroup(group_id=group, error_code=error)
    store = call.broker.store
    try:
        found = describe_consumer_group(call.broker.groups, store, group)
        if found is None:
            message = call.text_if_room(f"Group {group} is not a consumer group.")
            return DescribedGroup(group_id=group, error_code=ErrorCode.GROUP_ID_NOT_FOUND, error_message=message)
        names = store.topic_names(
            {topic_id for member in found.members for topic_id in (*member.assigned, *member.target)}
        )
    except GroupUnavailable as unavailable:
        return DescribedGroup(group_id=group, error_code=unavailable.code)
    except (SegmentlogError, OSError) as problem:
        return DescribedGroup(group_id=group, error_code=code_of(problem))
    shown = {*names.values(), *(name for member in found.members for name in member.topics)}
    if not all(call.may_see(Thing.TOPIC, name) for name in shown):
        return DescribedGroup(group_id=group, error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    sizes = [_member_size_bytes(member, names) for member in found.members]
    if not call.reserve_room(sum(elements for elements, _ in sizes), sum(size_bytes for _, size_bytes in sizes)):
        return DescribedGroup(group_id=group, error_code=TOO_MUCH)
    described = DescribedGroup(
        group_id=group, group_state=found.state, group_epoch=found.epoch, assignment_epoch=found.epoch,
        assignor_name=found.assignor, members=[_member(member, names) for member in found.members],
    )  # fmt: skip
    if request.include_authorized_operations:
        described.authorized_operations = call.broker.authorizer.authorized_operations(
            call.principal, call.client_host, ResourceType.GROUP, group
        )
    return described


def _member_size_bytes(member: ConsumerDescription, names: dict[str, str]) -> tuple[int, int]:
    """Return (elements, characters of text) that a member takes in a response."""
    described = [names[topic_id] for topic_id in (*member.assigned, *member.target) if topic_id in names]
    numbers = sum(map(len, (*member.assigned.values(), *member.target.values())))
    return 1 + len(member.topics) + len(described) + numbers, sum(
        map(len, (*member.topics, *described, member.regex or ""))
    )


def _member(member: ConsumerDescription, names: dict[str, str]) -> Member:
    return Member(
        member_id=member.id, instance_id=member.instance_id, rack_id=member.rack_id, member_epoch=member.epoch,
        client_id=member.client_id, client_host=member.client_host, subscribed_topic_names=list(member.topics),
        subscribed_topic_regex=member.regex or None, assignment=_assignment(member.assigned, names),
        target_assignment=_assignment(member.target, names), member_type=_CLASSIC if member.is_classic else _CONSUMER,
    )  # fmt: skip


def _assignment(partitions: dict[str, list[int]], names: dict[str, str]) -> Assignment:
    return Assignment(
        [
            TopicPartitions(wire_id(topic_id), names[topic_id], numbers)
            for topic_id, numbers in partitions.items()
            if topic_id in names
        ]
    )
