"""Consumer instances of version 2: who reads for a client between its requests, and for how long.

Those that nobody asks for five minutes are closed, and leave their groups; so are all of them with the door. They are
known by who made them: nobody else finds one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import rest_error_codes
from segmentlog.http.rest.instance_reader import GroupReader, ReaderOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from segmentlog.http.context import Site
    from segmentlog.security.principals import Principal

logger = logging.getLogger("segmentlog.http")

INSTANCE_TIMEOUT_S: Final = 300.0
INSTANCES_MAX: Final = 200
"""Each keeps files open."""
_SWEEP_S: Final = 0.5

_Key = tuple["Principal", str, str]


class InstanceSettings(msgspec.Struct, frozen=True):
    """What an instance was made with, beside what its reader knows."""

    format: str
    min_bytes: int
    timeout_ms: int


class Instance:
    """One consumer of a client. One request at a time is at it."""

    def __init__(self, key: _Key, reader: GroupReader, settings: InstanceSettings) -> None:
        self.key = key
        self.reader = reader
        self.settings = settings
        self.lock = asyncio.Lock()
        self.is_closing = False
        self.expires_s = time.monotonic() + INSTANCE_TIMEOUT_S

    @property
    def name(self) -> str:
        """As its client calls it."""
        return self.key[2]

    def touch(self) -> None:
        """It was asked: it lives on."""
        self.expires_s = time.monotonic() + INSTANCE_TIMEOUT_S


class Instances:
    """All of them. For one event loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._by_key: dict[_Key, Instance] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def make(
        self, principal: Principal, group: str, name: str | None, options: ReaderOptions, settings: InstanceSettings
    ) -> Instance:
        """A new one. Raises `HttpProblem` when there is one of that name, or there are too many."""
        key = (principal, group, name or f"rest-consumer-{uuid.uuid4()}")
        if key in self._by_key:
            raise HttpProblem(
                HTTPStatus.CONFLICT, f"group {group!r} has a consumer {key[2]!r} already",
                error_code=rest_error_codes.INSTANCE_EXISTS,
            )  # fmt: skip
        if len(self._by_key) >= INSTANCES_MAX:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"there are {INSTANCES_MAX} consumers: delete one that is not needed",
                error_code=rest_error_codes.RETRIABLE, headers={"retry-after": "10"},
            )  # fmt: skip
        share = self._site.share(principal, INSTANCES_MAX)
        if sum(one[0] == principal for one in self._by_key) >= share:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{principal} has {share} consumers: delete one that is not needed",
                error_code=rest_error_codes.RETRIABLE, headers={"retry-after": "10"},
            )  # fmt: skip
        made = self._by_key[key] = Instance(key, GroupReader(self._site.store, group, key[2], options), settings)
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return made

    @contextlib.asynccontextmanager
    async def using(self, principal: Principal, group: str, name: str) -> AsyncIterator[Instance]:
        """The one of that name, for this request alone. Raises `HttpProblem`."""
        found = self._by_key.get((principal, group, name))
        if found is None or found.is_closing:
            raise _unknown(group, name)
        found.touch()
        async with found.lock:
            if found.is_closing:
                raise _unknown(group, name)
            try:
                yield found
            finally:
                found.touch()

    async def remove(self, principal: Principal, group: str, name: str) -> None:
        """Close one; a request that waits in it ends. Raises `HttpProblem`."""
        found = self._by_key.get((principal, group, name))
        if found is None or found.is_closing:
            raise _unknown(group, name)
        await self._close(found)

    async def _close(self, instance: Instance) -> None:
        instance.is_closing = True
        async with instance.lock:
            try:
                await asyncio.to_thread(instance.reader.close)
            finally:
                self._by_key.pop(instance.key, None)
                if not self._by_key and self._sweeper is not None and self._sweeper is not asyncio.current_task():
                    self._sweeper.cancel()
                    self._sweeper = None  # not done before the loop comes to it: who comes first begins another

    async def _sweep(self) -> None:
        """Close those whose time is over, as long as there are any; and all of them when the door closes."""
        try:
            while self._by_key and not self._site.is_closing:
                await asyncio.sleep(_SWEEP_S)
                now_s = time.monotonic()
                for instance in self._by_key.copy().values():
                    if now_s >= instance.expires_s and not instance.lock.locked():
                        logger.info("consumer %s of group %s was not asked for %d s, and is closed",
                                    instance.name, instance.key[1], INSTANCE_TIMEOUT_S)  # fmt: skip
                        with contextlib.suppress(SegmentlogError, OSError):
                            await self._close(instance)
        finally:
            for instance in self._by_key.copy().values() if self._site.is_closing else ():
                instance.is_closing = True
                with contextlib.suppress(SegmentlogError, OSError):
                    instance.reader.close()
                self._by_key.pop(instance.key, None)


def _unknown(group: str, name: str) -> HttpProblem:
    return HttpProblem(
        HTTPStatus.NOT_FOUND, f"group {group!r} has no consumer {name!r}; one that nobody asks for"
        f" {INSTANCE_TIMEOUT_S / 60:.0f} minutes is closed",
        error_code=rest_error_codes.INSTANCE_NOT_FOUND,
    )  # fmt: skip
