"""A few threads for blocking calls, shared by all asynchronous clients of a process."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from segmentlog.storage import fork_safety

logger = logging.getLogger("segmentlog")

THREADS_MAX: Final = 8
"""Maximum number of appends, reads and fsyncs at the same time. Callers of one partition share fsyncs anyway."""

_IDLE_S = 0.5

Call = Callable[[], object]


class Pool:
    """Threads that start when there is a call, and end soon after the last one. Thread-safe.

    They are daemon threads, so that a hanging disk does not prevent the program from ending. A forked child starts
    without threads.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._idle = self._threads = 0
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._mutex = fork_safety.lock(self, "_mutex")
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        self._calls = SimpleQueue()
        self._idle = self._threads = 0
        self._users = weakref.WeakSet()

    @property
    def thread_count(self) -> int:
        """Number of running threads."""
        return self._threads

    def add_user(self, user: object) -> None:
        """Register a client. When the last client is removed, idle threads end at once."""
        self._users.add(user)

    def remove_user(self, user: object) -> None:
        """Remove a client. If it was the last one, idle threads end at once."""
        with self._mutex:
            self._users.discard(user)
            if not self._users:
                for _ in range(self._idle):
                    self._calls.put(None)

    def submit(self, call: Call) -> None:
        """Run a call in a thread. The call must not raise."""
        self._calls.put(call)
        with self._mutex:
            if self._idle >= self._calls.qsize() or self._threads >= THREADS_MAX:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, args=(self._calls,), name="segmentlog-aio", daemon=True).start()
        except BaseException:
            with self._mutex:
                self._threads -= 1
                if self._threads:
                    return  # another thread takes the call
            raise

    def _work(self, calls: SimpleQueue[Call | None]) -> None:
        while True:
            with self._mutex:
                self._idle += 1
            call = None
            try:
                call = calls.get(timeout=_IDLE_S)
            except Empty:
                pass
            with self._mutex:
                if calls is not self._calls:
                    return  # in a child that was forked during a call: it starts its own threads
                self._idle -= 1
                # `submit` starts no thread if idle threads suffice. So this thread must not end if a call has arrived
                # just now.
                if call is None and self._idle >= calls.qsize():
                    self._threads -= 1
                    return
            if call is not None:
                try:
                    call()
                except Exception:
                    logger.exception("a call of an asynchronous client failed")
                del call  # it may hold the last reference to a store


pool = Pool()
"""The pool of this process."""
