"""Find where recently decided transactions end, so that none of them is shipped in part.

A commit marker in one partition says nothing about the other partitions of its transaction. Partitions are scanned one
after another, and producers decide transactions meanwhile. So the decisions (the records of the transaction log) are
read after all partitions have been scanned. A decision names the end of its transaction in each partition. A partition
that was scanned before its end is scanned again, up to its marker; earlier markers are then included, too.

A marker may not be on disk when its decision is shipped. After a restore, as after a crash, the store then writes the
marker from the decision. Once the marker is on the local disk, the producer's next decision no longer contains what the
store needs for that. So that next decision must not be shipped before the marker.
"""

from __future__ import annotations

from collections.abc import Mapping

from segmentlog.errors import LogTruncated, OffsetOutOfRange, SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.transactions.transaction_log import TransactionState, decode_state

PartitionKey = tuple[str, int]
"""A partition: (topic id, partition number)."""
TransactionEnds = dict[PartitionKey, dict[int, int]]
"""End offset of the last committed transaction of each producer id in each partition, without its marker."""


def commit_ends(log: Partition, start_offset: int, end_offset: int) -> TransactionEnds | None:
    """Return the ends of the transactions whose commit was decided in ``[start_offset, end_offset)`` of ``log``.

    ``log`` is the transaction log. Return None if these decisions were compacted away.
    """
    if log.compacted_below > start_offset:
        return None
    ends: TransactionEnds = {}
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


def unconfirmed_commit_ends(log: Partition, end_offset: int) -> TransactionEnds:
    """Return the ends of transactions whose markers the store may still have to write from a decision.

    Consider the decisions below ``end_offset``.
    """
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
    ends: TransactionEnds = {}
    for state in states.values():
        for marker in state.unconfirmed_markers:
            ends.setdefault((marker.topic_id, marker.partition), {})[state.producer_id] = marker.offset
        if state.status in ("PrepareCommit", "CompleteCommit"):
            for (topic_id, number), end in zip(state.partitions, state.ends, strict=False):
                ends.setdefault((topic_id, number), {})[state.producer_id] = end
    return ends


def find_markers(log: Partition, ends: Mapping[int, int], durable_offset: int) -> dict[int, int]:
    """Return, by producer id, the offset after the marker of each transaction whose marker is on disk.

    ``ends`` contains the last transaction of each producer. Markers that were trimmed, truncated or damaged are left
    out: no reader gets them.
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
