"""Metadata (3) and DescribeTopicPartitions (75): topics, their partitions, and the workers that lead them."""

from __future__ import annotations

from typing import Final

from segmentlog.errors import SegmentlogError, TopicExists
from segmentlog.format.file_names import MAX_PARTITIONS, check_topic_name
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from segmentlog.server.codec.generated.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.codec.primitives import ZERO_UUID
from segmentlog.server.error_codes import code_of
from segmentlog.server.request_context import TOO_MUCH, RequestContext
from segmentlog.server.topic_ids import wire_epoch, wire_id

_NULL_NAMES_FROM = 12
_NONE: Final[list[int]] = []
"""An empty list of nodes, shared by all partitions."""
_PAGE_MAX = 2000
"""`max.request.partition.size.limit`."""
_OPENED_MAX = 64
"""Maximum number of partitions that a request opens to read their epochs. The epoch of others is -1 until a fetch."""


def metadata(call: RequestContext, request: MetadataRequest) -> MetadataResponse:
    """Return the workers, and the requested topics, or all topics that the client may see."""
    broker = call.broker
    cluster = broker.cluster
    response = MetadataResponse(
        brokers=[MetadataResponseBroker(node.node_id, node.host, node.port) for node in cluster.brokers],
        cluster_id=cluster.cluster_id,
        controller_id=cluster.controller_id,
    )
    view = _View(call, request.include_topic_authorized_operations)
    if request.topics is None or (call.version == 0 and not request.topics):
        names = call.each(broker.store.topics())
        found = [view.describe(name) for name in names if call.may_see(Thing.TOPIC, name)]
        # Leave out topics that were deleted after this request listed them: the client did not request them by name.
        response.topics = [topic for topic in found if topic.error_code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    else:
        may_create = request.allow_auto_topic_creation and broker.settings.auto_create
        response.topics = [
            _describe_requested(view, requested, may_create) for requested in call.distinct(request.topics, view.key_of)
        ]
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = broker.authorizer.authorized_operations(
            call.principal, call.client_host, ResourceType.CLUSTER, CLUSTER_NAME
        )
    return response


def _describe_requested(view: _View, requested: MetadataRequestTopic, may_create: bool) -> MetadataResponseTopic:
    """Describe a topic requested by name or id. Only a client with permission learns whether it exists."""
    call = view.call
    if requested.topic_id != ZERO_UUID:
        named = call.topic_by_id(requested.topic_id)
        if named is not None and call.may_see(Thing.TOPIC, named[0]):
            found = view.describe(*named)
            if found.error_code != ErrorCode.UNKNOWN_TOPIC_ID:
                return found
        unnamed = None if call.version >= _NULL_NAMES_FROM else ""
        return MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=unnamed, topic_id=requested.topic_id)
    if requested.name is None:
        return MetadataResponseTopic(error_code=ErrorCode.INVALID_REQUEST, name="")
    if not call.may_see(Thing.TOPIC, requested.name):
        return MetadataResponseTopic(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED, name=requested.name)
    found = view.describe(requested.name)
    if found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and view.call.broker.cluster.is_standby:
        found.error_code = ErrorCode.LEADER_NOT_AVAILABLE  # the owner may have it already: clients ask again
    elif found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and may_create:
        code = view.create(requested.name)
        return (
            view.describe(requested.name)
            if code is None
            else MetadataResponseTopic(error_code=code, name=requested.name)
        )
    return found


class _View:
    """Describes topics for one request, within its limits and permissions."""

    def __init__(self, call: RequestContext, with_operations: bool) -> None:
        self.call = call
        self._with_operations = with_operations
        self._may_open = _OPENED_MAX
        self._may_create = call.broker.settings.limits.partitions_made
        self._replicas = {node.node_id: [node.node_id] for node in call.broker.cluster.nodes}
        """List of replicas for each leader. Partitions share it, because a response may contain very many of them."""

    def key_of(self, requested: MetadataRequestTopic) -> str | bytes | None:
        """Return the name of a requested topic; or, if the request has an id that no visible topic has, this id."""
        if requested.topic_id == ZERO_UUID:
            return requested.name
        named = self.call.topic_by_id(requested.topic_id)
        # Without permission to see the topic, the client must not learn that this id belongs to that name.
        is_seen = named is not None and self.call.may_see(Thing.TOPIC, named[0])
        return named[0] if named is not None and is_seen else requested.topic_id

    def create(self, name: str) -> ErrorCode | None:
        """Create a requested topic (auto.create.topics.enable). Return the error if that fails, else None."""
        call, count = self.call, self.call.broker.settings.default_partitions
        if not (call.allows_cluster(Operation.CREATE) or call.allows_topic(Operation.CREATE, name)):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED
        if count > self._may_create:  # the same limit as for CreateTopics
            return ErrorCode.POLICY_VIOLATION
        try:
            call.broker.store.create_topic(name, count)
        except TopicExists:  # another client created it at the same time
            return None
        except (SegmentlogError, OSError) as error:
            return code_of(error)
        self._may_create -= count
        return None

    def describe(
        self, name: str, topic_id: str | None = None, first: int = 0, most: int = MAX_PARTITIONS
    ) -> MetadataResponseTopic:
        """Describe a topic with its partitions ``[first, first + most)``, or return an error.

        With ``topic_id``, return UNKNOWN_TOPIC_ID if the name belongs to another topic.
        """
        call, cluster = self.call, self.call.broker.cluster
        try:
            check_topic_name(name)
            topic = call.broker.store.topic(name)
            count = topic.partition_count
        except (SegmentlogError, OSError) as error:
            return MetadataResponseTopic(error_code=code_of(error), name=name)
        if topic_id is not None and topic.id != topic_id:
            return MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=name)
        found = MetadataResponseTopic(name=name, topic_id=wire_id(topic.id))
        numbers = range(count)[first : first + most]
        if not call.reserve_room(len(numbers)):
            found.error_code = TOO_MUCH
            return found
        for number in call.each(numbers):
            node_id = cluster.leader_of(topic.id, number).node_id
            replicas, epoch = self._replicas.get(node_id, _NONE), self._epoch_of(name, number, topic.id)
            code = ErrorCode.NONE if replicas else ErrorCode.LEADER_NOT_AVAILABLE
            found.partitions.append(MetadataResponsePartition(code, number, node_id, epoch, replicas, replicas, _NONE))
        if self._with_operations:
            found.topic_authorized_operations = call.broker.authorizer.authorized_operations(
                call.principal, call.client_host, ResourceType.TOPIC, name
            )
        return found

    def _epoch_of(self, name: str, number: int, topic_id: str) -> int:
        broker = self.call.broker
        partition = broker.opened(name, number)
        if (partition is None or partition.topic_id != topic_id) and self._may_open:
            self._may_open -= 1
            try:
                partition = broker.partition(name, number, topic_id)
            except (SegmentlogError, OSError):  # a fetch of the partition returns the error
                return -1
        return -1 if partition is None or partition.topic_id != topic_id else wire_epoch(partition.epoch)


def describe_topic_partitions(
    call: RequestContext, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    """Describe topics in pages, ordered by name: as many partitions as requested, and the cursor of the next page."""
    left = max(1, min(request.response_partition_limit, _PAGE_MAX))
    if request.topics:
        names = sorted(topic.name for topic in call.distinct(request.topics, lambda topic: topic.name))
    else:
        names = [name for name in call.broker.store.topics() if call.may_see(Thing.TOPIC, name)]
    begin = Cursor() if request.cursor is None else request.cursor
    view = _View(call, with_operations=True)
    response = DescribeTopicPartitionsResponse()
    for name in call.each(names):
        if name < begin.topic_name:
            continue
        if not call.may_see(Thing.TOPIC, name):
            code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            response.topics.append(DescribeTopicPartitionsResponseTopic(error_code=code, name=name))
            continue
        first = max(begin.partition_index, 0) if name == begin.topic_name else 0
        if not left:
            response.next_cursor = Cursor(name, first)
            break
        found = view.describe(name, None, first, left + 1)
        if found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and call.broker.cluster.is_standby:
            found.error_code = ErrorCode.LEADER_NOT_AVAILABLE
        page = found.partitions[:left]
        response.topics.append(
            DescribeTopicPartitionsResponseTopic(
                error_code=found.error_code,
                name=name,
                topic_id=found.topic_id,
                partitions=[_on_page(partition) for partition in page],
                topic_authorized_operations=found.topic_authorized_operations,
            )
        )
        left -= len(page)
        if len(page) < len(found.partitions):
            response.next_cursor = Cursor(name, first + len(page))
            break
    return response


def _on_page(partition: MetadataResponsePartition) -> DescribeTopicPartitionsResponsePartition:
    return DescribeTopicPartitionsResponsePartition(
        partition_index=partition.partition_index,
        leader_id=partition.leader_id,
        leader_epoch=partition.leader_epoch,
        replica_nodes=partition.replica_nodes,
        isr_nodes=partition.isr_nodes,
        eligible_leader_replicas=_NONE,
        last_known_elr=_NONE,
    )
