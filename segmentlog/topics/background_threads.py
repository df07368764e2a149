"""Background threads. Each thread repeatedly calls a public function, its *tick*. Tests call the ticks directly."""

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
"""A function that does the work that is due, and returns the seconds until the next call."""


class BackgroundThread:
    """A named daemon thread that repeats a tick. Thread-safe.

    The thread has a reference to this object, and to the owner of the tick, only during a tick. Between two ticks both
    can be garbage-collected, and then the thread ends. If a tick raises, the error is logged and stored in ``error``,
    and the pause before the next call grows. A forked child has no thread until `ensure_running` starts one.
    """

    def __init__(self, name: str, tick: Tick, first_pause_s: float = 0.0) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._tick = tick
        self._first_pause_s = first_pause_s
        self.has_work = False
        """Set by the owner of the tick, to prevent garbage collection of this object until the next tick."""
        self._failures = 0
        # A queue and not an Event: a finalizer may run in a thread that holds the Event's lock.
        self._wake: SimpleQueue[BackgroundThread | None] = SimpleQueue()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._mutex = fork_safety.lock(self, "_mutex")
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        self._thread, self._pid = None, 0
        self._wake = SimpleQueue()

    def __del__(self) -> None:
        self._wake.put(None)  # end the thread now instead of at its next tick

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
        """Return whether a thread of this process calls the tick."""
        thread = self._thread
        return thread is not None and self._pid == os.getpid() and thread.is_alive()

    def wake(self) -> None:
        """Call the tick now, even if no other reference to this object exists."""
        self._wake.put(self)

    def pause(self, seconds: float) -> bool:
        """Sleep in the middle of a long tick. Return True if the tick should end because the thread must stop."""
        if seconds > 0 and not self._stopped:
            time.sleep(min(seconds, _PAUSE_MAX_S))
        return self._stopped

    def ask_to_stop(self) -> None:
        """Stop the thread after the current tick."""
        with self._mutex:
            self._stopped = True
            self._wake.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        thread = self._thread
        # A start that was interrupted may have left a thread object that never ran.
        if thread is not None and thread.is_alive() and thread.ident != threading.get_ident():
            thread.join(max(timeout_s, 0.0))

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stop the thread; wait for a running tick, up to ``timeout_s``."""
        self.ask_to_stop()
        self.join(timeout_s)

    def run_tick(self) -> float | None:
        """Call the tick once. Return the seconds until the next call, or None to end the thread."""
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


def _loop(
    find: weakref.ref[BackgroundThread], wake: SimpleQueue[BackgroundThread | None], pause_s: float | None
) -> None:
    """Run ticks until the worker is stopped or garbage-collected. ``wake`` ends a pause, and may contain the worker."""
    worker = None
    while pause_s is not None:
        try:
            worker = wake.get(timeout=max(pause_s, 0.0)) or worker
            while True:
                worker = wake.get_nowait() or worker
        except Empty:
            worker = worker or find()
        pause_s = None if worker is None else worker.run_tick()
        if worker is not None and not worker.has_work:
            worker = None


_PAUSE_LONGEST_S = 86_400.0
_PAUSE_MAX_S = 0.2
# Keep each sleep short, so that a tick that throttles itself notices in time that the store is closed.


class BackgroundThreads:
    """The background threads of a store, by name. Thread-safe.

    Starting a thread takes 0.1 ms, and milliseconds on a busy machine. So opening a store does not wait for that:
    another thread starts them a moment later.
    """

    def __init__(self) -> None:
        self._threads: dict[str, BackgroundThread] = {}
        self._pid = 0
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        self._pid = 0

    def add(self, name: str, tick: Tick, first_pause_s: float = 0.0) -> BackgroundThread:
        """Add a thread that calls ``tick``. `ensure_running` starts it."""
        worker = self._threads[name] = BackgroundThread(name, tick, first_pause_s)
        return worker

    def __iter__(self) -> Iterator[BackgroundThread]:
        return iter(self._threads.values())

    def ensure_running(self) -> None:
        """Start the threads that do not run in this process, a moment after this call."""
        if self._pid == os.getpid() or not self._threads:
            return
        _thread.start_new_thread(self._start, ())
        self._pid = os.getpid()

    def _start(self) -> None:
        time.sleep(_START_AFTER_S)
        for worker in self:
            try:
                worker.ensure_running()
            except RuntimeError as error:  # too many threads: `errors` reports it, and the next call tries again
                self._pid = 0
                worker.error = error
                logger.warning("%s: %s", worker.name, error)

    def errors(self) -> dict[str, str]:
        """Return the errors of failing ticks, by the thread's name."""
        return {worker.name: str(worker.error) for worker in self if worker.error is not None}

    def stop(self, timeout_s: float = 1.0) -> None:
        """Stop all threads. Wait for running ticks, up to ``timeout_s`` altogether."""
        for worker in self:
            worker.ask_to_stop()
        ends = time.monotonic() + timeout_s
        for worker in self:
            worker.join(ends - time.monotonic())
