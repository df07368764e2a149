"""How many connections there may be, and which of them make room for others.

strangers  have not had a request let in yet: in TLS's handshake, silent, or refused. They fill what is left, and at
           least a quarter. When there are too many, the oldest of the address that has most is closed.
let in     have had one. When there are as many as there may be, one that is between two requests is closed; where all
           are at work, or three quarters are of one address, the next request is answered with 503. A client that
           still receives its last response is at work.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.security.address_limits import ByAddress

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

PLACE: Final = "segmentlog.place"
"""Under this key the scope of a request has the `Place` of its connection."""


class Place:
    """One connection, as `Admission` counts it."""

    __slots__ = ("_admission", "encrypted", "host", "transport")

    def __init__(self, admission: Admission, host: str, transport: asyncio.Transport) -> None:
        self._admission = admission
        self.host = host
        self.transport = transport
        """Of the socket, below TLS."""
        self.encrypted: asyncio.Transport | None = None
        """Above TLS, where there is TLS and its handshake is complete."""

    @property
    def has_unsent(self) -> bool:
        """Whether bytes of a response still wait in this process for the client to take them."""
        # Each layer counts only its own bytes.
        above = self.encrypted.get_write_buffer_size() if self.encrypted is not None else 0
        return above > 0 or self.transport.get_write_buffer_size() > 0

    def let_in(self) -> None:
        """Count a request of it that was let in. Raises `HttpProblem` (503) where there are too many."""
        self._admission.let_in(self)

    def work(self) -> None:
        """A request begins: it is not closed for others meanwhile, if it was let in before."""
        self._admission.idle.discard(self)

    def rest(self) -> None:
        """A request is answered: until the next one it may have to make room."""
        self._admission.rest(self)

    def leave(self) -> None:
        """The connection is closed. Idempotent."""
        self._admission.leave(self)


class Admission:
    """The connections of one HTTP server. For one event loop."""

    def __init__(self, connections: int) -> None:
        self._let_in_max = connections
        self._all_max = connections + max(connections // 4, 1)
        self._share = -(-connections * 3 // 4)
        self.strangers: ByAddress[Place] = ByAddress()
        self.let_in_ones: ByAddress[Place] = ByAddress()
        self.idle: ByAddress[Place] = ByAddress()
        """Of those that were let in."""

    def __iter__(self) -> Iterator[Place]:
        """All connections."""
        yield from self.strangers
        yield from self.let_in_ones

    def __len__(self) -> int:
        return len(self.strangers) + len(self.let_in_ones)

    def arrive(self, host: str, transport: asyncio.Transport) -> Place:
        """Count a connection that was accepted; close a stranger where there are too many, which may be this one."""
        place = Place(self, host, transport)
        self.strangers.add(place, host)
        if len(self) > self._all_max:
            self._close(self.strangers.oldest())
        return place

    def let_in(self, place: Place) -> None:
        """See `Place.let_in`."""
        if place not in self.strangers:
            return
        if self.let_in_ones.count(place.host) >= self._share:
            self._make_room(place.host, f"{self._share} requests or more of one address are being answered")
        elif len(self.let_in_ones) >= self._let_in_max:
            self._make_room(None, f"{self._let_in_max} requests are being answered")
        self.strangers.discard(place)
        self.let_in_ones.add(place, place.host)

    def _make_room(self, host: str | None, why: str) -> None:
        # The server completes a response when the last of it is buffered: the client may need seconds for the rest.
        found = self.idle.oldest(host, lambda place: not place.has_unsent)
        if found is None:
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{why} at this moment: try again",
                headers={"retry-after": "1", "connection": "close"},
            )  # fmt: skip
        self._close(found)

    def _close(self, place: Place | None) -> None:
        if place is not None:
            self.leave(place)
            place.transport.abort()

    def rest(self, place: Place) -> None:
        """See `Place.rest`."""
        if place in self.let_in_ones and place not in self.idle:
            self.idle.add(place, place.host)

    def leave(self, place: Place) -> None:
        """See `Place.leave`."""
        for places in (self.strangers, self.let_in_ones, self.idle):
            places.discard(place)
