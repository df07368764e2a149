"""Background threads: each loops one public ``tick`` that is tested without threads."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger("segmentlog")

_BACKOFF_MAX_S = 30.0


class Worker:
    """A named daemon thread around ``tick() -> seconds until the next one``.

    A tick that raises is logged and tried again with a growing pause; ``error`` says what it
    was. After a fork the child's copy has no thread: `ensure_running` starts one. Thread-safe.
    """

    def __init__(self, name: str, tick: Callable[[], float]) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._tick = tick
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._mutex = threading.Lock()

    def ensure_running(self) -> None:
        """Start the thread unless it runs in this process."""
        if self._pid == os.getpid() or self._stopped:
            return
        with self._mutex:
            if self._pid == os.getpid() or (self._thread is not None and self._thread.is_alive()):
                return
            self._wake = threading.Event()
            self._thread = threading.Thread(target=self._loop, name=f"segmentlog-{self.name}", daemon=True)
            self._thread.start()
            self._pid = os.getpid()

    def wake(self) -> None:
        """Have the next tick now."""
        self._wake.set()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread; waits for a tick in progress, up to ``timeout_s``."""
        self._stopped = True
        self._wake.set()
        thread = self._thread
        # A start that was interrupted may have left a thread that never ran: there is nothing to wait for.
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _loop(self) -> None:
        pause_s = 0.0
        failures = 0
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
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
