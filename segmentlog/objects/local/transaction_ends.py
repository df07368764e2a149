"""What transactions decided lately, so that no part of one is shipped without the rest.

A partition's marker says that a transaction was committed, whatever lies in the others. Partitions are looked at one
after the other, and transactions are decided meanwhile. So the decisions are read once all have been looked at: each
says where its transaction ends in each partition, and what was looked at before that is looked at once more, up to
its marker there and no further. Markers below that were decided before, too.

Where a marker is not on disk yet, the decision makes up for it after a restore, as it does after a crash. But the next
decisions of that producer forget it once the marker is on disk here: none of them is shipped before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from segmentlog.errors import LogTruncated, OffsetOutOfRange, SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.transactions.transaction_log import TransactionState, decode_state

Where = tuple[str, int]
"""A partition: the id of its topic, its number."""
Ends = dict[Where, dict[int, int]]
"""Where transactions that were committed end, without their markers: by partition and producer, the last one each."""


def ends_of_commits(log: Partition, start_offset: int, end_offset: int) -> Ends | None:
    """Of those in ``[start_offset, end_offset)`` of the decisions.

    None when nobody can tell any more, because these have been compacted.
    """
    if log.compacted_below > start_offset:
        return None
    ends: Ends = {}
    try:
        for batch in log.read(max(start_offset, log.log_start_offset)):
            if batch.base_offset >= end_offset:
                break
            for value in batch.values:
                state = None if value is None else decode_state(value)
                if state is not None and state.status in ("PrepareCommit", "CompleteCommit"):
                    for (topic_id, number), end in zip(state.partitions, state.ends, strict=False):
                        ends.setdefault((topic_id, number), {})[state.producer_id] = end
    except (LogTruncated, OffsetOutOfRange):
        return None
    return ends


def ends_still_owed(log: Partition, end_offset: int) -> Ends:
    """Of those whose markers a decision below ``end_offset`` may still make up for: the last one of each producer."""
    states: dict[bytes | None, TransactionState] = {}
    for batch in log.read(log.log_start_offset):
        if batch.base_offset >= end_offset:
            break
        for name, value in zip(batch.keys, batch.values, strict=True):
            state = None if value is None else decode_state(value)
            if state is not None:
                states[name] = state
            else:
                states.pop(name, None)
    ends: Ends = {}
    for state in states.values():
        for marker in state.unconfirmed_markers:
            ends.setdefault((marker.topic_id, marker.partition), {})[state.producer_id] = marker.offset
        if state.status in ("PrepareCommit", "CompleteCommit"):
            for (topic_id, number), end in zip(state.partitions, state.ends, strict=False):
                ends.setdefault((topic_id, number), {})[state.producer_id] = end
    return ends


def find_markers(log: Partition, ends: Mapping[int, int], durable_offset: int) -> dict[int, int]:
    """The offsets behind the markers of those transactions that are on disk, by producer.

    A marker that is not found because the log was trimmed, cut or is damaged is none that anybody sees.
    """
    found: dict[int, int] = {}
    try:
        for batch in log.read(max(min(ends.values()), log.log_start_offset), control=True):
            if batch.base_offset >= durable_offset or len(found) == len(ends):
                break
            producer_id = batch.header.producer_id
            if batch.header.is_control and batch.base_offset >= ends.get(producer_id, durable_offset):
                found.setdefault(producer_id, batch.next_offset)
    except SegmentlogError:
        pass
    return found
