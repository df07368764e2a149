"""One thread for the time-outs of many groups: it sleeps until the first of them."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("segmentlog")


class Deadlines:
    """Names and when they are due. Thread-safe.

    ``tick`` is called when the first of them is due, or somewhat later, and says after how many seconds it wants to be
    called again at the latest; None: once there is something new.
    """

    def __init__(self, tick: Callable[[], float | None], name: str) -> None:
        self._tick = tick
        self._name = name
        self._mutex = threading.Lock()
        self._due: list[tuple[int, str]] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Have a thread call ``tick`` from now on."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def add(self, due_ms: int, name: str) -> None:
        """Something is due then; that it was due at other times before stays."""
        with self._mutex:
            heapq.heappush(self._due, (due_ms, name))
            is_first = self._due[0] == (due_ms, name)
        if is_first:
            self._wake.set()

    def pop(self, now_ms: int) -> tuple[int, str] | None:
        """What is due the longest, if anything is."""
        with self._mutex:
            return heapq.heappop(self._due) if self._due and self._due[0][0] <= now_ms else None

    def first_ms(self) -> int | None:
        """When the next is due."""
        with self._mutex:
            return self._due[0][0] if self._due else None

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.clear()
            try:
                wait_s = self._tick()
            except Exception:
                logger.exception("%s: what was due could not be done", self._name)
                wait_s = 1.0
            if not self._is_closed:
                self._wake.wait(wait_s)

    def close(self) -> None:
        """Return once ``tick`` is not called any more."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def forget_thread(self) -> None:
        """In a forked child, which has none."""
        self._is_closed, self._thread = True, None
