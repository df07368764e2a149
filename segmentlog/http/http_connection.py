"""A connection: uvicorn's, with limits against who sends slowly or without end, and TLS's word on who it is."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segmentlog.http.admission import PLACE, Place
from segmentlog.http.middleware import TLS_PRINCIPAL
from segmentlog.http.request_parser import Parser
from segmentlog.http.settings import HttpLimits
from segmentlog.security.principals import Principal
from segmentlog.security.tls import principal_of

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState


class Connection(HttpToolsProtocol):
    """One connection, once it is known to be one: behind TLS's handshake, where there is TLS."""

    def __init__(self, config: Config, server_state: ServerState, limits: HttpLimits, place: Place) -> None:
        super().__init__(config, server_state, {})
        self.limits = limits
        self.place = place
        self.parser = Parser(self)  # type: ignore[assignment]
        self._quiet_bytes = 0
        """That came since a head was complete or a body got longer: of a head, trailers, or a chunk's first line."""
        self._is_in_head = True
        self._has_begun = False
        """The head of a request has begun, and is not complete."""
        self._deadline: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._principal: Principal | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The other end may begin."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does it only where the listener was made for TCP by number. Without it a head waits for 40 ms
            # until the client has confirmed it, and the body behind it as long.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if transport is not self.place.transport:
            self.place.encrypted = transport
        tls = transport.get_extra_info("ssl_object")
        if isinstance(tls, ssl.SSLObject | ssl.SSLSocket):
            self._principal = principal_of(tls)
        self._expect(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._expect(None)
        self.place.leave()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Something of a request."""
        if not self._is_in_head:
            self._expect(self.limits.body_s)
        elif self._deadline is None:
            self._expect(self.limits.head_s)
        # The parser takes heads and trailers of any size. What is behind them in a piece counts, too: it is small.
        self._quiet_bytes += len(data)
        super().data_received(data)
        if self._quiet_bytes > self.limits.head_bytes and not self.transport.is_closing():
            if self._is_in_head:
                self.send_400_response(f"a request's head has at most {self.limits.head_bytes} bytes")
            else:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._has_begun = True
        self.place.work()
        self.scope[PLACE] = self.place  # type: ignore[typeddict-unknown-key]
        if self._principal is not None:
            self.scope[TLS_PRINCIPAL] = self._principal  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; what comes behind a body means nothing to us, and is not kept."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._quiet_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._is_in_head, self._quiet_bytes = False, 0
        self._has_begun = False
        self._expect(self.limits.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there: now it is our turn."""
        if cast(Parser, self.parser).is_cut_short:
            return
        self._is_in_head, self._quiet_bytes = True, 0
        self._expect(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It is answered."""
        if not self.pipeline and not self._has_begun:  # else the next request came with it
            self.place.rest()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The other end does not take what it is sent."""
        super().pause_writing()
        if self._taking is None:
            self._taking = self.loop.call_later(self.limits.answer_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does."""
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
        super().resume_writing()

    def _expect(self, within_s: float | None) -> None:
        """Hear something within that time, or hang up; None: nothing is expected."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if within_s is None else self.loop.call_later(within_s, self._hang_up)

    def _hang_up(self) -> None:
        self._deadline = None
        # Paused by us, because the application takes its time: not the client's fault.
        if self.flow is not None and self.flow.read_paused:
            self._expect(self.limits.body_s)
        elif not self.transport.is_closing():
            self.transport.abort()
