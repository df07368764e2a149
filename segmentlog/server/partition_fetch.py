"""Read one partition for a fetch: batches in Kafka's format, up to the last offset that the client may see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from segmentlog.errors import CorruptBatch
from segmentlog.format.wire_encode import empty_wire_batch
from segmentlog.policy.lost_ranges import skip_lost_ranges
from segmentlog.server.codec.generated.fetch import (
    AbortedTransaction,
    EpochEndOffset,
    LeaderIdAndEpoch,
    PartitionData,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.converted_batch_cache import ConvertedBatchCache
from segmentlog.server.epoch_ends import end_of_epoch
from segmentlog.server.fetch_sessions import SessionPartition
from segmentlog.server.topic_ids import wire_epoch
from segmentlog.server.transport import Buffer

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

_DELTA_MAX: Final = 2**31 - 1
_FILLED_MAX: Final = 1024
"""Maximum number of empty batches in a response; they cover more than 2^41 offsets."""


class Bounds:
    """The offsets of a partition that a fetch may return now."""

    __slots__ = ("high_watermark", "is_committed", "last_stable", "log_start")

    def __init__(self, partition: Partition, *, is_committed: bool, durable_only: bool) -> None:
        log = partition.handle.page.log.read()
        end = min(log.log_end_offset, partition.durable_offset) if durable_only else log.log_end_offset
        self.high_watermark = end
        self.last_stable = min(log.last_stable_offset, end)
        self.log_start = log.log_start_offset
        self.is_committed = is_committed

    @property
    def end(self) -> int:
        """Offset after the last record that the fetch may return."""
        return self.last_stable if self.is_committed else self.high_watermark

    def empty_response(self, index: int, code: ErrorCode = ErrorCode.NONE) -> PartitionData:
        """Return a response without records."""
        return PartitionData(
            partition_index=index,
            error_code=int(code),
            high_watermark=self.high_watermark,
            last_stable_offset=self.last_stable,
            log_start_offset=self.log_start,
            aborted_transactions=[] if self.is_committed else None,
            records=b"",  # librdkafka treats null as a malformed response
        )


def fetch_error(
    partition: Partition, bounds: Bounds, requested: SessionPartition, node_id: int | None
) -> PartitionData | None:
    """Return the error response to a fetch with a wrong leader epoch or a diverging log; None if the fetch is valid.

    ``node_id`` is the node id of the leader; None in versions whose response has no field for it.
    """
    epoch = wire_epoch(partition.epoch)
    if requested.leader_epoch >= 0 and requested.leader_epoch != epoch:
        is_old = requested.leader_epoch < epoch
        answer = bounds.empty_response(
            requested.partition, ErrorCode.FENCED_LEADER_EPOCH if is_old else ErrorCode.UNKNOWN_LEADER_EPOCH
        )
        if node_id is not None:
            answer.current_leader = LeaderIdAndEpoch(node_id, epoch)
        return answer
    if requested.last_fetched_epoch >= 0:
        found, end = end_of_epoch(partition, requested.last_fetched_epoch)
        if found < 0:
            return bounds.empty_response(requested.partition, ErrorCode.OFFSET_OUT_OF_RANGE)
        if found < requested.last_fetched_epoch or end < requested.fetch_offset:
            answer = bounds.empty_response(requested.partition)
            answer.diverging_epoch = EpochEndOffset(found, end)
            return answer
    return None


def read_batches(
    partition: Partition,
    bounds: Bounds,
    requested: SessionPartition,
    max_bytes: int,
    *,
    at_least_one: bool,
    converted_batches: ConvertedBatchCache,
) -> PartitionData:
    """Return the whole batches from ``requested.fetch_offset`` on; the first may begin before it.

    With ``at_least_one`` the first batch is returned even if it is larger than ``max_bytes``. Raise the errors of
    `Partition.read`.
    """
    while True:
        generation = partition.generation
        answer = bounds.empty_response(requested.partition)
        gathered = _Gathered(requested.fetch_offset, max_bytes, at_least_one)
        _gather_all(partition, bounds, gathered, converted_batches)
        batches = gathered.batches
        if not batches:
            batches = _fill_lost_range(partition, requested.fetch_offset, bounds.end)
        elif bounds.is_committed:
            aborted = partition.aborted_transactions(requested.fetch_offset, gathered.reached)
            # A compaction between the two reads could remove aborted records from the files, and their entries from the
            # index. Records that were read from the old files would then seem to be committed.
            if partition.generation != generation:
                continue
            answer.aborted_transactions = [AbortedTransaction(producer_id, begun) for producer_id, begun in aborted]
        answer.records = batches or b""
        return answer


def _gather_all(
    partition: Partition, bounds: Bounds, gathered: _Gathered, converted_batches: ConvertedBatchCache
) -> None:
    """Collect batches until the log ends or the response has no room."""
    while gathered.room > 0 and gathered.reached < bounds.end:
        run, reached, is_full = partition.read_wire(gathered.reached, bounds.end, gathered.room)
        if run:
            gathered.take_run(run, reached)
        if is_full and (gathered.batches or not gathered.at_least_one):
            break
        if run:
            continue
        try:
            if not _gather_converted(partition, bounds, gathered, converted_batches):
                break
        except CorruptBatch:
            if not gathered.batches:
                raise
            break  # return the batches before the damage; the next fetch starts at the damage and gets the error


class _Gathered:
    """Batches collected for one response."""

    __slots__ = ("at_least_one", "batches", "reached", "room")

    def __init__(self, offset: int, max_bytes: int, at_least_one: bool) -> None:
        self.batches: list[Buffer] = []
        self.reached = offset
        self.room = max(max_bytes, 1)
        self.at_least_one = at_least_one

    def take_run(self, run: list[Buffer], reached: int) -> None:
        self.batches += run
        self.room -= sum(map(len, run))
        self.reached = reached

    def take(self, wire: list[Buffer], next_offset: int) -> bool:
        """Add one batch. Return False if it has no room."""
        size = sum(map(len, wire))
        if not self.has_room_for(size):
            return False
        self.batches += wire
        self.room -= size
        self.reached = next_offset
        return True

    @property
    def is_due(self) -> bool:
        """Whether the response must include the next batch, whatever its size."""
        return self.at_least_one and not self.batches

    def has_room_for(self, size_bytes: int) -> bool:
        """Return whether ``size_bytes`` more fit into the response; a batch that `is_due` always fits."""
        return size_bytes <= self.room or self.is_due


def _gather_converted(
    partition: Partition, bounds: Bounds, gathered: _Gathered, converted_batches: ConvertedBatchCache
) -> bool:
    """Add batches that the library wrote, up to the next one in Kafka's format.

    Return False at the end or without room.
    """
    begun = len(gathered.batches)
    log = partition.handle.page.log.read()
    version = partition.topic_id, partition.number, log.generation, log.epoch
    while gathered.reached < bounds.end and (known := converted_batches.lookup(version, gathered.reached)) is not None:
        if not gathered.take(*known):
            return False
    for batch in partition.read(gathered.reached, gathered.room, control=True):
        header = batch.header
        if header.base_offset >= bounds.end or (header.is_kafka and len(gathered.batches) > begun):
            break
        # Check the size first: converting a batch for which the response has no room would be wasted work.
        if not gathered.has_room_for(header.payload_size):
            return False
        if not header.is_kafka and converted_batches.is_used_up and not gathered.is_due:
            return False
        wire = converted_batches.convert(partition.topic_id, batch)
        converted_batches.register(version, batch)
        if not gathered.take(wire, header.next_offset):
            return False
    return len(gathered.batches) > begun


def _fill_lost_range(partition: Partition, offset: int, end: int) -> list[Buffer]:
    """Return empty batches for the offsets that a crash lost.

    Without them a client that reads up to the end would wait forever: the next batch begins after the lost range.
    """
    upto = min(skip_lost_ranges(partition.lost_ranges(), offset), end)
    epoch = wire_epoch(partition.epoch)
    batches: list[Buffer] = []
    while offset < upto and len(batches) < _FILLED_MAX:
        last_delta = min(upto - offset - 1, _DELTA_MAX)
        batches.append(empty_wire_batch(offset, last_delta, epoch))
        offset += last_delta + 1
    return batches
