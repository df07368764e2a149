"""Metadata (3) and DescribeTopicPartitions (75): which topics there are, and which worker has which partition."""

from __future__ import annotations

from segmentlog.errors import SegmentlogError, TopicExists
from segmentlog.format.names import check_topic_name
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.call import Call
from segmentlog.server.codec.errors import ErrorCode
from segmentlog.server.codec.messages.describe_topic_partitions import (
    Cursor,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from segmentlog.server.codec.messages.metadata import (
    MetadataRequest,
    MetadataRequestTopic,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from segmentlog.server.codec.primitives import ZERO_UUID
from segmentlog.server.faults import code_of
from segmentlog.server.names import wire_epoch, wire_id

_NULL_NAMES_FROM = 12
_PAGE_MAX = 2000
"""`max.request.partition.size.limit`."""
_OPENED_MAX = 64
"""Partitions that one request opens to tell their epoch; of others it is not told (-1), and a fetch will tell it."""


def metadata(call: Call, request: MetadataRequest) -> MetadataResponse:
    """The workers, and the topics that are asked for, or all that may be seen."""
    broker = call.broker
    cluster = broker.cluster
    response = MetadataResponse(
        brokers=[MetadataResponseBroker(node.node_id, node.host, node.port) for node in cluster.nodes],
        cluster_id=cluster.cluster_id,
        controller_id=cluster.nodes[0].node_id,
    )
    view = _View(call, request.include_topic_authorized_operations)
    if request.topics is None or (call.version == 0 and not request.topics):
        found = [view.describe(name) for name in broker.store.topics() if call.may_see(Thing.TOPIC, name)]
        # Deleted since they were listed: nobody asked for these by name.
        response.topics = [topic for topic in found if topic.error_code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    else:
        may_create = request.allow_auto_topic_creation and broker.settings.auto_create
        # Each once, as Kafka does: two bytes that ask for a topic of 10,000 partitions are answered by 300 kB.
        wanted_once = {(wanted.topic_id, wanted.name): wanted for wanted in request.topics}
        response.topics = [_of_wanted(view, wanted, may_create) for wanted in wanted_once.values()]
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = broker.authorizer.authorized_operations(
            call.principal, call.client_host, ResourceType.CLUSTER, CLUSTER_NAME
        )
    return response


def _of_wanted(view: _View, wanted: MetadataRequestTopic, may_create: bool) -> MetadataResponseTopic:
    """One topic that is asked for by name or by id; who may not see it is told nothing of whether it is there."""
    call = view.call
    if wanted.topic_id != ZERO_UUID:
        name = call.broker.topic_ids.name_of(wanted.topic_id)
        if name is None or not call.may_see(Thing.TOPIC, name):
            unnamed = None if call.version >= _NULL_NAMES_FROM else ""
            return MetadataResponseTopic(error_code=ErrorCode.UNKNOWN_TOPIC_ID, name=unnamed, topic_id=wanted.topic_id)
        return view.describe(name)
    if wanted.name is None:
        return MetadataResponseTopic(error_code=ErrorCode.INVALID_REQUEST, name="")
    if not call.may_see(Thing.TOPIC, wanted.name):
        return MetadataResponseTopic(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED, name=wanted.name)
    found = view.describe(wanted.name)
    if found.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and may_create:
        code = view.create(wanted.name)
        return view.describe(wanted.name) if code is None else MetadataResponseTopic(error_code=code, name=wanted.name)
    return found


class _View:
    """The topics as one request sees them."""

    def __init__(self, call: Call, with_operations: bool) -> None:
        self.call = call
        self._with_operations = with_operations
        self._may_open = _OPENED_MAX
        self._may_make = call.broker.settings.limits.partitions_made

    def create(self, name: str) -> ErrorCode | None:
        """Make a topic because somebody asked for it; why not, if it was not made."""
        call, count = self.call, self.call.broker.settings.default_partitions
        if not (call.allows_cluster(Operation.CREATE) or call.allows_topic(Operation.CREATE, name)):
            return ErrorCode.TOPIC_AUTHORIZATION_FAILED
        if count > self._may_make:  # as of a request that is there to make topics
            return ErrorCode.POLICY_VIOLATION
        try:
            call.broker.store.create_topic(name, count)
        except TopicExists:  # somebody else asked at the same time
            return None
        except (SegmentlogError, OSError) as error:
            return code_of(error)
        self._may_make -= count
        return None

    def describe(self, name: str) -> MetadataResponseTopic:
        """A topic, or why there is none to be described."""
        call, cluster = self.call, self.call.broker.cluster
        try:
            check_topic_name(name)
            topic = call.broker.store.topic(name)
            count = topic.partition_count
        except (SegmentlogError, OSError) as error:
            return MetadataResponseTopic(error_code=code_of(error), name=name)
        found = MetadataResponseTopic(name=name, topic_id=wire_id(topic.id))
        for number in range(count):
            node_id = cluster.leader_of(topic.id, number).node_id
            epoch = self._epoch_of(name, number)
            found.partitions.append(MetadataResponsePartition(0, number, node_id, epoch, [node_id], [node_id]))
        if self._with_operations:
            found.topic_authorized_operations = call.broker.authorizer.authorized_operations(
                call.principal, call.client_host, ResourceType.TOPIC, name
            )
        return found

    def _epoch_of(self, name: str, number: int) -> int:
        broker = self.call.broker
        partition = broker.opened(name, number)
        if partition is None and self._may_open:
            self._may_open -= 1
            try:
                partition = broker.partition(name, number)
            except (SegmentlogError, OSError):  # whoever reads it is told
                return -1
        return -1 if partition is None else wire_epoch(partition.epoch)


def describe_topic_partitions(call: Call, request: DescribeTopicPartitionsRequest) -> DescribeTopicPartitionsResponse:
    """The same in pages, by name: as many partitions as asked for, and where to go on."""
    left = max(1, min(request.response_partition_limit, _PAGE_MAX))
    if request.topics:
        names = sorted({topic.name for topic in request.topics})
    else:
        names = [name for name in call.broker.store.topics() if call.may_see(Thing.TOPIC, name)]
    begin = Cursor() if request.cursor is None else request.cursor
    view = _View(call, with_operations=True)
    response = DescribeTopicPartitionsResponse()
    for name in names:
        if name < begin.topic_name:
            continue
        if not call.may_see(Thing.TOPIC, name):
            code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            response.topics.append(DescribeTopicPartitionsResponseTopic(error_code=code, name=name))
            continue
        first = begin.partition_index if name == begin.topic_name else 0
        if not left:
            response.next_cursor = Cursor(name, first)
            break
        found = view.describe(name)
        page = found.partitions[first : first + left]
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
        if first + len(page) < len(found.partitions):
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
        eligible_leader_replicas=[],
        last_known_elr=[],
    )
