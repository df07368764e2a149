"""Sleep until an event: a writer, `interrupt` or the clock wakes a sleeper soon."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from segmentlog.storage import watch as watch_module
from segmentlog.storage.watch import Watch

FORK = multiprocessing.get_context("fork")
LONG_S = 3_600.0
"""Longer than a test may take: a wait that ends was woken."""


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Yield a watch that uses inotify if the system has it."""
    watch = Watch()
    yield watch
    watch.close()


@pytest.fixture
def polling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Yield a watch for which the system has no inotify instance left."""
    monkeypatch.setattr(watch_module, "_inotify_init", lambda: -1)
    watch = Watch()
    yield watch
    watch.close()


def timed(wait: Callable[[], bool]) -> tuple[bool, float]:
    """Return (result of the wait, its duration in seconds)."""
    started = time.monotonic()
    return wait(), time.monotonic() - started


def rewrite_byte(path: Path) -> None:
    """Do what an appender does to wake followers."""
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, b"\0", 0)
    os.close(fd)


def later(delay_s: float, action: Callable[[], object]) -> threading.Timer:
    """Do something in another thread, after a while."""
    timer = threading.Timer(delay_s, action)
    timer.start()
    return timer


def test_a_write_in_another_process_wakes(tmp_path, watch):
    """A byte that another process rewrites in a watched file ends the wait, long before its time is up."""
    path = tmp_path / "lock"
    path.write_bytes(b"\0")
    assert watch.add(str(path))

    def write() -> None:
        time.sleep(0.1)
        rewrite_byte(path)

    process = FORK.Process(target=write)
    process.start()
    woken, took_s = timed(lambda: watch.wait(LONG_S))
    process.join()
    assert woken
    assert took_s > 0.05


def test_a_write_that_came_before_the_wait_wakes(tmp_path, watch):
    """A write between the check and the wait ends the wait at once."""
    path = tmp_path / "lock"
    path.touch()
    watch.add(str(path))
    rewrite_byte(path)
    assert watch.wait(LONG_S) is True
    assert watch.wait(0) is False, "one write wakes once"


def test_any_of_several_files_wakes(tmp_path, watch):
    """A watch may follow many logs; a write to any of them wakes it."""
    paths = [tmp_path / str(number) for number in range(20)]
    for path in paths:
        path.touch()
        assert watch.add(str(path))
        assert watch.add(str(path)), "adding it again is no error"
    for path in paths:
        rewrite_byte(path)
        assert watch.wait(0) is True
        assert watch.wait(0) is False


def test_a_new_name_in_a_folder_wakes(tmp_path, watch):
    """Creating a topic, or renaming one into place, wakes watchers of the store's folder."""
    (tmp_path / "store").mkdir()
    assert watch.add(str(tmp_path / "store"), folder=True)
    (tmp_path / "store" / "made").mkdir()
    assert watch.wait(0) is True
    (tmp_path / "aside").mkdir()
    assert watch.wait(0) is False
    (tmp_path / "aside").rename(tmp_path / "store" / "moved")
    assert watch.wait(0) is True


def test_time_is_up(watch):
    """Without events, the wait ends after its time, and returns False."""
    woken, took_s = timed(lambda: watch.wait(0.15))
    assert not woken
    assert took_s > 0.14
    assert watch.wait(-1) is False, "a deadline that has passed is no error"


def test_a_file_that_is_not_there_cannot_be_watched(tmp_path, watch):
    """Watching a missing file says so, and works once the file is there."""
    path = tmp_path / "lock"
    assert watch.add(str(path)) is False
    path.touch()
    assert watch.add(str(path)) is True
    rewrite_byte(path)
    assert watch.wait(0) is True


def test_an_interrupt_wakes(watch):
    """Another thread ends a wait, at once; one interrupt that came earlier ends the next wait."""
    timer = later(0.1, watch.interrupt)
    assert watch.wait(LONG_S) is True
    timer.join()
    watch.interrupt()
    watch.interrupt()
    assert watch.wait(LONG_S) is True
    assert watch.wait(0) is False, "interrupts do not pile up"


def test_any_number_of_interrupts_is_taken(watch):
    """More interrupts than a pipe holds do not block."""
    for _ in range(70_000):
        watch.interrupt()
    assert watch.wait(0) is True
    assert watch.wait(0) is False


def test_draining_forgets(tmp_path, watch):
    """After draining, earlier events wake no thread: the logs are checked next."""
    path = tmp_path / "lock"
    path.touch()
    watch.add(str(path))
    rewrite_byte(path)
    watch.interrupt()
    watch.drain()
    assert watch.wait(0) is False


def test_polling_looks_often_at_first_and_less_often_when_nothing_happens(polling):
    """Without inotify a wait is a short sleep that doubles up to 20 ms, and is short again after an event."""
    assert polling.must_poll
    delays = []
    for _ in range(8):
        before = polling._delay
        delays.append(before)
        woken, took_s = timed(lambda: polling.wait(LONG_S))
        assert not woken
        assert took_s >= before
    assert delays == [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]
    polling.interrupt()
    assert polling.wait(LONG_S) is True
    assert polling._delay == 0.0005


def test_polling_needs_no_files(tmp_path, polling):
    """Without inotify, adding a path is not an error: the waiting thread polls."""
    assert polling.add(str(tmp_path / "missing")) is True
    assert polling.wait(0.0001) is False


def test_a_watch_that_could_be_woken_can_be_told_to_poll(watch):
    """For a log whose appenders cannot wake followers, a wait is a short sleep, too."""
    assert not watch.must_poll
    assert watch.wait(LONG_S, poll=True) is False, "it looked again, long before its time was up"


def test_a_watch_gives_back_its_descriptors():
    """Closing releases every descriptor; closing again, and a late interrupt, are not errors."""
    before = sorted(os.listdir("/proc/self/fd"))
    watch = Watch()
    assert len(os.listdir("/proc/self/fd")) > len(before)
    watch.close()
    watch.close()
    watch.interrupt()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_that_takes_the_place_of_one_that_goes_on_is_watched(watch: Watch, tmp_path: Path) -> None:
    """No event reports that the former file is gone, as it may have another name. The name given to `add` shows it."""
    path = tmp_path / "lock"
    for number in range(3):
        path.write_bytes(b"x")
        assert watch.add(str(path), file=str(number))
        watch.wait_for_changes(0)
        path.write_bytes(b"y")
        assert watch.wait_for_changes(LONG_S) == {str(path)}
        path.rename(tmp_path / f"former-{number}")
    for number in range(3):  # entries of deleted files are removed, and the last file is unaffected
        (tmp_path / f"former-{number}").unlink()
    watch.wait_for_changes(0)
    path.write_bytes(b"x")
    assert watch.add(str(path), file="2")
    path.write_bytes(b"y")
    assert watch.wait_for_changes(LONG_S) == {str(path)}
