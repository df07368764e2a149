"""What becomes of a transaction: the decision, the markers that tell it in the partitions, and what a crash took.

Everything here is done under the lock of the producer's name, and can be done again by whoever finds it half done.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from segmentlog.errors import SegmentlogError, StoreClosed, StoreVersionError, UnknownTopic
from segmentlog.records import PartitionId
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.producer_lease import write_fence
from segmentlog.transactions.transaction_log import Status, TransactionLog, TransactionState, Unsettled

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

logger = logging.getLogger("segmentlog")


class Decisions:
    """Decides about transactions, and tells partitions of it. Thread-safe under the names' locks."""

    def __init__(self, topics: Topics, log: TransactionLog) -> None:
        self._topics = topics
        self._log = log

    def decide(self, name: str, state: TransactionState, fence_fd: int, *, fence: bool) -> TransactionState:
        """Finish what a state has begun; abort what is undecided. Under the name's lock.

        ``fence``: the instance that has the transaction open gets `ProducerFenced` from now on, also where its worker
        was killed while it committed: the instance must not take the abort for the answer to its commit.
        """
        if state.status == "Ongoing":
            if fence:
                write_fence(self._topics.fs, fence_fd, state.producer_id, state.epoch + 1)
                state = replace(state, epoch=state.epoch + 1, last_epoch=-1)
            state = replace(state, status="PrepareAbort", updated_ms=self._topics.clock.now_ms())
            self._log.write(name, state)
        elif state.status == "PrepareCommit":
            self._log.sync()  # who wrote it may have died before that was on disk, and nobody is told before it is
        return self.complete(name, state)

    def complete(self, name: str, state: TransactionState) -> TransactionState:
        """Write the markers, then that it is done; the state as it is then, still open if a partition has no room."""
        committed = state.status == "PrepareCommit"
        unsettled = {PartitionId(marker.topic_id, marker.partition): marker for marker in state.unsettled}
        failure: Exception | None = None
        for where in state.partitions:
            try:
                marker = self._topics.on_partition(where, lambda log: self._tell(log, state))
                if marker is not None:
                    unsettled[where] = marker
            except UnknownTopic:
                continue  # deleted, with all that it held
            except StoreClosed:
                return state  # the next one finishes it
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                failure = error
        if failure is not None:
            logger.warning("producer %s: its transaction is decided, but not told everywhere: %s", name, failure)
            return state
        done: Status = "CompleteCommit" if committed else "CompleteAbort"
        state = replace(
            state,
            status=done,
            updated_ms=self._topics.clock.now_ms(),
            unsettled=self.still_unsettled(state.producer_id, unsettled.values()),
        )
        self._log.write(name, state)
        return state

    def complete_if_possible(self, name: str, state: TransactionState) -> TransactionState:
        """`complete` for who has just decided: that stands, and an error would say that it does not.

        What was kept from being done is done by whoever looks next.
        """
        try:
            return self.complete(name, state)
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            logger.warning("producer %s: its transaction is decided, but that is not noted: %s", name, error)
            return state

    def _tell(self, log: Partition, state: TransactionState) -> Unsettled | None:
        """Write the marker of what was decided, if there is anything to decide; that of a commit may yet be lost."""
        said, epoch = self._said(log, state), log.epoch  # the epoch first: a marker is in this one, or lost with it
        offset = None if said is None else log.end_transaction(state.producer_id, state.epoch, committed=said)
        if offset is None and state.wrote(PartitionId(log.topic_id, log.number)):
            # Written by who died before it noted that this is done, or failed elsewhere: at what offset, nobody says.
            said, offset = True, log.log_end_offset - 1
        return Unsettled(log.topic_id, log.number, offset, epoch) if said and offset is not None else None

    @staticmethod
    def _said(log: Partition, state: TransactionState) -> bool | None:
        """`TransactionState.said` of what is open in a partition; None when nothing is."""
        entry = log.producer(state.producer_id)
        if entry is None or entry.transaction_offset < 0:
            return None
        return state.said(PartitionId(log.topic_id, log.number), entry)

    def still_unsettled(self, producer_id: int, unsettled: Iterable[Unsettled]) -> tuple[Unsettled, ...]:
        """Those whose markers are not known to be on disk, or were lost in a crash."""
        left = []
        for marker in unsettled:
            where = PartitionId(marker.topic_id, marker.partition)
            try:
                is_settled = self._topics.on_partition(
                    where, partial(_is_settled, producer_id=producer_id, marker=marker)
                )
            except UnknownTopic:
                continue
            except StoreVersionError:  # of a topic that cannot be read now, that one perhaps
                is_settled = False
            if not is_settled:
                left.append(marker)
        return tuple(left)

    def settle(self, state: TransactionState) -> None:
        """Put the markers of commits on disk, before what stands for them goes."""
        for marker in self.still_unsettled(state.producer_id, state.unsettled):

            def settle(log: Partition) -> None:
                self.end_lost(log, state)
                log.flush()

            with contextlib.suppress(UnknownTopic):
                self._topics.on_partition(PartitionId(marker.topic_id, marker.partition), settle)

    def end_lost(self, log: Partition, state: TransactionState) -> None:
        """Write the marker that was lost, if there is one to write: as the state remembers it, or else an abort."""
        entry = log.producer(state.producer_id)
        said = self._said(log, state)
        if entry is None or said is None:
            return
        told = "committed" if said else "aborted"
        name = f"{log.topic}/{log.number}"
        logger.info("%s: the transaction of producer %d is %s, as its end was lost", name, state.producer_id, told)
        offset = log.end_transaction(state.producer_id, max(state.epoch, entry.epoch), committed=said)
        if said and offset is not None:  # no record speaks of this marker
            log.sync_upto(offset + 1, offset)


def _is_settled(log: Partition, producer_id: int, marker: Unsettled) -> bool:
    """Whether a commit's marker is on disk."""
    if log.durable_offset <= marker.offset:
        return False
    if log.epoch == marker.epoch:
        return True
    entry = log.producer(producer_id)  # a crash since: is it there?
    return entry is None or not 0 <= entry.transaction_offset < marker.offset
