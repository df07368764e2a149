"""SASL mechanisms: exchanges of PLAIN (RFC 4616) and SCRAM (RFC 5802, 7677), one token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from segmentlog.security.saslprep import prepared
from segmentlog.security.security_errors import AuthenticationFailed
from segmentlog.security.users import HASHES

if TYPE_CHECKING:
    from scramp.core import ScramServer

    from segmentlog.security.users import Users

PLAIN: Final = "PLAIN"
SCRAM_MECHANISMS: Final = tuple(HASHES)
MECHANISMS: Final = (*SCRAM_MECHANISMS, PLAIN)


class Exchange(Protocol):
    """One authentication, from a client's first token to its user name."""

    name: str | None
    """Authenticated user name; None until the exchange has succeeded."""

    def step(self, token: bytes) -> bytes:
        """Return the response to a token. Raise `AuthenticationFailed`."""


def start_exchange(mechanism: str, users: Users) -> Exchange:
    """Return a new exchange of one of `MECHANISMS`."""
    return PlainExchange(users) if mechanism == PLAIN else ScramExchange(mechanism, users)


class PlainExchange:
    """PLAIN: the client sends name and password unencrypted."""

    def __init__(self, users: Users) -> None:
        self.name: str | None = None
        self._users = users

    def step(self, token: bytes) -> bytes:
        failed = AuthenticationFailed("Authentication failed: Invalid username or password")
        try:
            authorize, name, password = token.decode().split("\0")
        except ValueError:  # not UTF-8, or not three parts
            raise failed from None
        name, authorize, password = map(prepared, (name, authorize, password))
        if not name or not password:
            raise failed
        # An authorization id other than the name is rejected, as in Kafka.
        if not self._users.verify(name, password) or authorize not in ("", name):
            raise failed
        self.name = name
        return b""


class ScramExchange:
    """SCRAM: challenge and response, which do not reveal the password. The package scramp handles the messages."""

    def __init__(self, mechanism: str, users: Users) -> None:
        # Imported on demand, because it takes 0.1 s, which servers without users save.
        from scramp import ScramMechanism

        self.name: str | None = None
        self._users = users
        self._mechanism = mechanism
        self._claimed = ""
        self._is_known = False
        self._server: ScramServer = ScramMechanism(mechanism).make_server(self._credential)
        self._was_challenged = False

    def step(self, token: bytes) -> bytes:
        from scramp import ScramException

        try:
            text = token.decode()
            if not self._was_challenged:
                self._was_challenged = True
                self._server.set_client_first(text)
                return str(self._server.get_server_first()).encode()
            self._accept_doubled_nonce(text)
            self._server.set_client_final(text)
            answer = str(self._server.get_server_final()).encode()
        except (ScramException, ValueError):  # also invalid UTF-8
            answer = b""
        # The credential of an unknown user is made up. Reject such a user even if the response were to match.
        if not answer or not self._is_known:
            raise AuthenticationFailed(
                f"Authentication failed during authentication due to invalid credentials with SASL mechanism"
                f" {self._mechanism}"
            )
        self.name = self._claimed
        return answer

    def _accept_doubled_nonce(self, client_final: str) -> None:
        """Accept the nonce of librdkafka before 2.6.1, which repeats the client's nonce before the complete nonce.

        RFC 5802 requires the nonce of the server's first message, and Kafka 4.3.1 refuses any other. Kafka 3.8.1
        accepted that nonce (librdkafka's pull request 4895). Accepting it is safe: this form, the only one that
        is accepted, contains the server's nonce. Also, the client's proof covers the first message that the server sent
        in this exchange. So a proof from another exchange fails.
        """
        nonce, of_server = self._server.nonce, str(self._server.s_nonce)
        doubled = str(nonce).removesuffix(of_server) + str(nonce)
        if nonce is not None and f"r={doubled}" in client_final.split(","):
            self._server.nonce = type(nonce)(doubled)

    def _credential(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        """Return a user's credential for scramp; for an unknown user, an invented credential that looks real."""
        found, self._is_known = self._users.challenge(name, self._mechanism)
        self._claimed = name
        return found.salt, found.stored_key, found.server_key, found.iterations
