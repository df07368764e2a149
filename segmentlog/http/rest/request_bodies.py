"""Request bodies: reading within limits, and decoding JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from segmentlog.http.error_responses import HttpProblem

if TYPE_CHECKING:
    from starlette.types import Receive

    from segmentlog.http.large_bodies import RequestMemory


class ClientDisconnected(Exception):
    """The client closed the connection, so no response can be sent."""


class RequestBody:
    """The body of one request, read as a whole or in pieces."""

    __slots__ = ("_memory", "_receive")

    def __init__(self, receive: Receive, memory: RequestMemory) -> None:
        self._receive = receive
        self._memory = memory

    async def read_all(self) -> bytes:
        """Return the whole body. Raises `ClientDisconnected`, and `HttpProblem` if it is too large or too slow."""
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientDisconnected
        body: bytes = message.get("body", b"")
        if not message.get("more_body", False):
            return body
        pieces, size = [body], len(body)
        async for piece in self.pieces():
            pieces.append(piece)
            size += len(piece)
            await self.reserve(size)
        return b"".join(pieces)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, without empty pieces. Raises `ClientDisconnected`.

        The caller must report with `reserve` how many bytes it buffers.
        """
        more = True
        while more:
            message = await self._memory.receive(self._receive)
            if message["type"] != "http.request":
                raise ClientDisconnected
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece

    async def reserve(self, size_bytes: int) -> None:
        """Reserve memory for the buffered bytes. Raises `HttpProblem` (503) if none becomes free."""
        await self._memory.reserve("body", size_bytes)

    async def wait_for_disconnect(self) -> None:
        """Return once the client has disconnected. Sending to a closed connection raises nothing."""
        while (await self._receive())["type"] == "http.request":
            pass


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a JSON document. Raises `HttpProblem`: 422 for a wrong shape, 400 for malformed JSON."""
    try:
        found = decoder.decode(body)
        if not body.isascii():
            body.decode()  # raw parts of the document were not decoded
    except msgspec.ValidationError as error:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, "the body is not JSON: it is nested too deeply") from None
    return found
