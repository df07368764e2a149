"""Background threads: each loops one public ``tick(now)`` that is tested without threads and without sleeping."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from segmentlog.storage.locks import rouse

logger = logging.getLogger("segmentlog")

_BACKOFF_MAX_S = 30.0
_START_AFTER_S = 0.05

Tick = Callable[[], float]
"""Does what is due and returns the seconds until it should be called again."""


class Worker:
    """A named daemon thread around a tick.

    A tick that raises is logged and tried again with a growing pause; ``error`` says what it
    was. After a fork the child's copy has no thread: `ensure_running` starts one. Thread-safe.
    """

    def __init__(self, name: str, tick: Tick, first_pause_s: float = 0.0) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._tick = tick
        self._first_pause_s = first_pause_s
        self._wake = _asleep()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._mutex = threading.Lock()

    def ensure_running(self) -> None:
        """Start the thread unless it runs in this process."""
        if self._pid == os.getpid():
            return
        with self._mutex:
            if self._stopped or self._pid == os.getpid() or (self._thread is not None and self._thread.is_alive()):
                return
            if self._pid:  # forked while somebody may have held its lock
                self._wake = _asleep()
            self._thread = threading.Thread(target=self._loop, name=f"segmentlog-{self.name}", daemon=True)
            self._thread.start()
            self._pid = os.getpid()

    def wake(self) -> None:
        """Have the next tick now."""
        rouse(self._wake)

    def pause(self, seconds: float) -> bool:
        """For a tick that takes its time: wait, and say whether it should end instead of going on."""
        if seconds > 0 and not self._stopped:
            time.sleep(min(seconds, _PAUSE_MAX_S))
        return self._stopped

    def ask_to_stop(self) -> None:
        """End the thread after the tick in hand."""
        with self._mutex:
            self._stopped = True
            rouse(self._wake)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        thread = self._thread
        # A start that was interrupted may have left a thread that never ran: there is nothing to wait for.
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(timeout_s, 0.0))

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread; waits for a tick in progress, up to ``timeout_s``."""
        self.ask_to_stop()
        self.join(timeout_s)

    def _loop(self) -> None:
        pause_s = self._first_pause_s
        failures = 0
        while True:
            self._wake.acquire(True, min(max(pause_s, 0.0), _PAUSE_LONGEST_S))
            if self._stopped:
                return
            try:
                pause_s = self._tick()
                failures, self.error = 0, None
            except Exception as error:
                failures += 1
                pause_s = min(0.1 * 2**failures, _BACKOFF_MAX_S)
                if str(error) != str(self.error):
                    logger.warning("%s: %s; trying again", self.name, error)
                self.error = error


def _asleep() -> Any:
    """A lock that is taken: who waits for it is woken by `rouse`, now or beforehand."""
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


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
