"""A SCRAM client according to RFC 5802, with hooks for mistakes. Like Kafka's clients, it does not prepare strings."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets


class ScramClient:
    """One exchange: `first`, then `final` of the server's answer, then `check` of its second."""

    def __init__(self, mechanism: str, name: str, password: str, *, header: str = "n,,", nonce: str = "") -> None:
        self._hash = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism]
        self._password = password.encode()
        self._header = header
        self.nonce = nonce or secrets.token_hex(12)
        self._bare = f"n={name.replace('=', '=3D').replace(',', '=2C')},r={self.nonce}"
        self._signature = b""

    def first(self) -> bytes:
        return f"{self._header}{self._bare}".encode()

    def parse(self, server_first: bytes) -> tuple[str, bytes, int]:
        """(nonce, salt, iterations)."""
        parts = dict(part.split("=", 1) for part in server_first.decode().split(","))
        return parts["r"], base64.b64decode(parts["s"]), int(parts["i"])

    def final(self, server_first: bytes, *, nonce: str = "") -> bytes:
        full_nonce, salt, iterations = self.parse(server_first)
        assert full_nonce.startswith(self.nonce)
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._hash)
        stored_key = hashlib.new(self._hash, client_key).digest()
        without_proof = f"c={base64.b64encode(self._header.encode()).decode()},r={nonce or full_nonce}"
        message = f"{self._bare},{server_first.decode()},{without_proof}".encode()
        mask = hmac.digest(stored_key, message, self._hash)
        proof = bytes(a ^ b for a, b in zip(client_key, mask, strict=True))
        self._signature = hmac.digest(hmac.digest(salted, b"Server Key", self._hash), message, self._hash)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def check(self, server_final: bytes) -> bool:
        """Return whether the server knows the password, too."""
        return server_final == b"v=" + base64.b64encode(self._signature)
