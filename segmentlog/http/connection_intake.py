"""A connection from its first moment: counted before anything is read of it, and then in TLS's handshake.

asyncio tells nobody of a connection before its handshake is complete when it is left to do that itself, so that
connections without a handshake would have no bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from segmentlog.http.admission import Admission, Place
    from segmentlog.http.http_connection import Connection
    from segmentlog.security.tls import ServerTls
    from segmentlog.security.tls_refusals import TlsRefusals

_GOODBYE_S: Final = 5.0
"""For the other end to confirm that TLS is over, once a connection is closed."""


class Arrival(asyncio.Protocol):
    """The protocol of a connection that was just accepted; hands it over to a `Connection`."""

    def __init__(
        self, admission: Admission, tls: ServerTls | None, refusals: TlsRefusals, handshake_s: float,
        make: Callable[[Place], Connection],
    ) -> None:  # fmt: skip
        self._admission = admission
        self._tls = tls
        self._refusals = refusals
        self._handshake_s = handshake_s
        self._make = make
        self._place: Place | None = None
        self._connection: Connection | None = None
        self._early = bytearray()
        """What came with the end of the handshake."""
        self._is_lost = False
        self._handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it."""
        made = cast(asyncio.Transport, transport)
        peer = made.get_extra_info("peername")
        self._place = self._admission.arrive(str(peer[0]) if isinstance(peer, tuple) else "", made)
        if made.is_closing():  # there were too many
            return
        if self._tls is None:
            self._hand_over(made, self._place)
        else:
            # The task runs before anything is read: `start_tls` begins by pausing that.
            self._handshake = asyncio.get_running_loop().create_task(self._agree(made, self._place, self._tls))

    async def _agree(self, transport: asyncio.Transport, place: Place, tls: ServerTls) -> None:
        # With the context of this moment: its tickets end with it, so no session outlives a change of the files.
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                transport, self, tls.context(), server_side=True,
                ssl_handshake_timeout=self._handshake_s, ssl_shutdown_timeout=_GOODBYE_S,
            )  # fmt: skip
            if encrypted is not None and not self._is_lost:  # else the peer has gone without a word
                self._hand_over(encrypted, place)
                return
        except (OSError, ValueError) as error:  # what TLS raises is one; a certificate that names nobody is the other
            self._refusals.log_failure(place.host, error)
        except BaseException:
            self._give_up(transport, place)
            raise
        self._give_up(transport, place)

    def _give_up(self, transport: asyncio.Transport, place: Place) -> None:
        place.leave()
        transport.abort()

    def _hand_over(self, transport: asyncio.Transport, place: Place) -> None:
        connection = self._connection = self._make(place)
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._early and not transport.is_closing():
            connection.data_received(bytes(self._early))

    def data_received(self, data: bytes) -> None:
        """The begin of a request, which came before the handshake was noticed to be complete."""
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._is_lost = True
        if self._connection is not None:
            self._connection.connection_lost(exc)
        elif self._place is not None:
            self._place.leave()
