"""Ports for servers that have to be told one: of another program, or of ours when it comes back where it was."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 10_000
_EPHEMERAL: Final = 32_768
"""Where Linux begins to take the ports of connections from; other systems begin higher."""
_TRIES: Final = 1000


def free_ports(count: int = 1, host: str = "127.0.0.1") -> int:
    """The first of ``count`` ports in a row that nobody listens on.

    They lie below those that the system gives to connections, and to whoever asks for any port: between this
    and the server's start nobody gets one by chance, unless somebody else draws the same one here, among 20,000.
    Nor does somebody while a server is down that is to come back. Raises OSError: none was found.
    """
    chance = random.SystemRandom()  # whoever seeds `random` would draw what others with that seed do
    for _ in range(_TRIES):
        base = chance.randrange(_LOWEST, _ephemeral_from() - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.create_server((host, port)))
            return base
    raise OSError(f"{host}: no {count} ports in a row are free; {_TRIES} places were looked at")


def _ephemeral_from() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        return max(first, 2 * _LOWEST)  # who has given connections all of them gets some of those
    return _EPHEMERAL
