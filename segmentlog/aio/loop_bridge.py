"""Run calls of asynchronous clients in pool threads, and deliver the results to the event loop."""

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


class _AsyncClient(Protocol):
    """A producer or consumer, which can be closed."""

    def close(self) -> None: ...


M = TypeVar("M", bound=_AsyncClient)


class Mailbox:
    """A queue of calls that other threads post and an event loop runs. Thread-safe.

    Several posted calls wake the event loop only once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._is_woken = False

    def post(self, call: Callable[[], object]) -> bool:
        """Queue a call for the loop. The call must not raise. Return False if the loop is closed."""
        self._calls.append(call)
        if self._is_woken:  # `_deliver` resets the flag before it runs the calls
            return True
        self._is_woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return False
        return True

    def _deliver(self) -> None:
        self._is_woken = False
        for _ in range(len(self._calls)):
            self._calls.popleft()()


class LoopBridge:
    """Runs the calls of one client in pool threads, one call at a time. Use it in the event loop's thread.

    A queued call runs even if the task that waits for it is cancelled.
    """

    def __init__(self, what: str) -> None:
        """Create a bridge to the running event loop. ``what`` names the client in errors."""
        self.loop = asyncio.get_running_loop()
        self.mailbox = Mailbox(self.loop)
        self._what = what
        self._calls: deque[Callable[[], object]] = deque()
        self._is_running = False
        self._redirected_to: SimpleQueue[Callable[[], object] | None] | None = None
        self.thread_id = threading.get_ident()
        """Id of the event loop's thread."""
        self._mutex = fork_safety.lock(self, "_mutex")
        self._fork_generation = fork_safety.generation()
        pool.add_user(self)

    def check_loop(self) -> None:
        """Raise `SegmentlogError` in another event loop, `StoreClosed` in a forked child."""
        if self._fork_generation != fork_safety.generation():
            raise StoreClosed.forked(self._what)
        if asyncio.get_running_loop() is not self.loop:
            raise SegmentlogError(f"this {self._what} belongs to another event loop: create one in each event loop")

    def call(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a call, and return a future of its result. Cancelling the future does not cancel the call."""
        self.check_loop()
        future: asyncio.Future[T] = self.loop.create_future()
        self.queue(lambda: self._run_call(call, future))
        return future

    async def create(self, make: Callable[[], M]) -> M:
        """Run ``make`` and return the client that it creates. If ``make`` fails, end this bridge.

        If the caller is cancelled before ``make`` starts, no client is created. If the caller is cancelled later, the
        client is closed: otherwise it would hold, for example, a producer name that the next client needs.
        """
        created: list[M] = []
        is_cancelled: list[bool] = []

        def work() -> M:
            if is_cancelled:
                raise StoreClosed(self._what)
            client = make()
            created.append(client)
            if is_cancelled:
                _close_quietly(client)
            return client

        creation = self.call(work)
        try:
            return await asyncio.shield(creation)
        except BaseException:
            is_cancelled.append(True)
            while not creation.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({creation})
            if not creation.cancelled():
                creation.exception()  # mark as retrieved, so that asyncio does not log it
            if created:  # otherwise `work` closes the client; closing it twice is harmless
                self.queue(lambda: _close_quietly(created[0]))
            self.end()
            raise

    def call_parallel(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a call in parallel with the queued calls. Return a future of its result."""
        self.check_loop()
        future: asyncio.Future[T] = self.loop.create_future()
        pool.submit(lambda: self._run_call(call, future))
        return future

    def queue(self, call: Callable[[], object]) -> None:
        """Queue a call for the pool threads. The call must not raise. Thread-safe."""
        with self._mutex:
            if self._redirected_to is not None:
                self._redirected_to.put(call)
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

    def redirect(self, calls: SimpleQueue[Callable[[], object] | None] | None) -> None:
        """Put all further calls into the queue ``calls``; None: let the pool threads run calls again.

        A thread that waits for a user's callback runs the calls in the queue meanwhile.
        """
        with self._mutex:
            self._redirected_to = calls

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
                pool.submit(self._run)  # for the remaining calls
                raise
            del call

    def _run_call(self, call: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            result = call()
        except BaseException as error:
            self.mailbox.post(_Failing(future, error))
        else:
            self.mailbox.post(_Succeeding(future, result))

    def end(self) -> None:
        """End the bridge after the client's last call, so that idle pool threads can end."""
        pool.remove_user(self)


class _Succeeding:
    """A call that sets the result of a future."""

    def __init__(self, future: asyncio.Future[Any], result: object) -> None:
        self._future, self._result = future, result

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_result(self._result)


class _Failing:
    """A call that sets the exception of a future."""

    def __init__(self, future: asyncio.Future[Any], error: BaseException) -> None:
        self._future, self._error = future, error

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_exception(self._error)


def _close_quietly(client: _AsyncClient) -> None:
    with contextlib.suppress(SegmentlogError, OSError):
        client.close()


def add_note(error: asyncio.CancelledError, text: str) -> None:
    """Add a note to a CancelledError. ``text`` states what happens to the cancelled call."""
    error.add_note(f"segmentlog: {text}")
