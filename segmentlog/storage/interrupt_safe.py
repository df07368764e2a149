"""Taking and letting go so that no interrupt leaks a lock or a descriptor.

An *interrupt* is an exception that a signal handler raises: Ctrl-C, a time-out made of SIGALRM.
CPython runs handlers in the main thread, between two instructions of whatever function it is in, but not
between any two. In 3.11 (`CHECK_EVAL_BREAKER` in Python/ceval.c) it looks for signals

    RESUME            at the start of a Python function, and where a generator goes on after a ``yield``
    CALL*             after a function written in C has returned, before its result is kept
    JUMP_BACKWARD*    at the end of each round of a loop

and in C functions that wait (`lock.acquire`, `flock`, `time.sleep`), which then have done nothing.
From that follows what is safe, and what is not:

- ``with lock:`` of a lock object: entering and leaving it are no CALLs, and the lock's own methods are written in C.
  (Not in CPython 3.14 before its fix of python/cpython#148874: there it is a CALL that the ``with`` does not cover.)
- ``try: flock(fd, LOCK_EX) ... finally: flock(fd, LOCK_UN)``, under a mutex: unlocking what is not locked is
  harmless, and nothing comes between the start of a ``finally`` and a C function that it begins with calling.
- Not ``acquire(); try:``, not ``flock(); try:``, not ``fd = open(); try:``: the result is lost, and nobody lets go.
- Not ``__exit__`` written in Python (`contextlib.contextmanager` is): an interrupt at its RESUME, and it was never run.
- Not a function written in Python that a ``finally`` calls, for the same reason.
- Not `threading.Condition` nor `Event`: they are written in Python, and wait with their lock taken off.

What is here makes the unsafe ones safe: `held` in place of `contextlib.contextmanager`, `keep` for a result that must
not be lost, `News` in place of `threading.Condition`; and what is made of them, like `fs.opened` and `forks.held_open`.
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
"""With one of the two: BlockingIOError instead of waiting."""
UNLOCK: Final = fcntl.LOCK_UN

POLL_INTERVAL_S = 0.2
"""Whoever waits to be told looks for himself so often: who should have told him may have been interrupted."""

_run_through: Callable[[Any], None] = deque[Any](maxlen=0).extend
# Calls what a `map` or `starmap` is made of, without a Python instruction in between.


class _Held(io.IOBase, Generic[T]):
    """A context whose end is one C function: ``IOBase.__exit__`` calls ``close``, which is the generator's.

    That throws `GeneratorExit` at the ``yield``, where no RESUME looks for signals first: the ``finally`` and
    ``with`` around it are run, whatever comes. It is no file, and always ``closed``: its finalizer does nothing.
    """

    closed = True

    def __init__(self, generator: Generator[T, None, None]) -> None:
        self._generator = generator
        self.close = generator.close  # type: ignore[method-assign]

    def __enter__(self) -> T:  # type: ignore[override]
        try:
            return next(self._generator)
        except BaseException:
            self.close()  # it may have got as far as its yield
            raise


def interrupt_safe_context(make: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Like `contextlib.contextmanager`, for what has to be let go of although an interrupt comes while that is done.

    The generator must not want to know how the body ended: it sees a `GeneratorExit` in any case. And it must
    take what it takes inside of a ``try`` or by ``with``, as the module says.
    """

    @wraps(make)
    def begin(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return cast("AbstractContextManager[T]", _Held(cast("Generator[T, None, None]", make(*args, **kwargs))))

    return begin


def store_result(owner: object, name: str, call: Callable[..., Any], *args: Any) -> None:
    """``owner.name = call(*args)`` in one step: no interrupt comes between the call and the store."""
    _run_through(map(setattr, (owner,), (name,), starmap(call, (args,))))


@interrupt_safe_context
def try_lock(lock: Any) -> Iterator[bool]:
    """Hold a lock for as long as the context lasts, if nobody has it; whether that is so."""
    got: list[bool] = []
    try:
        got.extend(starmap(lock.acquire, ((False,),)))
        yield got[0]
    finally:
        if got and got[0]:
            lock.release()


def is_main_thread() -> bool:
    """Whether this is the thread that signal handlers run in, and so the one that may be interrupted."""
    return _thread.get_ident() == threading.main_thread().ident


def wake_sleeper(asleep: Any) -> None:
    """Wake whoever sleeps on a lock that he took himself; nothing when somebody has done so already."""
    try:
        asleep.release()
    except RuntimeError:
        pass


class InterruptSafeCondition:
    """What threads wait for that another one tells. For `threading.Condition`, without a lock of its own."""

    __slots__ = ("_asleep",)

    def __init__(self) -> None:
        self._asleep: deque[Any] = deque()

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until the caller's question is answered with yes; False when it was not in time."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_there():
            left_s = POLL_INTERVAL_S if ends is None else min(ends - time.monotonic(), POLL_INTERVAL_S)
            if left_s <= 0:
                return False
            mine = _thread.allocate_lock()
            mine.acquire()
            try:
                self._asleep.append(mine)
                if not is_there():  # who told before it was there to be woken need not tell again
                    mine.acquire(True, left_s)
            finally:
                self._take_off(mine)
        return True

    def _take_off(self, mine: Any) -> None:
        try:
            self._asleep.remove(mine)
        except ValueError:  # woken
            pass

    @property
    def anybody(self) -> bool:
        """Whether somebody waits."""
        return bool(self._asleep)

    def tell(self) -> None:
        """Wake those who wait."""
        while self._asleep:
            try:
                wake_sleeper(self._asleep.popleft())
            except IndexError:
                return
