"""Refuse the requests that a standby must not answer from its replica, with errors after which clients ask the owner.

Requests for partitions, groups and transactional ids need no table: their handlers check who leads or coordinates, and
a standby never does. The requests below would otherwise change the replica, or answer from a copy that may be old.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from segmentlog.server.codec.generated import alter_configs as whole
from segmentlog.server.codec.generated import incremental_alter_configs as incremental
from segmentlog.server.codec.generated.create_acls import AclCreationResult, CreateAclsRequest, CreateAclsResponse
from segmentlog.server.codec.generated.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopicResult,
)
from segmentlog.server.codec.generated.create_topics import (
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from segmentlog.server.codec.generated.delete_acls import DeleteAclsFilterResult, DeleteAclsRequest, DeleteAclsResponse
from segmentlog.server.codec.generated.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from segmentlog.server.codec.generated.describe_acls import DescribeAclsResponse
from segmentlog.server.codec.generated.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeConfigsResult,
)
from segmentlog.server.codec.generated.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from segmentlog.server.codec.generated.list_groups import ListGroupsResponse
from segmentlog.server.codec.generated.list_partition_reassignments import ListPartitionReassignmentsResponse
from segmentlog.server.codec.generated.list_transactions import ListTransactionsResponse
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.request_context import RequestContext

_CODE: Final = ErrorCode.NOT_CONTROLLER
"""Clients refresh their metadata, which names a worker of the owner as the controller, and repeat the request there."""
_TEXT: Final = "this machine is a standby; ask the owner of the store, which the metadata names"
_NOT_AVAILABLE: Final = ErrorCode.COORDINATOR_NOT_AVAILABLE
"""For lists that each broker has a part of, which Kafka's clients then request again."""
_STATES_FROM: Final = 6


def _create_topics(call: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    names = call.distinct(topic.name for topic in request.topics)
    results = [CreatableTopicResult(name=name, error_code=_CODE, error_message=_TEXT, configs=None) for name in names]
    return CreateTopicsResponse(topics=results)


def _delete_topics(call: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    requested = request.topics
    if call.version < _STATES_FROM:
        requested = [DeleteTopicState(name=name) for name in request.topic_names]
    once = call.distinct(requested, lambda topic: (topic.name, topic.topic_id))
    return DeleteTopicsResponse(
        responses=[
            DeletableTopicResult(name=topic.name, topic_id=topic.topic_id, error_code=_CODE, error_message=_TEXT)
            for topic in once
        ]
    )


def _create_partitions(call: RequestContext, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    names = call.distinct(topic.name for topic in request.topics)
    return CreatePartitionsResponse(results=[CreatePartitionsTopicResult(name, _CODE, _TEXT) for name in names])


def _init_producer_id(call: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    # Clients without a transactional id send this to any broker. Java clients repeat it there after LOAD_IN_PROGRESS;
    # after NOT_COORDINATOR they would look for the coordinator of an id that they do not have.
    has_id = request.transactional_id is not None
    code = ErrorCode.NOT_COORDINATOR if has_id else ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    return InitProducerIdResponse(error_code=code, producer_epoch=-1)


def _describe_configs(call: RequestContext, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    once = call.distinct(request.resources, lambda one: (one.resource_type, one.resource_name))
    return DescribeConfigsResponse(
        results=[DescribeConfigsResult(_CODE, _TEXT, one.resource_type, one.resource_name) for one in once]
    )


def _alter_configs(call: RequestContext, request: whole.AlterConfigsRequest) -> whole.AlterConfigsResponse:
    once = call.distinct(request.resources, lambda one: (one.resource_type, one.resource_name))
    return whole.AlterConfigsResponse(
        responses=[
            whole.AlterConfigsResourceResponse(_CODE, _TEXT, one.resource_type, one.resource_name) for one in once
        ]
    )


def _incremental_alter_configs(
    call: RequestContext, request: incremental.IncrementalAlterConfigsRequest
) -> incremental.IncrementalAlterConfigsResponse:
    once = call.distinct(request.resources, lambda one: (one.resource_type, one.resource_name))
    return incremental.IncrementalAlterConfigsResponse(
        responses=[
            incremental.AlterConfigsResourceResponse(_CODE, _TEXT, one.resource_type, one.resource_name) for one in once
        ]
    )


def _describe_acls(call: RequestContext, request: object) -> DescribeAclsResponse:
    return DescribeAclsResponse(error_code=_CODE, error_message=_TEXT)


def _create_acls(call: RequestContext, request: CreateAclsRequest) -> CreateAclsResponse:
    return CreateAclsResponse(results=[AclCreationResult(_CODE, _TEXT) for _ in call.each(request.creations)])


def _delete_acls(call: RequestContext, request: DeleteAclsRequest) -> DeleteAclsResponse:
    results = [DeleteAclsFilterResult(_CODE, _TEXT) for _ in call.each(request.filters)]
    return DeleteAclsResponse(filter_results=results)


def _list_groups(call: RequestContext, request: object) -> ListGroupsResponse:
    return ListGroupsResponse(error_code=_NOT_AVAILABLE)


def _list_transactions(call: RequestContext, request: object) -> ListTransactionsResponse:
    return ListTransactionsResponse(error_code=_NOT_AVAILABLE)


def _list_partition_reassignments(call: RequestContext, request: object) -> ListPartitionReassignmentsResponse:
    return ListPartitionReassignmentsResponse(error_code=_CODE, error_message=_TEXT)


REFUSALS: Final[dict[int, Callable[[RequestContext, Any], Any]]] = {
    16: _list_groups,
    19: _create_topics,
    20: _delete_topics,
    22: _init_producer_id,
    29: _describe_acls,
    30: _create_acls,
    31: _delete_acls,
    32: _describe_configs,
    33: _alter_configs,
    37: _create_partitions,
    44: _incremental_alter_configs,
    46: _list_partition_reassignments,
    66: _list_transactions,
}
"""By API key. All other APIs have the same handler as at the owner."""
