"""Background threads: one that starts badly, and one that fails."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from segmentlog.workers import Worker


def test_an_interrupted_start_can_be_stopped_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C in the middle of starting the thread leaves nothing half done."""
    ticked = threading.Event()

    def tick() -> float:
        ticked.set()
        return 60.0

    def interrupted(thread: threading.Thread) -> NoReturn:
        raise KeyboardInterrupt

    worker = Worker("test", tick)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ensure_running()
    worker.ensure_running()
    assert ticked.wait(10)
    worker.stop(10)
    assert not any(thread.name == "segmentlog-test" for thread in threading.enumerate())


def test_stopping_what_never_started_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a store does that is closed because starting its worker was interrupted."""

    def interrupted(thread: threading.Thread) -> NoReturn:
        raise KeyboardInterrupt

    worker = Worker("test", lambda: 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ensure_running()
    worker.stop()
