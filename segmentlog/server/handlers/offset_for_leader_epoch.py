"""OffsetForLeaderEpoch (23): the end offsets of epochs, by which a client detects whether its log has diverged."""

from __future__ import annotations

from segmentlog.errors import SegmentlogError
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.offset_for_leader_epoch import (
    EpochEndOffset,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopicResult,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.epoch_ends import end_of_epoch
from segmentlog.server.error_codes import code_of
from segmentlog.server.request_context import RequestContext
from segmentlog.server.topic_ids import is_visible, wire_epoch


def offset_for_leader_epoch(call: RequestContext, request: OffsetForLeaderEpochRequest) -> OffsetForLeaderEpochResponse:
    """Return for each partition the end offset of an epoch."""
    response = OffsetForLeaderEpochResponse()
    part_key = ("partition", "leader_epoch", "current_leader_epoch")  # as in Kafka, a request may name several epochs
    for asked in call.merged_topics(request.topics, "partitions", part_key, "topic"):
        name = asked.topic.topic
        answers = [_epoch_end(call, name, requested) for requested in call.each(asked.partitions.values())]
        response.topics.append(OffsetForLeaderTopicResult(name, answers))
    return response


def _epoch_end(call: RequestContext, name: str, requested: OffsetForLeaderPartition) -> EpochEndOffset:
    broker = call.broker
    answer = EpochEndOffset(partition=requested.partition)
    if not call.may_see(Thing.TOPIC, name):
        answer.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return answer
    if not is_visible(name):
        answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return answer
    try:
        partition = broker.partition(name, requested.partition)
        epoch = wire_epoch(partition.epoch)
        if not broker.cluster.leads(partition.topic_id, partition.number):
            answer.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif 0 <= requested.current_leader_epoch != epoch:
            is_old = requested.current_leader_epoch < epoch
            answer.error_code = ErrorCode.FENCED_LEADER_EPOCH if is_old else ErrorCode.UNKNOWN_LEADER_EPOCH
        else:
            answer.leader_epoch, answer.end_offset = end_of_epoch(partition, requested.leader_epoch)
    except (SegmentlogError, OSError) as error:
        answer.error_code = code_of(error)
    return answer
