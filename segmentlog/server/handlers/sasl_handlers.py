"""SaslHandshake (17) and SaslAuthenticate (36): to the session of the connection that they came on.

The connection closes what `SaslSession.has_failed`, after `FAILED_DELAY_S`, in which this answer waits, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segmentlog.server.codec.generated.sasl_authenticate import SaslAuthenticateRequest, SaslAuthenticateResponse
from segmentlog.server.codec.generated.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse
from segmentlog.server.codec.kafka_errors import ErrorCode

if TYPE_CHECKING:
    from segmentlog.server.request_context import Call


def sasl_handshake(call: Call, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    """Whether the mechanism is one that there is, and which there are."""
    session = call.connection.sasl if call.connection is not None else None
    if session is None:
        return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE)
    error_code, mechanisms = session.handshake(request.mechanism, call.version)
    return SaslHandshakeResponse(error_code=error_code, mechanisms=mechanisms)


def sasl_authenticate(call: Call, request: SaslAuthenticateRequest) -> SaslAuthenticateResponse:
    """The server's token to the client's."""
    session = call.connection.sasl if call.connection is not None else None
    if session is None:
        message = "SaslHandshake comes first, and nobody has to authenticate himself here"
        return SaslAuthenticateResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message=message)
    error_code, message_or_none, token = session.authenticate(bytes(request.auth_bytes))
    return SaslAuthenticateResponse(
        error_code=error_code,
        error_message=message_or_none,
        auth_bytes=token,
        session_lifetime_ms=session.session_lifetime_ms if session.is_complete else 0,
    )
