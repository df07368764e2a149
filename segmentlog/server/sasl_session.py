"""State machine of SASL authentication on one connection, with re-authentication (KIP-368).

    initial              SaslHandshake and ApiVersions are allowed
    exchanging           SaslAuthenticate requests; after a SaslHandshake of version 0 bare tokens with a length prefix
    authenticated        every request is allowed; a SaslHandshake starts re-authentication
    re-authenticating    as exchanging; the user must be the same
    failed               nothing is allowed: the connection is closed after a delay

A failure never reveals whether the user exists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from segmentlog.security.mechanisms import MECHANISMS, Exchange, start_exchange
from segmentlog.security.principals import Principal
from segmentlog.security.security_errors import AuthenticationFailed
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.storage.fs import Buffer

if TYPE_CHECKING:
    from segmentlog.security.users import Users

logger = logging.getLogger("segmentlog.server")

FAILED_DELAY_S: Final = 0.1
"""`connection.failed.authentication.delay.ms`: delay of a failed client's response, and of closing its connection."""
TOKEN_MAX_BYTES: Final = 8 << 10
"""A name and a password are shorter. SASLprep examines each character a dozen times, so longer tokens cost time."""

_HANDSHAKE: Final = 17
_API_VERSIONS: Final = 18
_AUTHENTICATE: Final = 36
_TO_BEGIN: Final = frozenset((_HANDSHAKE, _API_VERSIONS))
_TO_EXCHANGE: Final = frozenset((_AUTHENTICATE, _API_VERSIONS))


class _State(Enum):
    INITIAL = 1
    EXCHANGING = 2
    AUTHENTICATED = 3
    REAUTHENTICATING = 4
    FAILED = 5


class SaslSession:
    """Authentication of one connection. Not thread-safe: requests before authentication are done one after the other.

    ``session_lifetime_ms`` is Kafka's `connections.max.reauth.ms`: the time after which a client must authenticate
    again; 0 for never.
    """

    def __init__(
        self,
        users: Users,
        mechanisms: Sequence[str] = MECHANISMS,
        *,
        session_lifetime_ms: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.principal: Principal | None = None
        """The authenticated user; None before authentication."""
        self.takes_raw_tokens = False
        """Whether the next frame is not a request but a token with a length prefix; so is the response to it."""
        self.session_lifetime_ms = session_lifetime_ms
        self._users = users
        self._mechanisms = tuple(mechanisms)
        self._clock = clock
        self._state = _State.INITIAL
        self._mechanism = ""
        self._exchange: Exchange | None = None
        self._ends_s = float("inf")

    @property
    def has_failed(self) -> bool:
        """Whether authentication has failed: the connection must be closed after `FAILED_DELAY_S`, and nothing more may
        be read from it.
        """
        return self._state is _State.FAILED

    @property
    def mechanism(self) -> str:
        """Mechanism that the client chose; empty before its choice."""
        return self._mechanism

    @property
    def is_complete(self) -> bool:
        """Whether the client is authenticated, and not re-authenticating."""
        return self._state is _State.AUTHENTICATED

    def permits(self, api_key: int) -> bool:
        """Return whether a request of this API is allowed now. If not, the connection must be closed."""
        if self._state is _State.AUTHENTICATED:
            return self._clock() < self._ends_s or api_key in _TO_BEGIN
        if self._state is _State.INITIAL:
            # SaslAuthenticate gets an error response, which clients understand.
            return api_key in _TO_BEGIN or api_key == _AUTHENTICATE
        return api_key in _TO_EXCHANGE and self._state is not _State.FAILED

    def handshake(self, mechanism: str, version: int = 1) -> tuple[int, list[str]]:
        """Handle a SaslHandshake. Return (error code, the enabled mechanisms)."""
        enabled = list(self._mechanisms)
        if self._state not in (_State.INITIAL, _State.AUTHENTICATED):
            self._state = _State.FAILED
            return ErrorCode.ILLEGAL_SASL_STATE, enabled
        is_again = self._state is _State.AUTHENTICATED
        # Re-authentication needs framed tokens: a bare token looks like the start of a request.
        if mechanism not in self._mechanisms or (is_again and (mechanism != self._mechanism or version == 0)):
            self._state = _State.FAILED
            return ErrorCode.UNSUPPORTED_SASL_MECHANISM, enabled
        self._mechanism = mechanism
        self._exchange = start_exchange(mechanism, self._users)
        self._state = _State.REAUTHENTICATING if is_again else _State.EXCHANGING
        self.takes_raw_tokens = version == 0
        return ErrorCode.NONE, enabled

    def authenticate(self, token: bytes) -> tuple[int, str | None, bytes]:
        """Handle a SaslAuthenticate. Return (error code, message, token for the client). The last sets `principal`."""
        exchange = self._exchange
        if exchange is None or self._state not in (_State.EXCHANGING, _State.REAUTHENTICATING):
            self._fail()
            return ErrorCode.ILLEGAL_SASL_STATE, "SaslAuthenticate must follow a SaslHandshake", b""
        try:
            if len(token) > TOKEN_MAX_BYTES:
                raise AuthenticationFailed(f"the token is longer than {TOKEN_MAX_BYTES} bytes")
            answer = exchange.step(token)
            if exchange.name is not None:
                self._accept(Principal("User", exchange.name))
        except AuthenticationFailed as error:
            self._fail()
            return ErrorCode.SASL_AUTHENTICATION_FAILED, str(error), b""
        return ErrorCode.NONE, None, answer

    def answer_raw(self, token: Buffer) -> list[Buffer] | None:
        """Return the response to a bare token, length prefix included.

        Return None after a failure (`has_failed`): the client then gets no response.
        """
        error_code, _, answer = self.authenticate(bytes(token))
        return None if error_code else [len(answer).to_bytes(4, "big") + answer]

    def _accept(self, principal: Principal) -> None:
        if self.principal not in (None, principal):
            raise AuthenticationFailed("Cannot change principals during re-authentication")
        self.principal = principal
        self._state = _State.AUTHENTICATED
        self._exchange = None
        self.takes_raw_tokens = False
        if self.session_lifetime_ms:
            self._ends_s = self._clock() + self.session_lifetime_ms / 1000

    def _fail(self) -> None:
        self._state = _State.FAILED
        self._exchange = None
        self.takes_raw_tokens = False
