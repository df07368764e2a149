"""Shorten a log: trim segments at its front, or truncate offsets at its end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from segmentlog.errors import OffsetOutOfRange
from segmentlog.log.handle import Handle
from segmentlog.log.recovery.log_recovery import recover
from segmentlog.log.recovery.open_partition import finish_interrupted_append
from segmentlog.log.segment_removal import retire_segment
from segmentlog.log.segment_tiering import is_remote, recall_or_raise
from segmentlog.log.swap import finish_swaps
from segmentlog.policy.lost_ranges import skip_lost_ranges
from segmentlog.records import LostRange
from segmentlog.storage.interrupt_safe import interrupt_safe_context


@interrupt_safe_context
def _locked_for_change(handle: Handle) -> Iterator[None]:
    """Hold the append lock of a log that accepts changes, after completing the change of a process that died."""
    with handle.append_locked():
        handle.check_appendable()
        finish_interrupted_append(handle)
        finish_swaps(handle)
        yield


def trim(handle: Handle, before_offset: int) -> int:
    """See `Partition.trim`."""
    with handle.translating_errors(), _locked_for_change(handle):
        return trim_locked(handle, before_offset)


def trim_locked(handle: Handle, before_offset: int) -> int:
    """Trim a log whose append lock the caller holds, and whose interrupted changes it has completed."""
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
    if gone:  # once more, for readers that listed the folder between the two
        handle.ledger.count_generation()
    return before_offset


def truncate(handle: Handle, offset: int) -> LostRange | None:
    """See `Partition.truncate`."""
    while True:
        with handle.translating_errors(), _locked_for_change(handle), handle.sync_locked():
            log = handle.page.log.read()
            if not log.log_start_offset <= offset <= log.log_end_offset:
                raise OffsetOutOfRange(handle.log_name, offset, log.log_start_offset, log.log_end_offset)
            # lost ranges may touch, but never overlap
            offset = skip_lost_ranges(handle.ledger.checkpoint().lost_ranges, offset)
            if offset == log.log_end_offset:
                return None
            base = max(base for base in handle.segments(log) if base <= offset)
            if not is_remote(handle, base):
                now_ms = handle.clock.now_ms()
                lost = LostRange(offset, log.log_end_offset + 1, log.epoch + 1, "truncated on request", now_ms)
                handle.ledger.start_truncation(log, lost, base)
                recover(handle, handle.page)
                handle.close_segments()
                return lost
        # Recovery reads the segment, and appends may go into it. Download it without the locks: it may take long.
        recall_or_raise(handle, base)
