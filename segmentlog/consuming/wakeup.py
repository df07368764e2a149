"""Sleeping until there is more to read: whoever appends wakes those who said that they wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from segmentlog.storage import fork_safety
from segmentlog.storage.watch import Watch

if TYPE_CHECKING:
    from segmentlog.consuming.cursor_set import Cursors
    from segmentlog.groups.group_session import GroupSession
    from segmentlog.log.partition import Partition

WAIT_S: Final = 1.0
"""How long anybody sleeps before he looks for himself."""
_FINISH_S: Final = 0.25
"""How often a waiting reader of committed transactions looks for those of dead producers."""


def announce(watch: Watch, logs: Iterable[Partition]) -> bool:
    """Have ``watch`` woken by whoever appends to these from now on; whether that cannot be had, and one must poll.

    Say so before looking whether there is something: who appends after the look then wakes.
    """
    must_poll = False
    for log in logs:
        watch.add(log.handle.lock_path, file=log.topic_id)
        must_poll |= not log.handle.announce_waiting(2 * WAIT_S)
    return must_poll


class Pause(NamedTuple):
    """For how long there is nothing to read, unless somebody wakes."""

    seconds: float
    must_poll: bool


class Follower:
    """Waits for more to read. `wait` is for one thread at a time; `interrupt` for any, and for signal handlers."""

    def __init__(
        self, store_path: str, cursors: Cursors, finish_transactions: Callable[[], object], *, is_committed: bool
    ) -> None:
        """``is_committed``: decisions are waited for, too, and ``finish_transactions`` makes those that nobody will."""
        self.watch: Watch | None = None
        self.is_closed = self.is_woken = False
        self.lock = fork_safety.reentrant_lock(self, "lock")
        """Held by whoever sleeps: what he is woken by must not be closed meanwhile."""
        self._store_path = store_path
        self._cursors = cursors
        self._finish_transactions = finish_transactions
        self._is_committed = is_committed
        self._finish_due_s = 0.0

    def is_ended(self) -> bool:
        """Whether another thread said that there is nothing to wait for."""
        return self.is_closed or self.is_woken

    def interrupt(self) -> None:
        """End a `wait`, this one or the next."""
        self.is_woken = True
        if self.watch is not None:
            self.watch.interrupt()

    def wait(self, session: GroupSession | None, until_s: float = math.inf) -> bool:
        """Sleep until `interrupt` or ``until_s`` of the monotonic clock; True if there may be more to read."""
        with self.lock:
            return self._wait_locked(session, until_s)

    def _wait_locked(self, session: GroupSession | None, until_s: float) -> bool:
        watch = self._watching(session)
        while not self.is_ended():
            pause = self._look(watch, session)
            if pause is None:
                return True
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            if not self.is_ended():  # said so just before the drain, which took the reason to wake up with it
                watch.wait(min(pause.seconds, left_s), poll=pause.must_poll)
        self.is_woken = False
        return False

    def look(self, session: GroupSession | None) -> Pause | None:
        """For who sleeps elsewhere: None when there may be more, else how long to, on the descriptors of `watch`.

        Not to be called while a `wait` is under way.
        """
        with self.lock:
            return self._look(self._watching(session), session)

    def _look(self, watch: Watch, session: GroupSession | None) -> Pause | None:
        cursors = self._cursors
        watch.drain()
        if self.is_ended():
            return Pause(0.0, must_poll=False)
        if session is not None:
            session.poll(ended=watch.pop_ended())
        must_poll = announce(watch, (cursor.log for cursor in cursors))
        if cursors.has_more():
            return None
        cursors.reopen_stale()
        if session is None and cursors.assign("earliest"):
            must_poll |= announce(watch, (cursor.log for cursor in cursors))
        self._finish_dead()
        if cursors.has_more():
            return None
        wait_s = _FINISH_S if self._is_committed else WAIT_S
        return Pause(wait_s if session is None else min(session.wait_s, wait_s), must_poll)

    def _watching(self, session: GroupSession | None) -> Watch:
        """What wakes: topics that come and go, and members of the group; partitions are added by `announce`."""
        if self.watch is None:
            self.watch = Watch()
            self.watch.add(self._store_path, folder=True)
        if session is not None:
            folder = session.member.folder
            self.watch.add(folder.path, folder=True)
            self.watch.add(folder.members_path, folder=True, endings=True)
        return self.watch

    def _finish_dead(self) -> None:
        """Where nobody waits for a decision, a dead producer's transaction would hold this reader back for ever."""
        if self._is_committed and time.monotonic() >= self._finish_due_s:
            self._finish_due_s = time.monotonic() + _FINISH_S
            self._finish_transactions()
