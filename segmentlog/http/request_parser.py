"""Requests as they come, for a server that has no other protocol than HTTP/1.1.

Clients ask for HTTP/2 on the way: Java's own does by default, with whatever it sends first. A server that goes on with
HTTP/1.1 takes the request as if nothing had been asked (RFC 9110, section 7.8). httptools' parser, left to itself,
takes a body for the other protocol: it would be lost, and a request to append would append nothing, and say so.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import httptools

_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding", b"connection"))


class Parser:
    """httptools' parser for a connection, by which no request ever changes the protocol."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._inner = _make(connection)

    def feed_data(self, data: bytes) -> None:
        """As httptools' does it."""
        while True:
            try:
                self._inner.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = bytes(data)[upgrade.args[0] :]
                self._begin_behind_head()

    def _begin_behind_head(self) -> None:
        """Go on with what follows the head of this request: its body, if it has one, and other requests."""
        head = [b"%b / HTTP/%b" % (self.get_method(), self.get_http_version().encode())]
        head += [b"%b: %b" % (name, value) for name, value in self._connection.headers if name in _FRAMING]
        self._inner = _make(_KnownHead(self._connection))
        self._inner.feed_data(b"\r\n".join(head) + b"\r\n\r\n")

    @property
    def is_cut_short(self) -> bool:
        """Whether httptools says that a request is complete whose body it has not looked at."""
        return bool(self._inner.should_upgrade())

    def should_upgrade(self) -> bool:
        """Never."""
        return False

    def should_keep_alive(self) -> bool:
        return bool(self._inner.should_keep_alive())

    def get_method(self) -> bytes:
        return bytes(self._inner.get_method())

    def get_http_version(self) -> str:
        return str(self._inner.get_http_version())


class _KnownHead:
    """Tells a connection what comes behind a head that it knows already."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._is_behind = False

    def on_message_begin(self) -> None:
        if self._is_behind:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_behind:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_behind:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_behind:
            self._connection.on_headers_complete()
        self._is_behind = True

    def on_body(self, body: bytes) -> None:
        self._connection.on_body(body)

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()


def _make(protocol: Any) -> Any:
    parser = httptools.HttpRequestParser(protocol)
    with contextlib.suppress(AttributeError):  # as uvicorn has it: httptools before 0.6.3 is lenient by itself
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
