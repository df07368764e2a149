"""What transactions decided lately, so that no part of one is shipped without the rest.

A partition's marker says that a transaction was committed, whatever lies in the others. Partitions are looked at one
after the other, and transactions are decided meanwhile. So the decisions are read once all have been looked at: each
says where its transaction ends in each partition, and what was looked at before that is looked at once more, up to
there and no further. Markers below that were decided before, too.
"""

from __future__ import annotations

from segmentlog.errors import LogTruncated, OffsetOutOfRange
from segmentlog.log.partition import Partition
from segmentlog.transactions.journal import decode_state

Where = tuple[str, int]
"""A partition: the id of its topic, its number."""


def ends_of_commits(log: Partition, start_offset: int, end_offset: int) -> dict[Where, int] | None:
    """Where transactions end, by partition, that were committed in ``[start_offset, end_offset)`` of the decisions.

    None when nobody can tell any more, because these have been compacted.
    """
    if log.compacted_below > start_offset:
        return None
    ends: dict[Where, int] = {}
    try:
        for batch in log.read(max(start_offset, log.log_start_offset)):
            if batch.base_offset >= end_offset:
                break
            for value in batch.values:
                state = None if value is None else decode_state(value)
                if state is not None and state.status in ("PrepareCommit", "CompleteCommit"):
                    for (topic_id, number), end in zip(state.partitions, state.ends, strict=False):
                        ends[topic_id, number] = max(ends.get((topic_id, number), 0), end)
    except (LogTruncated, OffsetOutOfRange):
        return None
    return ends
