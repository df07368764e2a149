"""DescribeCluster (60) and ListPartitionReassignments (46)."""

from __future__ import annotations

from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.server.codec.generated.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from segmentlog.server.codec.generated.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.request_context import RequestContext

_BROKERS = 1


def describe_cluster(call: RequestContext, request: DescribeClusterRequest) -> DescribeClusterResponse:
    """Return the workers as brokers."""
    cluster = call.broker.cluster
    if request.endpoint_type != _BROKERS:
        return DescribeClusterResponse(
            error_code=ErrorCode.MISMATCHED_ENDPOINT_TYPE, error_message="this server has no controller endpoints"
        )
    response = DescribeClusterResponse(
        cluster_id=cluster.cluster_id,
        controller_id=cluster.controller_id,
        brokers=[DescribeClusterBroker(node.node_id, node.host, node.port) for node in cluster.brokers],
    )
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = call.broker.authorizer.authorized_operations(
            call.principal, call.client_host, ResourceType.CLUSTER, CLUSTER_NAME
        )
    return response


def list_partition_reassignments(
    call: RequestContext, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    """Return an empty list: partitions have one copy, which cannot be reassigned."""
    if not call.allows_cluster(Operation.DESCRIBE):
        return ListPartitionReassignmentsResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    return ListPartitionReassignmentsResponse(error_message=None)
