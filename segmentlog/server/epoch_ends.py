"""Where an epoch of a partition ended, as KIP-320 asks it: how a client learns that what it has read is gone.

Kafka's answer is where the next epoch begins. Between two of our epochs lies what a crash took: offsets that may have
been handed out, and hold nothing any more. So the answer is where that *begins*: a client that stands behind it learns
that it was truncated, instead of going on as if it had missed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from segmentlog.server.topic_ids import wire_epoch

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

UNDEFINED: Final = (-1, -1)


def end_of_epoch(partition: Partition, epoch: int) -> tuple[int, int]:
    """(the last epoch up to this one that there was, where it ended); `UNDEFINED` for one that there is not yet."""
    if epoch == wire_epoch(partition.epoch):
        return epoch, partition.log_end_offset
    found = -1
    for start in partition.epochs():
        if start.epoch > epoch:
            if found < 0:
                return UNDEFINED
            end = start.start_offset
            for lost in reversed(partition.lost_ranges()):
                if lost.base_offset < end <= lost.end_offset:
                    end = lost.base_offset
            return found, end
        found = start.epoch
    return UNDEFINED
