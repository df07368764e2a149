"""Identity of a producer: its id and epoch, the number of its next record in each partition, its transaction."""

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
from segmentlog.log.append.batch_encoding import RecordColumns
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
    from segmentlog.transactions.producer_lease import Registration


def _sync(log: Partition, upto_offset: int, base_offset: int) -> int:
    return log.sync_upto(upto_offset, base_offset)


class _Transaction:
    """What a transaction wrote to, and what went wrong in it."""

    def __init__(self) -> None:
        self.logs: dict[PartitionId, Partition] = {}
        self.ends: dict[PartitionId, int] = {}
        """The offset behind the last record of it in each partition."""
        self.bases: dict[PartitionId, int] = {}
        """The offset of the first."""
        self.failure: Exception | None = None


class Identity:
    """The idempotent part of a producer. `append` is for one thread a partition at a time."""

    def __init__(self, topics: Topics, transactions: Transactions, name: str | None, timeout_ms: int) -> None:
        self.name = name
        self._topics = topics
        self._transactions = transactions
        self._timeout_ms = timeout_ms
        self._registration: Registration | None = None
        self._sequences: dict[Partition, int] = {}
        self._transaction: _Transaction | None = None
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._has_transactions = name is not None
        self._is_foreign = self._is_closed = False
        if name is not None:
            self._registration = transactions.register(name, timeout_ms)
            self.producer_id, self.epoch = self._registration.producer_id, self._registration.epoch
        else:
            self._draw_id()
        fork_safety.on_fork(self, "_forget_parent")

    def _draw_id(self) -> None:
        """An id that nobody else has, without asking anybody: 61 random bits."""
        self.producer_id, self.epoch = new_store_id(), 0

    @property
    def label(self) -> str:
        """For people."""
        return repr(self.name) if self.name is not None else str(self.producer_id)

    def _forget_parent(self) -> None:
        """In a forked child: another producer without a name, or none at all."""
        self._is_foreign = self._is_foreign or self.name is not None or self._transaction is not None
        self._registration = self._transaction = None
        self._has_transactions = False
        self._sequences = {}
        if not self._is_foreign:
            self._draw_id()

    def _check_usable(self) -> None:
        if self._is_closed:  # nothing fences it any more
            raise StoreClosed(f"producer {self.label}")
        if self._is_foreign:
            raise StoreClosed.forked(f"producer {self.label}")

    # ------------------------------------------------------------ appending

    @interrupt_safe_context
    def sending(self, topic: str, partitions: Sequence[int]) -> Iterator[None]:
        """Around the appends of one chunk: they belong to the transaction, all of them, or to none."""
        self._check_usable()
        with self._mutex:
            if self._transaction is not None:
                self._take_part([self._topics.open_partition(topic, number) for number in partitions])
            yield

    def _take_part(self, logs: Iterable[Partition]) -> None:
        """Have it written down that the transaction writes to these, before it does."""
        transaction = self._transaction
        assert transaction is not None
        named = {PartitionId(log.topic_id, log.number): log for log in logs}
        fresh = {where: log for where, log in named.items() if where not in transaction.logs}
        if fresh:
            assert self._registration is not None
            self._transactions.add_partitions(self._registration, fresh)
            transaction.logs.update(fresh)

    def append(self, log: Partition, columns: RecordColumns, ack: Ack | None, create_ms: int | None) -> int:
        """Append under this producer's next numbers, after an interrupt the same again; the first record's offset."""
        return self._append(log, len(columns.values), lambda stamp: log.append_columns(columns, ack, create_ms, stamp))

    def append_batches(self, log: Partition, batches: Sequence[EncodedBatch], ack: Ack | None) -> int:
        """The same with batches that are encoded already, which no one appends again."""
        count = sum(batch.last_offset_delta + 1 for batch in batches)
        return self._append_once(log, count, lambda stamp: log.append_batches(batches, ack, stamp))

    def append_positions(self, log: Partition, columns: RecordColumns) -> int:
        """The same with positions of a group: who commits again commits others."""
        return self._append_once(log, len(columns.values), lambda stamp: log.append_columns(columns, None, None, stamp))

    def _append_once(self, log: Partition, count: int, append: Callable[[ProducerStamp], int]) -> int:
        try:
            return self._append(log, count, append)
        except BaseException:
            # What comes next is something else: under a number that the log has already it would not be appended.
            self._sequences.pop(log, None)
            raise

    def _append(self, log: Partition, count: int, append: Callable[[ProducerStamp], int]) -> int:
        if self._is_foreign or self._is_closed:
            self._check_usable()
        transaction = self._transaction
        if transaction is not None and (log.topic_id, log.number) not in transaction.logs:
            self._take_part([log])  # another topic has got the name since `sending`
        sequence = self._sequences.get(log)
        if sequence is None:
            sequence = (self.last_number(log) + 1) % SEQUENCE_END
        registration = self._registration
        stamp = ProducerStamp(
            self.producer_id,
            self.epoch,
            sequence,
            transaction is not None,
            None if registration is None else registration.check,
        )
        try:
            offset = append(stamp)
            if transaction is not None:
                where = PartitionId(log.topic_id, log.number)
                transaction.bases.setdefault(where, offset)
                transaction.ends[where] = offset + count
        except BaseException as error:
            if isinstance(error, Exception) and not is_interrupt(error):
                # Told as failed it is not sent again, though it may be there: not on disk, or not shipped. Ask the log.
                self._sequences.pop(log, None)
            else:
                self._sequences[log] = sequence  # perhaps just after it was appended: it is known under this
            raise
        # Last, and with no call before the caller has stored the offset: what is sent again keeps its number.
        self._sequences[log] = (sequence + count) % SEQUENCE_END
        return offset

    def last_number(self, log: Partition) -> int:
        """The number of the last record that was appended to a partition under this id or name; -1 for none."""
        entry = log.producer(self.producer_id)
        if entry is None and self._registration is not None and self._registration.state.previous_id >= 0:
            entry = log.producer(self._registration.state.previous_id)
        return -1 if entry is None else entry.last_number

    def note_failure(self, error: Exception) -> None:
        """Something that was sent could not be appended: the transaction that it belongs to cannot be committed."""
        if self._transaction is not None and self._transaction.failure is None:
            self._transaction.failure = error

    def note_resume(self, topic: str, partitions: int) -> int:
        """See `Producer.note_resume`."""
        if self._registration is None:
            return partitions
        return self._transactions.note_resume(self._registration, topic, partitions)

    # ------------------------------------------------------------ transactions

    @property
    def has_transactions(self) -> bool:
        """Whether `sending` has to be around appends: it may have transactions, or had some."""
        return self._has_transactions

    @property
    def in_transaction(self) -> bool:
        """Whether one was begun."""
        return self._transaction is not None

    def prepare(self) -> None:
        """Have a name under which transactions are coordinated, and nothing undecided from an earlier one."""
        self._check_usable()
        if self._transaction is not None:
            raise SegmentlogError(f"producer {self.label} has a transaction open: commit or abort it first")
        transactions = self._transactions
        if self._registration is None:
            self._registration = transactions.register_anonymous(self.producer_id, self._timeout_ms)
            self.epoch = self._registration.epoch
        elif self._registration.unsure:
            transactions.make_sure(self._registration)
            if self._registration.unsure:
                raise ProducerBusy(self.label, "its last transaction is decided, but a partition cannot be told")
        self._has_transactions = True

    def begin(self) -> None:
        """From here on what is sent belongs to a transaction."""
        assert self._registration is not None
        self._registration.check()
        with self._mutex:
            self._transaction = _Transaction()

    def check_open(self) -> None:
        """Raise unless a transaction was begun."""
        self._check_usable()
        if self._transaction is None:
            raise SegmentlogError(f"producer {self.label} has no transaction open: begin one first")

    def sync_data(self) -> None:
        """Put what the transaction wrote on disk: one fsync a partition. Raises what kept a record out of it."""
        transaction = self._transaction
        assert transaction is not None
        if transaction.failure is not None:
            raise transaction.failure
        for where, end_offset in transaction.ends.copy().items():
            base_offset = transaction.bases[where]
            self._topics.on_partition(where, partial(_sync, upto_offset=end_offset, base_offset=base_offset))

    @property
    def last_note(self) -> str | None:
        """What the last transaction that was committed under the name left as its note."""
        return None if self._registration is None else self._registration.state.note

    def commit(self, note: str | None = None) -> None:
        """Decide for it."""
        with self._mutex:
            transaction, registration = self._transaction, self._registration
            assert transaction is not None
            assert registration is not None
            try:
                self.sync_data()  # again: another thread may have sent since, and what it sent belongs to it
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                with failures_ignored(SegmentlogError):
                    self.abort()
                raise TransactionAborted(self.label, str(error)) from error
            self._transaction = None
            if transaction.logs or note is not None:
                registration.unsure = True  # until it returns: the next one must not go on with what this one wrote
                self._transactions.commit(registration, transaction.ends, note)

    def wait_shipped(self) -> None:
        """Return once what was committed lies in the object store. Raises `ShipUnconfirmed`: it is committed here."""
        self._transactions.wait_shipped()

    def abort(self) -> None:
        """Decide against it."""
        with self._mutex:
            transaction, self._transaction = self._transaction, None
            if transaction is not None and transaction.logs and self._registration is not None:
                self._registration.unsure = True
                with contextlib.suppress(ProducerFenced):  # whoever fenced it has aborted it
                    self._transactions.abort(self._registration)

    def drop(self) -> None:
        """Forget it: somebody else has decided."""
        with self._mutex:
            self._transaction = None

    def close(self) -> None:
        """Let others have the name."""
        self._is_closed = True
        registration, self._registration = self._registration, None
        if registration is not None:
            self._transactions.unregister(registration)
        self._registration = None
