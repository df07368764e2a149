"""Descriptors that hold locks for a while: of this process alone, whatever it forks.

An `flock` belongs to the open file, and so to a forked child as well: were its copy of the
descriptor left open, the lock would outlive the parent. So a child closes them all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from itertools import starmap
from typing import Any

from segmentlog.storage.fs import FileSystem
from segmentlog.storage.locks import held

_held: dict[int, FileSystem] = {}
_held_mutex = threading.RLock()  # reentrant: a member may be garbage-collected in the middle


def hold_open(fs: FileSystem, path: str, flags: int) -> int:
    """Open a file to lock it; a forked child closes it. Store the result by `locks.keep`: an interrupt may lose it."""
    fds: list[int] = []
    try:
        with _held_mutex:
            fds.extend(starmap(fs.open, ((path, flags | os.O_CLOEXEC, 0o666),)))
            _held[fds[0]] = fs
    except BaseException:
        for fd in fds:
            let_go(fs, fd)
        raise
    return fds[0]


def let_go(fs: FileSystem, fd: int, owner: dict[Any, int] | None = None, key: object = None) -> None:
    """Unlock and close; ``owner[key]`` is -1 from then on. Who was interrupted in it may call it again with that."""
    with _held_mutex:
        if fd in _held:  # else a forked child's: closed already
            try:
                # Unlocked first: a process that is being started may still have a copy of the descriptor.
                fs.flock(fd, fcntl.LOCK_UN)
            except OSError:
                pass
            finally:
                # With no call before the close: its number may be another file's right after.
                del _held[fd]
                if owner is not None:
                    owner[key] = -1
                try:
                    fs.close(fd)
                except OSError:
                    pass


@held
def held_open(fs: FileSystem, path: str, flags: int) -> Iterator[int]:
    """`hold_open`, and `let_go` at the end of the context."""
    fds: list[int] = []
    try:
        fds.extend(starmap(hold_open, ((fs, path, flags),)))
        yield fds[0]
    finally:
        for fd in fds:
            try:
                if fd in _held:
                    fs.flock(fd, fcntl.LOCK_UN)  # here, before a function that an interrupt may keep from beginning
            except OSError:
                pass
            finally:
                let_go(fs, fd)


def _forget_parent() -> None:
    """In a forked child: close them without unlocking, since a flock belongs to parent and child alike."""
    global _held_mutex
    _held_mutex = threading.RLock()
    for fd, fs in _held.items():
        with contextlib.suppress(OSError):
            fs.close(fd)
    _held.clear()


# Not while another thread has opened a file that is not noted yet: the child would keep it, and its lock.
os.register_at_fork(
    before=lambda: _held_mutex.acquire(), after_in_parent=lambda: _held_mutex.release(), after_in_child=_forget_parent
)
