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
from segmentlog.server.request_context import TOO_MUCH, Call
from segmentlog.server.topic_ids import is_visible

_TO_THE_END: Final = -1


def delete_records(call: Call, request: DeleteRecordsRequest) -> DeleteRecordsResponse:
    """Trim partitions from the front."""
    response = DeleteRecordsResponse()
    for asked in call.topics_once(request.topics, "partitions", ("partition_index",), "name"):
        name, answers = asked.topic.name, []
        for number, wanted in call.each(asked.partitions.items()):
            if number in asked.unclear:  # two offsets are no wish
                answers.append(DeleteRecordsPartitionResult(number, -1, ErrorCode.INVALID_REQUEST))
            else:
                answers.append(_trim(call, name, wanted))
        response.topics.append(DeleteRecordsTopicResult(name, answers))
    return response


def _trim(call: Call, name: str, wanted: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
    broker = call.broker
    answer = DeleteRecordsPartitionResult(wanted.partition_index, -1)
    if not call.allows_topic(Operation.DELETE, name):
        answer.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return answer
    if not is_visible(name):
        answer.error_code = ErrorCode.INVALID_TOPIC_EXCEPTION
        return answer
    try:
        partition = broker.partition(name, wanted.partition_index)
        if not broker.cluster.leads(partition.topic_id, partition.number):
            answer.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            return answer
        if partition.config.compacts and not partition.config.deletes:
            answer.error_code = ErrorCode.POLICY_VIOLATION  # as Kafka: of a topic that is only compacted
            return answer
        offset = partition.log_end_offset if wanted.offset == _TO_THE_END else wanted.offset
        if offset < 0:
            answer.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
            return answer
        # What is gone already is no error, as in Kafka: who asks again, or later than retention, has what he wants.
        answer.low_watermark = partition.trim(offset)
    except (SegmentlogError, OSError) as error:
        answer.error_code = code_of(error)
    return answer


def describe_log_dirs(call: Call, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """How large partitions are, in the one folder that there is. Leaders tell of theirs, so that sums are right.

    Kafka shows all topics to who may describe the cluster; here they are those that the client may describe, too.
    """
    if not call.may_see(Thing.CLUSTER):
        return DescribeLogDirsResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    store = call.broker.store
    room = os.statvfs(store.path)
    result = DescribeLogDirsResult(
        log_dir=store.path, total_bytes=room.f_frsize * room.f_blocks, usable_bytes=room.f_frsize * room.f_bavail
    )
    wanted = None
    if request.topics is not None:
        asked = call.topics_once(request.topics, "partitions", (), "topic")
        wanted = {one.topic.topic: one.partitions for one in asked}
    for name in call.each(store.topics()):
        if (wanted is not None and name not in wanted) or not call.may_see(Thing.TOPIC, name):
            continue
        partitions = []
        try:
            topic = store.topic(name)
            for number in call.each(range(topic.partition_count)):
                if (wanted is None or number in wanted[name]) and call.broker.cluster.leads(topic.id, number):
                    if not call.takes_room(1):
                        return DescribeLogDirsResponse(error_code=TOO_MUCH)
                    partitions.append(DescribeLogDirsPartition(number, _size_of(call, name, number)))
        except (SegmentlogError, OSError):  # deleted meanwhile, or it cannot be opened: its own requests say so
            continue
        result.topics.append(DescribeLogDirsTopic(name, partitions))
    return DescribeLogDirsResponse(results=[result])


def _size_of(call: Call, name: str, number: int) -> int:
    """Bytes of a partition. To open it for that would cost more than whoever asks about all of them may take."""
    partition = call.broker.opened(name, number)
    if partition is not None:
        return sum(segment.size_bytes for segment in partition.segments())
    with os.scandir(f"{call.broker.store.path}/{name}/{number}") as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".log"))
