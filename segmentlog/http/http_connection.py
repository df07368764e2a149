"""An HTTP connection: uvicorn's, with time and size limits for requests, and the principal of the TLS certificate."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segmentlog.http.admission import CONNECTION_SLOT, ConnectionSlot
from segmentlog.http.middleware import TLS_PRINCIPAL
from segmentlog.http.request_parser import RequestParser
from segmentlog.http.settings import HttpLimits
from segmentlog.security.principals import Principal
from segmentlog.security.tls import principal_of

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState


class HttpConnection(HttpToolsProtocol):
    """One connection after its TLS handshake."""

    def __init__(self, config: Config, server_state: ServerState, limits: HttpLimits, slot: ConnectionSlot) -> None:
        super().__init__(config, server_state, {})
        self.limits = limits
        self.slot = slot
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._quiet_bytes = 0
        """Bytes received of a head, of trailers or of a chunk size line. A complete head or a body byte resets it."""
        self._is_in_head = True
        self._has_begun = False
        """Whether the head of a request has begun and is not complete."""
        self._deadline: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._principal: Principal | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Prepare the connection, and start the timer for the first request."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio sets this only if the listener names TCP by number. Without it the body after a response's head
            # waits up to 40 ms for the client's acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if transport is not self.slot.transport:
            self.slot.encrypted = transport
        tls = transport.get_extra_info("ssl_object")
        if isinstance(tls, ssl.SSLObject | ssl.SSLSocket):
            self._principal = principal_of(tls)
        self._set_deadline(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and release the connection's slot."""
        self._set_deadline(None)
        self.slot.release()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Refuse a head that is too large."""
        if not self._is_in_head:
            self._set_deadline(self.limits.body_s)
        elif self._deadline is None:
            self._set_deadline(self.limits.head_s)
        # The parser accepts heads and trailers of any size, so count their bytes. A few bytes after them count as well.
        self._quiet_bytes += len(data)
        super().data_received(data)
        if self._quiet_bytes > self.limits.head_bytes and not self.transport.is_closing():
            if self._is_in_head:
                self.send_400_response(
                    f"the first line and headers of a request may have at most {self.limits.head_bytes:,} bytes"
                )
            else:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """Mark the connection busy at the start of a request."""
        super().on_message_begin()
        self._has_begun = True
        self.slot.mark_busy()
        self.scope[CONNECTION_SLOT] = self.slot  # type: ignore[typeddict-unknown-key]
        if self._principal is not None:
            self.scope[TLS_PRINCIPAL] = self._principal  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Trailers after a body are ignored."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._quiet_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Start the timer for the body."""
        self._is_in_head, self._quiet_bytes = False, 0
        self._has_begun = False
        self._set_deadline(self.limits.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        if cast(RequestParser, self.parser).is_incomplete:
            return
        self._is_in_head, self._quiet_bytes = True, 0
        self._set_deadline(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection idle, unless the next request has arrived."""
        if not self.pipeline and not self._has_begun:  # else the next request has already arrived
            self.slot.mark_idle()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start the timer for a client that does not read its response."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.answer_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer, because the client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _set_deadline(self, within_s: float | None) -> None:
        """Close the connection if no byte arrives within this time; None stops the timer."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if within_s is None else self.loop.call_later(within_s, self._close_late)

    def _close_late(self) -> None:
        self._deadline = None
        # The server paused reading because the application is slow: that is not the client's fault.
        if self.flow is not None and self.flow.read_paused:
            self._set_deadline(self.limits.body_s)
        elif not self.transport.is_closing():
            self.transport.abort()
