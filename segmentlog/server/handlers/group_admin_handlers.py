"""ListGroups, DescribeGroups and DeleteGroups, for groups of Kafka clients and of the library."""

from __future__ import annotations

from functools import partial
from typing import Final

from segmentlog.errors import SegmentlogError
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
)
from segmentlog.server.codec.generated.describe_groups import (
    DescribedGroup,
    DescribedGroupMember,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from segmentlog.server.codec.generated.list_groups import ListedGroup, ListGroupsRequest, ListGroupsResponse
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of, message_of
from segmentlog.server.groups.cached_group import GroupUnavailable
from segmentlog.server.groups.classic_types import GroupState
from segmentlog.server.groups.describe import describe, group_overview
from segmentlog.server.groups.subscriptions import visible_assignment, visible_subscription
from segmentlog.server.handlers.classic_group_handlers import refusal
from segmentlog.server.request_context import TOO_MUCH, RequestContext

_DESCRIBE_NOT_FOUND: Final = 6
_DELETE_MESSAGES: Final = 3
_NOT_DELETED: Final = {
    ErrorCode.NON_EMPTY_GROUP: "The group has members. Its committed offsets are unchanged. Stop the members first.",
    ErrorCode.GROUP_ID_NOT_FOUND: "The group does not exist: it has neither members nor committed offsets.",
    ErrorCode.INVALID_GROUP_ID: "No group can have this id: it is empty or too long.",
    ErrorCode.GROUP_AUTHORIZATION_FAILED: "The client's user must have the right DELETE on the group.",
    ErrorCode.NOT_COORDINATOR: "Another worker coordinates the group. FindCoordinator returns its address.",
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: "The group is being loaded. It is unchanged. Repeat the request.",
    ErrorCode.COORDINATOR_NOT_AVAILABLE: "The group is unavailable. It is unchanged. Repeat the request.",
}
"""Messages for errors that are not exceptions. Kafka has a message for few of them."""


def list_groups(call: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    """Return the groups that this worker coordinates, including groups of the library."""
    may_see_all = call.may_see(Thing.CLUSTER)
    states = {state.lower() for state in request.states_filter}
    types = {one.lower() for one in request.types_filter}
    response = ListGroupsResponse()
    broker = call.broker
    try:
        for group in call.each(broker.store.groups.names()):
            if not broker.cluster.is_coordinator(group):
                continue
            if not may_see_all and not call.may_see(Thing.GROUP, group):
                continue
            found = group_overview(broker.groups, broker.store, group)
            if not call.reserve_room(1):
                return ListGroupsResponse(error_code=TOO_MUCH)
            if (not states or found.state.lower() in states) and (not types or found.type in types):
                response.groups.append(
                    ListedGroup(
                        group_id=group, protocol_type=found.protocol_type, group_state=found.state,
                        group_type=found.type,
                    )
                )  # fmt: skip
    except GroupUnavailable as unavailable:
        return ListGroupsResponse(error_code=unavailable.code)
    except (SegmentlogError, OSError) as problem:
        return ListGroupsResponse(error_code=code_of(problem))
    return response


def describe_groups(call: RequestContext, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    """Return the members of groups with their subscriptions and assignments."""
    return DescribeGroupsResponse(groups=[_describe(call, group, request) for group in call.distinct(request.groups)])


def _describe(call: RequestContext, group: str, request: DescribeGroupsRequest) -> DescribedGroup:
    error = refusal(call, group, Operation.DESCRIBE)
    if error is not ErrorCode.NONE:
        return DescribedGroup(group_id=group, error_code=error)
    try:
        found = describe(call.broker.groups, call.broker.store, group)
    except GroupUnavailable as unavailable:
        return DescribedGroup(group_id=group, error_code=unavailable.code)
    except (SegmentlogError, OSError) as problem:
        return DescribedGroup(group_id=group, error_code=code_of(problem))
    if found is None:
        described = DescribedGroup(group_id=group, group_state=GroupState.DEAD)
        if call.version >= _DESCRIBE_NOT_FOUND:
            described.error_code = ErrorCode.GROUP_ID_NOT_FOUND
            described.error_message = call.text_if_room(f"Group {group} not found.")
    elif not call.reserve_room(
        len(found.members), sum(len(one.metadata) + len(one.assignment) for one in found.members)
    ):
        return DescribedGroup(group_id=group, error_code=TOO_MUCH)
    else:
        kind, may_see = found.protocol_type, partial(call.may_see, Thing.TOPIC)
        sees_cluster = call.may_see(Thing.CLUSTER)
        described = DescribedGroup(
            group_id=group, group_state=found.state, protocol_type=found.protocol_type, protocol_data=found.protocol,
            members=[
                DescribedGroupMember(
                    member_id=one.id, group_instance_id=one.instance_id, client_id=one.client_id,
                    client_host=one.client_host,
                    # Kafka shows both unchanged. Here topics that the client may not describe are removed from both.
                    member_metadata=visible_subscription(kind, one.metadata, may_see, sees_cluster=sees_cluster),
                    member_assignment=visible_assignment(kind, one.assignment, may_see, sees_cluster=sees_cluster),
                )
                for one in found.members
            ],
        )  # fmt: skip
    if request.include_authorized_operations:
        described.authorized_operations = call.broker.authorizer.authorized_operations(
            call.principal, call.client_host, ResourceType.GROUP, group
        )
    return described


def delete_groups(call: RequestContext, request: DeleteGroupsRequest) -> DeleteGroupsResponse:
    """Delete groups that have no members, and their committed offsets."""
    return DeleteGroupsResponse(results=[_delete(call, group) for group in call.distinct(request.groups_names)])


def _delete(call: RequestContext, group: str) -> DeletableGroupResult:
    error = refusal(call, group, Operation.DELETE)
    message = None
    if error is ErrorCode.NONE:
        try:
            error = call.broker.groups.delete(group)
        except GroupUnavailable as unavailable:
            error = unavailable.code
        except (SegmentlogError, OSError) as problem:
            error, message = code_of(problem), message_of(problem)
    message = message or _NOT_DELETED.get(error)
    described = DeletableGroupResult(group_id=group, error_code=error)
    if message is not None and call.version >= _DELETE_MESSAGES:
        described.error_message = call.text_if_room(message)
    return described
