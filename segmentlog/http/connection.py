"""A connection: uvicorn's, with limits against who sends slowly or without end, and TLS's word on who it is."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segmentlog.http.guard import TLS_PRINCIPAL
from segmentlog.http.settings import HttpLimits
from segmentlog.security.principals import Principal
from segmentlog.security.tls import principal_of

if TYPE_CHECKING:
    from uvicorn.config import Config
    from uvicorn.server import ServerState


class Connection(HttpToolsProtocol):
    """Made for each connection. ``limits`` is set on a subclass: uvicorn makes it by the class alone."""

    limits = HttpLimits()

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0
        self._is_in_head = True
        self._deadline: asyncio.TimerHandle | None = None
        self._taking: asyncio.TimerHandle | None = None
        self._principal: Principal | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The other end may begin."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        if isinstance(tls, ssl.SSLObject | ssl.SSLSocket):
            self._principal = principal_of(tls)
        self._expect(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Something of a request."""
        if self._is_in_head:
            # The parser takes heads of any size. What is behind a head in the same piece counts, too: a piece is small.
            self._head_bytes += len(data)
            if self._deadline is None:
                self._expect(self.limits.head_s)
        else:
            self._expect(self.limits.body_s)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self.limits.head_bytes and not self.transport.is_closing():
            self.send_400_response(f"a request's head has at most {self.limits.head_bytes} bytes")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        if self._principal is not None:
            self.scope[TLS_PRINCIPAL] = self._principal  # type: ignore[typeddict-unknown-key]

    def on_headers_complete(self) -> None:
        """Its head is there."""
        self._is_in_head, self._head_bytes = False, 0
        self._expect(self.limits.body_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there: now it is our turn."""
        self._is_in_head = True
        self._expect(None)
        super().on_message_complete()

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
