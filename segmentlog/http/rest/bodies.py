"""What requests bring: read within limits, and made sense of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.http.problems import HttpProblem

if TYPE_CHECKING:
    from starlette.types import Receive

_LARGE_BYTES: Final = 1 << 20
_LARGE_AT_A_TIME: Final = 4


class Disconnected(Exception):
    """Nobody is there any more to be answered."""


class LargeBodies:
    """Bodies above 1 MiB are gathered four at a time; others wait, and so do their senders.

    What a request takes is a few times the size of its body, so that all of them together have a bound.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_LARGE_AT_A_TIME)

    async def acquire(self) -> None:
        """Wait for a place."""
        await self._room.acquire()

    def release(self) -> None:
        """Give it back."""
        self._room.release()


class Body:
    """The body of one request: as a whole, or piece by piece."""

    __slots__ = ("_holds_room", "_large", "_receive")

    def __init__(self, receive: Receive, large: LargeBodies) -> None:
        self._receive = receive
        self._large = large
        self._holds_room = False

    async def whole(self) -> bytes:
        """All of it. Raises `Disconnected`, and what the guard says of one that is too large."""
        message = await self._receive()
        if message["type"] != "http.request":
            raise Disconnected
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return body
        pieces, size = [body], len(body)
        async for piece in self.pieces():
            pieces.append(piece)
            size += len(piece)
            if size > _LARGE_BYTES and not self._holds_room:
                await self._large.acquire()
                self._holds_room = True
        return b"".join(pieces)

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
        if self._holds_room:
            self._holds_room = False
            self._large.release()


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
