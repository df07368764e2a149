"""The one list of what must not cross a fork: locks, descriptors that hold locks, and what sleepers are woken by.

A forked child has one thread and copies of everything else, taken while the parent's other threads
were at any instruction. Four things in it must not be used as they are:

locks        whoever holds one is not there to release it. `lock` and its like are how every lock of the
             package is made: a plain one, noted with its owner, and made anew there in the child.
descriptors  an `flock` belongs to the open file, and so to parent and child alike. Were the child's copy left
             open, the lock would outlive the parent; were it unlocked through the copy, the parent would lose it.
             `hold_open` notes those that are ever locked; the child closes its copies and unlocks nothing.
             `let_go` unlocks *and* closes, since a child that is just being made may have a copy still.
state        half changed by a thread that is gone. Owners name a method with `on_fork`, which throws away what
             can be derived anew. It is called when all locks are new and all those descriptors closed.

modules      one that another thread is importing would stay half imported in the child, its lock taken, and whoever
             imports it there would wait for ever. A fork waits for those of this package.

A fork waits while another thread is between opening a file and noting it, microseconds. One that the
same thread makes there, in a signal handler or a finalizer, does not wait for itself: if the child
comes back to the opening it sees that it is another process, and opens the file anew.
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
    """What is needed of a `FileSystem`, which is made of what this file makes."""

    @property
    def open(self) -> Callable[..., int]: ...
    @property
    def close(self) -> Callable[[int], None]: ...
    @property
    def flock(self) -> Callable[[int, int], None]: ...


# ---------------------------------------------------------------- owners


class _Entry(weakref.ref[Any]):
    """What is done in a child for one owner: a lock is made anew under its name, or a method called, or both."""

    __slots__ = ("forget", "make", "name", "number")
    forget: str
    make: Callable[[], Any] | None
    name: str
    number: int


_entries: dict[int, _Entry] = {}
_numbers = itertools.count()
_generation = 0
_PACKAGE = f"{__name__.partition('.')[0]}."


def _forget_owner(entry: _Entry) -> None:
    _entries.pop(entry.number, None)


def _note(owner: object, name: str, make: Callable[[], Any] | None, forget: str = "") -> None:
    entry = _Entry(owner, _forget_owner)
    entry.make, entry.name, entry.forget = make, name, forget
    entry.number = number = next(_numbers)
    _entries[number] = entry


def lock(owner: object, name: str, forget: str = "") -> threading.Lock:
    """A lock to keep under ``owner.name``, where a forked child finds a new one. As fast as any.

    ``forget`` is a method as `on_fork` takes one, noted with it: for what is made often.
    """
    _note(owner, name, _make_lock, forget)
    return _make_lock()


def reentrant_lock(owner: object, name: str) -> threading.RLock:
    """The same, for one that its thread may take again."""
    _note(owner, name, _make_reentrant_lock)
    return _make_reentrant_lock()


def condition(owner: object, name: str) -> threading.Condition:
    """A condition to keep under ``owner.name``; nobody waits for the one that a forked child finds there."""
    _note(owner, name, _make_condition)
    return _make_condition()


def event(owner: object, name: str) -> threading.Event:
    """An event to keep under ``owner.name``; the one that a forked child finds there is not set."""
    _note(owner, name, _make_event)
    return _make_event()


def short_lived_lock() -> threading.Lock:
    """One that is kept nowhere for long: a forked child has nobody who waits for it, or drops what it is kept in."""
    return _make_lock()


def on_fork(owner: object, method: str) -> None:
    """Have a method of ``owner`` called in every forked child, for as long as the owner lives.

    Call it when the owner is made: the child may be forked at the next instruction.
    """
    _note(owner, "", None, method)


# By these names, so that tests can see what is done with a lock.
def _make_lock() -> threading.Lock:
    return threading.Lock()


def _make_reentrant_lock() -> threading.RLock:
    return threading.RLock()


def _make_condition() -> threading.Condition:
    return threading.Condition(_make_reentrant_lock())


def _make_event() -> threading.Event:
    return threading.Event()


def generation() -> int:
    """How many forks made this process: tells what was begun before one."""
    return _generation


# ---------------------------------------------------------------- descriptors


_held: dict[int, tuple[int, LockableFiles]] = {}
"""Number and file system by the identity of the `Held`: simulated processes have the same numbers."""

_opening = threading.RLock()  # reentrant: a finalizer may let go of another in the middle


class Descriptor(int):
    """One that was let go of: nothing runs when it is dropped, so that no interrupt can be lost there."""

    __slots__ = ()


class LockableFd(Descriptor):
    """A descriptor that this process may hold a lock through. In a forked child its number is another file's.

    It is closed when nobody has it any more: who was to keep it, or to let go of it, was interrupted. The cyclic
    collector finalizes what somebody has still, and may bring back to use it (`LogStore.__del__`): that one is closed
    once the collector is done, if it was not brought back.
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
"""By the collector, which does so once in the life of an object."""
_references_when_dropped = 0
"""`sys.getrefcount` in the finalizer of one that nobody has: it depends on the interpreter."""


def _count_references() -> None:
    class Probe(int):
        def __del__(self) -> None:
            global _references_when_dropped
            _references_when_dropped = sys.getrefcount(self)

    Probe()


_count_references()


def _close_dropped(fd: LockableFd) -> None:
    # Without the lock, for it comes at any point of any thread. A child forked before the last line closes it as well.
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
    """It is the collector's only while there is something to do for it.

    An interrupt that comes while one of its callbacks runs is lost: Python tells of the exception, and drops it. So
    there must not be one in every collection of whatever program.
    """
    if phase == "stop":
        # Not from the middle: whoever comes behind would be left out this time.
        if gc.callbacks[-1:] == [_after_collection]:
            gc.callbacks.pop()
        for _ in range(len(_finalized)):  # others may come while it is at it
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
    """Open a file to lock it; a forked child closes it."""
    with _opening:
        while True:
            before = _generation
            fds: list[LockableFd] = []
            try:
                fds.extend(map(LockableFd, starmap(fs.open, ((path, flags | os.O_CLOEXEC, 0o666),))))  # in one step
                (fd,) = fds
                _held[id(fd)] = (int(fd), fs)
            except BaseException:  # not noted yet, so that nothing would close it
                for fd in fds:
                    fs.close(fd)
                raise
            if _generation == before:
                return fd
            # Forked in between by this very thread: the file is the parent's, and here it may be closed already.
            if _held.pop(id(fd), None) is not None:
                fs.close(fd)


def close_lockable(fs: LockableFiles, fd: int, owner: dict[Any, int] | None = None, key: object = None) -> None:
    """Unlock and close; ``owner[key]`` is -1 from then on, and who was interrupted may call it again with that.

    In a forked child nothing: it is closed, and what has the number now is something else.
    """
    if not isinstance(fd, Descriptor):
        raise TypeError(f"descriptor {fd} was not opened by hold_open")
    with _opening:
        if id(fd) in _held:
            try:
                # Unlocked first: a process that is being started may still have a copy of the descriptor.
                fs.flock(fd, fcntl.LOCK_UN)
            except OSError as error:
                if is_interrupt(error):
                    raise
            finally:
                # With no call before the close: its number may be another file's right after.
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
    """`hold_open`, or an ``opener`` that ends in it, for as long as a block lasts."""
    fds: list[LockableFd] = []
    try:
        fds.extend(starmap(opener, ((fs, path, flags),)))
        yield fds[0]
    finally:
        for fd in fds:
            try:
                if id(fd) in _held:
                    fs.flock(fd, fcntl.LOCK_UN)  # here, before a function that an interrupt may keep from beginning
            except OSError as error:
                if is_interrupt(error):
                    raise
            finally:
                close_lockable(fs, fd)


def forks_blocked() -> contextlib.AbstractContextManager[object]:
    """Around opening what is no file, and noting it in an object that closes it `on_fork`: no fork comes in between."""
    return _opening


# ---------------------------------------------------------------- the fork


def _begin_fork() -> None:
    """In the parent, before: what another thread has half done here is finished first."""
    for _ in range(_IMPORTS_WAITED_FOR):
        importing = _imported_by_others()
        if not importing:
            break
        for name in importing:
            with contextlib.suppress(Exception):  # whoever imports it is told
                importlib.import_module(name)  # waits for the other thread, which may go on to the next one
    _opening.acquire()


_IMPORTS_WAITED_FOR = 100
"""In turn: more than there are modules that are loaded when they are first needed."""


def _imported_by_others() -> list[str]:
    """Modules of this package that other threads are importing."""
    # CPython's own list; where it has another one, it is as with any other library.
    locks = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})
    found = []
    for name, reference in locks.copy().items():
        if str(name).startswith(_PACKAGE):
            lock = reference()
            if lock is not None and getattr(lock, "owner", None) != threading.get_ident():
                found.append(str(name))
    return found


def _end_fork() -> None:
    """In the parent."""
    with contextlib.suppress(RuntimeError):  # an interrupt kept it from being taken
        _opening.release()


def _forget_parent() -> None:
    """In the child, before anything else runs there."""
    global _opening, _generation
    _opening = threading.RLock()
    _generation += 1
    copies = _held.copy().values()
    _held.clear()
    for fd, fs in copies:
        # Not unlocked: that would take the lock from the parent. Whatever one says to it, the others are closed, too.
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
        if owner is not None and entry.forget:
            try:
                getattr(owner, entry.forget)()
            except BaseException as error:  # the others are to be seen to all the same
                first = first or error
    if first is not None:
        raise first


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_forget_parent)
