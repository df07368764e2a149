"""Making a log shorter: at its front, where whole segments go, and at its end, where offsets are given up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from segmentlog.errors import OffsetOutOfRange
from segmentlog.log.handle import Handle
from segmentlog.log.recovery.log_recovery import recover
from segmentlog.log.recovery.open_partition import settle
from segmentlog.log.segment_removal import retire_segment
from segmentlog.log.segment_tiering import is_remote, recall_or_raise
from segmentlog.log.swap import finish_swaps
from segmentlog.policy.lost_ranges import first_behind
from segmentlog.records import LostRange
from segmentlog.storage.interrupt_safe import held


@held
def _changing(handle: Handle) -> Iterator[None]:
    """Hold the append lock of a log that can be changed, and that no dead process left half changed."""
    with handle.append_locked():
        handle.check_appendable()
        settle(handle)
        finish_swaps(handle)
        yield


def trim(handle: Handle, before_offset: int) -> int:
    """As `Partition.trim`."""
    with handle.telling(), _changing(handle):
        log = handle.page.log.read()
        if not 0 <= before_offset <= log.log_end_offset:
            raise OffsetOutOfRange(handle.log_name, before_offset, log.log_start_offset, log.log_end_offset)
        if before_offset <= log.log_start_offset:
            return log.log_start_offset
        bases = handle.segments(log)
        gone = [base for base, following in pairwise(bases) if following <= before_offset]
        with handle.sync_locked():
            handle.ledger.trim(log, before_offset, bases[len(gone)] if gone else None)
        for base in gone:
            retire_segment(handle, base)
        if gone:  # once more: who listed the folder in between keeps that list for a generation
            handle.ledger.count_generation()
        return before_offset


def truncate(handle: Handle, offset: int) -> LostRange | None:
    """As `Partition.truncate`."""
    while True:
        with handle.telling(), _changing(handle), handle.sync_locked():
            log = handle.page.log.read()
            if not log.log_start_offset <= offset <= log.log_end_offset:
                raise OffsetOutOfRange(handle.log_name, offset, log.log_start_offset, log.log_end_offset)
            offset = first_behind(handle.ledger.checkpoint().lost_ranges, offset)  # ranges touch, but never overlap
            if offset == log.log_end_offset:
                return None
            base = max(base for base in handle.segments(log) if base <= offset)
            if not is_remote(handle, base):
                now_ms = handle.clock.now_ms()
                lost = LostRange(offset, log.log_end_offset + 1, log.epoch + 1, "truncated on request", now_ms)
                handle.ledger.begin_truncation(log, lost, base)
                recover(handle, handle.page)
                handle.close_segments()
                return lost
        # Recovery reads it, and appends may go into it: not while they wait at the locks, it may take long.
        recall_or_raise(handle, base)
