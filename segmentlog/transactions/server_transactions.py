"""Transactions of a server's clients: the library's states, decisions and markers, without an instance that lives here.

A client is known by its name (``transactional.id``), and by the numbers that it was given: producer id and epoch. Any
process of the store may do what it asks for; what there is to know is in the state of the name. So

- an open transaction outlives whoever served its client. It ends by the client's word, by its timeout, or when somebody
  becomes the name's instance anew: no lease says whether the client lives.
- an append is let through by a look at that state under the partition's lock: the transaction is open, under these
  numbers, and the partition is part of it. A decision is written before its markers, so nothing comes behind those.
- whoever decides says so first (`TransactionState.last_epoch`): from then on nothing is let through, and what is
  synced is all that there is. In Kafka's second protocol of transactions that is where the next epoch begins (KIP-890),
  so that no request of this transaction can become part of the next one. In the first the epoch stays, and it can.

What is not said durably, that a transaction is open and where, a power cut may take. Then this log has another epoch
than when the name was last decided about (`TransactionState.log_epoch`), and the transaction cannot be committed. The
same goes for a partition that has another epoch than when it became part of the transaction.
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
from segmentlog.transactions.name_locks import Names
from segmentlog.transactions.outcome import Decisions
from segmentlog.transactions.producer_lease import fenced_epoch, write_fence
from segmentlog.transactions.transaction_log import EPOCH_MAX, TransactionLog, TransactionState

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class Numbers(NamedTuple):
    """Under which a client writes."""

    producer_id: int
    epoch: int


class UnknownProducer(SegmentlogError):
    """A client has no numbers under its name, or others."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"producer {self.name!r} has other numbers, or none: it has to ask for them first"


class WrongState(SegmentlogError):
    """What a client asks for cannot be asked for now."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"producer {self.name!r}: {self.why}"


class RemoteTransactions:
    """What clients of a server do with transactions. Thread-safe, and any number of processes have one."""

    def __init__(self, topics: Topics, names: Names, log: TransactionLog, decisions: Decisions) -> None:
        self._topics = topics
        self._names = names
        self._log = log
        self._decisions = decisions

    # ------------------------------------------------------------ who counts

    def begin(self, name: str, timeout_ms: int, expected: Numbers | None = None) -> Numbers:
        """Become the instance of a name; an open transaction of an older one is aborted. Durable when it returns.

        ``expected``: only if these are its numbers still (KIP-360); who asks again gets the same answer. Raises
        `ProducerFenced`, `ProducerNameInUse`, `ProducerBusy`, `InvalidConfig` for what is no name.
        """
        with self._names.locked(name) as fence_fd:
            state = self._log.find(name)
            if state is None:
                state = TransactionState(new_store_id(), -1, remote=True)
            elif not state.remote:
                raise ProducerNameInUse(name, "a producer of the library")
            elif expected is not None and not _may_go_on(state, expected):
                raise ProducerFenced(name, expected.epoch, state.epoch)
            is_repeated = (
                expected is not None and not state.is_open and expected.epoch == state.last_epoch != state.epoch
            )
            if state.is_open:
                state = self._decisions.decide(name, state, fence_fd, fence=True)
                if state.is_open:
                    raise _cannot_be_told(name)
            self._decisions.settle(state)
            if not is_repeated:
                epoch = max(state.epoch, fenced_epoch(self._topics.fs, fence_fd, state.producer_id)) + 1
                state = replace(state, epoch=epoch, last_epoch=-1 if expected is None else expected.epoch)
                if epoch > EPOCH_MAX:
                    state = _renumbered(state)
            state = replace(
                state, status="Empty", timeout_ms=timeout_ms, partitions=(), epochs=(), ends=(), unsettled=(),
                note=None, updated_ms=self._topics.clock.now_ms(), log_epoch=self._log.epoch,
            )  # fmt: skip
            write_fence(self._topics.fs, fence_fd, state.producer_id, state.epoch)
            self._log.write(name, state, "durable")
            return Numbers(state.producer_id, state.epoch)

    def _known(self, name: str, numbers: Numbers) -> TransactionState:
        """The state of the name, if these are its numbers."""
        state = self._log.find(name)
        if state is None or not state.remote or state.producer_id != numbers.producer_id:
            raise UnknownProducer(name)
        if state.epoch != numbers.epoch:
            raise ProducerFenced(name, numbers.epoch, state.epoch)
        return state

    # ------------------------------------------------------------ while it is open

    def add(self, name: str, numbers: Numbers, logs: Iterable[Partition]) -> None:
        """Have partitions be part of the name's transaction, which is begun if there is none.

        Raises `UnknownProducer`, `ProducerFenced`, and `ProducerBusy` while the last one cannot be finished.
        """
        named = {PartitionId(log.topic_id, log.number): log for log in logs}
        if self._has(self._known(name, numbers), named):
            return
        with self._names.locked(name) as fence_fd:
            state = self._known(name, numbers)
            if state.is_open and not state.is_writable:
                if state.status == "Ongoing":
                    raise ProducerBusy(name, "its transaction is being decided")
                state = self._decisions.decide(name, state, fence_fd, fence=False)
                if state.is_open:
                    raise _cannot_be_told(name)
            fresh = {where: log for where, log in named.items() if not self._has(state, (where,))}
            for log in fresh.values():  # what a power cut left open there must not become part of this one
                if log.last_stable_offset < log.log_end_offset:
                    self._decisions.end_lost(log, state)
            if state.status != "Ongoing":
                clock = self._topics.clock
                now_ms = clock.now_ms()
                state = replace(
                    state, status="Ongoing", started_ms=now_ms, started_up_ms=clock.monotonic_ms(), updated_ms=now_ms,
                    partitions=(), epochs=(), ends=(), last_epoch=-1, note=None,
                    unsettled=self._decisions.still_unsettled(state.producer_id, state.unsettled),
                )  # fmt: skip
            state = replace(
                state,
                partitions=(*state.partitions, *fresh),
                epochs=(*state.epochs, *(log.epoch for log in fresh.values())),
            )
            self._log.write(name, state)

    def has(self, name: str, numbers: Numbers, where: PartitionId) -> bool:
        """Whether the name's transaction is open, and the partition part of it. Raises as `add`."""
        return self._has(self._known(name, numbers), (where,))

    @staticmethod
    def _has(state: TransactionState, wanted: Iterable[PartitionId]) -> bool:
        return state.is_writable and all(where in state.partitions for where in wanted)

    def guard(self, name: str, numbers: Numbers, log: Partition) -> Callable[[], None]:
        """What is to be called under the lock of ``log`` before something of the transaction is appended there.

        It raises `UnknownProducer`, `ProducerFenced` or `WrongState`.
        """
        where = PartitionId(log.topic_id, log.number)

        def check() -> None:
            if not self.has(name, numbers, where):
                raise WrongState(name, f"{log.topic}/{log.number} is not part of a transaction that is open")

        return check

    # ------------------------------------------------------------ its end

    def end(self, name: str, numbers: Numbers, *, committed: bool, bumps: bool = False) -> Numbers:
        """Decide for the name's transaction, or against it; durable when it returns. Who asks again is told the same.

        ``bumps``: with it an epoch ends (KIP-890); the numbers of the next one are returned. To abort where there is
        nothing to abort is allowed then. Raises `TransactionAborted` for what cannot be committed, and was aborted;
        `WrongState`, `UnknownProducer`, `ProducerFenced`.
        """
        with self._names.locked(name) as fence_fd:
            state = self._log.find(name)
            is_repeated = bumps and state is not None and _has_begun_to_end(state, numbers)
            if not is_repeated or state is None:
                state = self._known(name, numbers)
            if state.status in ("PrepareCommit", "PrepareAbort"):
                state = self._decisions.decide(name, state, fence_fd, fence=False)
            if state.status == "Ongoing":
                state = self._decide(name, state, committed=committed, bumps=bumps)
            elif bumps and not is_repeated and not committed:
                state = self._end_nothing(name, state)
            elif not is_repeated and self._is_lost(state, committed=committed, bumps=bumps):
                state = self._end_lost(name, state, committed=committed)
            elif bumps and not is_repeated:
                raise WrongState(name, f"nothing was written under epoch {numbers.epoch} that could be committed")
            else:
                self._check_outcome(name, state, committed=committed, is_known=is_repeated)
            return Numbers(state.producer_id, state.epoch)

    def _is_lost(self, state: TransactionState, *, committed: bool, bumps: bool) -> bool:
        """Whether the transaction that a client wants to end can be none but one of which a crash took every note.

        In the first protocol that may also be one that was committed before the crash, if the last one was: whoever
        asks for that again cannot be told that it was not. Who wants to abort has not asked for it.
        """
        is_told = committed and state.status == "CompleteCommit" and not bumps
        return state.log_epoch != self._log.epoch and not is_told

    def _end_lost(self, name: str, state: TransactionState, *, committed: bool) -> TransactionState:
        """Nothing of it counts: who wants to commit it is told to abort, and who aborts it goes on from here."""
        if committed:
            raise TransactionAborted(repr(name), "a crash took the note of it")
        state = replace(state, updated_ms=self._topics.clock.now_ms(), log_epoch=self._log.epoch)
        self._log.write(name, state)
        return state

    def _check_outcome(self, name: str, state: TransactionState, *, committed: bool, is_known: bool) -> None:
        """Raise unless a transaction that has ended did so; ``is_known``: its epoch says which one that was.

        A commit that failed, and whose worker was killed before it answered, raises `TransactionAborted` again.
        """
        ended = ("PrepareCommit", "CompleteCommit") if committed else ("PrepareAbort", "CompleteAbort")
        if state.status not in ended:
            if committed and state.note is not None:
                raise TransactionAborted(repr(name), state.note)
            wanted = "committed" if committed else "aborted"
            raise WrongState(name, f"there is no transaction to be {wanted}: {state.status}")
        if not is_known and state.log_epoch != self._log.epoch:
            raise WrongState(name, "a crash came in between: this may be another transaction than the one that ended")

    def _decide(self, name: str, state: TransactionState, *, committed: bool, bumps: bool) -> TransactionState:
        """Of an open transaction: keep out what is late, sync, decide, tell. Under the name's lock."""
        if state.last_epoch < 0:
            state = replace(state, last_epoch=state.epoch, epoch=state.epoch + bumps)
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
                failure, why = error, error.why if isinstance(error, TransactionAborted) else str(error)
        state = replace(
            state, status="PrepareCommit" if committed and failure is None else "PrepareAbort", ends=ends, note=why,
            updated_ms=self._topics.clock.now_ms(), log_epoch=self._log.epoch,
        )  # fmt: skip
        # An abort that brings an epoch has to be kept as well: the client goes on under that.
        self._log.write(name, state, "durable" if bumps or state.status == "PrepareCommit" else "written")
        state = self._decisions.complete_if_possible(name, state)
        if why is not None:
            raise TransactionAborted(repr(name), why) from failure
        return self._renumber_if_due(name, state) if bumps else state

    def _sync(self, name: str, state: TransactionState) -> tuple[int, ...]:
        """Put what the transaction wrote on disk: where it ends in each partition."""
        if state.log_epoch != self._log.epoch:
            raise TransactionAborted(repr(name), "a crash may have taken the note of what it wrote to")
        ends = []
        for where, epoch in zip(state.partitions, state.epochs, strict=True):
            try:
                ends.append(self._topics.on_partition(where, partial(_sync_one, name=name, state=state, epoch=epoch)))
            except UnknownTopic:
                ends.append(0)  # deleted, with all that it held
        return tuple(ends)

    def _end_nothing(self, name: str, state: TransactionState) -> TransactionState:
        """An epoch ends, under which nothing was written."""
        unsettled = self._decisions.still_unsettled(state.producer_id, state.unsettled)
        state = replace(
            state, status="CompleteAbort", last_epoch=state.epoch, epoch=state.epoch + 1, partitions=(), epochs=(),
            ends=(), unsettled=unsettled, note=None, updated_ms=self._topics.clock.now_ms(), log_epoch=self._log.epoch,
        )  # fmt: skip
        self._log.write(name, state, "durable")
        return self._renumber_if_due(name, state)

    def _renumber_if_due(self, name: str, state: TransactionState) -> TransactionState:
        """Go on under another id when the epochs of this one have come to an end; unless it cannot be finished yet."""
        if state.epoch <= EPOCH_MAX or state.is_open:
            return state
        self._decisions.settle(state)
        state = replace(_renumbered(state), partitions=(), epochs=(), ends=(), unsettled=())
        self._log.write(name, state, "durable")
        return state


def _renumbered(state: TransactionState) -> TransactionState:
    return replace(state, producer_id=new_store_id(), previous_id=state.producer_id, epoch=0)


def _may_go_on(state: TransactionState, expected: Numbers) -> bool:
    """Whether who has these numbers may have the next ones; or has got them, and was not told."""
    if expected.producer_id == state.producer_id and expected.epoch == state.epoch:
        return True
    return expected.producer_id in (state.producer_id, state.previous_id) and expected.epoch == state.last_epoch


def _has_begun_to_end(state: TransactionState, numbers: Numbers) -> bool:
    """Whether the transaction under these numbers is decided, or about to be, and has brought others."""
    return (
        state.remote
        and state.status != "Empty"
        and numbers.producer_id in (state.producer_id, state.previous_id)
        and numbers.epoch == state.last_epoch
        and numbers != (state.producer_id, state.epoch)
    )


def _sync_one(log: Partition, name: str, state: TransactionState, epoch: int) -> int:
    """fsync what the transaction wrote to a partition; the offset behind it, 0 for nothing."""
    entry = log.producer(state.producer_id)
    if log.epoch != epoch:
        raise TransactionAborted(repr(name), f"a crash may have taken what it wrote to {log.topic}/{log.number}")
    if entry is None or entry.transaction_offset < 0:
        return 0
    log.sync_upto(entry.next_offset, entry.transaction_offset)
    return entry.next_offset


def _cannot_be_told(name: str) -> ProducerBusy:
    return ProducerBusy(name, "its last transaction is decided, but a partition cannot be told (is the disk full?)")
