"""URLs of etcd and ZooKeeper.

    etcd://[USER:PASSWORD@]HOST[:PORT],.../PATH      etcd 3.4 or newer; with TLS: etcds://
    zk://[USER:PASSWORD@]HOST[:PORT],.../PATH        ZooKeeper 3.5 or newer; with TLS: zks://

Percent-encode special characters in USER and PASSWORD. Or set them in the environment variable `USER_VARIABLE`, because
other users of the machine can see the arguments of a process. With TLS, a query can name files: ``?cacert=FILE`` has
the trusted certificates, ``cert=FILE&key=FILE`` the certificate of this client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote

from segmentlog.errors import InvalidConfig

USER_VARIABLE: Final = "SEGMENTLOG_COORDINATOR_USER"
"""Environment variable with USER:PASSWORD, for URLs of etcd and ZooKeeper without a user."""
PORTS: Final = {"etcd": 2379, "etcds": 2379, "zk": 2181, "zks": 2281}
"""Scheme -> port of a host without a port."""
_TLS_SCHEMES: Final = ("etcds", "zks")
_MAX_PORT: Final = 65535
_HOST: Final = re.compile(
    r"(?:\[([0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,15})?)\]|([A-Za-z0-9._-]{1,253}))(?::([0-9]{1,5}))?"
)
_PATH: Final = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]+)+")
_BEFORE_HOSTS: Final = re.compile(r"//.*@")
_FILES: Final = ("cacert", "cert", "key")


@dataclass(frozen=True)
class EngineAddress:
    """The parts of a URL of etcd or ZooKeeper. ``repr`` shows no secrets."""

    url: str
    """The URL without user, password and query, for messages."""
    hosts: tuple[tuple[str, int], ...]
    """(host name or IP address, port)"""
    path: str
    """The place of the documents; it begins with a slash."""
    is_tls: bool = False
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    files: Mapping[str, str] = field(default_factory=dict)
    """Paths of the PEM files ``cacert``, ``cert`` and ``key``, as far as they are given."""


def parse_address(url: str, environment: Mapping[str, str]) -> EngineAddress:
    """Return the parts of a URL of etcd or ZooKeeper. Raise `InvalidConfig`, without secrets.

    Take user and password from ``environment`` if the URL has none.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    is_tls = scheme in _TLS_SCHEMES
    shown = _BEFORE_HOSTS.sub("//", url).partition("?")[0]
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    place = _PATH.fullmatch(slash + path.rstrip("/"))
    if place is None:
        accepted = f"{scheme}://HOST,HOST,HOST/path, with letters, digits, '.', '_' and '-' in the path"
        raise InvalidConfig("url", shown, accepted)
    if "@" in authority:
        user, _, password = map(unquote, credentials.partition(":"))
    else:
        user, _, password = environment.get(USER_VARIABLE, "").partition(":")
    if bool(user) != bool(password):
        where = f"USER:PASSWORD before the @, or in the environment variable {USER_VARIABLE}"
        raise InvalidConfig("url", shown, where)
    parsed = tuple(_host(scheme, host, shown) for host in hosts.split(","))
    files = _files(query, is_tls, shown)
    return EngineAddress(f"{scheme}://{hosts}{place[0]}", parsed, place[0], is_tls, user, password, files)


def _host(scheme: str, text: str, shown: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    port = int(found[3] or PORTS[scheme]) if found else 0
    if found is None or not 1 <= port <= _MAX_PORT:
        accepted = (
            f"{scheme}://HOST[:PORT],.../path, for example {scheme}://h1,h2,h3/orders; the port is {PORTS[scheme]}"
        )
        raise InvalidConfig("url", shown, f"{accepted} if the URL has none")
    return found[1] or found[2], port


def _files(query: str, is_tls: bool, shown: str) -> dict[str, str]:
    """Return the files that the query of a URL names, and check that they can be read."""
    try:
        files = dict(parse_qsl(query, strict_parsing=True)) if query else {}
    except ValueError:
        files = {"": ""}
    unknown = [name for name in files if name not in _FILES]
    if unknown or (files and not is_tls) or ("cert" in files) != ("key" in files):
        accepted = "?cacert=FILE, ?cert=FILE&key=FILE, or all three, after a URL that begins with etcds:// or zks://"
        raise InvalidConfig("url", f"{shown}?...", accepted)
    for name, path in files.items():
        try:
            with open(path, "rb"):
                pass
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidConfig(name, path, f"a PEM file that this process can read ({why})") from None
    return files
