"""Room in memory for large request bodies, shared by all requests of an HTTP server.

A request holds room for every byte that it keeps: a body that it reads as a whole, a line that has not ended, a
compressed body. Up to 1 MiB a request holds nothing. Not thread-safe: for one event loop.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem

if TYPE_CHECKING:
    from starlette.types import Message, Receive

ROOM: Final = "segmentlog.room"
"""Under this key the scope of a request has its `RequestRoom`."""
LARGE_BYTES: Final = 1 << 20
_MIB_S: Final = 30.0
"""For each MiB of a large body to arrive."""
_WAIT_S: Final = 30.0
"""Longest wait for room."""


def too_large(limit_bytes: int) -> HttpProblem:
    """The refusal of a body that has more bytes than a request may have, as sent or once decompressed."""
    return HttpProblem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {limit_bytes:,} bytes",
        headers={"connection": "close"},
    )  # fmt: skip


class LargeBodies:
    """The bytes that large bodies hold, by request.

    A request that finds no room waits, and so does its sender. The request that has held room for longest never
    waits, so requests cannot all wait for one another.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._held: dict[object, int] = {}
        self._is_freed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """The bytes that all requests hold now."""
        return sum(self._held.values())

    async def grow(self, holder: object, size_bytes: int) -> None:
        """Set what ``holder`` holds, after a wait where it is more than before.

        Raises `HttpProblem` (503) when there is no room for 30 s.
        """
        try:
            async with asyncio.timeout(_WAIT_S):
                while not self._has_room(holder, size_bytes):
                    self._is_freed.clear()
                    await self._is_freed.wait()
        except TimeoutError:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, "too many large requests at this moment: try again",
                headers={"retry-after": "5", "connection": "close"},
            ) from None  # fmt: skip
        is_less = size_bytes < self._held.get(holder, 0)
        self._held[holder] = size_bytes
        if is_less:
            self._is_freed.set()

    def _has_room(self, holder: object, size_bytes: int) -> bool:
        held_bytes = self._held.get(holder, 0)
        if size_bytes <= held_bytes or next(iter(self._held), holder) is holder:
            return True
        return self.held_bytes - held_bytes + size_bytes <= self._room_bytes

    def release(self, holder: object) -> None:
        """Give back everything that ``holder`` holds."""
        if self._held.pop(holder, None) is not None:
            self._is_freed.set()


class RequestRoom:
    """What one request holds of `LargeBodies`: the sum of its parts."""

    __slots__ = ("_due_s", "_held_bytes", "_large", "_parts")

    def __init__(self, large: LargeBodies) -> None:
        self._large = large
        self._parts: dict[str, int] = {}
        self._held_bytes = 0
        self._due_s: float | None = None

    async def hold(self, part: str, size_bytes: int) -> None:
        """Set the size of a part; wait for room where the request needs more. Raises `HttpProblem` (503)."""
        parts = self._parts
        if size_bytes <= LARGE_BYTES and not self._held_bytes and (not parts or parts.keys() == {part}):
            parts[part] = size_bytes
            return
        parts[part] = size_bytes
        total = sum(parts.values())
        if total <= LARGE_BYTES:
            self.release()
        elif not self._held_bytes - 2 * LARGE_BYTES <= total <= self._held_bytes:
            self._held_bytes = total + LARGE_BYTES
            await self._large.grow(self, self._held_bytes)
            self._due_s = asyncio.get_running_loop().time() + _MIB_S

    def release(self) -> None:
        """Give everything back; the parts keep their sizes."""
        if self._held_bytes:
            self._held_bytes, self._due_s = 0, None
            self._large.release(self)

    async def receive(self, receive: Receive) -> Message:
        """Call ``receive``. Raises `HttpProblem` (408) when a large body does not go on within its time."""
        if self._due_s is None:
            return await receive()
        try:
            async with asyncio.timeout_at(self._due_s):
                return await receive()
        except TimeoutError:
            raise HttpProblem(
                HTTPStatus.REQUEST_TIMEOUT,
                f"a body above {LARGE_BYTES:,} bytes has to arrive at {LARGE_BYTES:,} bytes in {_MIB_S:g} s or faster;"
                " send less at a time",
                headers={"connection": "close"},
            ) from None
