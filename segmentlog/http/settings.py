"""What the HTTP door is told when it opens; and the defaults, once."""

from __future__ import annotations

import msgspec


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client, or all of them, may take."""

    request_bytes: int = 100 << 20
    """Of the body of a request."""
    head_bytes: int = 64 << 10
    """Of its first line and its headers."""
    head_s: float = 30.0
    """From the first byte of a request, or from the connection, to the end of its headers; for TLS, too."""
    body_s: float = 30.0
    """Between two pieces of a body."""
    answer_s: float = 30.0
    """For a part of an answer to be taken."""
    idle_s: float = 75.0
    """Between two requests of a connection."""
    connections: int = 400
    """That had a request let in; of one address three quarters. Beside them there are others, a quarter as many at
    the least. Fewer than files that a process may usually have open."""
    log_ins: int = 2
    """Passwords that are tried at a time: each takes milliseconds."""
    log_ins_waiting: int = 64
    """And that wait for that. Beyond that the newest of the address with most of them is answered with 503."""


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the door behaves."""

    allow_writes: bool = False
    """Whether the console has forms that change something, and administration by REST is done."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beside those of the machine itself by which it may be asked for, where nobody has to say who he is."""
    limits: HttpLimits = HttpLimits()
