"""Requests over HTTP that a page of another site has a visitor's browser send.

DNS rebinding   a page has its own name resolve to this machine, and may then read what is here: the request says that
                name, so only names of this machine are answered to
cross-site      browsers say on whose behalf they ask, by Sec-Fetch-Site or Origin; other programs say nothing
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from collections.abc import Iterable

_full_names: dict[int, str] = {}
"""The full name of this machine by process id; empty until a name server has told it."""


def names_of_machine(host: str, further: Iterable[str] = ()) -> frozenset[str]:
    """The names, in lower case, by which a server that listens on ``host`` may be asked for, beside addresses.

    `is_own_name` also accepts the machine's full name. A thread looks it up, because a name server may take long.
    """
    pid = os.getpid()
    if pid not in _full_names:
        _full_names[pid] = ""
        threading.Thread(target=_look_up_full_name, args=(pid,), name="segmentlog-full-name", daemon=True).start()
    return frozenset(name.lower() for name in ("localhost", socket.gethostname(), host, *further) if name)


def _look_up_full_name(pid: int) -> None:
    _full_names[pid] = socket.getfqdn().lower()


def is_own_name(asked: str, names: frozenset[str]) -> bool:
    """Whether a ``Host`` header is one of the names, or an address: no name can be made to be that."""
    name = without_port(asked).lower()
    if name in names or (name and name == _full_names.get(os.getpid())):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    except ValueError:
        return False


def is_cross_site(site: str | None, origin: str | None, host: str) -> bool:
    """Whether a browser asks for a page of another site; by the headers Sec-Fetch-Site, Origin and Host."""
    if site is None and origin is not None:
        return origin.partition("://")[2].lower() != host.lower()
    return site not in (None, "same-origin", "none")


def without_port(host: str) -> str:
    """The name or address in a ``Host`` header."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host
