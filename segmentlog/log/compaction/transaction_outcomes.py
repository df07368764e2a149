"""What a compaction has to know of producers and transactions: whose batches go, whose numbers stay.

aborted data       goes, all of it
committed data     stays as if no transaction had written it: its producer's numbers go
a producer's last  stays with its numbers, empty if need be: a reload counts on from there
markers            go once the pass before this one has dealt with all that they decide
"""

from __future__ import annotations

from bisect import bisect_left

from msgspec.structs import replace

from segmentlog.format.batch import CONTROL, TRANSACTIONAL, BatchHeader
from segmentlog.format.control import decode_marker
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStates
from segmentlog.log.transaction_index import AbortedTransactions, is_aborted
from segmentlog.storage.state_page import PRODUCERS_WORD, LogState


class TransactionOutcomes:
    """The producers of a log as they are when a pass begins; everything below its end is decided."""

    def __init__(self, handle: Handle, log: LogState, now_ms: int) -> None:
        self._aborted = AbortedTransactions(handle).look()
        states = ProducerStates(handle)
        if handle.page.words[PRODUCERS_WORD]:
            with handle.folder_locked():
                states.load(log, list(handle.segments(log)))
        self._protected = states.protected_offsets(now_ms)

    @property
    def any_aborted(self) -> bool:
        """Whether there is data that goes whatever its keys are."""
        return bool(self._aborted)

    def is_aborted(self, header: BatchHeader) -> bool:
        """Whether it is data of an aborted transaction."""
        return bool(header.attributes & TRANSACTIONAL and self._aborted) and is_aborted(self._aborted, header)

    def is_protected(self, header: BatchHeader) -> bool:
        """Whether the batch must stay with its producer's numbers, though its records may go."""
        return header.producer_id >= 0 and self._any_protected(header.base_offset, header.next_offset)

    def strips(self, header: BatchHeader) -> bool:
        """Whether the batch is committed data that is to lose its producer's numbers."""
        return header.producer_id >= 0 and not header.attributes & CONTROL and not self.is_protected(header)

    def may_drop_marker(self, header: BatchHeader, payload: memoryview, cleaned_offset: int) -> bool:
        """Whether nothing depends on a marker any more. What it decided went, or was stripped, in an earlier pass.

        Not in the same one: a reader may have opened the files of before, and look for markers
        in those of after.
        """
        if header.next_offset > cleaned_offset:
            return False
        try:
            marker = decode_marker(header, payload)
        except ValueError:  # damaged: it stays, for a repair
            return False
        return marker is not None and not self._any_protected(marker.first_offset, marker.offset + 1)

    def _any_protected(self, base_offset: int, end_offset: int) -> bool:
        at = bisect_left(self._protected, base_offset)
        return at < len(self._protected) and self._protected[at] < end_offset


def stripped(header: BatchHeader) -> BatchHeader:
    """The header as if nobody in particular had written the batch."""
    attributes = header.attributes & ~TRANSACTIONAL
    return replace(header, attributes=attributes, producer_id=-1, producer_epoch=-1, base_sequence=-1)
