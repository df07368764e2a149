"""An HTTP/1.1 parser that ignores requests to switch to another protocol.

Some clients offer HTTP/2 with their first request; Java's HTTP client does so by default. A server that continues with
HTTP/1.1 handles the request as if no upgrade had been offered (RFC 9110, section 7.8). But httptools would treat
the body as data of the new protocol. The body would be lost: a request to append would append nothing and report
success.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import httptools

_FRAMING: Final = frozenset((b"content-length", b"transfer-encoding", b"connection"))


class RequestParser:
    """httptools' parser for one connection. It ignores requests to upgrade the protocol."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._inner = _make_parser(connection)

    def feed_data(self, data: bytes) -> None:
        """Parse received bytes."""
        while True:
            try:
                self._inner.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = bytes(data)[upgrade.args[0] :]
                self._restart_after_head()

    def _restart_after_head(self) -> None:
        """Continue after the head of this request with a new parser: its body, then further requests."""
        head = [b"%b / HTTP/%b" % (self.get_method(), self.get_http_version().encode())]
        head += [b"%b: %b" % (name, value) for name, value in self._connection.headers if name in _FRAMING]
        self._inner = _make_parser(_BodyCallbacks(self._connection))
        self._inner.feed_data(b"\r\n".join(head) + b"\r\n\r\n")

    @property
    def is_incomplete(self) -> bool:
        """Whether httptools reports a request as complete although it has skipped the request's body."""
        return bool(self._inner.should_upgrade())

    def should_upgrade(self) -> bool:
        """Return False: the protocol never changes."""
        return False

    def should_keep_alive(self) -> bool:
        return bool(self._inner.should_keep_alive())

    def get_method(self) -> bytes:
        return bytes(self._inner.get_method())

    def get_http_version(self) -> str:
        return str(self._inner.get_http_version())


class _BodyCallbacks:
    """Parser callbacks that skip the first head, which the connection has already seen."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._is_after_head = False

    def on_message_begin(self) -> None:
        if self._is_after_head:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._is_after_head:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_after_head:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_after_head:
            self._connection.on_headers_complete()
        self._is_after_head = True

    def on_body(self, body: bytes) -> None:
        self._connection.on_body(body)

    def on_message_complete(self) -> None:
        self._connection.on_message_complete()


def _make_parser(protocol: Any) -> Any:
    parser = httptools.HttpRequestParser(protocol)
    with contextlib.suppress(AttributeError):  # as in uvicorn: httptools before 0.6.3 is lenient by default
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
