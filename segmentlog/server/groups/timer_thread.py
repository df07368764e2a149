"""A thread for the time-outs of many groups, which sleeps until the first is due."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("segmentlog")


class TimerThread:
    """Names of groups with due times, and the thread that calls ``run_due`` for them. Thread-safe.

    The thread calls ``run_due`` when the first name is due, or somewhat later. ``run_due`` returns the maximum
    number of seconds until its next call, or None: no call is necessary until a name is added.
    """

    def __init__(self, run_due: Callable[[], float | None], name: str) -> None:
        self._run_due = run_due
        self._name = name
        self._mutex = threading.Lock()
        self._due: list[tuple[int, str]] = []
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the thread that calls ``run_due``."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def schedule(self, due_ms: int, name: str) -> None:
        """Add a due time of a name. Earlier entries of the name remain."""
        with self._mutex:
            heapq.heappush(self._due, (due_ms, name))
            is_first = self._due[0] == (due_ms, name)
        if is_first:
            self._wake.set()

    def pop(self, now_ms: int) -> tuple[int, str] | None:
        """Remove and return the entry with the earliest due time; None if no entry is due."""
        with self._mutex:
            return heapq.heappop(self._due) if self._due and self._due[0][0] <= now_ms else None

    def first_ms(self) -> int | None:
        """Return the earliest due time, or None."""
        with self._mutex:
            return self._due[0][0] if self._due else None

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.clear()
            try:
                wait_s = self._run_due()
            except Exception:
                logger.exception("%s: a time-out could not be handled; the next attempt is in 1 s", self._name)
                wait_s = 1.0
            if not self._is_closed:
                self._wake.wait(wait_s)

    def close(self) -> None:
        """Stop the thread, and wait until ``run_due`` has returned."""
        self._is_closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def discard_thread(self) -> None:
        """Drop the thread in a forked child, which does not inherit it."""
        self._is_closed, self._thread = True, None
