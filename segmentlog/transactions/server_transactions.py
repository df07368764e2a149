"""Transactions of clients of a server. They have no instance with a lease in the store.

A client has a name (``transactional.id``), a producer id and an epoch. Any process of the store can serve its requests,
because the whole state is in the transaction log. Therefore:

- An open transaction survives the worker that served its client. It ends when the client ends it, at its time-out, or
  when another instance registers the name. No lease shows whether the client is alive.
- An append checks the state under the partition's lock. The transaction must be open, under this id and epoch, with
  this partition. The decision is written before the markers. So no record can be appended after a marker.
- A process that ends a transaction first saves that its end has begun (`TransactionState.last_epoch`). From then on,
  appends are rejected, so a sync covers all records. In Kafka's second transaction protocol, this step also begins the
  next epoch (KIP-890), so a late request cannot become part of the next transaction. In the first protocol the epoch
  stays the same, so a late request can.

The state with an open transaction and its partitions is not synced, so a power cut may lose it. After a power cut, the
epoch of the transaction log differs from the epoch at the last decision about the name (`TransactionState.log_epoch`).
Then the transaction cannot be committed. Nor can it if the epoch of one of its partitions has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from segmentlog.errors import (
    ProducerBusy,
    ProducerFenced,
    ProducerNameInUse,
    SegmentlogError,
    TransactionAborted,
    UnknownTopic,
)
from segmentlog.records import PartitionId
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.assigned_ids import new_store_id
from segmentlog.transactions.name_locks import NameLocks
from segmentlog.transactions.outcome import TransactionCompleter
from segmentlog.transactions.producer_lease import fenced_epoch, write_fence
from segmentlog.transactions.transaction_log import EPOCH_MAX, TransactionLog, TransactionState

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class ProducerIdAndEpoch(NamedTuple):
    """Producer id and epoch of a client."""

    producer_id: int
    epoch: int


class UnknownProducer(SegmentlogError):
    """A client uses an unknown name, or a producer id that does not belong to its name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"producer {self.name!r} does not have this producer id; the client must send InitProducerId first"


class WrongState(SegmentlogError):
    """A request does not fit the state of the transaction."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"producer {self.name!r}: {self.why}"


class ServerTransactions:
    """Transactions of clients of a server. Thread-safe, and safe with other processes."""

    def __init__(self, topics: Topics, names: NameLocks, log: TransactionLog, completer: TransactionCompleter) -> None:
        self._topics = topics
        self._names = names
        self._log = log
        self._completer = completer

    # ------------------------------------------------------------ names

    def register(self, name: str, timeout_ms: int, expected: ProducerIdAndEpoch | None = None) -> ProducerIdAndEpoch:
        """Register an instance of a name, and abort the open transaction of an older instance. Durable when it returns.

        ``expected``: the producer id and epoch that the client has; if they are not current, fail (KIP-360). A repeated
        request gets the same answer.

        Raises `ProducerFenced`, `ProducerNameInUse`, `ProducerBusy`, `InvalidConfig` for an invalid name.
        """
        with self._names.locked(name) as fence_fd:
            state = self._log.find(name)
            if state is None:
                state = TransactionState(new_store_id(), -1, is_server_name=True)
            elif not state.is_server_name:
                raise ProducerNameInUse(name, "a producer of the library")
            elif expected is not None and not _may_continue(state, expected):
                raise ProducerFenced(name, expected.epoch, state.epoch)
            is_repeated = (
                expected is not None and not state.is_open and expected.epoch == state.last_epoch != state.epoch
            )
            if state.is_open:
                state = self._completer.decide(name, state, fence_fd, fence=True)
                if state.is_open:
                    raise _incomplete_markers_error(name)
            self._completer.confirm_markers(state)
            if not is_repeated:
                epoch = max(state.epoch, fenced_epoch(self._topics.fs, fence_fd, state.producer_id)) + 1
                state = replace(state, epoch=epoch, last_epoch=-1 if expected is None else expected.epoch)
                if epoch > EPOCH_MAX:
                    state = _renumbered(state)
            state = replace(
                state, status="Empty", timeout_ms=timeout_ms, partitions=(), epochs=(), ends=(), unconfirmed_markers=(),
                note=None, updated_ms=self._topics.clock.now_ms(), log_epoch=self._log.epoch,
            )  # fmt: skip
            write_fence(self._topics.fs, fence_fd, state.producer_id, state.epoch)
            self._log.write(name, state, "durable")
            return ProducerIdAndEpoch(state.producer_id, state.epoch)

    def _checked_state(self, name: str, identity: ProducerIdAndEpoch) -> TransactionState:
        """Return the state of the name. Raises `UnknownProducer` for another producer id, `ProducerFenced` for another
        epoch.
        """
        state = self._log.find(name)
        if state is None or not state.is_server_name or state.producer_id != identity.producer_id:
            raise UnknownProducer(name)
        if state.epoch != identity.epoch:
            raise ProducerFenced(name, identity.epoch, state.epoch)
        return state

    # ------------------------------------------------------------ open transactions

    def add_partitions(self, name: str, identity: ProducerIdAndEpoch, logs: Iterable[Partition]) -> None:
        """Add partitions to the name's transaction; begin it if none is open.

        Raises `UnknownProducer`, `ProducerFenced`, and `ProducerBusy` while the last transaction cannot be finished.
        """
        by_id = {PartitionId(log.topic_id, log.number): log for log in logs}
        if self._includes(self._checked_state(name, identity), by_id):
            return
        with self._names.locked(name) as fence_fd:
            state = self._checked_state(name, identity)
            if state.is_open and not state.is_writable:
                if state.status == "Ongoing":
                    raise ProducerBusy(name, "its transaction is being decided")
                state = self._completer.decide(name, state, fence_fd, fence=False)
                if state.is_open:
                    raise _incomplete_markers_error(name)
            fresh = {partition: log for partition, log in by_id.items() if not self._includes(state, (partition,))}
            for log in fresh.values():  # first end a transaction that a power cut left open: it must not join this one
                if log.last_stable_offset < log.log_end_offset:
                    self._completer.restore_lost_marker(log, state)
            if state.status != "Ongoing":
                clock = self._topics.clock
                now_ms = clock.now_ms()
                state = replace(
                    state, status="Ongoing", started_ms=now_ms, started_up_ms=clock.monotonic_ms(), updated_ms=now_ms,
                    partitions=(), epochs=(), ends=(), last_epoch=-1, note=None,
                    unconfirmed_markers=self._completer.find_unconfirmed(state.producer_id, state.unconfirmed_markers),
                )  # fmt: skip
            state = replace(
                state,
                partitions=(*state.partitions, *fresh),
                epochs=(*state.epochs, *(log.epoch for log in fresh.values())),
            )
            self._log.write(name, state)

    def is_open_in(self, name: str, identity: ProducerIdAndEpoch, partition: PartitionId) -> bool:
        """Return whether the name's transaction is open and includes the partition. Raises as `add_partitions`."""
        return self._includes(self._checked_state(name, identity), (partition,))

    @staticmethod
    def _includes(state: TransactionState, wanted: Iterable[PartitionId]) -> bool:
        return state.is_writable and all(partition in state.partitions for partition in wanted)

    def append_check(self, name: str, identity: ProducerIdAndEpoch, log: Partition) -> Callable[[], None]:
        """Return a function that `log` must call, under its append lock, before each append of the transaction.

        The function raises `UnknownProducer`, `ProducerFenced` or `WrongState` if the append is not allowed.
        """
        partition = PartitionId(log.topic_id, log.number)

        def check() -> None:
            if not self.is_open_in(name, identity, partition):
                raise WrongState(name, f"{log.topic}/{log.number} is not part of an open transaction")

        return check

    # ------------------------------------------------------------ commit and abort

    def end_transaction(
        self, name: str, identity: ProducerIdAndEpoch, *, committed: bool, bumps_epoch: bool = False
    ) -> ProducerIdAndEpoch:
        """Commit or abort the name's transaction. Durable when it returns. A repeated request gets the same answer.

        With ``bumps_epoch`` the end of the transaction raises the epoch (KIP-890), and the call returns the new
        producer id and epoch. The client may then abort even if no transaction is open. Raises `TransactionAborted` if
        the transaction could not be committed and was aborted; `WrongState`, `UnknownProducer`, `ProducerFenced`; and
        `ProducerBusy` while the last transaction cannot be finished.
        """
        with self._names.locked(name) as fence_fd:
            state = self._log.find(name)
            is_repeated = bumps_epoch and state is not None and _is_ending(state, identity)
            if not is_repeated or state is None:
                state = self._checked_state(name, identity)
            if state.status in ("PrepareCommit", "PrepareAbort"):
                state = self._completer.decide(name, state, fence_fd, fence=False)
                may_be_repeated = is_repeated or (not bumps_epoch and state.log_epoch == self._log.epoch)
                if state.is_open and not may_be_repeated:
                    # The request is about a later transaction. Its outcome must not replace this decision, on which
                    # the missing markers depend.
                    raise _incomplete_markers_error(name)
            if state.status == "Ongoing":
                state = self._decide(name, state, committed=committed, bumps_epoch=bumps_epoch)
            elif bumps_epoch and not is_repeated and not committed:
                state = self._end_empty_epoch(name, state)
            elif not is_repeated and self._is_lost(state, committed=committed, bumps_epoch=bumps_epoch):
                state = self._end_lost(name, state, committed=committed)
            elif bumps_epoch and not is_repeated:
                raise WrongState(name, f"no transaction of epoch {identity.epoch} is open, so nothing can be committed")
            else:
                self._check_outcome(name, state, committed=committed, is_same=is_repeated)
            return ProducerIdAndEpoch(state.producer_id, state.epoch)

    def _is_lost(self, state: TransactionState, *, committed: bool, bumps_epoch: bool) -> bool:
        """Return whether a crash must have lost the record of the transaction that the client wants to end.

        False for a commit in the first protocol after a committed transaction: the request may repeat that commit, and
        must get the same answer.
        """
        may_repeat = committed and state.status == "CompleteCommit" and not bumps_epoch
        return state.log_epoch != self._log.epoch and not may_repeat

    def _end_lost(self, name: str, state: TransactionState, *, committed: bool) -> TransactionState:
        """End a transaction whose record was lost: raise `TransactionAborted` for a commit; an abort succeeds."""
        if committed:
            raise TransactionAborted(repr(name), "a crash has lost the state of the transaction")
        state = replace(state, updated_ms=self._topics.clock.now_ms(), log_epoch=self._log.epoch)
        self._log.write(name, state)
        return state

    def _check_outcome(self, name: str, state: TransactionState, *, committed: bool, is_same: bool) -> None:
        """Raise unless the last transaction ended as requested.

        ``is_same``: the epoch of the request shows that it is about the last transaction. A commit that failed raises
        `TransactionAborted` again when the client repeats it.
        """
        ended = ("PrepareCommit", "CompleteCommit") if committed else ("PrepareAbort", "CompleteAbort")
        if state.status not in ended:
            if committed and state.note is not None:
                raise TransactionAborted(repr(name), state.note)
            wanted = "committed" if committed else "aborted"
            raise WrongState(name, f"there is no transaction that can be {wanted}: its state is {state.status}")
        if not is_same and state.log_epoch != self._log.epoch:
            raise WrongState(name, "after a crash it is unknown whether the request is about the last transaction")

    def _decide(self, name: str, state: TransactionState, *, committed: bool, bumps_epoch: bool) -> TransactionState:
        """End an open transaction: reject late appends, sync, decide, write markers. The caller holds the lock."""
        if state.last_epoch < 0:
            state = replace(state, last_epoch=state.epoch, epoch=state.epoch + bumps_epoch)
            self._log.write(name, state)
        ends: tuple[int, ...] = ()
        failure: Exception | None = None
        why: str | None = None
        if committed:
            try:
                ends = self._sync(name, state)
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                failure = error
                why = error.why if isinstance(error, TransactionAborted) else str(error)
        state = replace(
            state, status="PrepareCommit" if committed and failure is None else "PrepareAbort", ends=ends, note=why,
            updated_ms=self._topics.clock.now_ms(), log_epoch=self._log.epoch,
        )  # fmt: skip
        # An abort with a new epoch must be durable, too: the client continues under that epoch.
        self._log.write(name, state, "durable" if bumps_epoch or state.status == "PrepareCommit" else "written")
        state = self._completer.complete_if_possible(name, state)
        if why is not None:
            raise TransactionAborted(repr(name), why) from failure
        return self._renumber_if_due(name, state) if bumps_epoch else state

    def _sync(self, name: str, state: TransactionState) -> tuple[int, ...]:
        """Sync the records of the transaction. Return the offset after its last record, for each partition."""
        if state.log_epoch != self._log.epoch:
            raise TransactionAborted(repr(name), "a crash may have lost the list of its partitions")
        ends = []
        for partition, epoch in zip(state.partitions, state.epochs, strict=True):
            try:
                ends.append(
                    self._topics.on_partition(partition, partial(_sync_partition, name=name, state=state, epoch=epoch))
                )
            except UnknownTopic:
                ends.append(0)  # the topic was deleted
        return tuple(ends)

    def _end_empty_epoch(self, name: str, state: TransactionState) -> TransactionState:
        """Raise the epoch for a client that aborts without an open transaction."""
        unconfirmed_markers = self._completer.find_unconfirmed(state.producer_id, state.unconfirmed_markers)
        state = replace(
            state,
            status="CompleteAbort",
            last_epoch=state.epoch,
            epoch=state.epoch + 1,
            partitions=(),
            epochs=(),
            ends=(),
            unconfirmed_markers=unconfirmed_markers,
            note=None,
            updated_ms=self._topics.clock.now_ms(),
            log_epoch=self._log.epoch,
        )
        self._log.write(name, state, "durable")
        return self._renumber_if_due(name, state)

    def _renumber_if_due(self, name: str, state: TransactionState) -> TransactionState:
        """Give the name a new producer id if it has no epochs left and its transaction is complete."""
        if state.epoch <= EPOCH_MAX or state.is_open:
            return state
        self._completer.confirm_markers(state)
        state = replace(_renumbered(state), partitions=(), epochs=(), ends=(), unconfirmed_markers=())
        self._log.write(name, state, "durable")
        return state


def _renumbered(state: TransactionState) -> TransactionState:
    return replace(state, producer_id=new_store_id(), previous_id=state.producer_id, epoch=0)


def _may_continue(state: TransactionState, expected: ProducerIdAndEpoch) -> bool:
    """Return whether a client with this producer id and epoch may get the next epoch.

    It may also have the epoch before the current one: then it repeats a request, because it has not received the
    answer with the current epoch.
    """
    if expected.producer_id == state.producer_id and expected.epoch == state.epoch:
        return True
    return expected.producer_id in (state.producer_id, state.previous_id) and expected.epoch == state.last_epoch


def _is_ending(state: TransactionState, identity: ProducerIdAndEpoch) -> bool:
    """Return whether a transaction of this producer id and epoch has begun to end, and its end has raised the epoch."""
    return (
        state.is_server_name
        and state.status != "Empty"
        and identity.producer_id in (state.producer_id, state.previous_id)
        and identity.epoch == state.last_epoch
        and identity != (state.producer_id, state.epoch)
    )


def _sync_partition(log: Partition, name: str, state: TransactionState, epoch: int) -> int:
    """Sync the records of the transaction in a partition. Return the offset after them; 0 if there are none."""
    entry = log.producer(state.producer_id)
    if log.epoch != epoch:
        raise TransactionAborted(repr(name), f"a crash may have lost its records in {log.topic}/{log.number}")
    if entry is None or entry.transaction_offset < 0:
        return 0
    log.sync_upto(entry.next_offset, entry.transaction_offset)
    return entry.next_offset


def _incomplete_markers_error(name: str) -> ProducerBusy:
    return ProducerBusy(name, "the outcome of its last transaction is not in every partition yet (is the disk full?)")
