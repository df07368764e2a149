"""HTTP Basic authentication, with a cache of verified passwords."""

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

_CACHED_MAX: Final = 1000
_CACHED_S: Final = 60.0


class Accounts:
    """The users of a file. Thread-safe.

    HTTP clients send the password with every request, and verifying it takes milliseconds. A verified password is
    therefore cached for one minute as a keyed hash, unless the file changes.
    """

    def __init__(self, users: Users, at_a_time: int = 2) -> None:
        self._users = users
        self._threads = ThreadPoolExecutor(at_a_time, "segmentlog-log-in")
        """A separate pool, so that slow requests in other threads do not delay log-ins."""
        self._secret = os.urandom(32)
        self._cached: dict[bytes, tuple[Principal, object, float]] = {}

    def cached_principal(self, header: str) -> Principal | None:
        """Return the principal of an ``Authorization`` header from the cache; None if the header must be verified."""
        found = self._cached.get(self._hash(header))
        if found is None:
            return None
        principal, version, until_s = found
        if version is not self._users.version() or time.monotonic() > until_s:
            return None
        return principal

    async def verify_in_thread(self, header: str) -> Principal | None:
        """Call `verify` in a thread. At most ``at_a_time`` calls run at once; others wait."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.verify, header)

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def verify(self, header: str) -> Principal | None:
        """Return the principal of an ``Authorization`` header, if it is valid. Takes milliseconds."""
        version = self._users.version()
        credentials = decode_basic(header)
        if credentials is None:
            return None
        name, password = map(prepared, credentials)
        if not self._users.verify(name, password):
            return None
        principal = Principal("User", name)
        if len(self._cached) >= _CACHED_MAX:
            self._cached = {}
        self._cached[self._hash(header)] = (principal, version, time.monotonic() + _CACHED_S)
        return principal

    def _hash(self, header: str) -> bytes:
        return hmac.digest(self._secret, header.encode("latin-1", "replace"), hashlib.sha256)


def decode_basic(header: str) -> tuple[str, str] | None:
    """Return (name, password) from a Basic header in UTF-8 (RFC 7617); None for any other value."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    return (name, password) if colon and name and password else None
