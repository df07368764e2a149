"""What requests bring: read within limits, and made sense of."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from segmentlog.http.error_responses import HttpProblem

if TYPE_CHECKING:
    from starlette.types import Receive

    from segmentlog.http.large_bodies import RequestRoom


class Disconnected(Exception):
    """Nobody is there any more to be answered."""


class Body:
    """The body of one request: as a whole, or piece by piece."""

    __slots__ = ("_receive", "_room")

    def __init__(self, receive: Receive, room: RequestRoom) -> None:
        self._receive = receive
        self._room = room

    async def whole(self) -> bytes:
        """All of it. Raises `Disconnected`, and `HttpProblem` for one that is too large or too slow."""
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
            await self.keep(size)
        return b"".join(pieces)

    async def pieces(self) -> AsyncIterator[bytes]:
        """As it comes, empty pieces left out. Raises `Disconnected` when it breaks off.

        Whoever reads it so has to say with `keep` how much of it is kept.
        """
        more = True
        while more:
            message = await self._room.receive(self._receive)
            if message["type"] != "http.request":
                raise Disconnected
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece

    async def keep(self, size_bytes: int) -> None:
        """Hold room for the bytes that are kept of it now. Raises `HttpProblem` (503) when there is none for long."""
        await self._room.hold("body", size_bytes)

    async def gone(self) -> None:
        """Return once the client is gone, for an answer that goes on: what is sent to nobody raises nothing."""
        while (await self._receive())["type"] == "http.request":
            pass


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
