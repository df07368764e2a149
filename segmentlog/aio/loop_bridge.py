"""Run calls of asynchronous clients in pool threads, and return their results to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from segmentlog.aio.pool import pool
from segmentlog.errors import SegmentlogError, StoreClosed
from segmentlog.storage import fork_safety

T = TypeVar("T")


class Closable(Protocol):
    """A producer or consumer."""

    def close(self) -> None: ...


M = TypeVar("M", bound=Closable)


class Mailbox:
    """A queue of calls that other threads post and an event loop runs. Thread-safe.

    Several posted calls wake the event loop only once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._left: deque[Callable[[], object]] = deque()
        self._is_woken = False

    def post(self, call: Callable[[], object]) -> bool:
        """Queue a call, which must not raise, for the loop; return False if the loop is closed."""
        self._left.append(call)
        if self._is_woken:  # the flag is reset before calls are taken out
            return True
        self._is_woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return False
        return True

    def _deliver(self) -> None:
        self._is_woken = False
        for _ in range(len(self._left)):
            self._left.popleft()()


class LoopBridge:
    """Runs the calls of one client in pool threads, one after the other. Use it in the event loop's thread.

    A queued call is run even if the task that waits for it is cancelled.
    """

    def __init__(self, what: str) -> None:
        """Use the running event loop; ``what`` names the client in errors."""
        self.loop = asyncio.get_running_loop()
        self.mailbox = Mailbox(self.loop)
        self._what = what
        self._calls: deque[Callable[[], object]] = deque()
        self._is_running = False
        self._served_by: SimpleQueue[Callable[[], object] | None] | None = None
        self.thread_id = threading.get_ident()
        """Ident of the event loop's thread."""
        self._mutex = fork_safety.lock(self, "_mutex")
        self._made_in = fork_safety.generation()
        pool.add_user(self)

    def check_loop(self) -> None:
        """Raise `SegmentlogError` in another event loop, `StoreClosed` in a forked child."""
        if self._made_in != fork_safety.generation():
            raise StoreClosed.forked(self._what)
        if asyncio.get_running_loop() is not self.loop:
            raise SegmentlogError(f"this {self._what} belongs to another event loop: create one in each event loop")

    def call(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a call; return a future of its result. Cancelling the future does not cancel the call."""
        self.check_loop()
        future: asyncio.Future[T] = self.loop.create_future()
        self.queue(lambda: self._make(call, future))
        return future

    async def create(self, make: Callable[[], M]) -> M:
        """Run ``make`` and return the client that it creates; end this bridge if it fails.

        If the caller is cancelled before ``make`` starts, no client is created. If it is cancelled later, the client is
        closed once it exists: it may hold a producer name, for example, which the next client needs.
        """
        found: list[M] = []
        is_cancelled: list[bool] = []

        def work() -> M:
            if is_cancelled:
                raise StoreClosed(self._what)
            made = make()
            found.append(made)
            if is_cancelled:
                _close_quietly(made)
            return made

        making = self.call(work)
        try:
            return await asyncio.shield(making)
        except BaseException:
            is_cancelled.append(True)
            while not making.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({making})
            if not making.cancelled():
                making.exception()  # mark as retrieved, so that asyncio does not log it
            if found:  # otherwise `work` closes it; closing twice is harmless
                self.queue(lambda: _close_quietly(found[0]))
            self.end()
            raise

    def call_parallel(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call in parallel with the queued calls; return a future of its result."""
        self.check_loop()
        future: asyncio.Future[T] = self.loop.create_future()
        pool.submit(lambda: self._make(call, future))
        return future

    def queue(self, call: Callable[[], object]) -> None:
        """Queue a call, which must not raise. Thread-safe."""
        with self._mutex:
            if self._served_by is not None:
                self._served_by.put(call)
                return
            self._calls.append(call)
            if self._is_running:
                return
            self._is_running = True
        try:
            pool.submit(self._run)
        except BaseException:
            with self._mutex:
                self._is_running = False
                with contextlib.suppress(ValueError):
                    self._calls.remove(call)
            raise

    def serve(self, asked: SimpleQueue[Callable[[], object] | None] | None) -> None:
        """Put queued calls into ``asked`` instead, from which the thread that waits for a user's callback runs them.

        None ends this: a pool thread runs calls again.
        """
        with self._mutex:
            self._served_by = asked

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not self._calls:
                    self._is_running = False
                    return
                call = self._calls.popleft()
            try:
                call()
            except BaseException:
                pool.submit(self._run)  # the remaining calls must be run nevertheless
                raise
            del call

    def _make(self, call: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self.mailbox.post(_Failing(future, error))
        else:
            self.mailbox.post(_Succeeding(future, result))

    def end(self) -> None:
        """End the client, after its last call: idle pool threads need not wait for it any more."""
        pool.remove_user(self)


class _Succeeding:
    """Sets the result of a future."""

    def __init__(self, future: asyncio.Future[Any], result: object) -> None:
        self._future, self._result = future, result

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_result(self._result)


class _Failing:
    """Sets the exception of a future."""

    def __init__(self, future: asyncio.Future[Any], error: BaseException) -> None:
        self._future, self._error = future, error

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_exception(self._error)


def _close_quietly(made: Closable) -> None:
    with contextlib.suppress(SegmentlogError, OSError):
        made.close()


def add_note(error: asyncio.CancelledError, text: str) -> None:
    """Add a note to a CancelledError; the note says what happens to the call that was cancelled."""
    error.add_note(f"segmentlog: {text}")
