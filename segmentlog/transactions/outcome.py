"""Completes transactions: writes decisions and markers, and restores markers that a crash has lost.

Every step needs the lock of the producer's name. Any process can repeat a step that it finds incomplete.
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
from segmentlog.transactions.transaction_log import Status, TransactionLog, TransactionState, UnconfirmedMarker

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

logger = logging.getLogger("segmentlog")


class TransactionCompleter:
    """Writes decisions about transactions, and their markers. The caller must hold the lock of the producer's name."""

    def __init__(self, topics: Topics, log: TransactionLog) -> None:
        self._topics = topics
        self._log = log

    def decide(self, name: str, state: TransactionState, fence_fd: int, *, fence: bool) -> TransactionState:
        """Finish a decided transaction; abort an undecided one. The caller holds the name's lock.

        ``fence``: fence the instance that has the transaction open. A server's worker may have been killed during a
        commit of that instance. When the instance repeats the commit, it must get `ProducerFenced`, and must not
        mistake this abort for the answer to its commit.
        """
        if state.status == "Ongoing":
            if fence:
                write_fence(self._topics.fs, fence_fd, state.producer_id, state.epoch + 1)
                state = replace(state, epoch=state.epoch + 1, last_epoch=-1)
            state = replace(state, status="PrepareAbort", updated_ms=self._topics.clock.now_ms())
            self._log.write(name, state)
        elif state.status == "PrepareCommit":
            self._log.sync()  # the writer may have died before its sync, and no reader may see the commit before that
        return self.complete(name, state)

    def complete(self, name: str, state: TransactionState) -> TransactionState:
        """Write the markers, then the completed state. Return the state, which is still open if a marker failed."""
        committed = state.status == "PrepareCommit"
        unconfirmed_markers = {
            PartitionId(marker.topic_id, marker.partition): marker for marker in state.unconfirmed_markers
        }
        failure: Exception | None = None
        for partition in state.partitions:
            try:
                marker = self._topics.on_partition(partition, lambda log: self._write_marker(log, state))
                if marker is not None:
                    unconfirmed_markers[partition] = marker
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
            unconfirmed_markers=self.find_unconfirmed(state.producer_id, unconfirmed_markers.values()),
        )
        self._log.write(name, state)
        return state

    def complete_if_possible(self, name: str, state: TransactionState) -> TransactionState:
        """Complete a transaction right after its decision, and log errors instead of raising them.

        The decision is valid even if a later step fails. If this call raised, the caller would conclude that the
        decision is not valid. The remaining steps are retried later.
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

    def _write_marker(self, log: Partition, state: TransactionState) -> UnconfirmedMarker | None:
        """Write the marker if the transaction is open in the partition.

        Return the marker of a commit, which may not be on disk yet. For an abort, and if the partition has none of the
        transaction's markers, return None.
        """
        is_commit = self._outcome(log, state)
        epoch = log.epoch  # read before the marker is written: if it changes afterwards, the marker may be lost
        offset = None if is_commit is None else log.end_transaction(state.producer_id, state.epoch, committed=is_commit)
        if offset is None and state.has_decided_commit(PartitionId(log.topic_id, log.number)):
            # The marker exists: its writer died before it saved the state, or failed in another partition. Its offset
            # is not known, but is below the end of the log.
            is_commit, offset = True, log.log_end_offset - 1
        return UnconfirmedMarker(log.topic_id, log.number, offset, epoch) if is_commit and offset is not None else None

    @staticmethod
    def _outcome(log: Partition, state: TransactionState) -> bool | None:
        """Return the outcome if a transaction is open in the partition and is decided, otherwise None."""
        entry = log.producer(state.producer_id)
        if entry is None or entry.transaction_offset < 0:
            return None
        return state.outcome_of(PartitionId(log.topic_id, log.number), entry)

    def find_unconfirmed(
        self, producer_id: int, unconfirmed_markers: Iterable[UnconfirmedMarker]
    ) -> tuple[UnconfirmedMarker, ...]:
        """Return the markers that may not be on disk: not synced yet, or lost in a crash."""
        unconfirmed = []
        for marker in unconfirmed_markers:
            partition = PartitionId(marker.topic_id, marker.partition)
            try:
                is_confirmed = self._topics.on_partition(
                    partition, partial(_is_confirmed, producer_id=producer_id, marker=marker)
                )
            except UnknownTopic:
                continue
            except StoreVersionError:  # some topic cannot be read now, perhaps the marker's topic
                is_confirmed = False
            if not is_confirmed:
                unconfirmed.append(marker)
        return tuple(unconfirmed)

    def confirm_markers(self, state: TransactionState) -> None:
        """Sync the commit markers of a state, before the state is overwritten.

        Until they are on disk, the state replaces markers that a crash loses.
        """
        for marker in self.find_unconfirmed(state.producer_id, state.unconfirmed_markers):

            def restore_and_flush(log: Partition) -> None:
                self.restore_lost_marker(log, state)
                log.flush()

            with contextlib.suppress(UnknownTopic):
                self._topics.on_partition(PartitionId(marker.topic_id, marker.partition), restore_and_flush)

    def restore_lost_marker(self, log: Partition, state: TransactionState) -> None:
        """Write a marker that a crash has lost: for a commit if the state shows one, otherwise for an abort."""
        entry = log.producer(state.producer_id)
        is_commit = self._outcome(log, state)
        if entry is None or is_commit is None:
            return
        outcome = "committed" if is_commit else "aborted"
        name = f"{log.topic}/{log.number}"
        logger.info(
            "%s: the transaction of producer %d is %s now: a crash had lost its marker",
            name,
            state.producer_id,
            outcome,
        )
        offset = log.end_transaction(state.producer_id, max(state.epoch, entry.epoch), committed=is_commit)
        if is_commit and offset is not None:  # no state replaces this marker if it is lost, so sync it now
            log.sync_upto(offset + 1, offset)


def _is_confirmed(log: Partition, producer_id: int, marker: UnconfirmedMarker) -> bool:
    """Return whether a commit's marker is on disk."""
    if log.durable_offset <= marker.offset:
        return False
    if log.epoch == marker.epoch:
        return True
    entry = log.producer(producer_id)  # there was a crash: check whether the marker survived it
    return entry is None or not 0 <= entry.transaction_offset < marker.offset
