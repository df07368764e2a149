"""Callbacks of users, called in their event loop by a thread that waits until they are done."""

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

_LOOK_S = 1.0


class Callbacks:
    """Wraps functions and coroutine functions into functions for threads of the pool.

    What a callback asks of the client's strand is done by the thread that waits for it: that one has the locks.
    """

    def __init__(self) -> None:
        self.strand: LoopBridge | None = None
        """Of the client, once it has begun."""

    def wrapped(self, callback: Callable[..., Any] | None) -> Callable[..., None] | None:
        """None for None."""
        if callback is None:
            return None
        return lambda *args: self._call(callback, args)

    def _call(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        strand = self.strand
        if strand is None or threading.get_ident() == strand.thread_id or not strand.loop.is_running():
            # The store is closed by the loop's own thread, or after its end: there is nobody to wait for.
            if inspect.iscoroutinefunction(callback):
                logger.warning("%r was not called: its event loop does not run", callback)
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
                strand.serve(None)
                asked.put(None)

        def begin() -> None:
            strand.serve(asked)
            tasks.append(strand.loop.create_task(run()))

        tasks: list[asyncio.Task[None]] = []  # a loop does not hold on to its tasks
        strand.mailbox.post(begin)
        while True:
            try:
                call = asked.get(timeout=_LOOK_S)
            except Empty:
                if strand.loop.is_running():
                    continue
                logger.warning("%r did not come to its end: its event loop was stopped", callback)
                strand.serve(None)
                return
            if call is None:
                break
            call()
        if outcome and outcome[0] is not None:
            raise outcome[0]
