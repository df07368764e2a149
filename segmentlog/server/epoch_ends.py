"""Find where a leader epoch of a partition ended (KIP-320), so that a client learns that its log was truncated.

Kafka returns the offset at which the next epoch begins. In this store, a crash can leave a lost range directly before
that offset: clients may have received records there that no longer exist. So this module returns the *start* of the
lost range. A client whose position is higher then learns that the log was truncated, and does not just continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from segmentlog.server.topic_ids import wire_epoch

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

UNDEFINED: Final = (-1, -1)


def end_of_epoch(partition: Partition, epoch: int) -> tuple[int, int]:
    """Return (the last existing epoch up to ``epoch``, its end offset); `UNDEFINED` if ``epoch`` is too high."""
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
