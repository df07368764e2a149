"""SASL mechanisms: one exchange of PLAIN (RFC 4616) or SCRAM (RFC 5802, 7677), token by token."""

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
    """An exchange with a client, from its first token to its proved name."""

    name: str | None
    """Name of the client; None until it is authenticated."""

    def step(self, token: bytes) -> bytes:
        """Return the answer to a token. Raises `AuthenticationFailed`."""


def start_exchange(mechanism: str, users: Users) -> Exchange:
    """Start an exchange of one of `MECHANISMS`."""
    return PlainExchange(users) if mechanism == PLAIN else ScramExchange(mechanism, users)


class PlainExchange:
    """The exchange of PLAIN: name and password in plain text."""

    def __init__(self, users: Users) -> None:
        self.name: str | None = None
        self._users = users

    def step(self, token: bytes) -> bytes:
        failed = AuthenticationFailed("Authentication failed: Invalid username or password")
        try:
            authorize, name, password = token.decode().split("\0")
        except ValueError:  # neither UTF-8 nor three parts
            raise failed from None
        name, authorize, password = map(prepared, (name, authorize, password))
        if not name or not password:
            raise failed
        # A client cannot act as another user, as in Kafka.
        if not self._users.verify(name, password) or authorize not in ("", name):
            raise failed
        self.name = name
        return b""


class ScramExchange:
    """The exchange of SCRAM, which does not reveal the password. The messages are handled by scramp."""

    def __init__(self, mechanism: str, users: Users) -> None:
        # Imported here, as it takes 0.1 s: servers without users never need it.
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
        except (ScramException, ValueError):  # also for invalid UTF-8
            answer = b""
        # No password fits the made-up credentials of unknown users. Refuse them in any case.
        if not answer or not self._is_known:
            raise AuthenticationFailed(
                f"Authentication failed during authentication due to invalid credentials with SASL mechanism"
                f" {self._mechanism}"
            )
        self.name = self._claimed
        return answer

    def _accept_doubled_nonce(self, client_final: str) -> None:
        """Accept the nonce of librdkafka before 2.6.1, which sends the client's nonce twice before the server's part.

        RFC 5802 requires the nonce of the server's first message, and Kafka 4.3.1 refuses any other; Kafka 3.8.1
        accepted this form (librdkafka's pull request 4895). It is safe to accept: this form contains the server's
        nonce, and the proof covers the server's first message. A message of another exchange does not fit.
        """
        nonce, of_server = self._server.nonce, str(self._server.s_nonce)
        doubled = str(nonce).removesuffix(of_server) + str(nonce)
        if nonce is not None and f"r={doubled}" in client_final.split(","):
            self._server.nonce = type(nonce)(doubled)

    def _credential(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        """Return the credential that scramp needs. For an unknown name it is made up, so that clients see no
        difference."""
        found, self._is_known = self._users.challenge(name, self._mechanism)
        self._claimed = name
        return found.salt, found.stored_key, found.server_key, found.iterations
