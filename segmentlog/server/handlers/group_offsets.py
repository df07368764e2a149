"""OffsetCommit (8), OffsetFetch (9), OffsetDelete (47): committed offsets, shared with the library's groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from segmentlog.errors import SegmentlogError
from segmentlog.groups.committed_offsets import CommittedOffset, is_metadata
from segmentlog.groups.server_groups import OffsetCommit
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from segmentlog.server.codec.generated.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from segmentlog.server.codec.generated.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of, coordinator_code_of
from segmentlog.server.groups.cached_group import GroupUnavailable
from segmentlog.server.groups.coordinator import AppendedOffsets
from segmentlog.server.handlers.classic_group_handlers import refusal
from segmentlog.server.handlers.list_offsets import EARLIEST, LATEST
from segmentlog.server.request_budget import merge_topics
from segmentlog.server.request_context import TOO_MUCH, DeferredResponse, RequestContext
from segmentlog.server.topic_ids import is_visible, wire_epoch, wire_id

if TYPE_CHECKING:
    from segmentlog.topics.topic_registry import Topic

_COMMIT_BY_ID: Final = 10
_COMMIT_STALE: Final = 9
"""First version whose clients know STALE_MEMBER_EPOCH."""
_FETCH_BY_ID: Final = 10
_FETCH_MANY: Final = 8
_FETCH_TOP_ERROR: Final = 2
_RETRY_OFFSET: Final = -1000
"""Offset in an error response that makes librdkafka repeat the request (its RD_KAFKA_OFFSET_STORED).

Other clients ignore the offset of an error. librdkafka (2.15) uses it if its assignment has changed while it waited for
the end of a transaction. With Kafka's -1 it would apply `auto.offset.reset`, and process records a second time in spite
of exactly-once."""


def offset_commit(call: RequestContext, request: OffsetCommitRequest) -> OffsetCommitResponse | DeferredResponse:
    """Commit offsets. Respond once they are durable or shipped; meanwhile the connection handles other requests."""
    error = refusal(call, request.group_id, Operation.READ)
    response = OffsetCommitResponse()
    positions: list[OffsetCommit] = []
    accepted: list[OffsetCommitResponsePartition] = []
    for once in merge_topics(request.topics, "partitions", ("partition_index",), "name", "topic_id"):
        asked = once.topic
        topic, topic_error = None, error
        if error is ErrorCode.NONE:
            topic, topic_error = find_topic(call, asked.name, asked.topic_id, Operation.READ, _COMMIT_BY_ID)
        count = topic.partition_count if topic is not None else 0
        response_topic = OffsetCommitResponseTopic(name=asked.name, topic_id=asked.topic_id)
        for partition in once.partitions.values():
            code = topic_error if topic is None else _check_position(partition, count)
            offset = partition.committed_offset
            if code is ErrorCode.NONE and topic is not None and offset < 0:
                offset, code = _resolve_special_offset(topic, partition)
            answer = OffsetCommitResponsePartition(partition_index=partition.partition_index, error_code=code)
            response_topic.partitions.append(answer)
            if code is ErrorCode.NONE and topic is not None:
                accepted.append(answer)
                positions.append(
                    OffsetCommit(
                        topic.name, topic.id, partition.partition_index, offset,
                        partition.committed_leader_epoch, partition.committed_metadata or "",
                    )
                )  # fmt: skip
        response.topics.append(response_topic)
    appended = None
    if error is ErrorCode.NONE:
        error, appended = _commit(call, request, positions)
        for answer in accepted:
            answer.error_code = error
    if appended is None:
        return response
    pending = call.defer_response()

    def answer_now(problem: Exception | None) -> None:
        if problem is not None:
            for answer in accepted:
                answer.error_code = coordinator_code_of(problem)
        pending.complete(response)

    call.broker.ack_waiter.when_durable(*appended, answer_now)
    return pending


def _commit(
    call: RequestContext, request: OffsetCommitRequest, positions: list[OffsetCommit]
) -> tuple[ErrorCode, AppendedOffsets | None]:
    try:
        error, appended = call.broker.groups.commit_offsets(
            request.group_id, positions,
            member_id=request.member_id, generation=request.generation_id_or_member_epoch,
            instance_id=request.group_instance_id,
        )  # fmt: skip
        if error is ErrorCode.STALE_MEMBER_EPOCH and call.version < _COMMIT_STALE:
            error = ErrorCode.UNSUPPORTED_VERSION
        return error, appended
    except GroupUnavailable as unavailable:
        return unavailable.code, None
    except (SegmentlogError, OSError) as problem:
        return coordinator_code_of(problem), None


def _check_position(position: OffsetCommitRequestPartition, count: int) -> ErrorCode:
    if not 0 <= position.partition_index < count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if not is_metadata(position.committed_metadata or ""):
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return ErrorCode.NONE if position.committed_offset >= EARLIEST else ErrorCode.INVALID_COMMIT_OFFSET_SIZE


def _resolve_special_offset(topic: Topic, position: OffsetCommitRequestPartition) -> tuple[int, ErrorCode]:
    """Return (the offset that "earliest" or "latest" stands for now, error code).

    kafkajs commits these special offsets when its committed offset is out of range. Kafka stores and returns them. This
    server stores the offset that they stand for, because members of the library could not interpret them. It does not
    reject them, because kafkajs would then request the lost offset forever.
    """
    try:
        partition = topic.partition(position.partition_index)
        is_latest = position.committed_offset == LATEST
        return partition.log_end_offset if is_latest else partition.log_start_offset, ErrorCode.NONE
    except (SegmentlogError, OSError) as problem:
        return -1, code_of(problem)


def find_topic(
    call: RequestContext, name: str, topic_id: bytes, operation: Operation, by_id_from: int
) -> tuple[Topic | None, ErrorCode]:
    """Return (the topic, NONE) or (None, the error). From version ``by_id_from`` on, the request has the topic's id.

    A topic that the client may not describe gets the error of an unknown topic.
    """
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if call.version >= by_id_from:
        unknown = ErrorCode.UNKNOWN_TOPIC_ID
        name = (call.topic_by_id(topic_id) or ("", ""))[0]
        if not name or not call.may_see(Thing.TOPIC, name):
            return None, unknown
    if not call.allows_topic(operation, name):
        return None, ErrorCode.TOPIC_AUTHORIZATION_FAILED
    try:
        topic = call.broker.store.topic(name) if is_visible(name) else None
    except SegmentlogError:
        topic = None
    if topic is None or (call.version >= by_id_from and wire_id(topic.id) != topic_id):
        return None, unknown
    return topic, ErrorCode.NONE


# ---------------------------------------------------------------- fetching


def offset_fetch(call: RequestContext, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """Return committed offsets of one group, or from version 8 on of several groups."""
    if call.version >= _FETCH_MANY:
        once = call.each(_merge_groups(call.each(request.groups)))
        groups = [_fetch(call, group, is_stable=request.require_stable) for group in once]
        return OffsetFetchResponse(groups=groups)
    requested = OffsetFetchRequestGroup(group_id=request.group_id, topics=None)
    if request.topics is not None:
        requested.topics = [
            OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes)
            for topic in request.topics
        ]
    found = _fetch(call, requested, is_stable=request.require_stable)
    response = OffsetFetchResponse(error_code=found.error_code)
    for topic in found.topics:
        response_topic = OffsetFetchResponseTopic(name=topic.name)
        response_topic.partitions = [
            OffsetFetchResponsePartition(
                partition_index=one.partition_index, committed_offset=one.committed_offset,
                committed_leader_epoch=one.committed_leader_epoch, metadata=one.metadata, error_code=one.error_code,
            )
            for one in topic.partitions
        ]  # fmt: skip
        response.topics.append(response_topic)
    if found.error_code and call.version < _FETCH_TOP_ERROR:
        # Old versions have no field for an error of the group: return it for each partition.
        for asked in call.merged_topics(request.topics or (), "partition_indexes", (), "name"):
            response_topic = OffsetFetchResponseTopic(name=asked.topic.name)
            response_topic.partitions = [
                OffsetFetchResponsePartition(partition_index=number, committed_offset=-1, error_code=found.error_code)
                for number in asked.partitions
            ]
            response.topics.append(response_topic)
    return response


def _merge_groups(groups: Iterable[OffsetFetchRequestGroup]) -> Iterable[OffsetFetchRequestGroup]:
    """Merge the entries for the same group."""
    once: dict[str, OffsetFetchRequestGroup] = {}
    for one in groups:
        known = once.setdefault(one.group_id, one)
        if one.topics is None:
            known.topics = None
        elif known is not one and known.topics is not None:
            known.topics += one.topics
    return once.values()


def _fetch(call: RequestContext, requested: OffsetFetchRequestGroup, *, is_stable: bool) -> OffsetFetchResponseGroup:
    group = requested.group_id
    response = OffsetFetchResponseGroup(group_id=group)
    response.error_code = refusal(call, group, Operation.DESCRIBE) or _member_error(call, requested)
    if response.error_code:
        return response
    positions = call.broker.store.group_offsets
    try:
        # Read pending offsets before committed offsets. If a transaction is committed between the two reads, its
        # offsets are then among the committed offsets.
        pending = positions.pending_by_topic_id(group) if is_stable else set()
        known = positions.by_topic_id(group)
    except (SegmentlogError, OSError) as problem:
        response.error_code = code_of(problem)
        return response
    if requested.topics is None:
        names = call.broker.store.topic_names({partition_id.topic_id for partition_id in (*known, *pending)})
        numbers: dict[str, list[int]] = {}
        for partition_id in sorted({*known, *pending}):
            name = names.get(partition_id.topic_id, "")
            if is_visible(name) and name and call.may_see(Thing.TOPIC, name):
                numbers.setdefault(partition_id.topic_id, []).append(partition_id.partition)
        for topic_id, partitions in numbers.items():
            response_topic = OffsetFetchResponseTopics(name=names[topic_id], topic_id=wire_id(topic_id))
            response_topic.partitions = _partition_responses(
                call, names[topic_id], topic_id, partitions, known, pending
            )
            response.topics.append(response_topic)
        return response
    for once in call.merged_topics(requested.topics, "partition_indexes", (), "name", "topic_id"):
        asked = once.topic
        topic, error = find_topic(call, asked.name, asked.topic_id, Operation.DESCRIBE, _FETCH_BY_ID)
        response_topic = OffsetFetchResponseTopics(name=asked.name, topic_id=asked.topic_id)
        if topic is not None:
            response_topic.partitions = _partition_responses(
                call, topic.name, topic.id, once.partitions, known, pending
            )
        else:
            if error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                # As in Kafka: return "no committed offset". Java's consumer would fail permanently on an error.
                error = ErrorCode.NONE
            response_topic.partitions = [
                OffsetFetchResponsePartitions(partition_index=number, committed_offset=-1, error_code=error)
                for number in once.partitions
            ]
        response.topics.append(response_topic)
    return response


def _member_error(call: RequestContext, requested: OffsetFetchRequestGroup) -> ErrorCode:
    if not requested.member_id and requested.member_epoch < 0:
        return ErrorCode.NONE
    try:
        return call.broker.groups.may_fetch(requested.group_id, requested.member_id, requested.member_epoch)
    except GroupUnavailable as unavailable:
        return unavailable.code


def _partition_responses(
    call: RequestContext, topic: str, topic_id: str, partitions: Iterable[int],
    known: Mapping[PartitionId, CommittedOffset], pending: set[PartitionId],
) -> list[OffsetFetchResponsePartitions]:  # fmt: skip
    response_topic = []
    for number in call.each(partitions):
        partition_id = PartitionId(topic_id, number)
        answer = OffsetFetchResponsePartitions(partition_index=number, committed_offset=-1)
        found = known.get(partition_id)
        if partition_id in pending:
            answer.error_code = ErrorCode.UNSTABLE_OFFSET_COMMIT
            answer.committed_offset = _RETRY_OFFSET
        elif found is not None and not call.reserve_room(1, len(found.metadata)):
            answer.error_code = TOO_MUCH
        elif found is not None:
            offset, epoch = _after_lost_range(call, topic, topic_id, number, found)
            answer.committed_offset = offset
            answer.committed_leader_epoch = epoch if epoch < 0 else wire_epoch(epoch)
            answer.metadata = found.metadata
        response_topic.append(answer)
    return response_topic


def _after_lost_range(
    call: RequestContext, topic: str, topic_id: str, number: int, committed: CommittedOffset
) -> tuple[int, int]:
    """Return (committed offset, its epoch), moved to the end of a lost range if it is at the start of one.

    Kafka's tools compute lag as log end offset minus committed offset. A consumer commits the offset after its last
    record, and a lost range has no records. So the lag of a group that has read everything would remain at the length
    of a lost range at the end. The move skips no record. An offset inside a lost range is not moved: the client's fetch
    then reports the loss.
    """
    try:
        found = call.broker.store.topic(topic)
        # Does not open the partition: a tool may request all partitions of a group, and other workers may lead them.
        resumed = found.find_lost_range_end(number, committed.offset) if found.id == topic_id else None
    except (SegmentlogError, OSError):  # the fetch of the partition reports the error
        resumed = None
    # Return the epoch of the new offset: with the old epoch the client would detect a truncation (KIP-320).
    return resumed or (committed.offset, committed.epoch)


# ---------------------------------------------------------------- deleting


def offset_delete(call: RequestContext, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    """Delete committed offsets in topics to which no member of the group subscribes."""
    error = refusal(call, request.group_id, Operation.DELETE)
    if error is not ErrorCode.NONE:
        return OffsetDeleteResponse(error_code=error)
    response = OffsetDeleteResponse()
    accepted: list[tuple[TopicPartition, OffsetDeleteResponsePartition]] = []
    for once in call.merged_topics(request.topics, "partitions", ("partition_index",), "name"):
        asked = once.topic
        topic, error = find_topic(call, asked.name, b"", Operation.READ, call.version + 1)
        count = topic.partition_count if topic is not None else 0
        response_topic = OffsetDeleteResponseTopic(name=asked.name)
        for one in once.partitions.values():
            code = error
            if topic is not None and not 0 <= one.partition_index < count:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            answer = OffsetDeleteResponsePartition(partition_index=one.partition_index, error_code=code)
            response_topic.partitions.append(answer)
            if code is ErrorCode.NONE:
                accepted.append((TopicPartition(asked.name, one.partition_index), answer))
        response.topics.append(response_topic)
    try:
        codes = call.broker.groups.delete_offsets(request.group_id, [tp for tp, _ in accepted])
    except GroupUnavailable as unavailable:
        return OffsetDeleteResponse(error_code=unavailable.code)
    except (SegmentlogError, OSError) as problem:
        return OffsetDeleteResponse(error_code=code_of(problem))
    if isinstance(codes, ErrorCode):
        return OffsetDeleteResponse(error_code=codes)
    for tp, answer in accepted:
        answer.error_code = codes[tp]
    return response
