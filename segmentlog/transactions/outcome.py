"""Completes transactions: writes decisions and markers, and restores markers that a crash has lost.

All of it happens under the lock of the producer's name. Any process can repeat steps that it finds incomplete.
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
    """Writes decisions about transactions and their markers. Thread-safe under the locks of the names."""

    def __init__(self, topics: Topics, log: TransactionLog) -> None:
        self._topics = topics
        self._log = log

    def decide(self, name: str, state: TransactionState, fence_fd: int, *, fence: bool) -> TransactionState:
        """Finish a decided transaction; abort an undecided one. The caller holds the name's lock.

        ``fence``: fence the instance that has the transaction open. A commit of which the worker was killed is then
        rejected with `ProducerFenced`, so the instance cannot take the abort for the answer to its commit.
        """
        if state.status == "Ongoing":
            if fence:
                write_fence(self._topics.fs, fence_fd, state.producer_id, state.epoch + 1)
                state = replace(state, epoch=state.epoch + 1, last_epoch=-1)
            state = replace(state, status="PrepareAbort", updated_ms=self._topics.clock.now_ms())
            self._log.write(name, state)
        elif state.status == "PrepareCommit":
            self._log.sync()  # its writer may have died before the sync, and no reader may see it earlier
        return self.complete(name, state)

    def complete(self, name: str, state: TransactionState) -> TransactionState:
        """Write the markers, then the completed state. Return the state, which stays open if a marker failed."""
        committed = state.status == "PrepareCommit"
        unsettled = {PartitionId(marker.topic_id, marker.partition): marker for marker in state.unsettled}
        failure: Exception | None = None
        for where in state.partitions:
            try:
                marker = self._topics.on_partition(where, lambda log: self._tell(log, state))
                if marker is not None:
                    unsettled[where] = marker
            except UnknownTopic:
                continue  # the topic was deleted
            except StoreClosed:
                return state  # the next process finishes it
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                failure = error
        if failure is not None:
            logger.warning(
                "producer %s: its transaction is decided, but a marker could not be written: %s; trying again",
                name,
                failure,
            )
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
        """Complete a transaction right after its decision, and log errors instead of raising them.

        The decision is valid, while an error would tell the caller that it is not. Remaining steps are retried later.
        """
        try:
            return self.complete(name, state)
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            logger.warning(
                "producer %s: its transaction is complete, but its state could not be saved: %s; trying again",
                name,
                error,
            )
            return state

    def _tell(self, log: Partition, state: TransactionState) -> Unsettled | None:
        """Write the marker if the transaction is open in the partition. Return a commit's marker, which may not be on
        disk."""
        said, epoch = self._said(log, state), log.epoch  # the epoch first: if it changes, the marker may be lost
        offset = None if said is None else log.end_transaction(state.producer_id, state.epoch, committed=said)
        if offset is None and state.wrote(PartitionId(log.topic_id, log.number)):
            # The marker exists: its writer died before it saved the state, or failed in another partition. Its offset
            # is not known, but is below the end of the log.
            said, offset = True, log.log_end_offset - 1
        return Unsettled(log.topic_id, log.number, offset, epoch) if said and offset is not None else None

    @staticmethod
    def _said(log: Partition, state: TransactionState) -> bool | None:
        """Return the outcome of the open transaction in a partition; None if there is none, or it is undecided."""
        entry = log.producer(state.producer_id)
        if entry is None or entry.transaction_offset < 0:
            return None
        return state.said(PartitionId(log.topic_id, log.number), entry)

    def still_unsettled(self, producer_id: int, unsettled: Iterable[Unsettled]) -> tuple[Unsettled, ...]:
        """Return the markers that are not known to be on disk, or were lost in a crash."""
        left = []
        for marker in unsettled:
            where = PartitionId(marker.topic_id, marker.partition)
            try:
                is_settled = self._topics.on_partition(
                    where, partial(_is_settled, producer_id=producer_id, marker=marker)
                )
            except UnknownTopic:
                continue
            except StoreVersionError:  # a topic cannot be read now, maybe this one
                is_settled = False
            if not is_settled:
                left.append(marker)
        return tuple(left)

    def settle(self, state: TransactionState) -> None:
        """Sync the markers of commits, before the state that replaces them is overwritten."""
        for marker in self.still_unsettled(state.producer_id, state.unsettled):

            def settle(log: Partition) -> None:
                self.end_lost(log, state)
                log.flush()

            with contextlib.suppress(UnknownTopic):
                self._topics.on_partition(PartitionId(marker.topic_id, marker.partition), settle)

    def end_lost(self, log: Partition, state: TransactionState) -> None:
        """Write a marker that a crash has lost: a commit if the state says so, else an abort."""
        entry = log.producer(state.producer_id)
        said = self._said(log, state)
        if entry is None or said is None:
            return
        told = "committed" if said else "aborted"
        name = f"{log.topic}/{log.number}"
        logger.info(
            "%s: the transaction of producer %d is %s: a crash had lost its marker", name, state.producer_id, told
        )
        offset = log.end_transaction(state.producer_id, max(state.epoch, entry.epoch), committed=said)
        if said and offset is not None:  # no state replaces this marker
            log.sync_upto(offset + 1, offset)


def _is_settled(log: Partition, producer_id: int, marker: Unsettled) -> bool:
    """Return whether a commit's marker is on disk."""
    if log.durable_offset <= marker.offset:
        return False
    if log.epoch == marker.epoch:
        return True
    entry = log.producer(producer_id)  # there was a crash: check whether the marker survived it
    return entry is None or not 0 <= entry.transaction_offset < marker.offset
