"""Count a new connection before any byte of it is read, then run its TLS handshake.

If asyncio ran the handshake itself, it would report a connection only afterwards. Connections that never complete
a handshake would then escape the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from segmentlog.http.admission import Admission, ConnectionSlot
    from segmentlog.http.http_connection import HttpConnection
    from segmentlog.security.tls import ServerTls
    from segmentlog.security.tls_refusals import TlsRefusals

_SHUTDOWN_S: Final = 5.0
"""Time in seconds for the client to confirm the end of TLS."""


class ConnectionIntake(asyncio.Protocol):
    """Protocol of a new connection. After the TLS handshake, an `HttpConnection` takes over the transport."""

    def __init__(
        self, admission: Admission, tls: ServerTls | None, refusals: TlsRefusals, handshake_s: float,
        make: Callable[[ConnectionSlot], HttpConnection],
    ) -> None:  # fmt: skip
        self._admission = admission
        self._tls = tls
        self._refusals = refusals
        self._handshake_s = handshake_s
        self._make_connection = make
        self._place: ConnectionSlot | None = None
        self._connection: HttpConnection | None = None
        self._received_early = bytearray()
        """Bytes that arrived together with the end of the handshake."""
        self._is_lost = False
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and start the TLS handshake if there is one."""
        accepted = cast(asyncio.Transport, transport)
        peer = accepted.get_extra_info("peername")
        self._place = self._admission.add(str(peer[0]) if isinstance(peer, tuple) else "", accepted)
        if accepted.is_closing():  # closed by `Admission`: too many connections
            return
        if self._tls is None:
            self._hand_over(accepted, self._place)
        else:
            # The task runs before any byte is read: `start_tls` first pauses reading.
            self._handshake = asyncio.get_running_loop().create_task(
                self._run_handshake(accepted, self._place, self._tls)
            )

    async def _run_handshake(self, transport: asyncio.Transport, slot: ConnectionSlot, tls: ServerTls) -> None:
        # Use the current context: its session tickets end with it, so no session outlives a change of the files.
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                transport, self, tls.context(), server_side=True,
                ssl_handshake_timeout=self._handshake_s, ssl_shutdown_timeout=_SHUTDOWN_S,
            )  # fmt: skip
            if encrypted is not None and not self._is_lost:  # otherwise the client has disconnected
                self._hand_over(encrypted, slot)
                return
        except (OSError, ValueError) as error:  # OSError from TLS, ValueError for a certificate without a name
            self._refusals.report(slot.host, error)
        except BaseException:
            self._abort(transport, slot)
            raise
        self._abort(transport, slot)

    def _abort(self, transport: asyncio.Transport, slot: ConnectionSlot) -> None:
        slot.release()
        transport.abort()

    def _hand_over(self, transport: asyncio.Transport, slot: ConnectionSlot) -> None:
        connection = self._connection = self._make_connection(slot)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._received_early and not transport.is_closing():
            connection.data_received(bytes(self._received_early))

    def data_received(self, data: bytes) -> None:
        """Buffer the first bytes of a request that arrive before the handshake is known to be complete."""
        self._received_early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's slot."""
        self._is_lost = True
        if self._connection is not None:
            self._connection.connection_lost(exc)
        elif self._place is not None:
            self._place.release()
