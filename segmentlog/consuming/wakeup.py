"""Wait for new records: readers announce that they wait, and the next append wakes them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from segmentlog.storage import fork_safety
from segmentlog.storage.watch import Watch

if TYPE_CHECKING:
    from segmentlog.consuming.cursor_set import CursorSet
    from segmentlog.groups.group_session import GroupSession
    from segmentlog.log.partition import Partition

WAIT_S: Final = 1.0
"""Longest sleep before a waiting reader checks for records itself."""
_FINISH_S: Final = 0.25
"""Interval in which a waiting read_committed reader checks for transactions of dead producers."""


def announce_waiting(watch: Watch, logs: Iterable[Partition]) -> bool:
    """Let appends to these partitions wake ``watch``. Return True if some cannot wake it, so that the caller must poll.

    The caller must check for records after this call: then an append after the check wakes the reader.
    """
    must_poll = False
    for log in logs:
        watch.add(log.handle.lock_path, file=log.topic_id)
        must_poll |= not log.handle.announce_waiting(2 * WAIT_S)
    return must_poll


class Pause(NamedTuple):
    """How long a reader may sleep before it checks for records again. An append ends the sleep earlier."""

    seconds: float
    must_poll: bool


class RecordWaiter:
    """Waits for new records. Only one thread at a time may `wait`; any thread or signal handler may `interrupt`."""

    def __init__(
        self, store_path: str, cursors: CursorSet, finish_transactions: Callable[[], object], *, is_committed: bool
    ) -> None:
        """Wait for records of ``cursors``.

        ``is_committed``: also wait for the outcomes of transactions; ``finish_transactions`` ends transactions of dead
        producers.
        """
        self.watch: Watch | None = None
        self.is_closed = self.is_woken = False
        self.lock = fork_safety.reentrant_lock(self, "lock")
        """Held during a sleep, so that no thread closes the descriptors that end the sleep."""
        self._store_path = store_path
        self._cursors = cursors
        self._finish_transactions = finish_transactions
        self._is_committed = is_committed
        self._finish_due_s = 0.0

    def is_ended(self) -> bool:
        """Return whether `interrupt` or `close` was called."""
        return self.is_closed or self.is_woken

    def interrupt(self) -> None:
        """End the current `wait`, or the next one if no thread is waiting now."""
        self.is_woken = True
        if self.watch is not None:
            self.watch.interrupt()

    def wait(self, session: GroupSession | None, until_s: float = math.inf) -> bool:
        """Sleep until `interrupt` or ``until_s`` (monotonic clock); return True if there may be new records."""
        with self.lock:
            return self._wait_locked(session, until_s)

    def _wait_locked(self, session: GroupSession | None, until_s: float) -> bool:
        watch = self._watching(session)
        while not self.is_ended():
            pause = self._check(watch, session)
            if pause is None:
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            if not self.is_ended():  # check again: `drain` may have discarded the wake-up of an `interrupt`
                watch.wait(min(pause.seconds, left_s), poll=pause.must_poll)
        self.is_woken = False
        return False

    def check_once(self, session: GroupSession | None) -> Pause | None:
        """Check for records without sleeping. Return None if there may be some, otherwise how long to wait on `watch`.

        Must not be called during a `wait`.
        """
        with self.lock:
            return self._check(self._watching(session), session)

    def _check(self, watch: Watch, session: GroupSession | None) -> Pause | None:
        cursors = self._cursors
        watch.drain()
        if self.is_ended():
            return Pause(0.0, must_poll=False)
        if session is not None:
            session.poll(ended=watch.pop_ended())
        must_poll = announce_waiting(watch, (cursor.log for cursor in cursors))
        if cursors.has_more():
            return None
        cursors.reopen_stale()
        if session is None and cursors.assign("earliest"):
            must_poll |= announce_waiting(watch, (cursor.log for cursor in cursors))
        self._finish_dead()
        if cursors.has_more():
            return None
        wait_s = _FINISH_S if self._is_committed else WAIT_S
        return Pause(wait_s if session is None else min(session.wait_s, wait_s), must_poll)

    def _watching(self, session: GroupSession | None) -> Watch:
        """Return a `Watch` that wakes the reader when topics or members of its group change.

        `announce_waiting` adds the partitions, so that appends wake the reader, too.
        """
        if self.watch is None:
            self.watch = Watch()
            self.watch.add(self._store_path, folder=True)
        if session is not None:
            folder = session.member.folder
            self.watch.add(folder.path, folder=True)
            self.watch.add(folder.members_path, folder=True, endings=True)
        return self.watch

    def _finish_dead(self) -> None:
        """Finish transactions of dead producers. Otherwise this reader would never get the records after them."""
        if self._is_committed and time.monotonic() >= self._finish_due_s:
            self._finish_due_s = time.monotonic() + _FINISH_S
            self._finish_transactions()
