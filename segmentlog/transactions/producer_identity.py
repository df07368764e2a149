"""The identity of a producer in appends: producer id, epoch, sequence numbers, and its open transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from segmentlog.errors import (
    ProducerBusy,
    ProducerFenced,
    SegmentlogError,
    StoreClosed,
    TransactionAborted,
)
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.producer_snapshot import SEQUENCE_END
from segmentlog.log.append.batch_encoding import CheckedColumns
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import PartitionId
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.assigned_ids import new_store_id
from segmentlog.transactions.transaction_coordinator import Transactions

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack, Partition
    from segmentlog.transactions.producer_lease import ProducerLease


def _sync(log: Partition, upto_offset: int, base_offset: int) -> int:
    return log.sync_upto(upto_offset, base_offset)


class _Transaction:
    """The partitions of an open transaction, and its first error."""

    def __init__(self) -> None:
        self.logs: dict[PartitionId, Partition] = {}
        self.ends: dict[PartitionId, int] = {}
        """By partition: the offset after the last record of the transaction."""
        self.bases: dict[PartitionId, int] = {}
        """By partition: the offset of the first record of the transaction."""
        self.failure: Exception | None = None


class ProducerIdentity:
    """Producer id, epoch and sequences of a producer. For each partition only one thread at a time may `append`."""

    def __init__(self, topics: Topics, transactions: Transactions, name: str | None, timeout_ms: int) -> None:
        self.name = name
        self._topics = topics
        self._transactions = transactions
        self._timeout_ms = timeout_ms
        self._lease: ProducerLease | None = None
        self._sequences: dict[Partition, int] = {}
        self._transaction: _Transaction | None = None
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._has_transactions = name is not None
        self._is_foreign = self._is_closed = False
        if name is not None:
            self._lease = transactions.register(name, timeout_ms)
            self.producer_id, self.epoch = self._lease.producer_id, self._lease.epoch
        else:
            self._draw_id()
        fork_safety.on_fork(self, "_discard_parent_state")

    def _draw_id(self) -> None:
        """Choose a random id of 61 bits, so that producers get different ids without coordination."""
        self.producer_id, self.epoch = new_store_id(), 0

    @property
    def label(self) -> str:
        """Return the name or id, for messages."""
        return repr(self.name) if self.name is not None else str(self.producer_id)

    def _discard_parent_state(self) -> None:
        """Choose a new id in a forked child; a producer with a name or a transaction becomes unusable there."""
        self._is_foreign = self._is_foreign or self.name is not None or self._transaction is not None
        self._lease = self._transaction = None
        self._has_transactions = False
        self._sequences = {}
        if not self._is_foreign:
            self._draw_id()

    def _check_usable(self) -> None:
        if self._is_closed:  # without this check, a closed producer could append: no fence stops it
            raise StoreClosed(f"producer {self.label}")
        if self._is_foreign:
            raise StoreClosed.forked(f"producer {self.label}")

    # ------------------------------------------------------------ appending

    @interrupt_safe_context
    def sending(self, topic: str, partitions: Sequence[int]) -> Iterator[None]:
        """Append the parts of one chunk within the block. All parts belong to the current transaction, or none does."""
        self._check_usable()
        with self._mutex:
            if self._transaction is not None:
                self._add_partitions([self._topics.open_partition(topic, number) for number in partitions])
            yield

    def _add_partitions(self, logs: Iterable[Partition]) -> None:
        """Record that the transaction includes these partitions, before it writes to them."""
        transaction = self._transaction
        assert transaction is not None
        named = {PartitionId(log.topic_id, log.number): log for log in logs}
        fresh = {partition: log for partition, log in named.items() if partition not in transaction.logs}
        if fresh:
            assert self._lease is not None
            self._transactions.add_partitions(self._lease, fresh)
            transaction.logs.update(fresh)

    def append(self, log: Partition, columns: CheckedColumns, ack: Ack | None, create_ms: int | None) -> int:
        """Append under the next sequence number and return the base offset.

        A retry after an interrupt uses the same sequence number.
        """
        return self._append(log, len(columns.values), lambda stamp: log.append_columns(columns, ack, create_ms, stamp))

    def append_batches(self, log: Partition, batches: Sequence[EncodedBatch], ack: Ack | None) -> int:
        """Append encoded batches as `append` does. A caller must not repeat the call after an interrupt."""
        count = sum(batch.last_offset_delta + 1 for batch in batches)
        return self._append_once(log, count, lambda stamp: log.append_batches(batches, ack, stamp))

    def append_positions(self, log: Partition, columns: CheckedColumns) -> int:
        """Append offsets of a group as `append` does. A repeated call may have other offsets, so it is not a retry."""
        return self._append_once(log, len(columns.values), lambda stamp: log.append_columns(columns, None, None, stamp))

    def _append_once(self, log: Partition, count: int, append: Callable[[ProducerStamp], int]) -> int:
        try:
            return self._append(log, count, append)
        except BaseException:
            # The next append is not a retry. If it used a sequence number that the log has already, the log would drop
            # it as a duplicate.
            self._sequences.pop(log, None)
            raise

    def _append(self, log: Partition, count: int, append: Callable[[ProducerStamp], int]) -> int:
        if self._is_foreign or self._is_closed:
            self._check_usable()
        transaction = self._transaction
        if transaction is not None and (log.topic_id, log.number) not in transaction.logs:
            self._add_partitions([log])  # since `sending`, another topic may have got the name
        sequence = self._sequences.get(log)
        if sequence is None:
            sequence = (self.last_number(log) + 1) % SEQUENCE_END
        lease = self._lease
        stamp = ProducerStamp(
            self.producer_id,
            self.epoch,
            sequence,
            transaction is not None,
            None if lease is None else lease.check,
        )
        try:
            offset = append(stamp)
            if transaction is not None:
                partition = PartitionId(log.topic_id, log.number)
                transaction.bases.setdefault(partition, offset)
                transaction.ends[partition] = offset + count
        except BaseException as error:
            if isinstance(error, Exception) and not is_interrupt(error):
                # The caller gets an error and does not repeat the append, although the records may be in the log. So
                # the next append asks the log for the last sequence number.
                self._sequences.pop(log, None)
            else:
                self._sequences[log] = sequence  # the append may have succeeded: a retry must use the same number
            raise
        # Advance the number last, with no call after it until the caller has stored the offset. If an interrupt came
        # before that, the caller would retry, and a retry must use the same number.
        self._sequences[log] = (sequence + count) % SEQUENCE_END
        return offset

    def last_number(self, log: Partition) -> int:
        """Return the sequence number of the last record that this id or name appended to a partition; -1 if none."""
        entry = log.producer(self.producer_id)
        if entry is None and self._lease is not None and self._lease.state.previous_id >= 0:
            entry = log.producer(self._lease.state.previous_id)
        return -1 if entry is None else entry.last_number

    def fail_transaction(self, error: Exception) -> None:
        """Fail the current transaction: a record that belongs to it could not be appended."""
        if self._transaction is not None and self._transaction.failure is None:
            self._transaction.failure = error

    def note_resume(self, topic: str, partitions: int) -> int:
        """Return the partition count that the first call for this name has stored: see `Producer.note_resume`."""
        if self._lease is None:
            return partitions
        return self._transactions.note_resume(self._lease, topic, partitions)

    # ------------------------------------------------------------ transactions

    @property
    def has_transactions(self) -> bool:
        """Return whether the producer has used transactions: then the caller must append within `sending`."""
        return self._has_transactions

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open."""
        return self._transaction is not None

    def prepare_transaction(self) -> None:
        """Prepare for a transaction: register if necessary, and finish an earlier transaction."""
        self._check_usable()
        if self._transaction is not None:
            raise SegmentlogError(f"producer {self.label} has a transaction open; commit or abort it first")
        transactions = self._transactions
        if self._lease is None:
            self._lease = transactions.register_anonymous(self.producer_id, self._timeout_ms)
            self.epoch = self._lease.epoch
        elif self._lease.is_unresolved:
            transactions.resolve_interrupted(self._lease)
            if self._lease.is_unresolved:
                raise ProducerBusy(self.label, "the outcome of its last transaction is not in every partition yet")
        self._has_transactions = True

    def begin_transaction(self) -> None:
        """Begin a transaction, to which all later records belong."""
        assert self._lease is not None
        self._lease.check()
        with self._mutex:
            self._transaction = _Transaction()

    def check_open(self) -> None:
        """Raise unless a transaction is open."""
        self._check_usable()
        if self._transaction is None:
            raise SegmentlogError(f"producer {self.label} has no transaction open; begin one first")

    def sync_data(self) -> None:
        """Sync the records of the transaction, partition by partition. Raises the first error of the transaction."""
        transaction = self._transaction
        assert transaction is not None
        if transaction.failure is not None:
            raise transaction.failure
        for partition, end_offset in transaction.ends.copy().items():
            base_offset = transaction.bases[partition]
            self._topics.on_partition(partition, partial(_sync, upto_offset=end_offset, base_offset=base_offset))

    @property
    def last_note(self) -> str | None:
        """Metadata of the last transaction that was committed under the name."""
        return None if self._lease is None else self._lease.state.note

    def commit(self, note: str | None = None) -> None:
        """Commit the transaction. Raises `TransactionAborted` if a record of it failed or cannot be synced."""
        with self._mutex:
            transaction, lease = self._transaction, self._lease
            assert transaction is not None
            assert lease is not None
            try:
                self.sync_data()  # again: another thread may have sent more records of the transaction
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                with failures_ignored(SegmentlogError):
                    self.abort()
                raise TransactionAborted(self.label, str(error)) from error
            self._transaction = None
            if transaction.logs or note is not None:
                # Until `commit` returns: the next transaction must not include these records.
                lease.is_unresolved = True
                self._transactions.commit(lease, transaction.ends, note)

    def wait_shipped(self) -> None:
        """Return once the commit is in the object store. Raises `ShipUnconfirmed`; the local commit is valid."""
        self._transactions.wait_shipped()

    def abort(self) -> None:
        """Abort the transaction."""
        with self._mutex:
            transaction, self._transaction = self._transaction, None
            if transaction is not None and transaction.logs and self._lease is not None:
                self._lease.is_unresolved = True
                with contextlib.suppress(ProducerFenced):  # the instance that fenced it has aborted the transaction
                    self._transactions.abort(self._lease)

    def discard_transaction(self) -> None:
        """Forget the transaction, because another process has decided its outcome."""
        with self._mutex:
            self._transaction = None

    def close(self) -> None:
        """Release the name."""
        self._is_closed = True
        lease, self._lease = self._lease, None
        if lease is not None:
            self._transactions.unregister(lease)
        self._lease = None
