"""Transaction outcomes and producer numbers that compaction must respect.

aborted records    are removed
committed records  stay, and become records outside a transaction: their producer's numbers are removed
a producer's last  batch keeps the numbers, even without records: a process that loads the log continues the sequence
markers            are removed once an earlier pass has removed or stripped every batch that they decide
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
    """The producers and transactions of a log when a compaction pass begins.

    All transactions below its end are decided.
    """

    def __init__(self, handle: Handle, log: LogState, now_ms: int) -> None:
        self._aborted = AbortedTransactions(handle).read_ranges()
        states = ProducerStates(handle)
        if handle.page.words[PRODUCERS_WORD]:
            with handle.folder_locked():
                states.load(log, list(handle.segments(log)))
        self._protected = states.protected_offsets(now_ms)

    @property
    def any_aborted(self) -> bool:
        """Whether there are aborted records, which are removed whatever their keys are."""
        return bool(self._aborted)

    def is_aborted(self, header: BatchHeader) -> bool:
        """Return whether the batch belongs to an aborted transaction."""
        return bool(header.attributes & TRANSACTIONAL and self._aborted) and is_aborted(self._aborted, header)

    def is_protected(self, header: BatchHeader) -> bool:
        """Return whether the batch must keep its producer's numbers, even if its records are removed."""
        return header.producer_id >= 0 and self._any_protected(header.base_offset, header.next_offset)

    def strips(self, header: BatchHeader) -> bool:
        """Return whether the batch has committed records that must lose their producer's numbers."""
        return header.producer_id >= 0 and not header.attributes & CONTROL and not self.is_protected(header)

    def may_drop_marker(self, header: BatchHeader, payload: memoryview, cleaned_offset: int) -> bool:
        """Return whether a marker can be removed: an earlier pass removed or stripped all batches that it decides.

        The pass that removes those batches must keep the marker: a reader may have opened the old segments, and search
        for markers in the new segments.
        """
        if header.next_offset > cleaned_offset:
            return False
        try:
            marker = decode_marker(header, payload)
        except ValueError:  # damaged: keep it for a repair
            return False
        return marker is not None and not self._any_protected(marker.first_offset, marker.offset + 1)

    def _any_protected(self, base_offset: int, end_offset: int) -> bool:
        at = bisect_left(self._protected, base_offset)
        return at < len(self._protected) and self._protected[at] < end_offset


def stripped(header: BatchHeader) -> BatchHeader:
    """Return the header without producer id, epoch and sequence, and outside any transaction."""
    attributes = header.attributes & ~TRANSACTIONAL
    return replace(header, attributes=attributes, producer_id=-1, producer_epoch=-1, base_sequence=-1)
