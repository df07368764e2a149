"""Named producers and their transactions: Kafka's transaction coordinator as a library, under file locks.

    @producers/<name>/fence              (producer id, epoch) of the newest instance; locked for every decision
    @producers/<name>/lease-<id>-<epoch> locked by that instance as long as it is alive
    __transaction_state                  the last record of each name: `TransactionState`

The status of a transaction is Empty, then Ongoing, then PrepareCommit and CompleteCommit, or PrepareAbort and
CompleteAbort. The record with PrepareCommit is the decision. It is written after the data is on disk, and is itself
synced before the next step. The later steps write the markers in the partitions, and the record with CompleteCommit.
Any process that finds them incomplete can repeat them. An abort needs no sync, because every undecided transaction is
aborted.

A process that aborts the transaction of another instance first writes a newer epoch into the fence. Appends read the
fence under the partition's lock, so the old instance can append nothing later.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from segmentlog.arguments import as_text
from segmentlog.errors import InvalidConfig, ProducerBusy, ProducerNameInUse
from segmentlog.format.producer_snapshot import NAMED_ID_END
from segmentlog.records import PartitionId
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.abandoned import ANONYMOUS as ANONYMOUS
from segmentlog.transactions.abandoned import AbandonedTransactions
from segmentlog.transactions.assigned_ids import AssignedIds
from segmentlog.transactions.name_locks import NameLocks
from segmentlog.transactions.outcome import TransactionCompleter
from segmentlog.transactions.producer_lease import ProducerLease, fenced_epoch
from segmentlog.transactions.server_transactions import ServerTransactions
from segmentlog.transactions.transaction_log import EPOCH_MAX, Status, TransactionLog, TransactionState

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class Transactions:
    """Coordinates the transactions of a store. Thread-safe, and safe with other processes."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._clock = topics.clock
        self._log = TransactionLog(topics)
        self._names = NameLocks(topics)
        self._completer = TransactionCompleter(topics, self._log)
        self._abandoned = AbandonedTransactions(topics, self._names, self._log, self._completer)
        self.server_transactions = ServerTransactions(topics, self._names, self._log, self._completer)
        """Transactions of clients of a server."""
        self.assigned_ids = AssignedIds(topics)
        """Producer ids of clients of a server without a transactional id."""

    def states(self) -> dict[str, TransactionState]:
        """Return the current state of each name."""
        return self._log.states()

    def has_producer_id(self, producer_id: int) -> bool:
        """Return whether a name has this producer id, or had it before it ran out of epochs."""
        return self._log.has_producer_id(producer_id)

    def may_have_producer_id(self, producer_id: int) -> bool:
        """Return what `has_producer_id` returns, or True while the transaction log is not open.

        Unlike `has_producer_id`, it may be called under the append lock of a partition.
        """
        # Opening the topic here would take the lock of all topics, whose holder may wait for the caller's lock.
        return not self._log.is_open or self._log.has_producer_id(producer_id)

    # ------------------------------------------------------------ names

    def register(self, name: str, timeout_ms: int) -> ProducerLease:
        """Register an instance of a name: fence older instances, and abort an open transaction. Durable when it
        returns."""
        if not isinstance(name, str) or not name or name.startswith(ANONYMOUS):
            raise InvalidConfig(
                "name",
                name,
                f"a text that is not empty and does not start with {ANONYMOUS!r}",
            )
        return self._register(as_text("name", name), timeout_ms, secrets.randbelow(NAMED_ID_END))

    def register_anonymous(self, producer_id: int, timeout_ms: int) -> ProducerLease:
        """Register a producer without a name, before its first transaction."""
        return self._register(f"{ANONYMOUS}{producer_id:x}", timeout_ms, producer_id)

    def _register(self, name: str, timeout_ms: int, new_id: int) -> ProducerLease:
        with self._names.locked(name) as fd:
            state = self.states().get(name)
            if state is None:
                state = TransactionState(new_id, -1)
            elif state.is_server_name:
                raise ProducerNameInUse(name, "a client of the server")
            elif state.is_open:
                state = self._completer.decide(name, state, fd, fence=True)
                if state.is_open:
                    why = "the outcome of its last transaction is not in every partition yet (is the disk full?)"
                    raise ProducerBusy(name, why)
            self._completer.confirm_markers(state)
            epoch = max(state.epoch, fenced_epoch(self._topics.fs, fd, state.producer_id)) + 1
            if epoch > EPOCH_MAX:
                state = replace(state, producer_id=secrets.randbelow(NAMED_ID_END), previous_id=state.producer_id)
                epoch = 0
            state = replace(
                state,
                epoch=epoch,
                status="Empty",
                timeout_ms=timeout_ms,
                partitions=(),
                unconfirmed_markers=(),
                updated_ms=self._clock.now_ms(),
            )
            return self._names.create_lease(name, state, fd, lambda: self._log.write(name, state, "durable"))

    def unregister(self, lease: ProducerLease) -> None:
        """Close an instance. A producer without a name is deleted."""
        name = lease.name
        lease.close()
        if name.startswith(ANONYMOUS) and not self._topics.read_only:
            self._abandoned.delete_name(name)
        self._log.compact_if_due()

    def note_resume(self, lease: ProducerLease, topic: str, partitions: int) -> int:
        """Return the partition count that was stored for a topic under this name.

        The first call for a topic stores ``partitions``, durably.
        """
        topic_id = self._topics.topic(topic).id
        with lease.deciding():
            state = lease.state
            if topic_id not in state.resume:
                lease.state = replace(state, resume={**state.resume, topic_id: partitions})
                self._log.write(lease.name, lease.state, "durable")
            return lease.state.resume[topic_id]

    # ------------------------------------------------------------ transactions of the own producers

    def add_partitions(self, lease: ProducerLease, logs: Mapping[PartitionId, Partition]) -> None:
        """Record that the transaction includes these partitions. The caller must not write to them before that."""
        with lease.deciding():
            state = lease.state
            for log in logs.values():  # first end a transaction that a power cut left open: it must not join this one
                if log.last_stable_offset < log.log_end_offset:
                    self._completer.restore_lost_marker(log, state)
            if state.status != "Ongoing":
                now_ms = self._clock.now_ms()
                state = replace(
                    state, status="Ongoing", started_ms=now_ms, started_up_ms=self._clock.monotonic_ms(),
                    updated_ms=now_ms, partitions=(), ends=(),
                )  # fmt: skip
            partitions = dict.fromkeys((*state.partitions, *logs))
            unconfirmed_markers = self._completer.find_unconfirmed(state.producer_id, state.unconfirmed_markers)
            state = replace(state, partitions=tuple(partitions), unconfirmed_markers=unconfirmed_markers)
            lease.is_unresolved = True
            self._log.write(lease.name, state)
            lease.state, lease.is_unresolved = state, False

    def commit(self, lease: ProducerLease, ends: Mapping[PartitionId, int], note: str | None = None) -> None:
        """Decide to commit, durably. The caller has synced the data up to ``ends``. The decision includes ``note``.

        Raises `ProducerFenced` if the transaction was aborted, `PartitionFailed` if it is unknown whether the decision
        survives a power cut.
        """
        state = lease.state
        if state.status != "Ongoing":  # it has no partitions: drop those of the last transaction
            lease.state = state = replace(state, partitions=(), started_ms=self._clock.now_ms())
        self._end(lease, "PrepareCommit", tuple(ends.get(partition, 0) for partition in state.partitions), note)

    def wait_shipped(self) -> None:
        """Return once all decisions, with their data, are in the object store. Raises `ShipUnconfirmed`."""
        self._log.wait_shipped()

    def abort(self, lease: ProducerLease) -> None:
        """Decide to abort."""
        self._end(lease, "PrepareAbort")

    def _end(self, lease: ProducerLease, status: Status, ends: tuple[int, ...] = (), note: str | None = None) -> None:
        name = lease.name
        with lease.deciding():
            state = lease.state
            note = state.note if note is None else note
            state = replace(state, status=status, updated_ms=self._clock.now_ms(), ends=ends, note=note)
            lease.is_unresolved = True
            self._log.write(name, state, "durable" if status == "PrepareCommit" else "written")
            lease.state = self._completer.complete_if_possible(name, state)
            lease.is_unresolved = lease.state.is_open

    def resolve_interrupted(self, lease: ProducerLease) -> None:
        """Finish a transaction whose decision was interrupted. If no decision was written, abort the transaction."""
        with lease.deciding() as fd:
            state = self.states().get(lease.name, lease.state)
            if state.is_open:
                state = self._completer.decide(lease.name, state, fd, fence=False)
            lease.state, lease.is_unresolved = state, state.is_open

    # ------------------------------------------------------------ transactions of others

    def is_alive(self, name: str, state: TransactionState) -> bool:
        """Return whether the instance in ``state`` still holds its lease."""
        return self._names.is_alive(name, state)

    def finish(self, now_ms: int | None = None) -> float:
        """Finish abandoned transactions: see `AbandonedTransactions.finish`."""
        return self._abandoned.finish(now_ms)

    @property
    def errors(self) -> dict[str, str]:
        """Errors that prevented `finish` from ending transactions, by the name of the producer."""
        return self._abandoned.errors

    def abort_in_partition(self, log: Partition, producer_id: int) -> None:
        """Abort the open transaction of a producer in a partition, and in all other partitions if a name has its id."""
        self._topics.check_writable("abort a transaction")
        states = self.states()
        name = next((name for name, state in states.items() if state.producer_id == producer_id), None)
        if name is None or not self.abort_by_name(name):
            self._abandoned.finish_orphan(log, producer_id)

    def abort_by_name(self, name: str) -> bool:
        """Abort the open transaction of a name, and fence its instance. Return whether this call has decided it.

        A transaction that was decided before is completed as it was decided, and the call returns False.
        """
        self._topics.check_writable("abort a transaction")
        state = self.states().get(name)
        if state is None or not state.is_open:
            return False
        with self._names.locked(name) as fd:
            state = self.states().get(name)
            if state is None or not state.is_open:
                return False
            self._completer.decide(name, state, fd, fence=True)
            return state.status == "Ongoing"
