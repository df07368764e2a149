"""What a connection knows of who is at its other end: from SaslHandshake to a principal, and again (KIP-368).

    begun         a SaslHandshake may come, and ApiVersions
    exchanging    SaslAuthenticate requests; after a SaslHandshake of version 0 bare tokens, each behind its length
    proved        everything; a SaslHandshake begins anew
    proving anew  as exchanging, and the name must be the same
    failed        nothing: the connection is closed, after a while

A failure never says whether there is such a user.
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
"""`connection.failed.authentication.delay.ms`: so long who failed waits for the answer, and for the end."""
TOKEN_MAX_BYTES: Final = 8 << 10
"""A name and a password are shorter, and SASLprep looks at each character a dozen times."""

_HANDSHAKE: Final = 17
_API_VERSIONS: Final = 18
_AUTHENTICATE: Final = 36
_TO_BEGIN: Final = frozenset((_HANDSHAKE, _API_VERSIONS))
_TO_EXCHANGE: Final = frozenset((_AUTHENTICATE, _API_VERSIONS))


class _State(Enum):
    BEGUN = 1
    EXCHANGING = 2
    PROVED = 3
    PROVING_ANEW = 4
    FAILED = 5


class SaslSession:
    """One connection's. Not thread-safe: requests before authentication come one after the other.

    ``session_lifetime_ms`` is Kafka's `connections.max.reauth.ms`: who was authenticated so long ago has to do it
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
        """Who it is; None until that is proved."""
        self.takes_raw_tokens = False
        """Whether what comes next is no request, but a token with its length in front, and is answered likewise."""
        self.session_lifetime_ms = session_lifetime_ms
        self._users = users
        self._mechanisms = tuple(mechanisms)
        self._clock = clock
        self._state = _State.BEGUN
        self._mechanism = ""
        self._exchange: Exchange | None = None
        self._ends_s = float("inf")

    @property
    def has_failed(self) -> bool:
        """The connection is to be closed, `FAILED_DELAY_S` later; nothing more is read from it."""
        return self._state is _State.FAILED

    @property
    def mechanism(self) -> str:
        """What the client chose; empty before."""
        return self._mechanism

    @property
    def is_complete(self) -> bool:
        """Whether there is a `principal`, and nothing is being proved anew."""
        return self._state is _State.PROVED

    def permits(self, api_key: int) -> bool:
        """Whether a request of this kind may be answered now. If not, the connection is closed."""
        if self._state is _State.PROVED:
            return self._clock() < self._ends_s or api_key in _TO_BEGIN
        if self._state is _State.BEGUN:
            # SaslAuthenticate is answered with an error, which clients understand.
            return api_key in _TO_BEGIN or api_key == _AUTHENTICATE
        return api_key in _TO_EXCHANGE and self._state is not _State.FAILED

    def handshake(self, mechanism: str, version: int = 1) -> tuple[int, list[str]]:
        """(error code, the mechanisms that there are)."""
        enabled = list(self._mechanisms)
        if self._state not in (_State.BEGUN, _State.PROVED):
            self._state = _State.FAILED
            return ErrorCode.ILLEGAL_SASL_STATE, enabled
        anew = self._state is _State.PROVED
        # Proving anew needs frames: between other requests nobody could tell a bare token.
        if mechanism not in self._mechanisms or (anew and (mechanism != self._mechanism or version == 0)):
            self._state = _State.FAILED
            return ErrorCode.UNSUPPORTED_SASL_MECHANISM, enabled
        self._mechanism = mechanism
        self._exchange = start_exchange(mechanism, self._users)
        self._state = _State.PROVING_ANEW if anew else _State.EXCHANGING
        self.takes_raw_tokens = version == 0
        return ErrorCode.NONE, enabled

    def authenticate(self, token: bytes) -> tuple[int, str | None, bytes]:
        """(error code, message, the token for the client). After the last one there is a `principal`."""
        exchange = self._exchange
        if exchange is None or self._state not in (_State.EXCHANGING, _State.PROVING_ANEW):
            self._fail()
            return ErrorCode.ILLEGAL_SASL_STATE, "SaslHandshake comes first, and SaslAuthenticate once", b""
        try:
            if len(token) > TOKEN_MAX_BYTES:
                raise AuthenticationFailed("the token is too long")
            answer = exchange.step(token)
            if exchange.name is not None:
                self._prove(Principal("User", exchange.name))
        except AuthenticationFailed as error:
            self._fail()
            return ErrorCode.SASL_AUTHENTICATION_FAILED, str(error), b""
        return ErrorCode.NONE, None, answer

    def answer_raw(self, token: Buffer) -> list[Buffer] | None:
        """The answer to a bare token, behind its length. None when it `has_failed`: such clients are told nothing."""
        error_code, _, answer = self.authenticate(bytes(token))
        return None if error_code else [len(answer).to_bytes(4, "big") + answer]

    def _prove(self, principal: Principal) -> None:
        if self.principal not in (None, principal):
            raise AuthenticationFailed("Cannot change principals during re-authentication")
        self.principal = principal
        self._state = _State.PROVED
        self._exchange = None
        self.takes_raw_tokens = False
        if self.session_lifetime_ms:
            self._ends_s = self._clock() + self.session_lifetime_ms / 1000

    def _fail(self) -> None:
        self._state = _State.FAILED
        self._exchange = None
        self.takes_raw_tokens = False
