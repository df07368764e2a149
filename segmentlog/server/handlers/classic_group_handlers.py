"""FindCoordinator, JoinGroup, SyncGroup, Heartbeat and LeaveGroup (classic group protocol).

A join or sync waits for the other members. Meanwhile the server reads no other request of the connection. If the client
disconnects, the member leaves the group.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from segmentlog.server.codec.generated.heartbeat import HeartbeatRequest, HeartbeatResponse
from segmentlog.server.codec.generated.join_group import JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember
from segmentlog.server.codec.generated.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberResponse
from segmentlog.server.codec.generated.sync_group import SyncGroupRequest, SyncGroupResponse
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.cached_group import GroupUnavailable
from segmentlog.server.groups.classic_types import JoinAnswer, JoinRequest
from segmentlog.server.request_context import RequestContext

_FIND_MANY: Final = 4
_GROUP, _TRANSACTION = 0, 1
_JOIN_RETURNS_ID: Final = 4
_JOIN_NULL_PROTOCOL: Final = 7
_JOIN_SKIPS_ASSIGNMENT: Final = 9
_LEAVE_MANY: Final = 3


def find_coordinator(call: RequestContext, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
    """Return the worker that coordinates a group or a transactional id; from version 4 on, of several ids."""
    if call.version >= _FIND_MANY:
        found = [_find(call, key, request.key_type) for key in call.distinct(request.coordinator_keys)]
        return FindCoordinatorResponse(coordinators=found)
    one = _find(call, request.key, request.key_type)
    return FindCoordinatorResponse(
        error_code=one.error_code, error_message=one.error_message, node_id=one.node_id, host=one.host, port=one.port
    )


def _find(call: RequestContext, key: str, key_type: int) -> Coordinator:
    if key_type == _GROUP:
        thing, denied = Thing.GROUP, ErrorCode.GROUP_AUTHORIZATION_FAILED
    elif key_type == _TRANSACTION:
        thing, denied = Thing.TRANSACTIONAL_ID, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    else:
        return _not_found(key, ErrorCode.INVALID_REQUEST, f"coordinator type {key_type} is not supported")
    if not call.may_see(thing, key):
        return _not_found(key, denied, "not authorized")
    node = call.broker.cluster.coordinator_of(key)
    if node.node_id < 0:  # at a standby whose owner has no server
        return _not_found(key, ErrorCode.COORDINATOR_NOT_AVAILABLE, "the owner of the store has no server")
    return Coordinator(key=key, node_id=node.node_id, host=node.host, port=node.port, error_message=None)


def _not_found(key: str, code: ErrorCode, message: str) -> Coordinator:
    return Coordinator(key=key, node_id=-1, host="", port=-1, error_code=code, error_message=message)


def refusal(call: RequestContext, group: str, operation: Operation) -> ErrorCode:
    """Return why this worker does not serve the group, or `ErrorCode.NONE`."""
    if not call.allows(operation, ResourceType.GROUP, group):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED
    if not call.broker.cluster.is_coordinator(group):
        return ErrorCode.NOT_COORDINATOR
    return ErrorCode.NONE


def join_group(call: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse:
    """Join a group. Waits until all members have joined, or for the rebalance timeout."""
    error = refusal(call, request.group_id, Operation.READ)
    if error is not ErrorCode.NONE:
        return _joined(call, JoinAnswer(error=error, member_id=request.member_id))
    groups = call.broker.groups
    # Version 0 has one timeout for both.
    rebalance_ms = request.rebalance_timeout_ms if request.rebalance_timeout_ms >= 0 else request.session_timeout_ms
    wanted = JoinRequest(
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        new_member_id=groups.new_member_id(request.group_instance_id or call.client_id),
        client_id=call.client_id,
        client_host=call.client_host,
        session_timeout_ms=request.session_timeout_ms,
        rebalance_timeout_ms=rebalance_ms,
        protocol_type=request.protocol_type,
        protocols=tuple((protocol.name, bytes(protocol.metadata)) for protocol in request.protocols),
        requires_known_member_id=call.version >= _JOIN_RETURNS_ID,
        supports_skipping_assignment=call.version >= _JOIN_SKIPS_ASSIGNMENT,
        may_see=partial(call.may_see, Thing.TOPIC),
    )
    try:
        return _joined(call, groups.join(request.group_id, wanted, call.is_disconnected))
    except GroupUnavailable as unavailable:
        return _joined(call, JoinAnswer(error=unavailable.code, member_id=request.member_id))


def _joined(call: RequestContext, answer: JoinAnswer) -> JoinGroupResponse:
    protocol = answer.protocol
    if protocol is None and call.version < _JOIN_NULL_PROTOCOL:
        protocol = ""
    return JoinGroupResponse(
        error_code=answer.error,
        generation_id=answer.generation,
        protocol_type=answer.protocol_type,
        protocol_name=protocol,
        leader=answer.leader,
        skip_assignment=answer.skip_assignment,
        member_id=answer.member_id,
        members=[
            JoinGroupResponseMember(member_id=member_id, group_instance_id=instance_id, metadata=metadata)
            for member_id, instance_id, metadata in answer.members
        ],
    )


def sync_group(call: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse:
    """Return a member's assignment. Waits until the leader has sent it."""
    error = refusal(call, request.group_id, Operation.READ)
    if error is not ErrorCode.NONE:
        return SyncGroupResponse(error_code=error)
    try:
        answer = call.broker.groups.sync(
            request.group_id, request.member_id, request.generation_id,
            [(one.member_id, bytes(one.assignment)) for one in request.assignments],
            instance_id=request.group_instance_id, protocol_type=request.protocol_type, protocol=request.protocol_name,
            is_disconnected=call.is_disconnected,
        )  # fmt: skip
    except GroupUnavailable as unavailable:
        return SyncGroupResponse(error_code=unavailable.code)
    return SyncGroupResponse(
        error_code=answer.error,
        protocol_type=answer.protocol_type,
        protocol_name=answer.protocol,
        assignment=answer.assignment,
    )


def heartbeat(call: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse:
    """Renew a member's session. The response makes the member rejoin if a rebalance is in progress."""
    error = refusal(call, request.group_id, Operation.READ)
    if error is ErrorCode.NONE:
        try:
            error = call.broker.groups.heartbeat(
                request.group_id, request.member_id, request.generation_id, instance_id=request.group_instance_id
            )
        except GroupUnavailable as unavailable:
            error = unavailable.code
    return HeartbeatResponse(error_code=error)


def leave_group(call: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse:
    """Remove a member; from version 3 on, several members."""
    error = refusal(call, request.group_id, Operation.READ)
    if error is not ErrorCode.NONE:
        return LeaveGroupResponse(error_code=error)
    is_many = call.version >= _LEAVE_MANY
    members = {(member.member_id, member.group_instance_id): member for member in request.members}
    leavers = list(members)
    try:
        results = call.broker.groups.leave(request.group_id, leavers if is_many else [(request.member_id, None)])
    except GroupUnavailable as unavailable:
        return LeaveGroupResponse(error_code=unavailable.code)
    if not is_many:
        return LeaveGroupResponse(error_code=results[0][1])
    return LeaveGroupResponse(
        members=[
            MemberResponse(member_id=member.member_id, group_instance_id=member.group_instance_id, error_code=error)
            for member, (_, error) in zip(members.values(), results, strict=True)
        ]
    )
