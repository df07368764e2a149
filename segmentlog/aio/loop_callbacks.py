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

    A pool thread waits until a callback has finished. The callback may call the client meanwhile. The waiting thread
    also runs these calls, because it holds the client's locks, so no other thread could.
    """

    def __init__(self) -> None:
        self.bridge: LoopBridge | None = None
        """The bridge of the client, once it has started."""

    def wrap(self, callback: Callable[..., Any] | None) -> Callable[..., None] | None:
        """Return a function that calls ``callback`` in the event loop; None if ``callback`` is None."""
        if callback is None:
            return None
        return lambda *args: self._call(callback, args)

    def _call(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        bridge = self.bridge
        if bridge is None or threading.get_ident() == bridge.thread_id or not bridge.loop.is_running():
            # The loop's own thread closes the store, or the loop has ended: this thread must not wait for the loop.
            if inspect.iscoroutinefunction(callback):
                logger.warning("callback %r was not called: its event loop is not running", callback)
            else:
                callback(*args)
            return
        calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        outcome: list[BaseException | None] = []

        async def run() -> None:
            try:
                result = callback(*args)
                if inspect.isawaitable(result):
                    await result
            except BaseException as error:
                outcome.append(error)
                if isinstance(error, asyncio.CancelledError):
                    raise
            else:
                outcome.append(None)
            finally:
                bridge.redirect(None)
                calls.put(None)

        def begin() -> None:
            bridge.redirect(calls)
            tasks.append(bridge.loop.create_task(run()))

        tasks: list[asyncio.Task[None]] = []  # a loop keeps no strong references to its tasks
        bridge.mailbox.post(begin)
        while True:
            try:
                call = calls.get(timeout=_CHECK_S)
            except Empty:
                if bridge.loop.is_running():
                    continue
                logger.warning("callback %r did not finish: its event loop was stopped", callback)
                bridge.redirect(None)
                return
            if call is None:
                break
            call()
        if outcome and outcome[0] is not None:
            raise outcome[0]
