"""Conditional puts to a folder: a process that is stopped or killed anywhere keeps no other process from its turn."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import NoSyncFileSystem
from seeds import seeds, share
from waiting import wait_until

from segmentlog.errors import ObjectStoreError
from segmentlog.objects.bucket import file_swap
from segmentlog.objects.bucket.base import PreconditionFailed
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

KEY = "manifest.json"


class Interrupted(FaultyFileSystem, NoSyncFileSystem):
    """A process that is stopped before its ``at``-th call, while ``action`` runs, and then continues."""

    def __init__(self, at: int = 0, action: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._at, self._action = at, action

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        call = super()._wrap(name, real)

        def stopped(*args: Any, **options: Any) -> Any:
            if len(self.calls) == self._at and self._action is not None:
                action, self._action = self._action, None
                action()
            return call(*args, **options)

        return stopped

    @property
    def was_stopped(self) -> bool:
        return self._action is None


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Revoke turns at once."""
    monkeypatch.setattr(file_swap, "PATIENCE_S", 0.0)


@pytest.fixture
def places(memory_path: Path) -> Iterator[str]:
    """Return new folders."""
    return (f"{memory_path}/{number}" for number in itertools.count())


def _swap(path: str, data: bytes, tag: str | None, fs: FaultyFileSystem | None = None) -> bool:
    """Return whether the swap was made."""
    try:
        LocalBucket(path, fs or Interrupted()).compare_and_swap(KEY, data, tag)
    except PreconditionFailed:
        return False
    return True


def _check(path: str, tag: str | None, done: list[tuple[bytes, bool]], where: object) -> None:
    """One of the swaps from the same tag was made, and the object has its content. A later swap works."""
    winners = [data for data, is_done in done if is_done]
    assert len(winners) == 1, (where, done)
    data, now = LocalBucket(path).get(KEY)
    assert data == winners[0], (where, done)
    assert _swap(path, b"later", now), where


@pytest.mark.parametrize("is_new", [True, False])
def test_of_a_stopped_process_and_one_that_overtakes_it_one_swaps(places: Iterator[str], is_new: bool) -> None:
    """Whichever call the first process is stopped at: the other one need not wait for it, and one of both wins."""
    counts = set()
    for at in itertools.count():
        path = next(places)
        tag = None if is_new else LocalBucket(path).compare_and_swap(KEY, b"before", None)
        done: list[tuple[bytes, bool]] = []
        fs = Interrupted(at, lambda path=path, tag=tag, done=done: done.append((b"other", _swap(path, b"other", tag))))
        done.append((b"first", _swap(path, b"first", tag, fs)))
        if not fs.was_stopped:
            break
        _check(path, tag, done, at)
        counts.add(done[0])
    assert at > 10
    assert counts == {(b"other", True), (b"other", False)}


class Scheduled(FaultyFileSystem, NoSyncFileSystem):
    """A process in a thread, each of whose calls waits until the test lets it continue."""

    def __init__(self) -> None:
        super().__init__()
        self._may_continue, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.next_call = ""
        self.is_over = False
        self.is_done: bool | None = None

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        call = super()._wrap(name, real)

        def scheduled(*args: Any, **options: Any) -> Any:
            self.next_call = name
            self._has_stopped.release()
            self._may_continue.acquire()
            return call(*args, **options)

        return scheduled

    def run(self, path: str, data: bytes, tag: str | None) -> None:
        with contextlib.suppress(Died):
            self.is_done = _swap(path, data, tag, self)
        self.is_over, self.next_call = True, ""
        self._has_stopped.release()

    def start(self, *arguments: Any) -> None:
        """Start the swap, up to its first call."""
        threading.Thread(target=self.run, args=arguments, daemon=True).start()
        self._has_stopped.acquire()

    def step(self) -> None:
        """Let the process make one call, up to the next."""
        self._may_continue.release()
        self._has_stopped.acquire()

    def step_to(self, name: str) -> None:
        """Let the process continue up to a call of this method, or to its end with an empty name."""
        while self.next_call != name:
            self.step()


def test_a_process_that_was_stopped_before_its_turn_notices_later_turns(places: Iterator[str]) -> None:
    """Others had many turns meanwhile, and deleted all earlier claims; one of them is stopped in its turn now."""
    path = next(places)
    old = LocalBucket(path).compare_and_swap(KEY, b"old", None)
    tag = LocalBucket(path).compare_and_swap(KEY, b"before", old)
    first, second = Scheduled(), Scheduled()
    first.start(path, b"first", tag)
    first.step_to("listdir")
    first.step()  # it has chosen the number of its turn
    for _ in range(3):
        assert not _swap(path, b"other", old)
    second.start(path, b"second", tag)
    second.step_to("rename")
    first.step_to("")
    second.step_to("")
    assert first.is_done
    assert not second.is_done
    assert LocalBucket(path).get(KEY)[0] == b"first"


@pytest.mark.parametrize("seed", seeds("file swap"))
def test_of_processes_that_are_stopped_all_the_time_one_swaps(places: Iterator[str], seed: int) -> None:
    """Processes make their calls in any order. Some have an old tag, and swap nothing; some are killed."""
    rng = random.Random(seed)
    for round_ in range(share(600, "file swap")):
        path = next(places)
        old = LocalBucket(path).compare_and_swap(KEY, b"old", None)
        tag = LocalBucket(path).compare_and_swap(KEY, b"before", old)
        found: dict[bytes, Scheduled] = {}
        for number in range(rng.choice((2, 3, 4, 5))):
            fs = Scheduled()
            if rng.random() < 0.1:
                fs.die_at(rng.randrange(10, 50))
            data = b"%d" % number
            fs.start(path, data, rng.choice((tag, tag, old)))
            found[data] = fs
        sticky = rng.choice((0.5, 0.9, 0.97))
        fs = next(iter(found.values()))
        while running := [one for one in found.values() if not one.is_over]:
            if fs.is_over or rng.random() > sticky:
                fs = rng.choice(running)
            fs.step()
        winners = [data for data, fs in found.items() if fs.is_done]
        now = LocalBucket(path).get(KEY)[0]
        # A process may have been killed after its swap.
        winners += [data for data, fs in found.items() if fs.is_done is None and now == data]
        where = (seed, round_, winners, now)
        assert len(winners) <= 1, where
        assert now == (winners[0] if winners else b"before"), where
        assert _swap(path, b"later", LocalBucket(path).get(KEY)[1]), where


def test_a_killed_process_leaves_nothing_behind_for_long(places: Iterator[str]) -> None:
    """The next swaps delete what it has staged, and the claims do not pile up."""
    path = next(places)
    tag = LocalBucket(path).compare_and_swap(KEY, b"0", None)
    for at in range(1, 40):
        fs = Interrupted()
        fs.die_at(at)
        with contextlib.suppress(Died):
            _swap(path, b"killed %d" % at, tag, fs)
        _, tag = LocalBucket(path).get(KEY)
        tag = LocalBucket(path).compare_and_swap(KEY, b"%d" % at, tag)
    LocalBucket(path).compare_and_swap(KEY, b"last", tag)
    assert len(os.listdir(f"{path}/{KEY}.lock")) == 1
    assert [found.key for found in LocalBucket(path).list()] == [KEY]


def test_deleting_the_object_removes_its_turns(places: Iterator[str]) -> None:
    """Also while another process is stopped in its turn: it then swaps nothing."""
    path = next(places)
    bucket = LocalBucket(path)
    tag = bucket.compare_and_swap(KEY, b"1", None)
    bucket.delete([KEY])
    assert os.listdir(path) == []
    for at in itertools.count():
        tag = bucket.compare_and_swap(KEY, b"1", None)
        fs = Interrupted(at, lambda: bucket.delete([KEY]))
        is_done = False
        with contextlib.suppress(ObjectStoreError):  # the folder is gone: it can be tried again
            is_done = _swap(path, b"2", tag, fs)
        if not fs.was_stopped:
            assert is_done
            break
        assert not is_done or not os.path.exists(f"{path}/{KEY}"), at
        bucket.delete([KEY])
        assert os.listdir(path) == [], at
    assert at > 10


# ---------------------------------------------------------------- earlier releases


def _lock(path: str) -> int:
    """Lock the object, as a process of an earlier release does."""
    fd = os.open(f"{path}/{KEY}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def test_the_lock_of_an_earlier_release_is_respected(places: Iterator[str]) -> None:
    """In a folder that such a release has written: it may be about to replace the object."""
    path = next(places)
    os.makedirs(path)
    fd = _lock(path)
    fs = Interrupted()
    fs.fail("flock", BlockingIOError(errno.EAGAIN, "it would wait"))
    with pytest.raises(ObjectStoreError, match="it cannot be written"):
        _swap(path, b"1", None, fs)
    os.close(fd)
    assert _swap(path, b"1", None)
    assert os.path.isfile(f"{path}/{KEY}.lock")
    _, tag = LocalBucket(path).get(KEY)
    assert _swap(path, b"2", tag)
    assert not _swap(path, b"3", tag)
    assert sorted(os.listdir(path)) == [KEY, f"{KEY}.lock"]
    LocalBucket(path).delete([KEY])
    assert os.listdir(path) == []


def test_an_earlier_release_cannot_write_to_a_new_folder(places: Iterator[str]) -> None:
    """Its lock is a folder there, which it cannot open: it reports an error, and changes nothing."""
    path = next(places)
    assert _swap(path, b"1", None)
    with pytest.raises(IsADirectoryError):
        _lock(path)
    assert LocalBucket(path).get(KEY)[0] == b"1"


# ---------------------------------------------------------------- real processes

_SWAPPING = """
import sys
from segmentlog.errors import ObjectStoreError
from segmentlog.objects.bucket.base import PreconditionFailed
from segmentlog.objects.bucket.local_bucket import LocalBucket
bucket, number = LocalBucket(sys.argv[1]), 0
while True:
    data, tag = bucket.get("manifest.json")
    try:
        bucket.compare_and_swap("manifest.json", b"%s %d" % (sys.argv[2].encode(), number), tag)
        number += 1
    except PreconditionFailed:
        pass
"""


def test_a_process_that_is_stopped_anywhere_blocks_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP at random moments of a process that swaps all the time; after SIGCONT both swap."""
    monkeypatch.setattr(file_swap, "PATIENCE_S", 0.05)
    path = str(tmp_path / "bucket")
    bucket = LocalBucket(path)
    bucket.compare_and_swap(KEY, b"mine", None)
    process = subprocess.Popen([sys.executable, "-c", _SWAPPING, path, "other"])
    try:
        for _ in range(20):
            wait_until(lambda: bucket.get(KEY)[0].startswith(b"other"), every_s=0.001)
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            data, tag = bucket.get(KEY)
            assert data.startswith(b"other")
            tag = bucket.compare_and_swap(KEY, b"mine", tag)
            process.send_signal(signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
