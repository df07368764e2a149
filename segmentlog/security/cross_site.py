"""Detect HTTP requests that a page of another site makes a visitor's browser send.

DNS rebinding   The page's host name resolves to this machine, so that the page may read responses. The Host header then
                has the page's name. So the server rejects every name except those of this machine.
cross-site      A browser sends the origin of a request in Sec-Fetch-Site or Origin; other programs send neither header.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Iterable

_full_names: dict[int, str] = {}
"""Full name of this machine by process id; empty until DNS has returned it."""


def names_of_machine(host: str, further: Iterable[str] = ()) -> frozenset[str]:
    """Return the host names, in lower case, under which a server that listens on ``host`` accepts requests.

    `is_own_name` also accepts addresses and the machine's full name. A thread looks up the full name, because DNS may
    be slow.
    """
    pid = os.getpid()
    if pid not in _full_names:
        _full_names[pid] = ""
        threading.Thread(target=_look_up_full_name, args=(pid,), name="segmentlog-full-name", daemon=True).start()
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), host, *further) if name)


def _look_up_full_name(pid: int) -> None:
    _full_names[pid] = socket.getfqdn().lower()


def is_own_name(asked: str, names: frozenset[str]) -> bool:
    """Return whether a ``Host`` header has one of the names, the full name of this machine, or an IP address.

    An IP address is safe: DNS rebinding needs a host name.
    """
    name = without_port(asked).lower()
    if name in names or (name and name == _full_names.get(os.getpid())):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    except ValueError:
        return False


def is_cross_site(site: str | None, origin: str | None, host: str) -> bool:
    """Return whether, by its headers, a page of another site made the browser send this request."""
    if site is None and origin is not None:
        return origin.partition("://")[2].lower() != host.lower()
    return site not in (None, "same-origin", "none")


def without_port(host: str) -> str:
    """Return the name or address of a ``Host`` header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host
