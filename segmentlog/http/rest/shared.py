"""What all requests share: the store, the threads that work for them, consumer instances, tails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from segmentlog.http.rest.appending import Appending
from segmentlog.http.rest.bodies import LargeBodies
from segmentlog.http.rest.formats import Schemas
from segmentlog.http.rest.instances import Instances
from segmentlog.http.rest.tails import Tails

if TYPE_CHECKING:
    from segmentlog.http.site import Site

_T = TypeVar("_T")

_THREADS: Final = 32
"""Most of them wait: for an fsync that they share, or for an object store."""


class Rest:
    """One for each door."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.schemas: Schemas | None = None
        self.large_bodies = LargeBodies()
        self.appending = Appending(site.store)
        self.tails = Tails(site)
        self.instances = Instances(site)
        # Its threads end when it is dropped, with the door.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="segmentlog-rest")

    async def work(self, do: Callable[..., _T], *args: Any) -> _T:
        """Call it in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, do, *args)
