"""What all requests share: the store, the threads that work for them, consumer instances, tails."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest.batch_append import AckName, Appending
from segmentlog.http.rest.consumer_instances import Instances
from segmentlog.http.rest.rest_schemas import StoreSchemas
from segmentlog.http.rest.topic_broadcast import Tails
from segmentlog.http.rest.value_formats import Schemas
from segmentlog.objects.ownership.binding import is_bound

if TYPE_CHECKING:
    from segmentlog.http.context import Site

_T = TypeVar("_T")

_THREADS: Final = 32
"""Most of them wait: for an fsync that they share, or for an object store."""

_SHIPPED_AT_A_TIME: Final = 12
"""Of the threads, those that may wait for an object store: for two minutes, when it cannot be reached."""

_with_threads: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


class Rest:
    """One for each door."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.schemas: Schemas = StoreSchemas(site.store)
        self.appending = Appending(site.store)
        self.tails = Tails(site)
        self.instances = Instances(site)
        self._shipping = asyncio.Semaphore(_SHIPPED_AT_A_TIME)

    async def append(self, ack: AckName | None, do: Callable[..., _T], *args: Any) -> _T:
        """`work` that appends: who waits for an object store leaves threads for everybody else."""
        if ack != "shipped":
            return await self.work(do, *args)
        if not is_bound(self.site.store.fs, self.site.store.path):  # else it would be appended, and then be a failure
            why = "nobody ships this store: nothing was appended; see 'segmentlog ship', or ask for ack=durable"
            raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, why)
        async with self._shipping:
            return await self.work(do, *args)

    async def work(self, do: Callable[..., _T], *args: Any) -> _T:
        """Call it in a thread of the event loop's."""
        loop = asyncio.get_running_loop()
        if loop not in _with_threads:
            # The loop's own, so that they end with it; but not as few as it would have by itself.
            _with_threads.add(loop)
            loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="segmentlog-http"))
        return await loop.run_in_executor(None, do, *args)
