"""Checks before every page and API: host name, origin, authentication, body size; and security headers on responses.

host name    Without authentication the server accepts only host names of its own machine (DNS rebinding). Otherwise a
             foreign page could resolve its own host name to this address, and read the store in its visitor's browser.
cross-site   Requests that a browser sends for a page of another site are refused, except navigation by a link.
identity     A name and a password, or the certificate that TLS verified. Without either, every client is anonymous.
size         Bodies are limited as sent, and again once decompressed.
body headers Headers that change the meaning of a body are applied or refused: see `body_headers`.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders

from segmentlog.http.admission import CONNECTION_SLOT, ConnectionSlot
from segmentlog.http.body_headers import content_coding, read_headers, verify_digests
from segmentlog.http.content_coding import decompress
from segmentlog.http.context import PRINCIPAL, HttpContext
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.large_bodies import REQUEST_MEMORY, RequestMemory, too_large
from segmentlog.security.address_limits import ByAddress
from segmentlog.security.cross_site import is_cross_site, is_own_name, names_of_machine
from segmentlog.security.principals import ANONYMOUS, Principal

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from segmentlog.http.accounts import Accounts

logger = logging.getLogger("segmentlog.http")

TLS_PRINCIPAL: Final = "segmentlog.tls_principal"
"""Key of the ASGI scope that holds the principal of a verified client certificate. Set by the connection."""
PAGES: Final = "/ui"
"""Path prefix of the console. All other paths are APIs."""
HEALTH: Final = "/healthz"
_FAILED_DELAY_S: Final = 0.1
_SAFE: Final = frozenset(("GET", "HEAD", "OPTIONS"))
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Middleware:
    """ASGI middleware that checks each request before the application runs.

    ``answer`` renders a refused request.
    """

    def __init__(
        self, app: ASGIApp, context: HttpContext, accounts: Accounts | None, host: str, is_tls: bool,
        answer: Callable[[Scope, HttpProblem], ASGIApp],
    ) -> None:  # fmt: skip
        self._app = app
        settings = context.settings
        self._limits = settings.limits
        self._large_bodies = context.large_bodies
        self._accounts = accounts
        self._answer = answer
        self._names = names_of_machine(host, settings.allowed_hosts)
        self._is_open = accounts is None and not is_tls
        """Whether the server accepts every client. Then it must not trust the `Host` header."""
        self._attempts: ByAddress[asyncio.Future[Principal | None]] = ByAddress()
        """Attempts to log in whose password is being verified or waits to be verified."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, authenticate its sender and run the application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket
            await send({"type": "websocket.close", "code": 1002})
            return
        send = _with_headers(send)
        memory = scope[REQUEST_MEMORY] = RequestMemory(self._large_bodies)
        try:
            headers = Headers(scope=scope)
            # The health check reveals nothing, and load balancers request it by host names of their own.
            if scope["path"] != HEALTH:
                self._check_name(headers)
            _check_cross_site(scope, headers)
            self._check_size(headers)
            body_headers = read_headers(headers.raw)
            coding = content_coding(body_headers)
            body = verify_digests(self._bounded(receive), body_headers)
            scope[PRINCIPAL] = await self._admit(scope, headers)
        except HttpProblem as problem:
            await self._answer(scope, problem)(scope, receive, send)
            return
        if coding is not None:
            body = decompress(body, coding, memory, self._limits.request_bytes)
        try:
            await self._app(scope, body, send)
        finally:
            memory.release()

    def _check_name(self, headers: Headers) -> None:
        asked = headers.get("host", "")
        if self._is_open and not is_own_name(asked, self._names):
            raise HttpProblem(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"host name {asked!r} is not accepted without authentication; use a name of this machine, or allow"
                " the name with --allowed-host",
            )

    def _check_size(self, headers: Headers) -> None:
        given = headers.get("content-length", "0")
        if given.isascii() and given.isdecimal() and int(given) > self._limits.request_bytes:
            raise too_large(self._limits.request_bytes)

    def _bounded(self, receive: Receive) -> Receive:
        received_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > self._limits.request_bytes:
                raise too_large(self._limits.request_bytes)
            return message

        return receive_bounded

    async def _admit(self, scope: Scope, headers: Headers) -> Principal:
        if scope["path"] == HEALTH:  # the health check is public
            return ANONYMOUS
        principal = await self._authenticate(scope, headers)
        slot: ConnectionSlot | None = scope.get(CONNECTION_SLOT)
        if slot is not None:
            slot.admit()
        return principal

    async def _authenticate(self, scope: Scope, headers: Headers) -> Principal:
        by_certificate: Principal | None = scope.get(TLS_PRINCIPAL)
        if self._accounts is None:
            return by_certificate or ANONYMOUS
        header = headers.get("authorization", "")
        if not header:
            raise _unauthorized("authentication required: send a user name and a password (HTTP Basic)")
        cached_principal = self._accounts.cached_principal(header)
        if cached_principal is not None:
            return cached_principal
        host = scope["client"][0] if scope.get("client") else ""
        found = await self._log_in(self._accounts, header, host)
        if found is None:
            await asyncio.sleep(_FAILED_DELAY_S)
            logger.warning("authentication failed for a client at %s", host or "an unknown address")
            raise _unauthorized("invalid user name or password")
        return found

    async def _log_in(self, accounts: Accounts, header: str, host: str) -> Principal | None:
        """Wait for this attempt's turn, and verify its password. An address with many attempts delays only itself."""
        attempt = asyncio.ensure_future(accounts.verify_in_thread(header))
        self._attempts.add(attempt, host)
        if len(self._attempts) > self._limits.log_ins_waiting:
            refused = self._attempts.newest()
            if refused is not None:
                self._attempts.discard(refused)
                refused.cancel()
        try:
            await asyncio.wait((attempt,))
        finally:
            self._attempts.discard(attempt)
            attempt.cancel()  # stops it if the client disconnected
        if attempt.cancelled():
            raise HttpProblem(HTTPStatus.SERVICE_UNAVAILABLE, "too many clients are logging in; retry in 1 s",
                              headers={"retry-after": "1"})  # fmt: skip
        return attempt.result()


def _check_cross_site(scope: Scope, headers: Headers) -> None:
    """Raise `HttpProblem` (403) if the headers show that a browser sends the request for a page of another site."""
    is_foreign = is_cross_site(headers.get("sec-fetch-site"), headers.get("origin"), headers.get("host", ""))
    follows_link = (
        scope["method"] in _SAFE
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and (scope["path"] == "/" or scope["path"] == PAGES or scope["path"].startswith(f"{PAGES}/"))
    )
    if is_foreign and not follows_link:
        raise HttpProblem(HTTPStatus.FORBIDDEN, "refused: a web page of another site sent this request")


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_with_headers


def _unauthorized(message: str) -> HttpProblem:
    return HttpProblem(
        HTTPStatus.UNAUTHORIZED, message, headers={"www-authenticate": 'Basic realm="segmentlog", charset="UTF-8"'}
    )
