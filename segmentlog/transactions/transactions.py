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

import contextlib
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from segmentlog.arguments import as_text
from segmentlog.errors import (
    InvalidConfig,
    ProducerBusy,
    SegmentlogError,
    StoreClosed,
    UnknownTopic,
)
from segmentlog.format.names import PRODUCERS_FOLDER, group_folder_name
from segmentlog.format.producers import NAMED_ID_END, ProducerEntry
from segmentlog.records import PartitionId
from segmentlog.storage import forks
from segmentlog.storage.forks import Held, LockableFiles, held_open, hold_open, let_go
from segmentlog.storage.locks import AT_ONCE, EXCLUSIVE, SHARED, held
from segmentlog.topics.topics import Topics
from segmentlog.transactions.journal import Status, TransactionLog, TransactionState, Unsettled
from segmentlog.transactions.registration import Registration, fenced_epoch, lock_fence, write_fence

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack, Partition

logger = logging.getLogger("segmentlog")

ANONYMOUS: Final = "~"
"""Begins the names of producers that were given none, and are forgotten when they are closed."""
_FENCE_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_EPOCH_MAX: Final = 32_000
"""Epochs are 16 bits; a name that was opened so often goes on under another id."""
_BUSY_PAUSE_S: Final = 0.25
_IDLE_PAUSE_S: Final = 1.0


class Transactions:
    """Coordinates the transactions of one store, with whatever processes have it open. Thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._fs = topics.fs
        self._clock = topics.clock
        self._folder = f"{topics.path}/{PRODUCERS_FOLDER}"
        self._log = TransactionLog(topics)
        self._finishing = False
        self.troubles: dict[str, str] = {}
        """What kept `finish` from ending transactions, by the name of the producer."""
        forks.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """In a forked child: another thread of the parent may have been at it."""
        self._finishing = False

    def states(self) -> dict[str, TransactionState]:
        """The last state of each name, as it is now."""
        return self._log.states()

    def _write(self, name: str, state: TransactionState | None, ack: Ack = "written") -> None:
        self._log.write(name, state, ack)

    # ------------------------------------------------------------ names

    @held
    def _locked(self, name: str, *, wait_s: float | None = None) -> Iterator[int]:
        """Hold the lock under which everything about a name is decided; the descriptor of its fence.

        Raises `ProducerBusy` when somebody holds it for longer than ``wait_s``, or half a minute.
        """
        with held_open(self._fs, f"{self._folder_of(name)}/fence", os.O_RDWR | os.O_CREAT, self._open_fence) as fd:
            lock_fence(self._fs, name, fd, wait_s)
            yield fd

    def _open_fence(self, fs: LockableFiles, path: str, flags: int) -> Held:
        while True:
            for folder in (self._folder, os.path.dirname(path)):
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(folder)
            try:
                return hold_open(fs, path, flags)
            except FileNotFoundError:  # an anonymous one's, which another process has just forgotten
                pass

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
        with self._locked(name) as fd:
            state = self.states().get(name)
            if state is None:
                state = TransactionState(fresh_id, -1)
            elif state.is_open:
                state = self._decide(name, state, fd, fence=True)
                if state.is_open:
                    why = "its last transaction is decided, but a partition cannot be told (is the disk full?)"
                    raise ProducerBusy(name, why)
            self._settle(state)
            epoch = max(state.epoch, fenced_epoch(self._fs, fd, state.producer_id)) + 1
            if epoch > _EPOCH_MAX:
                state = replace(state, producer_id=secrets.randbelow(NAMED_ID_END), previous_id=state.producer_id)
                epoch = 0
            state = replace(
                state,
                epoch=epoch,
                status="Empty",
                timeout_ms=timeout_ms,
                partitions=(),
                unsettled=(),
                updated_ms=self._now_ms(),
            )
            files: list[int] = []
            path = self._lease_path(name, state)
            try:
                files.extend(starmap(hold_open, ((self._fs, path, os.O_RDWR | os.O_CREAT),)))
                self._fs.flock(files[0], EXCLUSIVE)
                write_fence(self._fs, fd, state.producer_id, epoch)
                self._write(name, state, "durable")
                files.extend(starmap(hold_open, ((self._fs, f"{self._folder_of(name)}/fence", os.O_RDWR),)))
                return Registration(self._fs, name, state, files[1], (files[0], path))
            except BaseException:
                for one in files:
                    let_go(self._fs, one)
                raise

    def _folder_of(self, name: str) -> str:
        return f"{self._folder}/{group_folder_name(name)}"

    def _lease_path(self, name: str, state: TransactionState) -> str:
        return f"{self._folder_of(name)}/lease-{state.producer_id}-{state.epoch}"

    def is_alive(self, name: str, state: TransactionState) -> bool:
        """Whether the instance that the state is of still has its lease; a dead one's is removed."""
        path = self._lease_path(name, state)
        try:
            with held_open(self._fs, path, os.O_RDONLY) as fd:  # also in the read-only store of another user
                # Shared: two who look at the same time must not take each other for the instance.
                self._fs.flock(fd, SHARED | AT_ONCE)
        except FileNotFoundError:
            return False
        except (PermissionError, BlockingIOError):
            return True  # locked; or nobody can tell, and what lives is not to be aborted
        if not self._topics.read_only:
            with contextlib.suppress(OSError):
                self._fs.unlink(path)
        return False

    def release(self, registration: Registration) -> None:
        """The instance is closed. One without a name leaves nothing behind."""
        name = registration.name
        registration.close()
        if name.startswith(ANONYMOUS) and not self._topics.read_only:
            self._forget(name)
        self._log.tidy()

    def _forget(self, name: str) -> None:
        with contextlib.suppress(ProducerBusy), self._locked(name, wait_s=0.0):
            state = self.states().get(name)
            if state is None or not state.is_open:
                if state is not None:
                    self._settle(state)
                    self._write(name, None)
                with contextlib.suppress(OSError):
                    self._fs.remove_tree(self._folder_of(name))

    def note_resume(self, registration: Registration, topic: str, partitions: int) -> int:
        """How many partitions the topic had when the name first sent to it in order; noted if that is now."""
        topic_id = self._topics.topic(topic).id
        with registration.deciding():
            state = registration.state
            if topic_id not in state.resume:
                registration.state = replace(state, resume={**state.resume, topic_id: partitions})
                self._write(registration.name, registration.state, "durable")
            return registration.state.resume[topic_id]

    # ------------------------------------------------------------ what the owner does

    def add_partitions(self, registration: Registration, logs: Mapping[PartitionId, Partition]) -> None:
        """Write down which partitions the transaction writes to, before it does."""
        with registration.deciding():
            state = registration.state
            for log in logs.values():  # what a power cut left open there must not become part of this one
                if log.last_stable_offset < log.log_end_offset:
                    self._end_lost(log, state)
            if state.status != "Ongoing":
                now_ms = self._now_ms()
                state = replace(
                    state, status="Ongoing", started_ms=now_ms, started_up_ms=self._clock.monotonic_ms(),
                    updated_ms=now_ms, partitions=(), ends=(),
                )  # fmt: skip
            known = dict.fromkeys((*state.partitions, *logs))
            state = replace(
                state, partitions=tuple(known), unsettled=self._still_unsettled(state.producer_id, state.unsettled),
            )  # fmt: skip
            registration.unsure = True
            self._write(registration.name, state)
            registration.state, registration.unsure = state, False

    def commit(self, registration: Registration, ends: Mapping[PartitionId, int], note: str | None = None) -> None:
        """Decide for the transaction, durably. Its data, up to ``ends``, is on disk already; ``note`` is with it.

        Raises `ProducerFenced`: it was aborted; `PartitionFailed`, when nobody knows whether the
        decision survives a power cut.
        """
        state = registration.state
        if state.status != "Ongoing":  # it wrote to no partition, and those of the last one are none of it
            registration.state = state = replace(state, partitions=(), started_ms=self._now_ms())
        self._end(registration, "PrepareCommit", tuple(ends.get(one, 0) for one in state.partitions), note)

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
            state = replace(state, status=status, updated_ms=self._now_ms(), ends=ends, note=note)
            registration.unsure = True
            self._write(name, state, "durable" if status == "PrepareCommit" else "written")
            registration.state = self._complete(name, state)
            registration.unsure = registration.state.is_open

    def make_sure(self, registration: Registration) -> None:
        """After an interruption: look up what was decided, and finish it; what was not decided is aborted."""
        with registration.deciding() as fd:
            state = self.states().get(registration.name, registration.state)
            if state.is_open:
                state = self._decide(registration.name, state, fd, fence=False)
            registration.state, registration.unsure = state, state.is_open

    # ------------------------------------------------------------ what anybody does

    def _decide(self, name: str, state: TransactionState, fence_fd: int, *, fence: bool) -> TransactionState:
        """Finish what a state has begun; abort what is undecided. Under the name's lock."""
        if state.status == "Ongoing":
            epoch = state.epoch
            if fence:
                epoch += 1
                write_fence(self._fs, fence_fd, state.producer_id, epoch)
            state = replace(state, epoch=epoch, status="PrepareAbort", updated_ms=self._now_ms())
            self._write(name, state)
        return self._complete(name, state)

    def _complete(self, name: str, state: TransactionState) -> TransactionState:
        """Write the markers, then that it is done; the state as it is then, still open if a partition has no room."""
        committed = state.status == "PrepareCommit"
        unsettled = {PartitionId(one.topic_id, one.partition): one for one in state.unsettled}
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
                failure = error
        if failure is not None:
            logger.warning("producer %s: its transaction is decided, but not told everywhere: %s", name, failure)
            return state
        done: Status = "CompleteCommit" if committed else "CompleteAbort"
        state = replace(
            state,
            status=done,
            updated_ms=self._now_ms(),
            unsettled=self._still_unsettled(state.producer_id, unsettled.values()),
        )
        self._write(name, state)
        return state

    def _tell(self, log: Partition, state: TransactionState) -> Unsettled | None:
        """Write the marker of what was decided, if there is anything to decide; that of a commit may yet be lost."""
        said = self._said(log, state)
        offset = None if said is None else log.end_transaction(state.producer_id, state.epoch, committed=said)
        return Unsettled(log.topic_id, log.number, offset, log.epoch) if said and offset is not None else None

    @staticmethod
    def _said(log: Partition, state: TransactionState) -> bool | None:
        """`TransactionState.said` of what is open in a partition; None when nothing is."""
        entry = log.producer(state.producer_id)
        if entry is None or entry.transaction_offset < 0:
            return None
        return state.said(PartitionId(log.topic_id, log.number), entry)

    def _still_unsettled(self, producer_id: int, unsettled: Iterable[Unsettled]) -> tuple[Unsettled, ...]:
        """Those whose markers are not known to be on disk, or were lost in a crash."""
        left = []
        for one in unsettled:
            with contextlib.suppress(UnknownTopic):
                where = PartitionId(one.topic_id, one.partition)
                if not self._topics.on_partition(where, partial(_is_settled, producer_id=producer_id, marker=one)):
                    left.append(one)
        return tuple(left)

    def _settle(self, state: TransactionState) -> None:
        """Put the markers of commits on disk, before what stands for them goes."""
        for one in self._still_unsettled(state.producer_id, state.unsettled):

            def settle(log: Partition) -> None:
                self._end_lost(log, state)
                log.flush()

            with contextlib.suppress(UnknownTopic):
                self._topics.on_partition(PartitionId(one.topic_id, one.partition), settle)

    def finish(self, now_ms: int | None = None) -> float:
        """Finish what others left: decided transactions, those of dead instances and those that took too long.

        ``now_ms`` is monotonic: a wall clock that jumps ends no transaction of who lives. Returns the seconds
        until it should be asked again. What keeps one from being finished does not keep it from the others:
        `troubles` tells.
        """
        if self._topics.read_only or self._finishing:
            return _IDLE_PAUSE_S
        self._finishing = True  # opening a partition asks for this, too
        try:
            now_ms = self._clock.monotonic_ms() if now_ms is None else now_ms
            troubles: dict[str, str] = {}
            undecided = self._undecided()
            states = self.states()
            is_busy = bool(undecided)
            for name, state in states.items():
                with self._trouble_of(name, troubles):
                    if state.is_open:
                        is_busy = True
                        self._finish_one(name, now_ms)
                    elif name.startswith(ANONYMOUS) and not self.is_alive(name, state):
                        self._forget(name)
            for log, entry in undecided:
                with self._trouble_of(str(entry.producer_id), troubles):
                    self._finish_orphan(log, entry, states)
            self.troubles = troubles
            return _BUSY_PAUSE_S if is_busy else _IDLE_PAUSE_S
        finally:
            self._finishing = False

    @contextlib.contextmanager
    def _trouble_of(self, name: str, troubles: dict[str, str]) -> Iterator[None]:
        try:
            yield
        except StoreClosed:
            raise
        except (SegmentlogError, OSError) as error:
            troubles[name] = str(error)
            if self.troubles.get(name) != str(error):
                logger.warning("producer %s: its transaction cannot be finished: %s; trying again", name, error)

    def _undecided(self) -> list[tuple[Partition, ProducerEntry]]:
        """Open transactions in the partitions that this process has open."""
        found = []
        for log in self._topics.opened_partitions():
            with contextlib.suppress(SegmentlogError, OSError):
                found += [(log, entry) for entry in log.open_transactions()]
        return found

    def _finish_one(self, name: str, now_ms: int) -> None:
        with contextlib.suppress(ProducerBusy), self._locked(name, wait_s=0.0) as fd:
            state = self.states().get(name)
            if state is None or not state.is_open:
                return
            if state.status == "Ongoing":
                overdue = state.is_overdue(now_ms)
                if not overdue and self.is_alive(name, state):
                    return
                why = "it was open for too long" if overdue else "its process is gone"
                logger.info("producer %s: its transaction is aborted: %s", name, why)
            self._decide(name, state, fd, fence=True)

    def _finish_orphan(self, log: Partition, seen: ProducerEntry, states: dict[str, TransactionState]) -> None:
        """End an open transaction that no state speaks of as open: a power cut took the marker, or the state.

        ``states`` was read after the transaction was seen: its owner writes the state first.
        """
        name = next((name for name, one in states.items() if one.producer_id == seen.producer_id), None)
        with contextlib.ExitStack() as stack:
            if name is not None:
                try:
                    stack.enter_context(self._locked(name, wait_s=0.0))
                except ProducerBusy:
                    return
            state = self.states().get(name) if name is not None else None
            entry = log.producer(seen.producer_id)
            if entry is None or entry.transaction_offset != seen.transaction_offset:
                return
            self._end_lost(log, state or TransactionState(seen.producer_id, entry.epoch))

    def _end_lost(self, log: Partition, state: TransactionState) -> None:
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

    def _now_ms(self) -> int:
        return self._clock.now_ms()

    def abort_by_name(self, name: str) -> bool:
        """Abort the open transaction of a name, and fence the instance that has it open; whether there was one.

        One that is decided already is finished as it was decided, and is no longer an open one.
        """
        self._topics.check_writable("abort a transaction")
        state = self.states().get(name)
        if state is None or not state.is_open:
            return False
        with self._locked(name) as fd:
            state = self.states().get(name)
            if state is None or not state.is_open:
                return False
            self._decide(name, state, fd, fence=True)
            return state.status == "Ongoing"


def _is_settled(log: Partition, producer_id: int, marker: Unsettled) -> bool:
    """Whether a commit's marker is on disk."""
    if log.durable_offset <= marker.offset:
        return False
    if log.epoch == marker.epoch:
        return True
    entry = log.producer(producer_id)  # a crash since: is it there?
    return entry is None or not 0 <= entry.transaction_offset < marker.offset
