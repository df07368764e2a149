"""Memory for large request bodies, shared by all requests of an HTTP server.

A request that buffers more than 1 MiB reserves memory for all bytes that it buffers: a body that is read as a whole, an
incomplete line, a compressed body. Not thread-safe: for one event loop.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem

if TYPE_CHECKING:
    from starlette.types import Message, Receive

REQUEST_MEMORY: Final = "segmentlog.room"
"""Key of the ASGI scope that holds the request's `RequestMemory`."""
LARGE_BYTES: Final = 1 << 20
_SECONDS_PER_MIB: Final = 30.0
"""Time in seconds for each MiB of a large body to arrive."""
_WAIT_S: Final = 30.0
"""Longest wait for memory, in seconds."""


def too_large(limit_bytes: int) -> HttpProblem:
    """Return the response (413) for a body above the limit, as sent or once decompressed."""
    return HttpProblem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"a request body may have at most {limit_bytes:,} bytes; send smaller requests",
        headers={"connection": "close"},
    )  # fmt: skip


class LargeBodies:
    """Memory that the requests with large bodies have reserved.

    A request that finds no free memory waits, and its client waits to send. The request that reserved memory first
    never waits, so a deadlock between requests is impossible.
    """

    def __init__(self, room_bytes: int) -> None:
        self._limit_bytes = room_bytes
        self._reserved: dict[object, int] = {}
        self._is_released = asyncio.Event()

    @property
    def reserved_bytes(self) -> int:
        """The bytes that all requests have reserved now."""
        return sum(self._reserved.values())

    async def grow(self, holder: object, size_bytes: int) -> None:
        """Set the size of the memory that ``holder`` has reserved. If the size grows, wait for free memory.

        Raises `HttpProblem` (503) if no memory becomes free within 30 s.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                while not self._fits(holder, size_bytes):
                    self._is_released.clear()
                    await self._is_released.wait()
        except TimeoutError:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, "the memory for large requests is in use; retry in 5 s",
                headers={"retry-after": "5", "connection": "close"},
            ) from None  # fmt: skip
        is_less = size_bytes < self._reserved.get(holder, 0)
        self._reserved[holder] = size_bytes
        if is_less:
            self._is_released.set()

    def _fits(self, holder: object, size_bytes: int) -> bool:
        reserved_bytes = self._reserved.get(holder, 0)
        if size_bytes <= reserved_bytes or next(iter(self._reserved), holder) is holder:
            return True
        return self.reserved_bytes - reserved_bytes + size_bytes <= self._limit_bytes

    def release(self, holder: object) -> None:
        """Release everything that ``holder`` has reserved."""
        if self._reserved.pop(holder, None) is not None:
            self._is_released.set()


class RequestMemory:
    """Memory that one request has reserved: the sum of its parts."""

    __slots__ = ("_due_s", "_large", "_parts", "_reserved_bytes")

    def __init__(self, large: LargeBodies) -> None:
        self._large = large
        self._parts: dict[str, int] = {}
        self._reserved_bytes = 0
        self._due_s: float | None = None

    async def reserve(self, part: str, size_bytes: int) -> None:
        """Set the size of a part; wait for free memory if the request needs more. Raises `HttpProblem` (503)."""
        parts = self._parts
        if size_bytes <= LARGE_BYTES and not self._reserved_bytes and (not parts or parts.keys() == {part}):
            parts[part] = size_bytes
            return
        parts[part] = size_bytes
        total = sum(parts.values())
        if total <= LARGE_BYTES:
            self.release()
        elif not self._reserved_bytes - 2 * LARGE_BYTES <= total <= self._reserved_bytes:
            self._reserved_bytes = total + LARGE_BYTES
            await self._large.grow(self, self._reserved_bytes)
            self._due_s = asyncio.get_running_loop().time() + _SECONDS_PER_MIB

    def release(self) -> None:
        """Release all memory, but keep the sizes of the parts for a later `reserve`."""
        if self._reserved_bytes:
            self._reserved_bytes, self._due_s = 0, None
            self._large.release(self)

    async def receive(self, receive: Receive) -> Message:
        """Call ``receive`` and return its message.

        Raises `HttpProblem` (408) if the next MiB of a large body does not arrive in time.
        """
        if self._due_s is None:
            return await receive()
        try:
            async with asyncio.timeout_at(self._due_s):
                return await receive()
        except TimeoutError:
            raise HttpProblem(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request body arrives too slowly: a body of more than {LARGE_BYTES:,} bytes must arrive at"
                f" {LARGE_BYTES:,} bytes in {_SECONDS_PER_MIB:g} s or faster; send smaller requests",
                headers={"connection": "close"},
            ) from None
