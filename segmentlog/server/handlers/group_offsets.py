"""OffsetCommit, OffsetFetch, OffsetDelete: positions of groups, where members of the library have theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from segmentlog.errors import SegmentlogError
from segmentlog.groups.committed_offsets import CommittedOffset, is_metadata
from segmentlog.groups.server_groups import NewPosition
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
from segmentlog.server.error_codes import code_of
from segmentlog.server.groups.cached_group import Unavailable
from segmentlog.server.groups.coordinator import Appended
from segmentlog.server.handlers.classic_group_handlers import refusal
from segmentlog.server.handlers.list_offsets import EARLIEST, LATEST
from segmentlog.server.request_budget import topics_once
from segmentlog.server.request_context import TOO_MUCH, Call, PendingAnswer
from segmentlog.server.topic_ids import is_visible, wire_epoch, wire_id

if TYPE_CHECKING:
    from segmentlog.topics.topic_registry import Topic

_COMMIT_BY_ID: Final = 10
_COMMIT_STALE: Final = 9
"""From here on clients know of member epochs."""
_FETCH_BY_ID: Final = 10
_FETCH_MANY: Final = 8
_FETCH_TOP_ERROR: Final = 2
_ASK_AGAIN: Final = -1000
"""Beside an error clients do not look at the offset. librdkafka (2.15) does, when its assignment has changed while it
waited for a decision: at -1, which Kafka has there, it begins by `auto.offset.reset`, and so does again what was done
exactly once. This is its own word (RD_KAFKA_OFFSET_STORED) for what is to be asked for."""


def offset_commit(call: Call, request: OffsetCommitRequest) -> OffsetCommitResponse | PendingAnswer:
    """Answered once the positions are on disk, or shipped; what else comes on the connection is seen to meanwhile."""
    error = refusal(call, request.group_id, Operation.READ)
    response = OffsetCommitResponse()
    positions: list[NewPosition] = []
    accepted: list[OffsetCommitResponsePartition] = []
    for once in topics_once(request.topics, "partitions", ("partition_index",), "name", "topic_id"):
        asked = once.topic
        topic, topic_error = None, error
        if error is ErrorCode.NONE:
            topic, topic_error = find_topic(call, asked.name, asked.topic_id, Operation.READ, _COMMIT_BY_ID)
        count = topic.partition_count if topic is not None else 0
        told = OffsetCommitResponseTopic(name=asked.name, topic_id=asked.topic_id)
        for partition in once.partitions.values():
            code = topic_error if topic is None else _check_position(partition, count)
            offset = partition.committed_offset
            if code is ErrorCode.NONE and topic is not None and offset < 0:
                offset, code = _look_up(topic, partition)
            answer = OffsetCommitResponsePartition(partition_index=partition.partition_index, error_code=code)
            told.partitions.append(answer)
            if code is ErrorCode.NONE and topic is not None:
                accepted.append(answer)
                positions.append(
                    NewPosition(
                        topic.name, topic.id, partition.partition_index, offset,
                        partition.committed_leader_epoch, partition.committed_metadata or "",
                    )
                )  # fmt: skip
        response.topics.append(told)
    appended = None
    if error is ErrorCode.NONE:
        error, appended = _commit(call, request, positions)
        for answer in accepted:
            answer.error_code = error
    if appended is None:
        return response
    pending = call.answer_later()

    def answer_now(problem: Exception | None) -> None:
        if problem is not None:
            for answer in accepted:
                answer.error_code = code_of(problem)
        pending.complete(response)

    call.broker.acknowledgement.when_durable(*appended, answer_now)
    return pending


def _commit(
    call: Call, request: OffsetCommitRequest, positions: list[NewPosition]
) -> tuple[ErrorCode, Appended | None]:
    try:
        error, appended = call.broker.groups.commit(
            request.group_id, positions,
            member_id=request.member_id, generation=request.generation_id_or_member_epoch,
            instance_id=request.group_instance_id,
        )  # fmt: skip
        if error is ErrorCode.STALE_MEMBER_EPOCH and call.version < _COMMIT_STALE:
            error = ErrorCode.UNSUPPORTED_VERSION
        return error, appended
    except Unavailable as unavailable:
        return unavailable.code, None
    except (SegmentlogError, OSError) as problem:
        return code_of(problem), None


def _check_position(position: OffsetCommitRequestPartition, count: int) -> ErrorCode:
    if not 0 <= position.partition_index < count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if not is_metadata(position.committed_metadata or ""):
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return ErrorCode.NONE if position.committed_offset >= EARLIEST else ErrorCode.INVALID_COMMIT_OFFSET_SIZE


def _look_up(topic: Topic, position: OffsetCommitRequestPartition) -> tuple[int, ErrorCode]:
    """What an offset stands for that is none: kafkajs commits "earliest" or "latest" where its position is gone.

    Kafka keeps the number and gives it back. A member of the library, which may come after it, would not know what it
    means; and refused, kafkajs asks for the position that is gone for ever.
    """
    try:
        partition = topic.partition(position.partition_index)
        is_latest = position.committed_offset == LATEST
        return partition.log_end_offset if is_latest else partition.log_start_offset, ErrorCode.NONE
    except (SegmentlogError, OSError) as problem:
        return -1, code_of(problem)


def find_topic(
    call: Call, name: str, topic_id: bytes, operation: Operation, by_id_from: int
) -> tuple[Topic | None, ErrorCode]:
    """Return (the topic, NONE), or (None, the reason): by id from version ``by_id_from`` on, before that by name.

    A topic that the client may not describe gets the same answer as one that does not exist.
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


def offset_fetch(call: Call, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """Positions of a group, or from version 8 on of several."""
    if call.version >= _FETCH_MANY:
        once = call.each(_groups_once(call.each(request.groups)))
        groups = [_fetch(call, group, is_stable=request.require_stable) for group in once]
        return OffsetFetchResponse(groups=groups)
    wanted = OffsetFetchRequestGroup(group_id=request.group_id, topics=None)
    if request.topics is not None:
        wanted.topics = [
            OffsetFetchRequestTopics(name=topic.name, partition_indexes=topic.partition_indexes)
            for topic in request.topics
        ]
    found = _fetch(call, wanted, is_stable=request.require_stable)
    response = OffsetFetchResponse(error_code=found.error_code)
    for topic in found.topics:
        told = OffsetFetchResponseTopic(name=topic.name)
        told.partitions = [
            OffsetFetchResponsePartition(
                partition_index=one.partition_index, committed_offset=one.committed_offset,
                committed_leader_epoch=one.committed_leader_epoch, metadata=one.metadata, error_code=one.error_code,
            )
            for one in topic.partitions
        ]  # fmt: skip
        response.topics.append(told)
    if found.error_code and call.version < _FETCH_TOP_ERROR:
        # There was no other place for it.
        for asked in call.topics_once(request.topics or (), "partition_indexes", (), "name"):
            told = OffsetFetchResponseTopic(name=asked.topic.name)
            told.partitions = [
                OffsetFetchResponsePartition(partition_index=number, committed_offset=-1, error_code=found.error_code)
                for number in asked.partitions
            ]
            response.topics.append(told)
    return response


def _groups_once(groups: Iterable[OffsetFetchRequestGroup]) -> Iterable[OffsetFetchRequestGroup]:
    """Each once, with what is asked about it anywhere."""
    once: dict[str, OffsetFetchRequestGroup] = {}
    for one in groups:
        known = once.setdefault(one.group_id, one)
        if one.topics is None:
            known.topics = None
        elif known is not one and known.topics is not None:
            known.topics += one.topics
    return once.values()


def _fetch(call: Call, wanted: OffsetFetchRequestGroup, *, is_stable: bool) -> OffsetFetchResponseGroup:
    group = wanted.group_id
    response = OffsetFetchResponseGroup(group_id=group)
    response.error_code = refusal(call, group, Operation.DESCRIBE) or _refusal_of_member(call, wanted)
    if response.error_code:
        return response
    positions = call.broker.store.group_offsets
    try:
        # Before the positions: one that is decided in between is found among them.
        pending = positions.undecided(group) if is_stable else set()
        known = positions.positions(group)
    except (SegmentlogError, OSError) as problem:
        response.error_code = code_of(problem)
        return response
    if wanted.topics is None:
        names = call.broker.store.topic_names({where.topic_id for where in (*known, *pending)})
        numbers: dict[str, list[int]] = {}
        for where in sorted({*known, *pending}):
            name = names.get(where.topic_id, "")
            if is_visible(name) and name and call.may_see(Thing.TOPIC, name):
                numbers.setdefault(where.topic_id, []).append(where.partition)
        for topic_id, partitions in numbers.items():
            told = OffsetFetchResponseTopics(name=names[topic_id], topic_id=wire_id(topic_id))
            told.partitions = _tell(call, names[topic_id], topic_id, partitions, known, pending)
            response.topics.append(told)
        return response
    for once in call.topics_once(wanted.topics, "partition_indexes", (), "name", "topic_id"):
        asked = once.topic
        topic, error = find_topic(call, asked.name, asked.topic_id, Operation.DESCRIBE, _FETCH_BY_ID)
        told = OffsetFetchResponseTopics(name=asked.name, topic_id=asked.topic_id)
        if topic is not None:
            told.partitions = _tell(call, topic.name, topic.id, once.partitions, known, pending)
        else:
            if error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                # As in Kafka, which does not look: that there is no position. Java's consumer fails for good otherwise.
                error = ErrorCode.NONE
            told.partitions = [
                OffsetFetchResponsePartitions(partition_index=number, committed_offset=-1, error_code=error)
                for number in once.partitions
            ]
        response.topics.append(told)
    return response


def _refusal_of_member(call: Call, wanted: OffsetFetchRequestGroup) -> ErrorCode:
    if not wanted.member_id and wanted.member_epoch < 0:
        return ErrorCode.NONE
    try:
        return call.broker.groups.may_fetch(wanted.group_id, wanted.member_id, wanted.member_epoch)
    except Unavailable as unavailable:
        return unavailable.code


def _tell(
    call: Call, topic: str, topic_id: str, partitions: Iterable[int], known: Mapping[PartitionId, CommittedOffset],
    pending: set[PartitionId],
) -> list[OffsetFetchResponsePartitions]:  # fmt: skip
    told = []
    for number in call.each(partitions):
        where = PartitionId(topic_id, number)
        answer = OffsetFetchResponsePartitions(partition_index=number, committed_offset=-1)
        found = known.get(where)
        if where in pending:
            answer.error_code = ErrorCode.UNSTABLE_OFFSET_COMMIT
            answer.committed_offset = _ASK_AGAIN
        elif found is not None and not call.takes_room(1, len(found.metadata)):
            answer.error_code = TOO_MUCH
        elif found is not None:
            offset, epoch = _after_lost_range(call, topic, topic_id, number, found)
            answer.committed_offset = offset
            answer.committed_leader_epoch = epoch if epoch < 0 else wire_epoch(epoch)
            answer.metadata = found.metadata
        told.append(answer)
    return told


def _after_lost_range(
    call: Call, topic: str, topic_id: str, number: int, committed: CommittedOffset
) -> tuple[int, int]:
    """(the committed offset, its epoch), moved to the end of a lost range that starts at the committed offset.

    Kafka's tools compute a lag as log end offset - committed offset. A client commits after a record, and a lost range
    has none, so the lag of a group that has read everything would stay at the length of the range. No record lies
    between the two offsets. An offset inside a lost range stays, so that the client's fetch reports the loss.
    """
    try:
        found = call.broker.store.topic(topic)
        # No partition is opened: a tool may ask for all of a group's, and other workers may lead them.
        resumed = found.find_lost_range_end(number, committed.offset) if found.id == topic_id else None
    except (SegmentlogError, OSError):  # the fetch of the partition reports the error
        resumed = None
    # The epoch of that offset: with the earlier one the client would take the move for a truncation (KIP-320).
    return resumed or (committed.offset, committed.epoch)


# ---------------------------------------------------------------- deleting


def offset_delete(call: Call, request: OffsetDeleteRequest) -> OffsetDeleteResponse:
    """Forget positions in topics that no member of the group subscribes to."""
    error = refusal(call, request.group_id, Operation.DELETE)
    if error is not ErrorCode.NONE:
        return OffsetDeleteResponse(error_code=error)
    response = OffsetDeleteResponse()
    accepted: list[tuple[TopicPartition, OffsetDeleteResponsePartition]] = []
    for once in call.topics_once(request.topics, "partitions", ("partition_index",), "name"):
        asked = once.topic
        topic, error = find_topic(call, asked.name, b"", Operation.READ, call.version + 1)
        count = topic.partition_count if topic is not None else 0
        told = OffsetDeleteResponseTopic(name=asked.name)
        for one in once.partitions.values():
            code = error
            if topic is not None and not 0 <= one.partition_index < count:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            answer = OffsetDeleteResponsePartition(partition_index=one.partition_index, error_code=code)
            told.partitions.append(answer)
            if code is ErrorCode.NONE:
                accepted.append((TopicPartition(asked.name, one.partition_index), answer))
        response.topics.append(told)
    try:
        codes = call.broker.groups.forget(request.group_id, [tp for tp, _ in accepted])
    except Unavailable as unavailable:
        return OffsetDeleteResponse(error_code=unavailable.code)
    except (SegmentlogError, OSError) as problem:
        return OffsetDeleteResponse(error_code=code_of(problem))
    if isinstance(codes, ErrorCode):
        return OffsetDeleteResponse(error_code=codes)
    for tp, answer in accepted:
        answer.error_code = codes[tp]
    return response
