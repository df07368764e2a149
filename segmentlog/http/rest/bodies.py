"""What requests bring: read within limits, and made sense of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.http.problems import HttpProblem

if TYPE_CHECKING:
    from starlette.types import Message, Receive

_LARGE_BYTES: Final = 1 << 20
_MIB_S: Final = 30.0
"""For each MiB of a large body to come."""
_WAIT_S: Final = 30.0
"""For room, in all of which the bodies of others have to be seen to."""


class Disconnected(Exception):
    """Nobody is there any more to be answered."""


class LargeBodies:
    """Bodies above 1 MiB share room, by bytes that have come; others wait for it, and so do their senders.

    What a request takes is a few times the size of its body, so that all of them together have a bound. The one that
    has held room for longest may always go on: never do all of them wait for one another.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._held: dict[object, int] = {}
        self._is_freed = asyncio.Event()

    async def grow(self, holder: object, size_bytes: int) -> None:
        """Wait until that much is the holder's. Raises `HttpProblem` when there is no room for long."""
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
        self._held[holder] = size_bytes

    def _has_room(self, holder: object, size_bytes: int) -> bool:
        if next(iter(self._held), holder) is holder:
            return True
        others_bytes = sum(self._held.values()) - self._held.get(holder, 0)
        return others_bytes + size_bytes <= self._room_bytes

    def release(self, holder: object) -> None:
        """Give it back, if there is any."""
        if self._held.pop(holder, None) is not None:
            self._is_freed.set()


class Body:
    """The body of one request: as a whole, or piece by piece."""

    __slots__ = ("_large", "_receive")

    def __init__(self, receive: Receive, large: LargeBodies) -> None:
        self._receive = receive
        self._large = large

    async def whole(self) -> bytes:
        """All of it. Raises `Disconnected`, and what the guard says of one that is too large."""
        message = await self._receive()
        if message["type"] != "http.request":
            raise Disconnected
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return body
        pieces, size = [body], len(body)
        room_bytes, due_s = _LARGE_BYTES, None
        more = True
        while more:
            if size > room_bytes:
                room_bytes = size + _LARGE_BYTES
                await self._large.grow(self, room_bytes)
                due_s = asyncio.get_running_loop().time() + _MIB_S
            message = await self._within(due_s)
            if message["type"] != "http.request":
                raise Disconnected
            more = message.get("more_body", False)
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
        return b"".join(pieces)

    async def _within(self, due_s: float | None) -> Message:
        try:
            async with asyncio.timeout_at(due_s):
                return await self._receive()
        except TimeoutError:
            raise HttpProblem(
                HTTPStatus.REQUEST_TIMEOUT,
                f"a body above {_LARGE_BYTES:,} bytes comes at least at so many in {_MIB_S:g} s; send less at a time",
                headers={"connection": "close"},
            ) from None

    async def pieces(self) -> AsyncIterator[bytes]:
        """As it comes, empty pieces left out. Raises `Disconnected` when it breaks off."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise Disconnected
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece

    async def gone(self) -> None:
        """Return once the client is gone, for an answer that goes on: what is sent to nobody raises nothing."""
        while (await self._receive())["type"] == "http.request":
            pass

    def release(self) -> None:
        """The request is done."""
        self._large.release(self)


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """A document of the decoder's type. Raises `HttpProblem`: 422 for another shape, 400 for what is no JSON."""
    try:
        found = decoder.decode(body)
        if not body.isascii():
            body.decode()  # texts that are kept as they came were not looked into
    except msgspec.ValidationError as error:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, f"the body is no JSON: {error}") from None
    except RecursionError:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, "the body is no JSON: it is nested too deeply") from None
    return found
