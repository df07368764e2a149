"""Detects HTTP requests that a page of another site makes a visitor's browser send.

DNS rebinding   A page lets its own name resolve to this machine, so that it may read the answers. Such a request
contains that name. The server answers only to names of this machine. cross-site      Browsers report the site of the
page in Sec-Fetch-Site or Origin; other programs send neither.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Iterable

_full_names: dict[int, str] = {}
"""The full name of this machine by process id; empty until a name server has answered."""


def names_of_machine(host: str, further: Iterable[str] = ()) -> frozenset[str]:
    """Return the names, in lower case, under which clients may address a server that listens on ``host``.

    `is_own_name` also accepts the machine's full name. A thread looks it up, as a name server may be slow.
    """
    pid = os.getpid()
    if pid not in _full_names:
        _full_names[pid] = ""
        threading.Thread(target=_look_up_full_name, args=(pid,), name="segmentlog-full-name", daemon=True).start()
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), host, *further) if name)


def _look_up_full_name(pid: int) -> None:
    _full_names[pid] = socket.getfqdn().lower()


def is_own_name(asked: str, names: frozenset[str]) -> bool:
    """Return whether a ``Host`` header is one of the names, or an IP address, which DNS rebinding cannot forge."""
    name = without_port(asked).lower()
    if name in names or (name and name == _full_names.get(os.getpid())):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    except ValueError:
        return False


def is_cross_site(site: str | None, origin: str | None, host: str) -> bool:
    """Return whether a browser sends the request for a page of another site, by its headers."""
    if site is None and origin is not None:
        return origin.partition("://")[2].lower() != host.lower()
    return site not in (None, "same-origin", "none")


def without_port(host: str) -> str:
    """Return the name or address in a ``Host`` header."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host
