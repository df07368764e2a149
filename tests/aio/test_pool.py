"""The threads that asynchronous clients share run every submitted call, even while others are blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from waiting import wait_until

from segmentlog.aio import pool as pool_module
from segmentlog.aio.pool import Pool


class _Late:
    """A queue in which a call arrives just as a thread has given up waiting."""

    def __init__(self, queue: SimpleQueue[Any]) -> None:
        self._queue = queue
        self.as_one_gives_up: Callable[[], object] | None = None
        self.put, self.qsize, self.empty = queue.put, queue.qsize, queue.empty

    def get(self, timeout: float) -> Any:
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            submit, self.as_one_gives_up = self.as_one_gives_up, None
            if submit is not None:
                submit()
            raise


def test_a_call_that_comes_as_a_thread_gives_up_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all other threads are busy, the thread that was about to give up makes the call."""
    monkeypatch.setattr(pool_module, "_IDLE_S", 0.02)
    pool = Pool()
    late = pool._calls = _Late(SimpleQueue())  # type: ignore[assignment]
    go_on, is_busy, is_made = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        is_busy.set()
        go_on.wait(30)

    pool.submit(work)
    assert is_busy.wait(10)
    late.as_one_gives_up = lambda: pool.submit(is_made.set)
    pool.submit(lambda: None)
    assert is_made.wait(2)
    go_on.set()
    wait_until(lambda: not pool.thread_count)
