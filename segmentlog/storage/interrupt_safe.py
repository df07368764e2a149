"""Acquire and release locks and descriptors so that an interrupt leaks neither.

An *interrupt* is an exception that a signal handler raises: Ctrl-C, or a time-out that uses SIGALRM. CPython runs
signal handlers in the main thread, between two instructions of the running function, but only at certain instructions.
CPython 3.11 (`CHECK_EVAL_BREAKER` in Python/ceval.c) checks for signals at

    RESUME            the start of a Python function, and the point where a generator resumes after a ``yield``
    CALL*             the return of a function written in C, before its result is stored
    JUMP_BACKWARD*    the end of each iteration of a loop

C functions that wait (`lock.acquire`, `flock`, `time.sleep`) check, too. A wait that is interrupted has acquired
nothing.

This decides which constructs are safe:

- Safe: ``with lock:`` on a lock object. Entering and leaving it are not CALLs, and the methods of the lock are written
  in C. (An exception is CPython 3.14 before its fix of python/cpython#148874: there entering is a CALL that the
  ``with`` does not cover.)
- Safe: ``try: flock(fd, LOCK_EX) ... finally: flock(fd, LOCK_UN)``, under a mutex. Unlocking a file that is not locked
  is harmless. No check comes between the start of a ``finally`` and a C function that is its first call.
- Unsafe: ``acquire(); try:``, ``flock(); try:`` and ``fd = open(); try:``. An interrupt loses the result, so no code
  releases the lock or closes the descriptor.
- Unsafe: an ``__exit__`` written in Python, as `contextlib.contextmanager` has. An interrupt at its RESUME skips it.
- Unsafe: a function written in Python that a ``finally`` calls, for the same reason.
- Unsafe: `threading.Condition` and `threading.Event`. They are written in Python, and wait after releasing their lock.

This module replaces the unsafe constructs: `interrupt_safe_context` replaces `contextlib.contextmanager`,
`store_result` stores a result that must not be lost, `InterruptSafeCondition` replaces `threading.Condition`.
`fs.opened` and `fork_safety.opened_lockable` build on them.
"""

from __future__ import annotations

import _thread
import fcntl
import io
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from itertools import starmap
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

EXCLUSIVE: Final = fcntl.LOCK_EX
SHARED: Final = fcntl.LOCK_SH
NON_BLOCKING: Final = fcntl.LOCK_NB
"""Add to `EXCLUSIVE` or `SHARED`: raise BlockingIOError instead of waiting."""
UNLOCK: Final = fcntl.LOCK_UN

POLL_INTERVAL_S = 0.2
"""A waiting thread checks its condition at least this often: an interrupt may have stopped the thread that wakes it."""

_run_through: Callable[[Any], None] = deque[Any](maxlen=0).extend
# Consume a `map` or `starmap`, and so make its calls, with no Python instruction in between.


class _Held(io.IOBase, Generic[T]):
    """A context manager that one C function ends: ``IOBase.__exit__`` calls ``close``, which is the generator's.

    The generator's ``close`` throws `GeneratorExit` at the ``yield``, where no RESUME checks for signals first. So the
    ``finally`` and ``with`` blocks around the ``yield`` always run. The object is not a file. It is always ``closed``,
    so its finalizer does nothing.
    """

    closed = True

    def __init__(self, generator: Generator[T, None, None]) -> None:
        self._generator = generator
        self.close = generator.close  # type: ignore[method-assign]

    def __enter__(self) -> T:  # type: ignore[override]
        try:
            return next(self._generator)
        except BaseException:
            self.close()  # the generator may have reached its yield
            raise


def interrupt_safe_context(make: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Decorate a generator like `contextlib.contextmanager`, but release even if an interrupt comes during the release.

    The generator cannot find out how the body ended: it always sees a `GeneratorExit`. It must acquire inside a ``try``
    or by ``with``, as the module docstring says.
    """

    @wraps(make)
    def open_context(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return cast("AbstractContextManager[T]", _Held(cast("Generator[T, None, None]", make(*args, **kwargs))))

    return open_context


def store_result(owner: object, name: str, call: Callable[..., Any], *args: Any) -> None:
    """Set ``owner.name = call(*args)`` in one step: no interrupt comes between the call and the assignment."""
    _run_through(map(setattr, (owner,), (name,), starmap(call, (args,))))


@interrupt_safe_context
def try_lock(lock: Any) -> Iterator[bool]:
    """Hold a lock for the duration of the context if it is free. Yield whether the lock was free."""
    got: list[bool] = []
    try:
        got.extend(starmap(lock.acquire, ((False,),)))
        yield got[0]
    finally:
        if got and got[0]:
            lock.release()


def is_main_thread() -> bool:
    """Return whether this is the main thread: the only thread that runs signal handlers and can be interrupted."""
    return _thread.get_ident() == threading.main_thread().ident


def wake_sleeper(asleep: Any) -> None:
    """Release a lock on which a thread sleeps, so that the thread wakes. Do nothing if the lock is already released."""
    try:
        asleep.release()
    except RuntimeError:
        pass


class InterruptSafeCondition:
    """A condition on which threads wait until another thread signals a change. Unlike `threading.Condition` it has no
    lock.
    """

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep: deque[Any] = deque()

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until ``is_there()`` returns true.

        Return False if ``timeout_s`` passes first; None waits as long as necessary.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_there():
            left_s = POLL_INTERVAL_S if ends is None else min(ends - time.monotonic(), POLL_INTERVAL_S)
            if left_s <= 0:
                return False
            mine = _thread.allocate_lock()
            mine.acquire()
            try:
                self._asleep.append(mine)
                if not is_there():  # a thread that signals from here on wakes this one
                    mine.acquire(True, left_s)
            finally:
                self._take_off(mine)
        return True

    def _take_off(self, mine: Any) -> None:
        try:
            self._asleep.remove(mine)
        except ValueError:  # notify_all() removed it
            pass

    @property
    def has_waiters(self) -> bool:
        """Whether a thread waits."""
        return bool(self._asleep)

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        while self._asleep:
            try:
                wake_sleeper(self._asleep.popleft())
            except IndexError:
                return
