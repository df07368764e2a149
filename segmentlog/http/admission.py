"""Limits the connections of an HTTP server, and chooses which connection is closed when there are too many.

unadmitted  The server has not accepted a request of the connection yet: it is in the TLS handshake, silent, or had its
            request refused. Unadmitted connections may use every slot that admitted connections leave free, and at
            least a quarter of all slots. Beyond that, the address with most unadmitted connections loses its oldest.
admitted    The server has accepted a request. At the limit, an idle connection (between two requests) is closed. If all
            are busy, or one address has three quarters of them, the next request gets 503. A connection whose client
            still receives its last response is busy.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.security.address_limits import ByAddress

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

CONNECTION_SLOT: Final = "segmentlog.place"
"""Key of the ASGI scope that holds the `ConnectionSlot` of the request's connection."""


class ConnectionSlot:
    """One connection, as `Admission` counts it."""

    __slots__ = ("_admission", "encrypted", "host", "transport")

    def __init__(self, admission: Admission, host: str, transport: asyncio.Transport) -> None:
        self._admission = admission
        self.host = host
        self.transport = transport
        """Transport of the socket, below TLS."""
        self.encrypted: asyncio.Transport | None = None
        """Transport above TLS once the handshake is complete; None without TLS."""

    @property
    def has_unsent(self) -> bool:
        """Whether this process still buffers bytes of a response that the client has not received."""
        # Each layer counts only its own bytes.
        above = self.encrypted.get_write_buffer_size() if self.encrypted is not None else 0
        return above > 0 or self.transport.get_write_buffer_size() > 0

    def admit(self) -> None:
        """Admit the connection after a request was accepted. Raises `HttpProblem` (503) if the server is full."""
        self._admission.admit(self)

    def mark_busy(self) -> None:
        """Mark the start of a request. Until its response is sent, the connection is not closed to make room."""
        self._admission.idle.discard(self)

    def mark_idle(self) -> None:
        """Mark the end of a response: the connection may be closed to make room until its next request."""
        self._admission.mark_idle(self)

    def release(self) -> None:
        """Stop counting the connection. Idempotent."""
        self._admission.release(self)


class Admission:
    """Counts the connections of one HTTP server. Must be used by one event loop only."""

    def __init__(self, connections: int) -> None:
        self._admitted_max = connections
        self._all_max = connections + max(connections // 4, 1)
        self._share = -(-connections * 3 // 4)
        self.unadmitted: ByAddress[ConnectionSlot] = ByAddress()
        self.admitted: ByAddress[ConnectionSlot] = ByAddress()
        self.idle: ByAddress[ConnectionSlot] = ByAddress()
        """Admitted connections without a running request."""

    def __iter__(self) -> Iterator[ConnectionSlot]:
        """Iterate over all connections."""
        yield from self.unadmitted
        yield from self.admitted

    def __len__(self) -> int:
        return len(self.unadmitted) + len(self.admitted)

    def add(self, host: str, transport: asyncio.Transport) -> ConnectionSlot:
        """Count a new connection, as unadmitted. At the limit close the oldest unadmitted one, possibly this one."""
        slot = ConnectionSlot(self, host, transport)
        self.unadmitted.add(slot, host)
        if len(self) > self._all_max:
            self._close(self.unadmitted.oldest())
        return slot

    def admit(self, slot: ConnectionSlot) -> None:
        """Implement `ConnectionSlot.admit`."""
        if slot not in self.unadmitted:
            return
        if self.admitted.count(slot.host) >= self._share:
            self._make_room(
                slot.host,
                f"this address has {self._share} connections with running requests, the most that one address may have",
            )
        elif len(self.admitted) >= self._admitted_max:
            self._make_room(None, f"all {self._admitted_max} connections of the server have running requests")
        self.unadmitted.discard(slot)
        self.admitted.add(slot, slot.host)

    def _make_room(self, host: str | None, why: str) -> None:
        # A response counts as complete once its last part is buffered, but the client may need seconds to read it.
        found = self.idle.oldest(host, lambda slot: not slot.has_unsent)
        if found is None:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{why}; retry in 1 s",
                headers={"retry-after": "1", "connection": "close"},
            )  # fmt: skip
        self._close(found)

    def _close(self, slot: ConnectionSlot | None) -> None:
        if slot is not None:
            self.release(slot)
            slot.transport.abort()

    def mark_idle(self, slot: ConnectionSlot) -> None:
        """Implement `ConnectionSlot.mark_idle`."""
        if slot in self.admitted and slot not in self.idle:
            self.idle.add(slot, slot.host)

    def release(self, slot: ConnectionSlot) -> None:
        """Implement `ConnectionSlot.release`."""
        for slots in (self.unadmitted, self.admitted, self.idle):
            slots.discard(slot)
