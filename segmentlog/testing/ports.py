"""Find free ports for servers that need a fixed port: other programs, or a server that is restarted on its port."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 10_000
_EPHEMERAL: Final = 32_768
"""Linux assigns ports from this number on to outgoing connections; other systems begin higher."""
_TRIES: Final = 1000


def free_ports(count: int = 1, host: str = "127.0.0.1") -> int:
    """Return the first of ``count`` consecutive ports on which no process listens.

    The ports are below the ephemeral ports of the system. So the system does not assign them to a connection or to a
    server on port 0 before the caller's server starts or while it is restarted. Two callers of this function may get
    the same port, with a chance of about 1 in 20,000. Raise OSError if no ports are found.
    """
    chance = random.SystemRandom()  # with `random`, processes with the same seed would draw the same ports
    for _ in range(_TRIES):
        base = chance.randrange(_LOWEST, _ephemeral_from() - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.create_server((host, port)))
            return base
    raise OSError(f"{host}: no {count} consecutive ports are free after {_TRIES} attempts")


def _ephemeral_from() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        return max(first, 2 * _LOWEST)  # if all ports are ephemeral, use some of them
    return _EPHEMERAL
