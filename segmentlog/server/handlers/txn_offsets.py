"""TxnOffsetCommit (28): positions of a group that count once the transaction is committed that they are part of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from segmentlog.errors import SegmentlogError
from segmentlog.groups.coordinating import NewPosition
from segmentlog.groups.positions import is_metadata
from segmentlog.log.producers import ProducerStamp
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.server.budget import topics_once
from segmentlog.server.call import Call
from segmentlog.server.codec.errors import ErrorCode
from segmentlog.server.codec.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from segmentlog.server.faults import code_of
from segmentlog.server.groups.entries import Unavailable
from segmentlog.server.handlers.groups import refusal
from segmentlog.server.names import is_visible
from segmentlog.transactions.remote import Numbers, WrongState

if TYPE_CHECKING:
    from segmentlog.topics.topics import Topic

_ABORTABLE_FROM: Final = 4
_JOINS_FROM: Final = 5


def txn_offset_commit(call: Call, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
    """Write positions that are pending; the end of the transaction puts them on disk, and decides about them."""
    error = ErrorCode.NONE
    if not call.allows(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id):
        error = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    error = error or refusal(call, request.group_id, Operation.READ)
    response = TxnOffsetCommitResponse()
    positions: list[NewPosition] = []
    accepted: list[TxnOffsetCommitResponsePartition] = []
    for once in topics_once(request.topics, "partitions", ("partition_index",), "name"):
        asked = once.topic
        topic, topic_error = (None, error) if error else _find_topic(call, asked.name)
        count = topic.partition_count if topic is not None else 0
        told = TxnOffsetCommitResponseTopic(asked.name)
        for one in once.partitions.values():
            code = topic_error if topic is None else _check_position(one, count)
            answer = TxnOffsetCommitResponsePartition(one.partition_index, code)
            told.partitions.append(answer)
            if topic is not None and code is ErrorCode.NONE:
                accepted.append(answer)
                positions.append(
                    NewPosition(
                        topic.name, topic.id, one.partition_index, one.committed_offset, one.committed_leader_epoch,
                        one.committed_metadata or "",
                    )
                )  # fmt: skip
        response.topics.append(told)
    if positions:
        code = _commit(call, request, positions)
        for answer in accepted:
            answer.error_code = code
    return response


def _commit(call: Call, request: TxnOffsetCommitRequest, positions: list[NewPosition]) -> ErrorCode:
    name, numbers = request.transactional_id, Numbers(request.producer_id, request.producer_epoch)
    remote = call.broker.store.transactions.remote
    try:
        log = call.broker.store.group_offsets.make_log()
        if call.version >= _JOINS_FROM:
            remote.add(name, numbers, [log])
        guard = remote.guard(name, numbers, log)
        guard()
        stamp = ProducerStamp(*numbers, sequence=-1, transactional=True, check=guard)
        return call.broker.groups.commit(
            request.group_id, positions,
            member_id=request.member_id, generation=request.generation_id, instance_id=request.group_instance_id,
            stamp=stamp,
        )[0]  # fmt: skip
    except Unavailable as unavailable:
        return unavailable.code
    except WrongState as problem:
        return ErrorCode.TRANSACTION_ABORTABLE if call.version >= _ABORTABLE_FROM else code_of(problem)
    except (SegmentlogError, OSError) as problem:
        return code_of(problem)


def _find_topic(call: Call, name: str) -> tuple[Topic | None, ErrorCode]:
    if not call.allows_topic(Operation.READ, name):
        return None, ErrorCode.TOPIC_AUTHORIZATION_FAILED
    try:
        if is_visible(name):
            return call.broker.store.topic(name), ErrorCode.NONE
    except SegmentlogError:
        pass
    return None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _check_position(position: TxnOffsetCommitRequestPartition, count: int) -> ErrorCode:
    if not 0 <= position.partition_index < count:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    if not is_metadata(position.committed_metadata or ""):
        return ErrorCode.OFFSET_METADATA_TOO_LARGE
    return ErrorCode.NONE if position.committed_offset >= 0 else ErrorCode.INVALID_COMMIT_OFFSET_SIZE
