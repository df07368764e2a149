"""What stands before every page and every API: who is let in, from where, with how much; and what browsers are told.

its name     where nobody has to say who he is, only names of this machine are answered to: a page elsewhere could
             have its own name resolve to this address, and read what is here in its visitor's browser
cross-site   what a browser sends on behalf of a page that is not ours is refused, but for following a link
who          name and password, or the certificate that TLS has checked; without either, whoever got here
how much     bodies end at a size, as sent and once decompressed
what         headers that change what a body means are honoured or refused: `body_headers`
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders

from segmentlog.http.admission import PLACE, Place
from segmentlog.http.body_headers import content_coding, read_headers, verified
from segmentlog.http.content_coding import decompressed
from segmentlog.http.context import PRINCIPAL, Site
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.large_bodies import ROOM, RequestRoom, too_large
from segmentlog.security.address_limits import ByAddress
from segmentlog.security.cross_site import is_cross_site, is_own_name, names_of_machine
from segmentlog.security.principals import ANONYMOUS, Principal

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from segmentlog.http.accounts import Accounts

logger = logging.getLogger("segmentlog.http")

TLS_PRINCIPAL: Final = "segmentlog.tls_principal"
"""Under this key the scope has whose certificate TLS has checked; set by the connection."""
PAGES: Final = "/ui"
"""Below this path are pages for people; everything else is for programs."""
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


class Guard:
    """Around an application. ``answer`` renders a refusal."""

    def __init__(
        self, app: ASGIApp, site: Site, accounts: Accounts | None, host: str, is_tls: bool,
        answer: Callable[[Scope, HttpProblem], ASGIApp],
    ) -> None:  # fmt: skip
        self._app = app
        settings = site.settings
        self._limits = settings.limits
        self._large_bodies = site.large_bodies
        self._accounts = accounts
        self._answer = answer
        self._names = names_of_machine(host, settings.allowed_hosts)
        self._is_open = accounts is None and not is_tls
        """Whoever reaches us is let in: then a browser that was misled is, too."""
        self._attempts: ByAddress[asyncio.Future[Principal | None]] = ByAddress()
        """Passwords that are tried, or wait for that."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket
            await send({"type": "websocket.close", "code": 1002})
            return
        send = _with_headers(send)
        room = scope[ROOM] = RequestRoom(self._large_bodies)
        try:
            headers = Headers(scope=scope)
            if scope["path"] != HEALTH:  # which tells nothing, and balancers ask for it by names of theirs
                self._check_name(headers)
            _check_site(scope, headers)
            self._check_size(headers)
            of_body = read_headers(headers.raw)
            coding = content_coding(of_body)
            body = verified(self._bounded(receive), of_body)
            scope[PRINCIPAL] = await self._let_in(scope, headers)
        except HttpProblem as problem:
            await self._answer(scope, problem)(scope, receive, send)
            return
        if coding is not None:
            body = decompressed(body, coding, room, self._limits.request_bytes)
        try:
            await self._app(scope, body, send)
        finally:
            room.release()

    def _check_name(self, headers: Headers) -> None:
        asked = headers.get("host", "")
        if self._is_open and not is_own_name(asked, self._names):
            raise HttpProblem(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"{asked!r} is no name of this machine: --allowed-host adds one",
            )

    def _check_size(self, headers: Headers) -> None:
        given = headers.get("content-length", "0")
        if given.isascii() and given.isdecimal() and int(given) > self._limits.request_bytes:
            raise too_large(self._limits.request_bytes)

    def _bounded(self, receive: Receive) -> Receive:
        taken = 0

        async def receive_bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limits.request_bytes:
                raise too_large(self._limits.request_bytes)
            return message

        return receive_bounded

    async def _let_in(self, scope: Scope, headers: Headers) -> Principal:
        if scope["path"] == HEALTH:  # tells nobody anything, so it needs neither a log-in nor a place for one
            return ANONYMOUS
        who = await self._who(scope, headers)
        place: Place | None = scope.get(PLACE)
        if place is not None:
            place.let_in()
        return who

    async def _who(self, scope: Scope, headers: Headers) -> Principal:
        by_certificate: Principal | None = scope.get(TLS_PRINCIPAL)
        if self._accounts is None:
            return by_certificate or ANONYMOUS
        header = headers.get("authorization", "")
        if not header:
            raise _unknown("say who you are, with a name and a password")
        known = self._accounts.known(header)
        if known is not None:
            return known
        host = scope["client"][0] if scope.get("client") else ""
        found = await self._log_in(self._accounts, header, host)
        if found is None:
            await asyncio.sleep(_FAILED_DELAY_S)
            logger.warning("%s: authentication failed", host or "?")
            raise _unknown("invalid name or password")
        return found

    async def _log_in(self, accounts: Accounts, header: str, host: str) -> Principal | None:
        """Verify a password, in turn. An address that tries many keeps only itself waiting."""
        attempt = asyncio.ensure_future(accounts.verify_aside(header))
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
            attempt.cancel()  # where its client has gone
        if attempt.cancelled():
            raise HttpProblem(HTTPStatus.SERVICE_UNAVAILABLE, "too many log in at this moment: try again",
                              headers={"retry-after": "1"})  # fmt: skip
        return attempt.result()


def _check_site(scope: Scope, headers: Headers) -> None:
    """Browsers say on whose behalf a request is; programs say nothing, and are no browsers."""
    is_foreign = is_cross_site(headers.get("sec-fetch-site"), headers.get("origin"), headers.get("host", ""))
    follows_link = (
        scope["method"] in _SAFE
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and (scope["path"] == "/" or scope["path"] == PAGES or scope["path"].startswith(f"{PAGES}/"))
    )
    if is_foreign and not follows_link:
        raise HttpProblem(HTTPStatus.FORBIDDEN, "a page of another site may not ask for this")


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_with_headers


def _unknown(message: str) -> HttpProblem:
    return HttpProblem(
        HTTPStatus.UNAUTHORIZED, message, headers={"www-authenticate": 'Basic realm="segmentlog", charset="UTF-8"'}
    )
