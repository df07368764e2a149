"""Ends abandoned transactions: those of dead processes, those that exceed their time-out, and those that lost their
marker or state in a crash.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from segmentlog.errors import ProducerBusy, SegmentlogError, StoreClosed
from segmentlog.format.producer_snapshot import ProducerEntry
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.name_locks import NameLocks
from segmentlog.transactions.outcome import TransactionCompleter
from segmentlog.transactions.transaction_log import TransactionLog, TransactionState

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

logger = logging.getLogger("segmentlog")

ANONYMOUS: Final = "~"
"""Prefix of the names of producers without a name. Such a name is deleted when its producer is closed."""
SERVER_NAME_EXPIRATION_MS: Final = 7 * 86_400_000
"""Unused names of clients of a server are deleted after this time: Kafka's `transactional.id.expiration.ms`."""
_BUSY_PAUSE_S: Final = 0.25
_IDLE_PAUSE_S: Final = 1.0


class AbandonedTransactions:
    """Ends transactions that their owners will not end. While a thread runs `finish`, other threads return at once."""

    def __init__(self, topics: Topics, names: NameLocks, log: TransactionLog, completer: TransactionCompleter) -> None:
        self._topics = topics
        self._names = names
        self._log = log
        self._completer = completer
        self._finishing = False
        self.errors: dict[str, str] = {}
        """Errors that prevented `finish` from ending transactions, by the name of the producer."""
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        """Reset the flag in a forked child: another thread of the parent may have been working."""
        self._finishing = False

    def finish(self, now_ms: int | None = None) -> float:
        """Finish abandoned transactions, and return the seconds until the next call.

        A transaction is abandoned if it is decided but incomplete, exceeds its time-out, or belongs to a dead instance.
        ``now_ms`` is monotonic, so a jump of the wall clock ends no transaction; None: read the clock for each
        transaction. If a transaction cannot be finished, `errors` has the reason, and the call continues with the other
        transactions. It skips names and partitions that this process may not write; other processes finish these.
        """
        if self._topics.read_only or self._finishing:
            return _IDLE_PAUSE_S
        self._finishing = True  # opening a partition calls this method again
        try:
            errors: dict[str, str] = {}
            undecided = self._undecided()
            states = self._log.states()
            is_busy = bool(undecided)
            for name, state in states.items():
                with self._recording_error(name, errors):
                    if state.is_open:
                        is_busy = True
                        self._finish_name(name, now_ms)
                    elif state.is_server_name:
                        if self._is_expired(state):
                            self.delete_name(name, self._is_expired)
                    elif name.startswith(ANONYMOUS) and not self._names.is_alive(name, state):
                        self.delete_name(name)
            for log, entry in undecided:
                with self._recording_error(str(entry.producer_id), errors):
                    self._finish_orphan(log, entry, states)
            self.errors = errors
            return _BUSY_PAUSE_S if is_busy else _IDLE_PAUSE_S
        finally:
            self._finishing = False

    @contextlib.contextmanager
    def _recording_error(self, name: str, errors: dict[str, str]) -> Iterator[None]:
        try:
            yield
        except StoreClosed:
            raise
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            if isinstance(error, PermissionError) and self._names.contains_path(error.filename):
                return  # the name belongs to another user, whose processes finish its transaction
            errors[name] = str(error)
            if self.errors.get(name) != str(error):
                logger.warning("producer %s: its transaction cannot be finished: %s; trying again", name, error)

    def _undecided(self) -> list[tuple[Partition, ProducerEntry]]:
        """Return open transactions in the partitions that this process has open and may write."""
        found = []
        for log in self._topics.opened_partitions():
            if log.handle.read_only:
                continue
            with failures_ignored(SegmentlogError):
                found += [(log, entry) for entry in log.open_transactions()]
        return found

    def _finish_name(self, name: str, now_ms: int | None) -> None:
        with contextlib.suppress(ProducerBusy), self._names.locked(name, wait_s=0.0) as fd:
            state = self._log.states().get(name)
            if state is None or not state.is_open:
                return
            if state.status == "Ongoing":
                # Read the clock after the state. Otherwise a transaction that a client began between the two reads
                # would have a start time in the future, and count as a transaction from before this boot.
                overdue = state.is_overdue(self._topics.clock.monotonic_ms() if now_ms is None else now_ms)
                # A client of a server has no lease, and may be reconnecting to another worker: only the time-out ends
                # its transaction.
                if not overdue and (state.is_server_name or self._names.is_alive(name, state)):
                    return
                why = "it exceeded its time-out" if overdue else "its process has died"
                logger.info("producer %s: its open transaction is aborted: %s", name, why)
            self._completer.decide(name, state, fd, fence=True)

    def _finish_orphan(self, log: Partition, seen: ProducerEntry, states: dict[str, TransactionState]) -> None:
        """End a transaction that is open in a partition, but not in the transaction log.

        A power cut has lost its marker, or its state. The caller must read ``states`` after it has found the
        transaction, because the owner writes the state before the records.
        """
        name = next((name for name, state in states.items() if state.producer_id == seen.producer_id), None)
        with contextlib.ExitStack() as stack:
            if name is not None:
                try:
                    stack.enter_context(self._names.locked(name, wait_s=0.0))
                except ProducerBusy:
                    return
            state = self._log.states().get(name) if name is not None else None
            entry = log.producer(seen.producer_id)
            if entry is None or entry.transaction_offset != seen.transaction_offset:
                return
            self._completer.restore_lost_marker(log, state or TransactionState(seen.producer_id, entry.epoch))

    def finish_orphan(self, log: Partition, producer_id: int) -> None:
        """End the open transaction of a producer in a partition, if it is not open in the transaction log."""
        entry = log.producer(producer_id)
        if entry is not None and entry.transaction_offset >= 0:
            self._finish_orphan(log, entry, self._log.states())

    def _is_expired(self, state: TransactionState) -> bool:
        """Return whether a client has been idle for so long that its name can be deleted, as in Kafka."""
        return not state.is_open and self._topics.clock.steady_ms() - state.updated_ms > SERVER_NAME_EXPIRATION_MS

    def delete_name(
        self, name: str, is_deletable: Callable[[TransactionState], bool] = lambda state: not state.is_open
    ) -> None:
        """Delete a name, unless ``is_deletable`` rejects its state or another process holds its lock."""
        with contextlib.suppress(ProducerBusy), self._names.locked(name, wait_s=0.0):
            state = self._log.find(name)
            if state is None or is_deletable(state):
                if state is not None:
                    self._completer.confirm_markers(state)
                    self._log.write(name, None)
                self._names.remove(name)
