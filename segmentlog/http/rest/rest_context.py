"""State shared by all REST requests: threads, the appender, consumer instances and broadcasts."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.batch_append import AckName, BatchAppender
from segmentlog.http.rest.consumer_instances import ConsumerInstances
from segmentlog.http.rest.rest_schemas import StoreSchemaCodec
from segmentlog.http.rest.topic_broadcast import BroadcastHub
from segmentlog.http.rest.value_formats import SchemaCodec
from segmentlog.objects.ownership.binding import is_bound

if TYPE_CHECKING:
    from segmentlog.http.context import HttpContext

_T = TypeVar("_T")

_THREADS: Final = 32
"""High, because most threads wait for a shared fsync or for an object store."""

_SHIPPED_AT_A_TIME: Final = 12
"""Number of threads that may wait for an object store, each up to two minutes if it is unreachable."""

_with_threads: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


class RestContext:
    """REST state of one HTTP server."""

    def __init__(self, context: HttpContext) -> None:
        self.context = context
        self.schemas: SchemaCodec = StoreSchemaCodec(context.store)
        self.appender = BatchAppender(context.store)
        self.broadcasts = BroadcastHub(context)
        self.instances = ConsumerInstances(context)
        self._shipping = asyncio.Semaphore(_SHIPPED_AT_A_TIME)

    async def append(self, ack: AckName | None, do: Callable[..., _T], *args: Any) -> _T:
        """Run an append in a thread. At most `_SHIPPED_AT_A_TIME` appends may wait for an object store."""
        if ack != "shipped":
            return await self.work(do, *args)
        # Check before the append: otherwise it would succeed and then be reported as failed.
        if not is_bound(self.context.store.fs, self.context.store.path):
            raise HttpProblem(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                "ack=shipped: this store is not shipped; nothing was appended; run 'segmentlog ship', or use"
                " ack=durable",
            )
        async with self._shipping:
            return await self.work(do, *args)

    async def work(self, do: Callable[..., _T], *args: Any) -> _T:
        """Run a function in one of the event loop's threads."""
        loop = asyncio.get_running_loop()
        if loop not in _with_threads:
            # The loop's own executor, so that the threads end with it, but with more threads than its default.
            _with_threads.add(loop)
            loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="segmentlog-http"))
        return await loop.run_in_executor(None, do, *args)
