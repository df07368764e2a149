"""A few threads for calls that may block, shared by all asynchronous clients of a process."""

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
"""As many appends, reads and fsyncs may be under way at once; fsyncs of one partition share one anyway."""

_IDLE_S = 0.5

Call = Callable[[], object]


class Pool:
    """Threads that are started when there is something to do, and end soon after there is nothing. Thread-safe.

    They are daemons: a disk that hangs keeps no program from its end. In a forked child there are none at first.
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
        """How many there are now."""
        return self._threads

    def use(self, user: object) -> None:
        """Keep threads at hand while ``user`` is there, up to `let_go`."""
        self._users.add(user)

    def let_go(self, user: object) -> None:
        """The last one to let go has idle threads end at once."""
        with self._mutex:
            self._users.discard(user)
            if not self._users:
                for _ in range(self._idle):
                    self._calls.put(None)

    def submit(self, call: Call) -> None:
        """Have a thread make the call, which raises nothing."""
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
                    return  # one of those takes it
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
                    return  # in a child that was forked by a call: it has other threads
                self._idle -= 1
                # Whoever submits counts on those that wait: what came just as this one gave up is not left to nobody.
                if call is None and self._idle >= calls.qsize():
                    self._threads -= 1
                    return
            if call is not None:
                try:
                    call()
                except Exception:
                    logger.exception("a call of an asynchronous client failed")
                del call  # it may be all that holds on to a store


pool = Pool()
"""Of this process."""
