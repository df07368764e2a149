"""Call users' callbacks in their event loop, from a thread that waits until they have finished."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from segmentlog.aio.loop_bridge import LoopBridge

logger = logging.getLogger("segmentlog")

_CHECK_S = 1.0


class Callbacks:
    """Wraps functions and coroutine functions so that pool threads can call them.

    A pool thread waits until a callback has finished. Meanwhile it also runs the calls that the callback makes through
    the client: another thread could not, because the waiting thread holds the client's locks.
    """

    def __init__(self) -> None:
        self.bridge: LoopBridge | None = None
        """The bridge of the client, once it has started."""

    def wrap(self, callback: Callable[..., Any] | None) -> Callable[..., None] | None:
        """Return a function that calls ``callback`` in the event loop; None for None."""
        if callback is None:
            return None
        return lambda *args: self._call(callback, args)

    def _call(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        bridge = self.bridge
        if bridge is None or threading.get_ident() == bridge.thread_id or not bridge.loop.is_running():
            # The store is closed by the loop's own thread, or after the loop has ended, so nothing can wait.
            if inspect.iscoroutinefunction(callback):
                logger.warning("%r was not called: its event loop is not running", callback)
            else:
                callback(*args)
            return
        asked: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        outcome: list[BaseException | None] = []

        async def run() -> None:
            try:
                found = callback(*args)
                if inspect.isawaitable(found):
                    await found
            except BaseException as error:
                outcome.append(error)
                if isinstance(error, asyncio.CancelledError):
                    raise
            else:
                outcome.append(None)
            finally:
                bridge.serve(None)
                asked.put(None)

        def begin() -> None:
            bridge.serve(asked)
            tasks.append(bridge.loop.create_task(run()))

        tasks: list[asyncio.Task[None]] = []  # a loop keeps no strong references to its tasks
        bridge.mailbox.post(begin)
        while True:
            try:
                call = asked.get(timeout=_CHECK_S)
            except Empty:
                if bridge.loop.is_running():
                    continue
                logger.warning("%r did not finish: its event loop was stopped", callback)
                bridge.serve(None)
                return
            if call is None:
                break
            call()
        if outcome and outcome[0] is not None:
            raise outcome[0]
