"""DeleteRecords (21) and DescribeLogDirs (35)."""

from __future__ import annotations

import os
from typing import Final

from segmentlog.errors import SegmentlogError
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from segmentlog.server.codec.generated.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of
from segmentlog.server.request_context import TOO_MUCH, RequestContext
from segmentlog.server.topic_ids import is_visible

_TO_THE_END: Final = -1


def delete_records(call: RequestContext, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    """Delete the records of partitions before an offset."""
    response = DeleteRecordsResponse()
    for asked in call.merged_topics(request.topics, "partitions", ("partition_index",), "name"):
        name, answers = asked.topic.name, []
        for number, requested in call.each(asked.partitions.items()):
            if number in asked.unclear:  # the request names two offsets
                answers.append(DeleteRecordsPartitionResult(number, -1, ErrorCode.INVALID_REQUEST))
            else:
                answers.append(_trim(call, name, requested))
        response.topics.append(DeleteRecordsTopicResult(name, answers))
    return response


def _trim(call: RequestContext, name: str, requested: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
    broker = call.broker
    answer = DeleteRecordsPartitionResult(requested.partition_index, -1)
    if not call.allows_topic(Operation.DELETE, name):
        answer.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return answer
    if not is_visible(name):
        answer.error_code = ErrorCode.INVALID_TOPIC_EXCEPTION
        return answer
    try:
        partition = broker.partition(name, requested.partition_index)
        if not broker.cluster.leads(partition.topic_id, partition.number):
            answer.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            return answer
        if partition.config.compacts and not partition.config.deletes:
            answer.error_code = ErrorCode.POLICY_VIOLATION  # as in Kafka, for a topic that is only compacted
            return answer
        offset = partition.log_end_offset if requested.offset == _TO_THE_END else requested.offset
        if offset < 0:
            answer.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
            return answer
        # As in Kafka, an offset that was deleted already is not an error: a repeated request succeeds.
        answer.low_watermark = partition.trim(offset)
    except (SegmentlogError, OSError) as error:
        answer.error_code = code_of(error)
    return answer


def describe_log_dirs(call: RequestContext, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """Return the sizes of partitions in the store's folder. A worker reports only partitions that it leads, so that a
    sum over all workers counts each partition once.

    Kafka shows all topics to clients that may describe the cluster. This server shows such a client only the topics
    that it may describe.
    """
    if not call.may_see(Thing.CLUSTER):
        return DescribeLogDirsResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    store = call.broker.store
    room = os.statvfs(store.path)
    result = DescribeLogDirsResult(
        log_dir=store.path, total_bytes=room.f_frsize * room.f_blocks, usable_bytes=room.f_frsize * room.f_bavail
    )
    requested = None
    if request.topics is not None:
        asked = call.merged_topics(request.topics, "partitions", (), "topic")
        requested = {one.topic.topic: one.partitions for one in asked}
    for name in call.each(store.topics()):
        if (requested is not None and name not in requested) or not call.may_see(Thing.TOPIC, name):
            continue
        partitions = []
        try:
            topic = store.topic(name)
            for number in call.each(range(topic.partition_count)):
                if (requested is None or number in requested[name]) and call.broker.cluster.leads(topic.id, number):
                    if not call.reserve_room(1):
                        return DescribeLogDirsResponse(error_code=TOO_MUCH)
                    partitions.append(DescribeLogDirsPartition(number, _size_of(call, name, number)))
        except (SegmentlogError, OSError):  # deleted in between, or damaged: its own requests return the error
            continue
        result.topics.append(DescribeLogDirsTopic(name, partitions))
    return DescribeLogDirsResponse(results=[result])


def _size_of(call: RequestContext, name: str, number: int) -> int:
    """Return the size of a partition. Do not open a closed partition, because a request may name all of them."""
    partition = call.broker.opened(name, number)
    if partition is not None:
        return sum(segment.size_bytes for segment in partition.segments())
    with os.scandir(f"{call.broker.store.path}/{name}/{number}") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".log"))
