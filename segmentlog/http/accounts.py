"""Who somebody is by name and password (HTTP's Basic), and the memory that spares the next request the work."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import time
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

    def __init__(self, users: Users) -> None:
        self._users = users
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
