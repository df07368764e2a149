"""From an event loop to the threads of the pool and back."""

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
    """A producer, a consumer."""

    def close(self) -> None: ...


M = TypeVar("M", bound=Closable)


class Mailbox:
    """What other threads leave for a loop to call: it is woken once for all that came meanwhile. Thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._left: deque[Callable[[], object]] = deque()
        self._is_woken = False

    def post(self, call: Callable[[], object]) -> bool:
        """Have the loop make a call, which raises nothing; False when the loop is closed."""
        self._left.append(call)
        if self._is_woken:  # it is set back before anything is taken out
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
    """Calls of one client, one after the other, by threads of the pool; results come to the loop. For its thread.

    A call that was handed over is made, whoever is cancelled that waits for it.
    """

    def __init__(self, what: str) -> None:
        """``what`` it belongs to, for errors. Begins in the loop that is running."""
        self.loop = asyncio.get_running_loop()
        self.mailbox = Mailbox(self.loop)
        self._what = what
        self._calls: deque[Callable[[], object]] = deque()
        self._is_running = False
        self._served_by: SimpleQueue[Callable[[], object] | None] | None = None
        self.thread_id = threading.get_ident()
        """For the thread of the loop alone."""
        self._mutex = fork_safety.lock(self, "_mutex")
        self._made_in = fork_safety.generation()
        pool.use(self)

    def check_loop(self) -> None:
        """Raise `SegmentlogError` in another loop than its own, `StoreClosed` in a forked child."""
        if self._made_in != fork_safety.generation():
            raise StoreClosed.forked(self._what)
        if asyncio.get_running_loop() is not self.loop:
            raise SegmentlogError(f"this {self._what} belongs to another event loop: make one in each")

    def call(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Make a call after those before it; its result, which may be cancelled while the call goes on."""
        self.check_loop()
        future: asyncio.Future[T] = self.loop.create_future()
        self.begin(lambda: self._make(call, future))
        return future

    async def made(self, make: Callable[[], M]) -> M:
        """What a call makes; the end of this strand if it fails.

        Cancelled, it is not made, or waited for and closed: it may take a name, say, which whoever comes next would
        lose to it.
        """
        found: list[M] = []
        unwanted: list[bool] = []

        def work() -> M:
            if unwanted:
                raise StoreClosed(self._what)
            made = make()
            found.append(made)
            if unwanted:
                _close_quietly(made)
            return made

        making = self.call(work)
        try:
            return await asyncio.shield(making)
        except BaseException:
            unwanted.append(True)
            while not making.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({making})
            if not making.cancelled():
                making.exception()  # nobody else is told of it
            if found:  # else it is seen there; closing twice does no harm
                self.begin(lambda: _close_quietly(found[0]))
            self.end()
            raise

    def beside(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Make a call whatever others are under way."""
        self.check_loop()
        future: asyncio.Future[T] = self.loop.create_future()
        pool.submit(lambda: self._make(call, future))
        return future

    def begin(self, call: Callable[[], object]) -> None:
        """Make a call, which raises nothing, after those before it. From any thread."""
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
        """While a call waits for a callback of the user: have it make the calls that come now; None ends that."""
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
                pool.submit(self._run)  # the others are to be made all the same
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
        """Nothing more is to come of this client."""
        pool.let_go(self)


class _Succeeding:
    """Hands over a result."""

    def __init__(self, future: asyncio.Future[Any], result: object) -> None:
        self._future, self._result = future, result

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_result(self._result)


class _Failing:
    """Hands over an error, and holds on to it no longer."""

    def __init__(self, future: asyncio.Future[Any], error: BaseException) -> None:
        self._future, self._error = future, error

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_exception(self._error)


def _close_quietly(made: Closable) -> None:
    with contextlib.suppress(SegmentlogError, OSError):
        made.close()


def note(error: asyncio.CancelledError, text: str) -> None:
    """Say with a cancellation what had become of what was cancelled."""
    error.add_note(f"segmentlog: {text}")
