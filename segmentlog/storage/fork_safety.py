"""Registry of locks and descriptors that must not cross a fork.

A forked child has one thread, and copies of all memory and descriptors. The copies were taken while the parent's other
threads were at any instruction. Four things must not be used in the child as they are:

- Locks: the thread that holds a lock does not exist in the child. Every lock of the package is created by `lock` or a
  function like it. It is a plain lock, registered with its owner, and the child replaces it with a new one.
- Descriptors: an `flock` belongs to the open file, and so to parent and child alike. If the child's copy stayed open,
  the lock would outlive the parent. If the child unlocked its copy, the parent would lose the lock. `open_lockable`
  registers every descriptor that is ever locked. The child closes its copies and unlocks none. `close_lockable` unlocks
  *and* closes, because a child that is just being forked may still have a copy.
- State: a thread that does not exist in the child may have changed it halfway. An owner registers a method with
  `on_fork` that discards what can be derived again. The method is called when all locks are new and all those
  descriptors are closed.
- Modules: a module that another thread is importing would stay half imported in the child, with its import lock held.
  An import of it in the child would wait forever. So a fork first waits for running imports of this package.

A fork also waits while another thread is between opening and registering a file: microseconds. A fork in the same
thread, by a signal handler or a finalizer at that point, does not wait for itself. If the child returns to the opening
code, that code detects the new process and opens the file again.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Any, Protocol

from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.interrupt_safe import interrupt_safe_context


class LockableFiles(Protocol):
    """The methods of a `FileSystem` that this module needs. (`FileSystem` itself is built on this module.)"""

    @property
    def open(self) -> Callable[..., int]: ...
    @property
    def close(self) -> Callable[[int], None]: ...
    @property
    def flock(self) -> Callable[[int, int], None]: ...


# ---------------------------------------------------------------- owners


class _ForkEntry(weakref.ref[Any]):
    """The action in a child for one owner: replace the lock of that name, call a method, or both."""

    __slots__ = ("make", "method", "name", "number")
    method: str
    make: Callable[[], Any] | None
    name: str
    number: int


_entries: dict[int, _ForkEntry] = {}
_numbers = itertools.count()
_generation = 0
_PACKAGE = f"{__name__.partition('.')[0]}."


def _unregister(entry: _ForkEntry) -> None:
    _entries.pop(entry.number, None)


def _register(owner: object, name: str, make: Callable[[], Any] | None, method: str = "") -> None:
    entry = _ForkEntry(owner, _unregister)
    entry.make, entry.name, entry.method = make, name, method
    entry.number = number = next(_numbers)
    _entries[number] = entry


def lock(owner: object, name: str, method: str = "") -> threading.Lock:
    """Create a lock. The caller must store it as the attribute ``name`` of ``owner``; a forked child replaces it with a
    new lock.

    ``method``: a method of the owner that is also called in the child, as by `on_fork`. One registration for both is
    cheaper for objects that are created often.
    """
    _register(owner, name, _make_lock, method)
    return _make_lock()


def reentrant_lock(owner: object, name: str) -> threading.RLock:
    """Like `lock`, but create a lock that the thread which holds it may acquire again."""
    _register(owner, name, _make_reentrant_lock)
    return _make_reentrant_lock()


def condition(owner: object, name: str) -> threading.Condition:
    """Create a condition to keep as ``owner.name``, which a forked child replaces with a condition without waiters."""
    _register(owner, name, _make_condition)
    return _make_condition()


def event(owner: object, name: str) -> threading.Event:
    """Create an event to keep as ``owner.name``, which a forked child replaces with an event that is not set."""
    _register(owner, name, _make_event)
    return _make_event()


def short_lived_lock() -> threading.Lock:
    """Create a lock without registering it, to be kept only briefly.

    Only for a lock that a forked child does not use: no thread of the child waits for it, or the child drops the object
    that has it.
    """
    return _make_lock()


def on_fork(owner: object, method: str) -> None:
    """Call a method of ``owner`` in every forked child, as long as the owner lives.

    Call this when the owner is created: a fork may come at the next instruction.
    """
    _register(owner, "", None, method)


# These are functions so that tests can replace them and observe the locks.
def _make_lock() -> threading.Lock:
    return threading.Lock()


def _make_reentrant_lock() -> threading.RLock:
    return threading.RLock()


def _make_condition() -> threading.Condition:
    return threading.Condition(_make_reentrant_lock())


def _make_event() -> threading.Event:
    return threading.Event()


def generation() -> int:
    """Return how many forks separate this process from the first process, to detect work that an ancestor began before
    a fork.
    """
    return _generation


# ---------------------------------------------------------------- descriptors


_held: dict[int, tuple[int, LockableFiles]] = {}
"""Number and file system by the identity of the `LockableFd`: simulated processes share descriptor numbers."""

_opening = threading.RLock()  # reentrant: a finalizer may close another descriptor in between


class Descriptor(int):
    """A closed descriptor. It has no finalizer, so no interrupt can be lost in one."""

    __slots__ = ()


class LockableFd(Descriptor):
    """A descriptor through which this process may hold a lock. A forked child closes its copy, and the number may then
    belong to another file.

    If an interrupt drops the last reference to a descriptor, the descriptor's finalizer closes it. There is one
    exception. The garbage collector may finalize a descriptor together with its owner, and the owner's finalizer may
    keep the owner alive (`LogStore.__del__`). So a descriptor that still has references is not closed at once. It is
    checked again after the collection, and closed only if no reference is left.
    """

    __slots__ = ()

    def __del__(self) -> None:
        if id(self) in _held:
            if sys.getrefcount(self) > _references_when_dropped:
                _finalized.append(self)
                if _after_collection not in gc.callbacks:
                    gc.callbacks.append(_after_collection)
            else:
                _close_dropped(self)


_finalized: list[LockableFd] = []
"""Descriptors that the garbage collector finalized. It does so once in the life of an object."""
_references_when_dropped = 0
"""`sys.getrefcount` in the finalizer of an object without references: it depends on the interpreter."""


def _count_references() -> None:
    class Probe(int):
        def __del__(self) -> None:
            global _references_when_dropped
            _references_when_dropped = sys.getrefcount(self)

    Probe()


_count_references()


def _close_dropped(fd: LockableFd) -> None:
    # Take no lock: this may run at any point of any thread. A child that is forked before the last line also closes its
    # copy.
    number, fs = _held[id(fd)]
    try:
        fs.flock(number, fcntl.LOCK_UN)
    except Exception as error:
        if is_interrupt(error):
            raise
    finally:
        try:
            fs.close(number)
        except Exception as error:
            if is_interrupt(error):
                raise
        finally:
            _held.pop(id(fd), None)


def _after_collection(phase: str, info: object) -> None:
    """Close the finalized descriptors without references. Registered as a callback of the garbage collector only while
    there are any.

    If an interrupt comes during a callback of the collector, Python prints the exception and drops it. So this callback
    must not run in every collection of the program.
    """
    if phase == "stop":
        # Remove this callback only if it is the last: otherwise the collector would skip the callback after it in this
        # collection.
        if gc.callbacks[-1:] == [_after_collection]:
            gc.callbacks.pop()
        for _ in range(len(_finalized)):  # more may be added meanwhile
            fd = _finalized.pop(0)
            if id(fd) not in _held:
                continue
            if sys.getrefcount(fd) > _REFERENCES_OF_A_LOCAL:
                _finalized.append(fd)
            else:
                _close_dropped(fd)
        if _finalized and _after_collection not in gc.callbacks:
            gc.callbacks.append(_after_collection)


def _references_of_a_local() -> int:
    fd = [LockableFd()].pop(0)
    return sys.getrefcount(fd)


_REFERENCES_OF_A_LOCAL = _references_of_a_local()


def open_lockable(fs: LockableFiles, path: str, flags: int) -> LockableFd:
    """Open a file that will be locked, and register its descriptor: a forked child closes it. Raises OSError."""
    with _opening:
        while True:
            before = _generation
            fds: list[LockableFd] = []
            try:
                fds.extend(map(LockableFd, starmap(fs.open, ((path, flags | os.O_CLOEXEC, 0o666),))))  # in one step
                (fd,) = fds
                _held[id(fd)] = (int(fd), fs)
            except BaseException:  # the file is not registered yet, so no other code would close it
                for fd in fds:
                    fs.close(fd)
                raise
            if _generation == before:
                return fd
            # This thread itself forked in between: the file belongs to the parent, and may already be closed here.
            if _held.pop(id(fd), None) is not None:
                fs.close(fd)


def close_lockable(fs: LockableFiles, fd: int, owner: dict[Any, int] | None = None, key: object = None) -> None:
    """Unlock and close a descriptor of `open_lockable`. Set ``owner[key]`` to -1; after an interrupt, call it again.

    Do nothing in a forked child: it has closed its copy already, and the number may belong to another file now.
    """
    if not isinstance(fd, Descriptor):
        raise TypeError(f"descriptor {fd} was not opened by open_lockable; it was not closed")
    with _opening:
        if id(fd) in _held:
            try:
                # Unlock first: a process that is being started may still have a copy of the descriptor.
                fs.flock(fd, fcntl.LOCK_UN)
            except OSError as error:
                if is_interrupt(error):
                    raise
            finally:
                # Call nothing before the close: afterwards the number may belong to another file.
                del _held[id(fd)]
                fd.__class__ = Descriptor
                if owner is not None:
                    owner[key] = -1
                try:
                    fs.close(fd)
                except OSError as error:
                    if is_interrupt(error):
                        raise


@interrupt_safe_context
def opened_lockable(
    fs: LockableFiles, path: str, flags: int, opener: Callable[[LockableFiles, str, int], LockableFd] = open_lockable
) -> Iterator[LockableFd]:
    """Open a file by `open_lockable`, or by an ``opener`` that calls it, for the duration of the context."""
    fds: list[LockableFd] = []
    try:
        fds.extend(starmap(opener, ((fs, path, flags),)))
        yield fds[0]
    finally:
        for fd in fds:
            try:
                if id(fd) in _held:
                    # before calling a Python function: an interrupt may keep it from starting
                    fs.flock(fd, fcntl.LOCK_UN)
            except OSError as error:
                if is_interrupt(error):
                    raise
            finally:
                close_lockable(fs, fd)


def forks_blocked() -> contextlib.AbstractContextManager[object]:
    """Block forks while the caller opens an object that is not a file and stores it where `on_fork` closes it."""
    return _opening


# ---------------------------------------------------------------- the fork


def _begin_fork() -> None:
    """Wait, in the parent before the fork, until no other thread is importing a module or between opening and
    registering a file.
    """
    for _ in range(_IMPORTS_WAITED_FOR):
        importing = _imported_by_others()
        if not importing:
            break
        for name in importing:
            with contextlib.suppress(Exception):  # the importing thread gets the exception
                importlib.import_module(name)  # waits for the other thread, which may continue with the next module
    _opening.acquire()


_IMPORTS_WAITED_FOR = 100
"""Number of attempts: more than there are modules that are imported on first use."""


def _imported_by_others() -> list[str]:
    """Return the modules of this package that other threads are importing."""
    # An internal list of CPython. An interpreter without it treats this package like any other.
    locks = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})
    found = []
    for name, reference in locks.copy().items():
        if str(name).startswith(_PACKAGE):
            lock = reference()
            if lock is not None and getattr(lock, "owner", None) != threading.get_ident():
                found.append(str(name))
    return found


def _end_fork() -> None:
    """Release `_opening` in the parent after the fork."""
    with contextlib.suppress(RuntimeError):  # an interrupt kept it from being acquired
        _opening.release()


def _forget_parent() -> None:
    """Discard the parent's locks, descriptors and state.

    This is the first function of the package that runs in the child.
    """
    global _opening, _generation
    _opening = threading.RLock()
    _generation += 1
    copies = _held.copy().values()
    _held.clear()
    for fd, fs in copies:
        # Do not unlock: that would release the parent's lock. Close all of them, even if closing one raises.
        with contextlib.suppress(BaseException):
            fs.close(fd)
    entries = _entries.copy().values()
    for entry in entries:
        owner = entry()
        if owner is not None and entry.make is not None:
            setattr(owner, entry.name, entry.make())
    first: BaseException | None = None
    for entry in entries:
        owner = entry()
        if owner is not None and entry.method:
            try:
                getattr(owner, entry.method)()
            except BaseException as error:  # the remaining methods must run, too
                first = first or error
    if first is not None:
        raise first


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_forget_parent)
