"""Background threads that cannot start, that are interrupted, or that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

import pytest
from waiting import wait_until

from segmentlog.topics.background_threads import BackgroundThread, BackgroundThreads


def test_an_interrupted_start_can_be_stopped_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose start was interrupted can be stopped, and started again."""
    ticked = threading.Event()

    def tick() -> float:
        ticked.set()
        return 60.0

    def interrupted(thread: threading.Thread) -> NoReturn:
        raise KeyboardInterrupt

    worker = BackgroundThread("test", tick)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ensure_running()
    worker.ensure_running()
    assert ticked.wait(10)
    worker.stop(10)
    assert not any(thread.name == "segmentlog-test" for thread in threading.enumerate())


def test_stopping_what_never_started_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping a thread that never started does nothing."""

    def interrupted(thread: threading.Thread) -> NoReturn:
        raise KeyboardInterrupt

    worker = BackgroundThread("test", lambda: 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ensure_running()
    worker.stop()


def test_workers_run_soon_and_a_call_before_that_is_not_lost() -> None:
    """Threads start in the background soon after the store opens; a wake before the start is not lost."""
    ticked = {"early": threading.Event(), "late": threading.Event()}
    workers = BackgroundThreads()

    def tick_of(name: str) -> Callable[[], float]:
        def tick() -> float:
            ticked[name].set()
            return 60.0

        return tick

    early = workers.add("early", tick_of("early"), 60.0)
    workers.add("late", tick_of("late"), 60.0)
    workers.ensure_running()
    early.wake()
    assert ticked["early"].wait(10)
    assert not ticked["late"].is_set()
    workers.stop(10)
    assert not {"segmentlog-early", "segmentlog-late"} & {thread.name for thread in threading.enumerate()}


def test_workers_that_are_stopped_before_they_started_never_start() -> None:
    """Threads of a store that is closed at once never start."""
    workers = BackgroundThreads()
    worker = workers.add("never", lambda: 60.0)
    workers.ensure_running()
    workers.stop()
    worker.ensure_running()  # as the thread that starts them does, some time later
    assert not any(thread.name == "segmentlog-never" for thread in threading.enumerate())


def test_a_machine_without_threads_to_spare_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that cannot start is reported by health, and starts when the machine has threads again."""
    refused, ticked = threading.Event(), threading.Event()

    def no_more(thread: threading.Thread) -> NoReturn:
        refused.set()
        raise RuntimeError("can't start new thread")

    def tick() -> float:
        ticked.set()
        return 60.0

    workers = BackgroundThreads()
    workers.add("test", tick)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        workers.ensure_running()
        assert refused.wait(10)
        while not workers.errors():
            time.sleep(0.001)
    assert workers.errors() == {"test": "can't start new thread"}
    workers.ensure_running()
    assert ticked.wait(10)
    while workers.errors():
        time.sleep(0.001)
    workers.stop(10)


def test_a_thread_that_came_to_an_end_is_started_anew() -> None:
    """A thread that has ended is started again at the next request."""
    ticks: list[int] = []

    def tick() -> float:
        ticks.append(1)
        if len(ticks) == 1:
            raise SystemExit  # ends a thread in silence
        return 60.0

    worker = BackgroundThread("mortal", tick)
    worker.ensure_running()
    wait_until(lambda: not worker.is_running)
    worker.ensure_running()
    wait_until(lambda: len(ticks) == 2)
    worker.stop()
    assert len(ticks) == 2
