"""Who somebody is by name and password (HTTP's Basic), and the memory that spares the next request the work."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from segmentlog.security.principals import Principal
from segmentlog.security.saslprep import prepared
from segmentlog.security.users import Users

_REMEMBERED: Final = 1000
_REMEMBER_S: Final = 60.0


class Accounts:
    """The users of a file. Thread-safe.

    A password takes milliseconds to verify, and HTTP brings it with each request: one that was right is known again for
    a minute, by a keyed hash of it, and as long as the file is the same.
    """

    def __init__(self, users: Users, at_a_time: int = 2) -> None:
        self._users = users
        self._threads = ThreadPoolExecutor(at_a_time, "segmentlog-log-in")
        """Of their own: what others wait for keeps nobody from logging in."""
        self._secret = os.urandom(32)
        self._known: dict[bytes, tuple[Principal, object, float]] = {}

    def known(self, header: str) -> Principal | None:
        """Who it is, where this is known without work."""
        found = self._known.get(self._hash(header))
        if found is None:
            return None
        principal, version, until_s = found
        if version is not self._users.version() or time.monotonic() > until_s:
            return None
        return principal

    async def verify_aside(self, header: str) -> Principal | None:
        """`verify`, in a thread; those that come at once wait for each other."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.verify, header)

    def close(self) -> None:
        """Its threads end."""
        self._threads.shutdown()

    def verify(self, header: str) -> Principal | None:
        """Who it is, by the value of an ``Authorization`` header; None where that proves nothing. Takes its time."""
        version = self._users.version()
        credentials = decode_basic(header)
        if credentials is None:
            return None
        name, password = map(prepared, credentials)
        if not self._users.verify(name, password):
            return None
        principal = Principal("User", name)
        if len(self._known) >= _REMEMBERED:
            self._known = {}
        self._known[self._hash(header)] = (principal, version, time.monotonic() + _REMEMBER_S)
        return principal

    def _hash(self, header: str) -> bytes:
        return hmac.digest(self._secret, header.encode("latin-1", "replace"), hashlib.sha256)


def decode_basic(header: str) -> tuple[str, str] | None:
    """(name, password) of RFC 7617, in UTF-8; None for anything else."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    return (name, password) if colon and name and password else None
