"""Named producers and their transactions: Kafka's transaction coordinator, as a library under a lock.

    @producers/<name>/fence              (producer id, epoch) of the newest instance; locked for every decision
    @producers/<name>/lease-<id>-<epoch> locked by that instance for its life
    __transaction_state                  the last record of each name: `TransactionState`

A transaction goes Empty -> Ongoing -> PrepareCommit -> CompleteCommit, or over PrepareAbort. The record
that says PrepareCommit is the decision: it is written once the data is on disk, and it is on disk
before anything else happens. Whatever comes after it can be done again by whoever finds it undone:
the markers in the partitions, and the record that says so. An abort needs no disk at all, since
that is what becomes of every transaction that nobody decided.

Whoever aborts another one's transaction writes a newer epoch into the fence first. Appends look at it
under the partition's lock, so nothing of the older one comes after that.
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
from segmentlog.transactions.abandoned import Finisher
from segmentlog.transactions.assigned_ids import AssignedIds
from segmentlog.transactions.name_locks import Names
from segmentlog.transactions.outcome import Decisions
from segmentlog.transactions.producer_lease import Registration, fenced_epoch
from segmentlog.transactions.server_transactions import RemoteTransactions
from segmentlog.transactions.transaction_log import EPOCH_MAX, Status, TransactionLog, TransactionState

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class Transactions:
    """Coordinates the transactions of one store, with whatever processes have it open. Thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._clock = topics.clock
        self._log = TransactionLog(topics)
        self._names = Names(topics)
        self._decisions = Decisions(topics, self._log)
        self._finisher = Finisher(topics, self._names, self._log, self._decisions)
        self.remote = RemoteTransactions(topics, self._names, self._log, self._decisions)
        """Those of a server's clients."""
        self.assigned_ids = AssignedIds(topics)
        """Producer ids of a server's clients that have no transactional id."""

    def states(self) -> dict[str, TransactionState]:
        """The last state of each name, as it is now."""
        return self._log.states()

    def holds(self, producer_id: int) -> bool:
        """Return whether a name has this producer id, or had it before it ran out of epochs."""
        return self._log.holds(producer_id)

    def may_hold(self, producer_id: int) -> bool:
        """The same for a caller that holds the append lock of a partition: True until the names have been read."""
        # To open the topic here would take the lock of all topics, whose holder may wait for the caller's lock.
        return not self._log.is_open or self._log.holds(producer_id)

    # ------------------------------------------------------------ names

    def register(self, name: str, timeout_ms: int) -> Registration:
        """Become the instance of a name that counts; older ones are fenced, and an open transaction is aborted.

        Durable when it returns.
        """
        if not isinstance(name, str) or not name or name.startswith(ANONYMOUS):
            raise InvalidConfig("name", name, f"a text that is not empty and does not begin with {ANONYMOUS!r}")
        return self._register(as_text("name", name), timeout_ms, secrets.randbelow(NAMED_ID_END))

    def register_anonymous(self, producer_id: int, timeout_ms: int) -> Registration:
        """For a producer without a name that begins a transaction."""
        return self._register(f"{ANONYMOUS}{producer_id:x}", timeout_ms, producer_id)

    def _register(self, name: str, timeout_ms: int, fresh_id: int) -> Registration:
        with self._names.locked(name) as fd:
            state = self.states().get(name)
            if state is None:
                state = TransactionState(fresh_id, -1)
            elif state.remote:
                raise ProducerNameInUse(name, "a client of the server")
            elif state.is_open:
                state = self._decisions.decide(name, state, fd, fence=True)
                if state.is_open:
                    why = "its last transaction is decided, but a partition cannot be told (is the disk full?)"
                    raise ProducerBusy(name, why)
            self._decisions.settle(state)
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
                unsettled=(),
                updated_ms=self._clock.now_ms(),
            )
            return self._names.become_instance(name, state, fd, lambda: self._log.write(name, state, "durable"))

    def unregister(self, registration: Registration) -> None:
        """The instance is closed. One without a name leaves nothing behind."""
        name = registration.name
        registration.close()
        if name.startswith(ANONYMOUS) and not self._topics.read_only:
            self._finisher.delete_name(name)
        self._log.tidy()

    def note_resume(self, registration: Registration, topic: str, partitions: int) -> int:
        """How many partitions the topic had when the name first sent to it in order; noted if that is now."""
        topic_id = self._topics.topic(topic).id
        with registration.deciding():
            state = registration.state
            if topic_id not in state.resume:
                registration.state = replace(state, resume={**state.resume, topic_id: partitions})
                self._log.write(registration.name, registration.state, "durable")
            return registration.state.resume[topic_id]

    # ------------------------------------------------------------ what the owner does

    def add_partitions(self, registration: Registration, logs: Mapping[PartitionId, Partition]) -> None:
        """Write down which partitions the transaction writes to, before it does."""
        with registration.deciding():
            state = registration.state
            for log in logs.values():  # what a power cut left open there must not become part of this one
                if log.last_stable_offset < log.log_end_offset:
                    self._decisions.end_lost(log, state)
            if state.status != "Ongoing":
                now_ms = self._clock.now_ms()
                state = replace(
                    state, status="Ongoing", started_ms=now_ms, started_up_ms=self._clock.monotonic_ms(),
                    updated_ms=now_ms, partitions=(), ends=(),
                )  # fmt: skip
            known = dict.fromkeys((*state.partitions, *logs))
            unsettled = self._decisions.still_unsettled(state.producer_id, state.unsettled)
            state = replace(state, partitions=tuple(known), unsettled=unsettled)
            registration.unsure = True
            self._log.write(registration.name, state)
            registration.state, registration.unsure = state, False

    def commit(self, registration: Registration, ends: Mapping[PartitionId, int], note: str | None = None) -> None:
        """Decide for the transaction, durably. Its data, up to ``ends``, is on disk already; ``note`` is with it.

        Raises `ProducerFenced`: it was aborted; `PartitionFailed`, when nobody knows whether the
        decision survives a power cut.
        """
        state = registration.state
        if state.status != "Ongoing":  # it wrote to no partition, and those of the last one are none of it
            registration.state = state = replace(state, partitions=(), started_ms=self._clock.now_ms())
        self._end(registration, "PrepareCommit", tuple(ends.get(where, 0) for where in state.partitions), note)

    def wait_shipped(self) -> None:
        """Return once all that was decided lies in the object store, with its data. Raises `ShipUnconfirmed`."""
        self._log.wait_shipped()

    def abort(self, registration: Registration) -> None:
        """Take back what the transaction wrote."""
        self._end(registration, "PrepareAbort")

    def _end(
        self, registration: Registration, status: Status, ends: tuple[int, ...] = (), note: str | None = None
    ) -> None:
        name = registration.name
        with registration.deciding():
            state = registration.state
            note = state.note if note is None else note
            state = replace(state, status=status, updated_ms=self._clock.now_ms(), ends=ends, note=note)
            registration.unsure = True
            self._log.write(name, state, "durable" if status == "PrepareCommit" else "written")
            registration.state = self._decisions.complete_if_possible(name, state)
            registration.unsure = registration.state.is_open

    def make_sure(self, registration: Registration) -> None:
        """After an interruption: look up what was decided, and finish it; what was not decided is aborted."""
        with registration.deciding() as fd:
            state = self.states().get(registration.name, registration.state)
            if state.is_open:
                state = self._decisions.decide(registration.name, state, fd, fence=False)
            registration.state, registration.unsure = state, state.is_open

    # ------------------------------------------------------------ what anybody does

    def is_alive(self, name: str, state: TransactionState) -> bool:
        """Whether the instance that the state is of still has its lease."""
        return self._names.is_alive(name, state)

    def finish(self, now_ms: int | None = None) -> float:
        """End what others left; see `Finisher.finish`."""
        return self._finisher.finish(now_ms)

    @property
    def troubles(self) -> dict[str, str]:
        """What kept `finish` from ending transactions, by the name of the producer."""
        return self._finisher.troubles

    def abort_at(self, log: Partition, producer_id: int) -> None:
        """Abort what a producer has open in a partition: its whole transaction, if it is known whose it is."""
        self._topics.check_writable("abort a transaction")
        states = self.states()
        name = next((name for name, state in states.items() if state.producer_id == producer_id), None)
        if name is None or not self.abort_by_name(name):
            self._finisher.finish_orphan(log, producer_id)

    def abort_by_name(self, name: str) -> bool:
        """Abort the open transaction of a name, and fence the instance that has it open; whether there was one.

        One that is decided already is finished as it was decided, and is no longer an open one.
        """
        self._topics.check_writable("abort a transaction")
        state = self.states().get(name)
        if state is None or not state.is_open:
            return False
        with self._names.locked(name) as fd:
            state = self.states().get(name)
            if state is None or not state.is_open:
                return False
            self._decisions.decide(name, state, fd, fence=True)
            return state.status == "Ongoing"
