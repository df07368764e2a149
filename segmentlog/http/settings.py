"""Settings and limits of the HTTP server, with their defaults."""

from __future__ import annotations

import msgspec


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one client and for all clients of an HTTP server."""

    request_bytes: int = 100 << 20
    """Maximum size of a request body, as sent and once decompressed."""
    head_bytes: int = 64 << 10
    """Maximum size of a request's first line and headers."""
    head_s: float = 30.0
    """Time for the headers to arrive, counted from the first byte or from the connection. Also limits the TLS
    handshake."""
    body_s: float = 30.0
    """Maximum pause between two parts of a request body."""
    answer_s: float = 30.0
    """Time for the client to read a part of a response."""
    idle_s: float = 75.0
    """Time a connection may stay open without a request."""
    connections: int = 400
    """Maximum number of admitted connections, at most three quarters of them from one address. The server accepts a
    quarter more that are not admitted yet. The default is below the usual limit of open files for a process."""
    log_ins: int = 2
    """Number of passwords verified at the same time. Each verification takes milliseconds."""
    log_ins_waiting: int = 64
    """Number of passwords that may wait to be verified. Beyond it, the newest attempt of the address with most
    attempts gets 503."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of an HTTP server."""

    allow_writes: bool = False
    """Whether the console has forms that change the store, and whether REST allows administration."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional `Host` names to accept when authentication is off."""
    limits: HttpLimits = HttpLimits()
