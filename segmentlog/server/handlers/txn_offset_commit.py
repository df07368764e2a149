"""TxnOffsetCommit (28): offsets that become committed when their transaction commits."""

from __future__ import annotations

from typing import Final

from segmentlog.errors import SegmentlogError
from segmentlog.groups.committed_offsets import is_metadata
from segmentlog.groups.server_groups import OffsetCommit
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.server.codec.generated.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import coordinator_code_of
from segmentlog.server.groups.cached_group import GroupUnavailable
from segmentlog.server.handlers.classic_group_handlers import refusal
from segmentlog.server.handlers.group_offsets import find_topic
from segmentlog.server.request_budget import merge_topics
from segmentlog.server.request_context import RequestContext
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch, WrongState

_ABORTABLE_FROM: Final = 4
_JOINS_FROM: Final = 5
_BY_ID: Final = 6
"""From this version on requests name topics by id, and clients know STALE_MEMBER_EPOCH and GROUP_ID_NOT_FOUND."""


def txn_offset_commit(call: RequestContext, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
    """Append pending offsets. The end of the transaction syncs them, and commits or discards them."""
    error = ErrorCode.NONE
    if not call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id):
        error = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    error = error or refusal(call, request.group_id, Operation.READ)
    response = TxnOffsetCommitResponse()
    positions: list[OffsetCommit] = []
    accepted: list[TxnOffsetCommitResponsePartition] = []
    for once in merge_topics(request.topics, "partitions", ("partition_index",), "name", "topic_id"):
        asked = once.topic
        topic, topic_error = None, error
        if error is ErrorCode.NONE:
            topic, topic_error = find_topic(call, asked.name, asked.topic_id, Operation.READ, _BY_ID)
        count = topic.partition_count if topic is not None else 0
        response_topic = TxnOffsetCommitResponseTopic(asked.name, asked.topic_id)
        for one in once.partitions.values():
            code = topic_error if topic is None else _check_position(one, count)
            answer = TxnOffsetCommitResponsePartition(one.partition_index, code)
            response_topic.partitions.append(answer)
            if topic is not None and code is ErrorCode.NONE:
                accepted.append(answer)
                positions.append(
                    OffsetCommit(
                        topic.name, topic.id, one.partition_index, one.committed_offset, one.committed_leader_epoch,
                        one.committed_metadata or "",
                    )
                )  # fmt: skip
        response.topics.append(response_topic)
    if positions:
        code = _commit(call, request, positions)
        for answer in accepted:
            answer.error_code = code
    return response


def _commit(call: RequestContext, request: TxnOffsetCommitRequest, positions: list[OffsetCommit]) -> ErrorCode:
    name, numbers = request.transactional_id, ProducerIdAndEpoch(request.producer_id, request.producer_epoch)
    remote = call.broker.store.transactions.server_transactions
    try:
        log = call.broker.store.group_offsets.open_or_create_log()
        if call.version >= _JOINS_FROM:
            remote.add_partitions(name, numbers, [log])
        guard = remote.append_check(name, numbers, log)
        guard()
        stamp = ProducerStamp(*numbers, sequence=-1, transactional=True, check=guard)
        code = call.broker.groups.commit_offsets(
            request.group_id, positions,
            member_id=request.member_id, generation=request.generation_id_or_member_epoch,
            instance_id=request.group_instance_id, stamp=stamp,
        )[0]  # fmt: skip
        return _in_version(call, request.group_id, code)
    except GroupUnavailable as unavailable:
        return unavailable.code
    except WrongState as problem:
        return ErrorCode.TRANSACTION_ABORTABLE if call.version >= _ABORTABLE_FROM else coordinator_code_of(problem)
    except (SegmentlogError, OSError) as problem:
        return coordinator_code_of(problem)


def _in_version(call: RequestContext, group: str, code: ErrorCode) -> ErrorCode:
    """Return the error code, or a similar one if clients of the request's version do not have it."""
    if call.version < _BY_ID:
        # Older clients treat an unknown code as fatal for the producer.
        return ErrorCode.ILLEGAL_GENERATION if code is ErrorCode.STALE_MEMBER_EPOCH else code
    if code is ErrorCode.UNKNOWN_MEMBER_ID and not call.broker.store.groups.exists(group):
        return ErrorCode.GROUP_ID_NOT_FOUND
    return code


def _check_position(position: TxnOffsetCommitRequestPartition, count: int) -> ErrorCode:
    if not 0 <= position.partition_index < count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if not is_metadata(position.committed_metadata or ""):
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return ErrorCode.NONE if position.committed_offset >= 0 else ErrorCode.INVALID_COMMIT_OFFSET_SIZE
