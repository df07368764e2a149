"""Consumer instances of REST v2: each keeps the consumer of one client between the client's requests.

An instance expires after five minutes without a request; closing the server closes all instances. A closed or expired
instance leaves its group.
Only the principal that created an instance can use it.
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
from segmentlog.http.rest.instance_reader import InstanceReader, ReaderOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from segmentlog.http.context import HttpContext
    from segmentlog.security.principals import Principal

logger = logging.getLogger("segmentlog.http")

INSTANCE_TIMEOUT_S: Final = 300.0
INSTANCES_MAX: Final = 200
"""Maximum number of instances: each keeps files open."""
_SWEEP_S: Final = 0.5

_Key = tuple["Principal", str, str]


class InstanceSettings(msgspec.Struct, frozen=True):
    """Settings of an instance, except those of its reader."""

    format: str
    min_bytes: int
    timeout_ms: int


class ConsumerInstance:
    """One consumer of a client. Its lock admits one request at a time."""

    def __init__(self, key: _Key, reader: InstanceReader, settings: InstanceSettings) -> None:
        self.key = key
        self.reader = reader
        self.settings = settings
        self.lock = asyncio.Lock()
        self.is_closing = False
        self.expires_s = time.monotonic() + INSTANCE_TIMEOUT_S

    @property
    def name(self) -> str:
        """The name that the client uses."""
        return self.key[2]

    def renew(self) -> None:
        """Restart the time until the instance expires."""
        self.expires_s = time.monotonic() + INSTANCE_TIMEOUT_S


class ConsumerInstances:
    """All instances of a server. Must be used by one event loop."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._by_key: dict[_Key, ConsumerInstance] = {}
        self._sweeper: asyncio.Task[None] | None = None

    def create(
        self, principal: Principal, group: str, name: str | None, options: ReaderOptions, settings: InstanceSettings
    ) -> ConsumerInstance:
        """Create an instance. Raises `HttpProblem` if its name exists or the limit is reached."""
        key = (principal, group, name or f"rest-consumer-{uuid.uuid4()}")
        if key in self._by_key:
            raise HttpProblem(
                HTTPStatus.CONFLICT,
                f"group {group!r} already has a consumer instance {key[2]!r}; delete it or use another name",
                error_code=rest_error_codes.INSTANCE_EXISTS,
            )  # fmt: skip
        if len(self._by_key) >= INSTANCES_MAX:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the server has {INSTANCES_MAX} consumer instances, its maximum; delete an unused one and retry",
                error_code=rest_error_codes.RETRIABLE, headers={"retry-after": "10"},
            )  # fmt: skip
        share = self._context.limit_for(principal, INSTANCES_MAX)
        if sum(one[0] == principal for one in self._by_key) >= share:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{principal} has {share} consumer instances, the maximum; delete an unused one and retry",
                error_code=rest_error_codes.RETRIABLE, headers={"retry-after": "10"},
            )  # fmt: skip
        instance = self._by_key[key] = ConsumerInstance(
            key, InstanceReader(self._context.store, group, key[2], options), settings
        )
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return instance

    @contextlib.asynccontextmanager
    async def locked(self, principal: Principal, group: str, name: str) -> AsyncIterator[ConsumerInstance]:
        """Lock the named instance for one request. Raises `HttpProblem` (404)."""
        found = self._by_key.get((principal, group, name))
        if found is None or found.is_closing:
            raise _unknown(group, name)
        found.renew()
        async with found.lock:
            if found.is_closing:
                raise _unknown(group, name)
            try:
                yield found
            finally:
                found.renew()

    async def remove(self, principal: Principal, group: str, name: str) -> None:
        """Close an instance; a request that waits in it ends. Raises `HttpProblem` (404)."""
        found = self._by_key.get((principal, group, name))
        if found is None or found.is_closing:
            raise _unknown(group, name)
        await self._close(found)

    async def _close(self, instance: ConsumerInstance) -> None:
        instance.is_closing = True
        async with instance.lock:
            try:
                await asyncio.to_thread(instance.reader.close)
            finally:
                self._by_key.pop(instance.key, None)
                if not self._by_key and self._sweeper is not None and self._sweeper is not asyncio.current_task():
                    self._sweeper.cancel()
                    self._sweeper = None  # the task ends later: the next instance must start a new one

    async def _sweep(self) -> None:
        """Close expired instances while there are any, and all instances when the server closes."""
        try:
            while self._by_key and not self._context.is_closing:
                await asyncio.sleep(_SWEEP_S)
                now_s = time.monotonic()
                for instance in self._by_key.copy().values():
                    if now_s >= instance.expires_s and not instance.lock.locked():
                        logger.info("closed consumer instance %s of group %s: no request for %d s",
                                    instance.name, instance.key[1], INSTANCE_TIMEOUT_S)  # fmt: skip
                        with contextlib.suppress(SegmentlogError, OSError):
                            await self._close(instance)
        finally:
            for instance in self._by_key.copy().values() if self._context.is_closing else ():
                instance.is_closing = True
                with contextlib.suppress(SegmentlogError, OSError):
                    instance.reader.close()
                self._by_key.pop(instance.key, None)


def _unknown(group: str, name: str) -> HttpProblem:
    return HttpProblem(
        HTTPStatus.NOT_FOUND, f"group {group!r} has no consumer instance {name!r}; instances expire after"
        f" {INSTANCE_TIMEOUT_S / 60:.0f} minutes without a request: create it again",
        error_code=rest_error_codes.INSTANCE_NOT_FOUND,
    )  # fmt: skip
