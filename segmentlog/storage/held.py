"""Descriptors that hold locks for a while: of this process alone, whatever it forks.

An `flock` belongs to the open file, and so to a forked child as well: were its copy of the
descriptor left open, the lock would outlive the parent. So a child closes them all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from segmentlog.storage.fs import FileSystem

_held: dict[int, FileSystem] = {}
_held_mutex = threading.RLock()  # reentrant: a member may be garbage-collected in the middle


def hold_open(fs: FileSystem, path: str, flags: int) -> int:
    """Open a file to lock it; a forked child closes it."""
    with _held_mutex:
        fd = fs.open(path, flags | os.O_CLOEXEC, 0o666)
        _held[fd] = fs
    return fd


def let_go(fs: FileSystem, fd: int) -> None:
    """Unlock and close."""
    with _held_mutex:
        if _held.pop(fd, None) is None:
            return  # a forked child's: closed already
        # Unlocked first: a process that is being started may still have a copy of the descriptor.
        with contextlib.suppress(OSError):
            fs.flock(fd, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            fs.close(fd)


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
