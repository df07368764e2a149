"""Descriptors, threads and child processes that a test leaves in its process, and objects to close at its end."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import time
import weakref
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.testing.fault_injection import Died

_GRACE_S = 5.0
"""Time for threads and child processes that are about to end."""
_DELETED = " (deleted)"
_LIBRARIES = tuple({sys.prefix + "/", sys.base_prefix + "/", "/usr/", "/dev/"})
"""Files below these folders belong to libraries, which open them once in the life of a process: fonts, for example."""


class Closable(Protocol):
    """A store, a partition, or a file of a segment."""

    def close(self) -> None: ...


_Opened = TypeVar("_Opened", bound=Closable)
_opened: weakref.WeakSet[Any] = weakref.WeakSet()
_opened_without_weak_references: list[Any] = []


def opened(one: _Opened) -> _Opened:
    """Close ``one`` at the end of the test if it still exists: a store cleanly, a partition as if the process was
    killed.
    """
    try:
        # Register the handle: it owns a partition's files, and may outlive the partition until the collector deletes
        # it.
        _opened.add(one.handle if isinstance(one, Partition) else one)
    except TypeError:
        _opened_without_weak_references.append(one)
    return one


def close_opened() -> None:
    """Close what was passed to `opened`, whatever its state."""
    for one in [*_opened, *_opened_without_weak_references]:
        with contextlib.suppress(Exception, Died):
            if isinstance(one, Handle):
                one.close_if_idle()
            else:
                one.close()
    _opened.clear()
    _opened_without_weak_references.clear()


class Snapshot(NamedTuple):
    """Resources of this process at one moment."""

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    clients: frozenset[tuple[int, str]] = frozenset()
    """Threads of librdkafka: a client that is not closed reconnects now and then, also during later tests."""

    @classmethod
    def take(cls) -> Snapshot:
        """Return the resources of this moment."""
        threads = (one for one in threading.enumerate() if not isinstance(one, threading._DummyThread))
        return cls(frozenset(_descriptors()), frozenset(threads), frozenset(_children()), frozenset(_clients()))

    def since(self, before: Snapshot) -> Snapshot:
        """Return what was added since ``before`` and still exists."""
        return Snapshot(
            frozenset(one for one in self.descriptors - before.descriptors if _is_a_leak(*one)),
            self.threads - before.threads,
            self.children - before.children - _helpers()[1],
            self.clients - before.clients,
        )

    def within(self, folder: str) -> Snapshot:
        """Return a snapshot with only the descriptors of files below a folder."""
        return Snapshot(
            frozenset(one for one in self.descriptors if one[1].startswith(f"{folder}/")), frozenset(), frozenset()
        )

    def describe(self) -> str:
        """Return the resources, one a line."""
        lines = [f"descriptor {fd}: {target}{_ends(fd)}" for fd, target in sorted(self.descriptors)]
        lines += [f"thread {thread.name}" for thread in self.threads]
        lines += [f"thread {name} of librdkafka" for _, name in sorted(self.clients)]
        lines += [f"child process {pid}: {_command(pid)}" for pid in sorted(self.children)]
        return "\n  ".join(lines)


def left_since(before: Snapshot, folder: str | None = None) -> str:
    """Describe what was added since ``before`` and stays.

    Return an empty string if nothing stays. With ``folder``, only files below it count.
    """
    ends_s = time.monotonic() + _GRACE_S
    while True:
        left = Snapshot.take().since(before)
        left = left if folder is None else left.within(folder)
        if not any(left):
            return ""
        if not (left.threads or left.children or left.clients) or time.monotonic() > ends_s:
            break
        time.sleep(0.002)
    text = left.describe()
    gc.collect()
    still = Snapshot.take().since(before)
    how = "left behind" if any(still if folder is None else still.within(folder)) else "dropped without being closed"
    return f"{how}:\n  {text}"


def files_open_below(folder: Path | str) -> list[str]:
    """Return the files below ``folder`` that this process has open, once for each descriptor.

    Files of other tests are elsewhere, so they do not count.
    """
    return sorted(target for _, target in _descriptors() if target.startswith(f"{folder}/"))


def _descriptors() -> list[tuple[int, str]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}").removesuffix(_DELETED)))
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
    return found


def _is_a_leak(fd: int, target: str) -> bool:
    if target.startswith("socket:") and _is_sparks(fd):
        return False
    is_a_librarys = target.startswith(_LIBRARIES) and not target.startswith("/dev/shm/segmentlog")
    return not is_a_librarys and fd not in _helpers()[0]


def _gateway() -> Any:
    """Return the connection to the JVM of this process's Spark session, if there is one."""
    pyspark = sys.modules.get("pyspark")
    return None if pyspark is None else pyspark.SparkContext._gateway


def _leave_java_alone() -> None:
    """Keep the collector of a forked child away from the parent's objects.

    If it found objects of Java, it would report them to the JVM over connections on which the parent waits for answers.
    """
    if _gateway() is not None:
        gc.freeze()


os.register_at_fork(after_in_child=_leave_java_alone)


def _is_sparks(fd: int) -> bool:
    """Return whether a socket leads to the JVM of this process's session, or did until Java closed it.

    The collector reports objects of Java to the JVM during any test, over as many connections as it needs.
    """
    gateway = _gateway()
    if gateway is None:
        return False
    if any(one.socket is not None and one.socket.fileno() == fd for one in list(gateway._gateway_client.deque)):
        return True
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            return bool(copy.getpeername()[1] == gateway.gateway_parameters.port)
    except OSError:  # not connected, or closed meanwhile
        return False


def _ends(fd: int) -> str:
    """Describe where a socket is bound and its peer."""
    try:
        with socket.socket(fileno=os.dup(fd)) as copy:
            here = copy.getsockname()
            try:
                return f" at {here}, connected to {copy.getpeername()}"
            except OSError as error:
                return f" at {here}, {error.strerror}"
    except OSError:
        return ""


def _helpers() -> tuple[set[int], set[int]]:
    """Return the descriptors and processes that `multiprocessing` keeps until this process ends."""
    tracker: Any = resource_tracker._resource_tracker
    server: Any = forkserver._forkserver
    fds = {tracker._fd, server._forkserver_alive_fd}
    return fds, {tracker._pid, server._forkserver_pid}


def _children() -> list[int]:
    """Return the children of all threads; an empty list if the kernel does not list them."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        try:
            fd = os.open(f"/proc/self/task/{thread}/children", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        try:
            found += map(int, os.read(fd, 1 << 16).split())
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)
    return found


def _clients() -> list[tuple[int, str]]:
    found = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                name = file.read().strip()
        except OSError:  # the thread has ended meanwhile
            continue
        if name.startswith("rdk:"):
            found.append((int(thread), name))
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone by now"
    return command or "a zombie that nobody waited for"
