"""SaslHandshake (17) and SaslAuthenticate (36): pass tokens to the SASL session of the connection.

If authentication fails, the connection delays the response by `FAILED_DELAY_S`, and closes after sending it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from segmentlog.server.codec.generated.sasl_authenticate import SaslAuthenticateRequest, SaslAuthenticateResponse
from segmentlog.server.codec.generated.sasl_handshake import SaslHandshakeRequest, SaslHandshakeResponse
from segmentlog.server.codec.kafka_errors import ErrorCode

if TYPE_CHECKING:
    from segmentlog.server.request_context import RequestContext


def sasl_handshake(call: RequestContext, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    """Select a mechanism. Return the enabled mechanisms."""
    session = call.connection.sasl if call.connection is not None else None
    if session is None:
        return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE)
    error_code, mechanisms = session.handshake(request.mechanism, call.version)
    return SaslHandshakeResponse(error_code=error_code, mechanisms=mechanisms)


def sasl_authenticate(call: RequestContext, request: SaslAuthenticateRequest) -> SaslAuthenticateResponse:
    """Pass the client's token to the mechanism. Return the server's token."""
    session = call.connection.sasl if call.connection is not None else None
    if session is None:
        message = "this listener does not require authentication, and there was no SaslHandshake"
        return SaslAuthenticateResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message=message)
    error_code, message_or_none, token = session.authenticate(bytes(request.auth_bytes))
    return SaslAuthenticateResponse(
        error_code=error_code,
        error_message=message_or_none,
        auth_bytes=token,
        session_lifetime_ms=session.session_lifetime_ms if session.is_complete else 0,
    )
