"""ListOffsets (2): where a partition begins and ends, and which record is the first from a time on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from segmentlog.errors import SegmentlogError
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of
from segmentlog.server.partition_fetch import Bounds
from segmentlog.server.request_context import Call
from segmentlog.server.topic_ids import is_visible, wire_epoch

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Partition
    from segmentlog.server.fair_slots import Turn

LATEST: Final = -1
EARLIEST: Final = -2
_MAX_TIMESTAMP: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
_EARLIEST_PENDING: Final = -6
_COMMITTED: Final = 1
_EPOCHS_FROM: Final = 4
"""Versions that tell epochs."""


def list_offsets(call: Call, request: ListOffsetsRequest) -> ListOffsetsResponse:
    """An offset for each partition, or why there is none."""
    response = ListOffsetsResponse()
    for asked in call.topics_once(request.topics, "partitions", ("partition_index",), "name"):
        name, answers = asked.topic.name, []
        for number, wanted in call.each(asked.partitions.items()):
            if number in asked.unclear:  # as in Kafka: each time that is asked for may decompress a batch
                answers.append(ListOffsetsPartitionResponse(number, ErrorCode.INVALID_REQUEST))
            else:
                answers.append(_one(call, request, name, wanted))
        response.topics.append(ListOffsetsTopicResponse(name, answers))
    return response


def _one(
    call: Call, request: ListOffsetsRequest, name: str, wanted: ListOffsetsPartition
) -> ListOffsetsPartitionResponse:
    broker = call.broker
    answer = ListOffsetsPartitionResponse(partition_index=wanted.partition_index)
    if not call.may_see(Thing.TOPIC, name):
        answer.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return answer
    if not is_visible(name):
        answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return answer
    try:
        partition = broker.partition(name, wanted.partition_index)
        epoch = wire_epoch(partition.epoch)
        if not broker.cluster.leads(partition.topic_id, partition.number):
            answer.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif 0 <= wanted.current_leader_epoch != epoch:
            is_old = wanted.current_leader_epoch < epoch
            answer.error_code = ErrorCode.FENCED_LEADER_EPOCH if is_old else ErrorCode.UNKNOWN_LEADER_EPOCH
        else:
            bounds = Bounds(
                partition,
                is_committed=request.isolation_level == _COMMITTED,
                durable_only=broker.settings.durable_reads,
            )
            unpacks = wanted.timestamp >= 0 or wanted.timestamp == _MAX_TIMESTAMP
            with call.unpacking() if unpacks else nullcontext() as turn:
                _look(call, turn, partition, bounds, wanted.timestamp, answer)
    except (SegmentlogError, OSError) as error:
        answer.error_code = code_of(error)
    if call.version < _EPOCHS_FROM:
        answer.leader_epoch = -1
    return answer


def _look(
    call: Call, turn: Turn | None, partition: Partition, bounds: Bounds, timestamp: int,
    answer: ListOffsetsPartitionResponse,
) -> None:  # fmt: skip
    if timestamp == LATEST:
        answer.offset, answer.leader_epoch = bounds.end, wire_epoch(partition.epoch)
    elif timestamp == EARLIEST:
        answer.offset = bounds.log_start
        answer.leader_epoch = epoch_at(partition, bounds.log_start)
    elif timestamp == _EARLIEST_LOCAL:
        answer.offset = max(partition.local_log_start_offset, bounds.log_start)
        answer.leader_epoch = epoch_at(partition, answer.offset)
    elif timestamp == _LATEST_TIERED:
        answer.leader_epoch = -1  # and no offset, where nothing is there
        last = partition.tiered_offset - 1
        if last >= bounds.log_start:
            answer.offset, answer.leader_epoch = last, epoch_at(partition, last)
    elif timestamp == _EARLIEST_PENDING:
        answer.leader_epoch = -1
        behind = partition.tiered_offset
        if partition.config.remote_storage_enable:
            answer.offset = max(behind, bounds.log_start)
            answer.leader_epoch = epoch_at(partition, answer.offset)
    elif timestamp == _MAX_TIMESTAMP:
        largest = max((segment.max_timestamp for segment in partition.segments()), default=-1)
        if largest >= 0:
            _look_for_time(partition, bounds, largest, answer)
            if answer.offset < 0 and turn is not None:
                _look_for_largest(call, turn, partition, bounds, answer)
    elif timestamp >= 0:
        _look_for_time(partition, bounds, timestamp, answer)
    else:
        answer.error_code = ErrorCode.UNSUPPORTED_VERSION


def _look_for_time(partition: Partition, bounds: Bounds, timestamp: int, answer: ListOffsetsPartitionResponse) -> None:
    offset = partition.offset_for_timestamp(timestamp)
    if offset is None or offset >= bounds.end:
        return
    for batch in partition.read(offset, 1):
        _tell(batch, 0, answer)
        return


def _look_for_largest(
    call: Call, turn: Turn, partition: Partition, bounds: Bounds, answer: ListOffsetsPartitionResponse
) -> None:
    """The record with the largest timestamp, where that of a segment is none of a record's that may be seen.

    It is a marker's where the last thing was the end of a transaction; or of what was trimmed, or is not decided yet.
    """
    for segment in sorted(partition.segments(), key=lambda one: one.max_timestamp, reverse=True):
        if segment.max_timestamp <= answer.timestamp:
            return
        begin, end = max(segment.base_offset, bounds.log_start), min(segment.end_offset, bounds.end)
        found = call.each(_batches(turn, partition, begin, end))
        likely = max(found, key=lambda batch: batch.header.max_timestamp, default=None)
        if likely is None:
            continue
        if int(likely.timestamps.max()) == likely.header.max_timestamp:
            batches: Iterable[RecordBatch] = (likely,)
        else:  # of a batch that is not whole any more the header says too much
            batches = _batches(turn, partition, begin, end)
        for batch in call.each(batches):
            at = int(batch.timestamps.argmax())
            if int(batch.timestamps[at]) > answer.timestamp:
                _tell(batch, at, answer)


def _batches(turn: Turn, partition: Partition, begin: int, end: int) -> Iterator[RecordBatch]:
    """Those with records in ``[begin, end)``. Others that unpack have their turn between two of them."""
    for batch in partition.read(begin) if begin < end else ():
        turn.pass_on()
        if batch.header.base_offset >= end:
            return
        if len(batch):
            yield batch


def _tell(batch: RecordBatch, at: int, answer: ListOffsetsPartitionResponse) -> None:
    answer.offset = int(batch.offsets[at])
    answer.timestamp = int(batch.timestamps[at])
    answer.leader_epoch = wire_epoch(batch.epoch)


def epoch_at(partition: Partition, offset: int) -> int:
    """The epoch that an offset belongs to."""
    found = 0
    for start in partition.epochs():
        if start.start_offset > offset:
            break
        found = start.epoch
    return wire_epoch(found)
