"""ListOffsets (2): the first and last offset of a partition, and the first record at or after a timestamp."""

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
from segmentlog.server.request_context import RequestContext
from segmentlog.server.topic_ids import is_visible, wire_epoch

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Partition
    from segmentlog.server.fair_slots import HeldSlot

LATEST: Final = -1
EARLIEST: Final = -2
_MAX_TIMESTAMP: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
_EARLIEST_PENDING: Final = -6
_COMMITTED: Final = 1
_EPOCHS_FROM: Final = 4
"""First version whose response contains leader epochs."""


def list_offsets(call: RequestContext, request: ListOffsetsRequest) -> ListOffsetsResponse:
    """Return an offset, or an error, for each partition."""
    response = ListOffsetsResponse()
    for asked in call.merged_topics(request.topics, "partitions", ("partition_index",), "name"):
        name, answers = asked.topic.name, []
        for number, requested in call.each(asked.partitions.items()):
            if number in asked.unclear:  # as in Kafka; also, each timestamp may decompress a batch
                answers.append(ListOffsetsPartitionResponse(number, ErrorCode.INVALID_REQUEST))
            else:
                answers.append(_list_offset(call, request, name, requested))
        response.topics.append(ListOffsetsTopicResponse(name, answers))
    return response


def _list_offset(
    call: RequestContext, request: ListOffsetsRequest, name: str, requested: ListOffsetsPartition
) -> ListOffsetsPartitionResponse:
    broker = call.broker
    answer = ListOffsetsPartitionResponse(partition_index=requested.partition_index)
    if not call.may_see(Thing.TOPIC, name):
        answer.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return answer
    if not is_visible(name):
        answer.error_code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return answer
    try:
        partition = broker.partition(name, requested.partition_index)
        epoch = wire_epoch(partition.epoch)
        if not broker.cluster.leads(partition.topic_id, partition.number):
            answer.error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        elif 0 <= requested.current_leader_epoch != epoch:
            is_old = requested.current_leader_epoch < epoch
            answer.error_code = ErrorCode.FENCED_LEADER_EPOCH if is_old else ErrorCode.UNKNOWN_LEADER_EPOCH
        else:
            bounds = Bounds(
                partition,
                is_committed=request.isolation_level == _COMMITTED,
                durable_only=broker.settings.durable_reads,
            )
            unpacks = requested.timestamp >= 0 or requested.timestamp == _MAX_TIMESTAMP
            with call.decompression_slot() if unpacks else nullcontext() as slot:
                _find_offset(call, slot, partition, bounds, requested.timestamp, answer)
    except (SegmentlogError, OSError) as error:
        answer.error_code = code_of(error)
    if call.version < _EPOCHS_FROM:
        answer.leader_epoch = -1
    return answer


def _find_offset(
    call: RequestContext, slot: HeldSlot | None, partition: Partition, bounds: Bounds, timestamp: int,
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
        answer.leader_epoch = -1  # remains -1, without an offset, if no segment is tiered
        last = partition.tiered_offset - 1
        if last >= bounds.log_start:
            answer.offset, answer.leader_epoch = last, epoch_at(partition, last)
    elif timestamp == _EARLIEST_PENDING:
        answer.leader_epoch = -1
        tiered_end = partition.tiered_offset
        if partition.config.remote_storage_enable:
            answer.offset = max(tiered_end, bounds.log_start)
            answer.leader_epoch = epoch_at(partition, answer.offset)
    elif timestamp == _MAX_TIMESTAMP:
        largest = max((segment.max_timestamp for segment in partition.segments()), default=-1)
        if largest >= 0:
            _find_by_time(partition, bounds, largest, answer)
            if answer.offset < 0 and slot is not None:
                _find_largest_timestamp(call, slot, partition, bounds, answer)
    elif timestamp >= 0:
        _find_by_time(partition, bounds, timestamp, answer)
    else:
        answer.error_code = ErrorCode.UNSUPPORTED_VERSION


def _find_by_time(partition: Partition, bounds: Bounds, timestamp: int, answer: ListOffsetsPartitionResponse) -> None:
    offset = partition.offset_for_timestamp(timestamp)
    if offset is None or offset >= bounds.end:
        return
    for batch in partition.read(offset, 1):
        _fill_from_record(batch, 0, answer)
        return


def _find_largest_timestamp(
    call: RequestContext, slot: HeldSlot, partition: Partition, bounds: Bounds, answer: ListOffsetsPartitionResponse
) -> None:
    """Find the record with the largest timestamp by reading batches.

    This is necessary if a segment's largest timestamp belongs to a transaction marker, or to a record that was trimmed
    or is not committed yet.
    """
    for segment in sorted(partition.segments(), key=lambda one: one.max_timestamp, reverse=True):
        if segment.max_timestamp <= answer.timestamp:
            return
        start, end = max(segment.base_offset, bounds.log_start), min(segment.end_offset, bounds.end)
        found = call.each(_batches(slot, partition, start, end))
        likely = max(found, key=lambda batch: batch.header.max_timestamp, default=None)
        if likely is None:
            continue
        if int(likely.timestamps.max()) == likely.header.max_timestamp:
            batches: Iterable[RecordBatch] = (likely,)
        else:  # the header's timestamp may belong to a record that was removed from the batch
            batches = _batches(slot, partition, start, end)
        for batch in call.each(batches):
            at = int(batch.timestamps.argmax())
            if int(batch.timestamps[at]) > answer.timestamp:
                _fill_from_record(batch, at, answer)


def _batches(slot: HeldSlot, partition: Partition, start: int, end: int) -> Iterator[RecordBatch]:
    """Yield the batches with records in ``[start, end)``. Other requests may use the slot between two batches."""
    for batch in partition.read(start) if start < end else ():
        slot.yield_slot()
        if batch.header.base_offset >= end:
            return
        if len(batch):
            yield batch


def _fill_from_record(batch: RecordBatch, at: int, answer: ListOffsetsPartitionResponse) -> None:
    answer.offset = int(batch.offsets[at])
    answer.timestamp = int(batch.timestamps[at])
    answer.leader_epoch = wire_epoch(batch.epoch)


def epoch_at(partition: Partition, offset: int) -> int:
    """Return the leader epoch of an offset."""
    found = 0
    for start in partition.epochs():
        if start.start_offset > offset:
            break
        found = start.epoch
    return wire_epoch(found)
