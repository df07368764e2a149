"""Answers: bytes that are there, and bytes that come."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from segmentlog.http.rest import media_types

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

encode_json = msgspec.json.Encoder().encode

RawHeaders = Iterable[tuple[bytes, bytes]]


class Reply:
    """An answer that is there as a whole. (Starlette's own take 10 us more each.)"""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        body: bytes = b"",
        status: int = HTTPStatus.OK,
        content_type: str = media_types.JSON,
        headers: RawHeaders = (),
    ) -> None:
        self.body = body
        self.status = int(status)
        self.headers = [(b"content-type", content_type.encode()), *headers] if body else list(headers)
        if status != HTTPStatus.NO_CONTENT:
            self.headers.append((b"content-length", b"%d" % len(body)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class Flow:
    """An answer that comes in pieces, for as long as the client takes them.

    What goes wrong once it has begun can only be told by an end that is none: the connection is closed in the middle.
    """

    __slots__ = ("headers", "is_begun", "pieces")

    def __init__(self, pieces: AsyncIterator[bytes], content_type: str, headers: RawHeaders = ()) -> None:
        self.pieces = pieces
        self.is_begun = False
        self.headers = [(b"content-type", content_type.encode()), *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. The first piece is waited for before anything is said: until then a problem is an answer."""
        pieces = self.pieces
        try:
            if scope["method"] == "HEAD":
                await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": self.headers})
                await send({"type": "http.response.body"})
                return
            first = await anext(pieces, b"")
            self.is_begun = True
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": self.headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]


def json_reply(document: Any, status: int = HTTPStatus.OK, content_type: str = media_types.JSON) -> Reply:
    """A document as JSON."""
    return Reply(encode_json(document), status, content_type)


def nothing() -> Reply:
    """Done, and nothing to say."""
    return Reply(status=HTTPStatus.NO_CONTENT)
