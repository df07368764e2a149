"""Background threads: each loops one public ``tick(now)`` that is tested without threads and without sleeping."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from segmentlog.storage import fork_safety

logger = logging.getLogger("segmentlog")

_BACKOFF_MAX_S = 30.0
_START_AFTER_S = 0.05

Tick = Callable[[], float]
"""Does what is due and returns the seconds until it should be called again."""


class Worker:
    """A named daemon thread around a tick.

    The thread holds the worker, and what its tick belongs to, only during the tick: when these are
    dropped it ends. A tick that raises is logged and tried again with a growing pause; ``error`` says
    what it was. After a fork the child's copy has no thread: `ensure_running` starts one. Thread-safe.
    """

    def __init__(self, name: str, tick: Tick, first_pause_s: float = 0.0) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._tick = tick
        self._first_pause_s = first_pause_s
        self.has_work = False
        """For whom the tick belongs to: keeps the worker alive up to its next turn, though it be dropped."""
        self._failures = 0
        # No Event, whose lock may be held by the very thread in which a finalizer runs.
        self._wake: SimpleQueue[Worker | None] = SimpleQueue()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._mutex = fork_safety.lock(self, "_mutex")
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        self._thread, self._pid = None, 0
        self._wake = SimpleQueue()

    def __del__(self) -> None:
        self._wake.put(None)  # the thread would end at its next turn: why wait for that

    def ensure_running(self) -> None:
        """Start the thread unless it runs in this process."""
        if self.is_running:
            return
        with self._mutex:
            if self._stopped or self.is_running or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(
                target=_loop, args=(weakref.ref(self), self._wake, self._first_pause_s),
                name=f"segmentlog-{self.name}", daemon=True,
            )  # fmt: skip
            self._thread.start()
            self._pid = os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether there is a thread that calls the tick."""
        thread = self._thread
        return thread is not None and self._pid == os.getpid() and thread.is_alive()

    def wake(self) -> None:
        """Have the next tick now, dropped or not."""
        self._wake.put(self)

    def pause(self, seconds: float) -> bool:
        """For a tick that takes its time: wait, and say whether it should end instead of going on."""
        if seconds > 0 and not self._stopped:
            time.sleep(min(seconds, _PAUSE_MAX_S))
        return self._stopped

    def ask_to_stop(self) -> None:
        """End the thread after the tick in hand."""
        with self._mutex:
            self._stopped = True
            self._wake.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        thread = self._thread
        # A start that was interrupted may have left a thread that never ran: there is nothing to wait for.
        if thread is not None and thread.is_alive() and thread.ident != threading.get_ident():
            thread.join(max(timeout_s, 0.0))

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread; waits for a tick in progress, up to ``timeout_s``."""
        self.ask_to_stop()
        self.join(timeout_s)

    def turn(self) -> float | None:
        """One tick; seconds until the next one, or None when there is to be none."""
        if self._stopped:
            return None
        try:
            pause_s = self._tick()
            self._failures, self.error = 0, None
        except Exception as error:
            self._failures += 1
            pause_s = min(0.1 * 2**self._failures, _BACKOFF_MAX_S)
            if str(error) != str(self.error):
                logger.warning("%s: %s; trying again", self.name, error)
            self.error = error
        return pause_s


def _loop(find: weakref.ref[Worker], wake: SimpleQueue[Worker | None], pause_s: float | None) -> None:
    worker = None
    while pause_s is not None:
        try:
            worker = wake.get(timeout=max(pause_s, 0.0)) or worker
            while True:
                worker = wake.get_nowait() or worker
        except Empty:
            worker = worker or find()
        pause_s = None if worker is None else worker.turn()
        if worker is not None and not worker.has_work:
            worker = None


_PAUSE_LONGEST_S = 86_400.0
_PAUSE_MAX_S = 0.2
# So that a tick that paces itself hears of a close in time.


class Workers:
    """The scheduler: every background thread of a store, by name. Thread-safe.

    Starting a thread means waiting until it runs, 0.1 ms each and milliseconds on a busy
    machine. So they are started a moment after a store was opened, by a thread that nobody waits for.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._pid = 0
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        self._pid = 0

    def add(self, name: str, tick: Tick, first_pause_s: float = 0.0) -> Worker:
        """Have a thread of that name call ``tick``, from `ensure_running` on."""
        worker = self._workers[name] = Worker(name, tick, first_pause_s)
        return worker

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def ensure_running(self) -> None:
        """Start those that do not run in this process, soon."""
        if self._pid == os.getpid() or not self._workers:
            return
        _thread.start_new_thread(self._start, ())
        self._pid = os.getpid()

    def _start(self) -> None:
        time.sleep(_START_AFTER_S)
        for worker in self:
            try:
                worker.ensure_running()
            except RuntimeError as error:  # too many threads; `errors` tells, and the next one to ask tries again
                self._pid = 0
                worker.error = error
                logger.warning("%s: %s", worker.name, error)

    def errors(self) -> dict[str, str]:
        """What keeps failing, by the worker's name."""
        return {worker.name: str(worker.error) for worker in self if worker.error is not None}

    def stop(self, timeout_s: float = 1.0) -> None:
        """End all of them, within ``timeout_s`` together where their ticks allow it."""
        for worker in self:
            worker.ask_to_stop()
        ends = time.monotonic() + timeout_s
        for worker in self:
            worker.join(ends - time.monotonic())
