"""The store, the settings and the access rules that every page and every API of an HTTP server uses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from starlette.requests import HTTPConnection

from segmentlog.http.error_responses import Forbidden, HttpProblem, problem_of
from segmentlog.http.large_bodies import LargeBodies
from segmentlog.http.settings import HttpSettings
from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.security.principals import ANONYMOUS, CLUSTER_NAME, Operation, Principal, ResourceType
from segmentlog.security.viewer import Thing, Viewer

if TYPE_CHECKING:
    from segmentlog.store import LogStore

PRINCIPAL: Final = "segmentlog.principal"
"""Key of the ASGI scope that holds the authenticated `Principal`."""
_LARGE_AT_A_TIME: Final = 4
"""The memory for large bodies is this many times the maximum size of a body."""
_STORE: Final = "the store"
READ_ONLY: Final = "this server is read-only: nothing was changed; start it with --allow-writes"


class HttpContext:
    """Store, settings and access rules of one HTTP server. Thread-safe. The caller closes the store."""

    def __init__(
        self, store: LogStore, settings: HttpSettings | None = None, authorizer: Authorizer | None = None
    ) -> None:
        self.store = store
        self.settings = settings or HttpSettings()
        self.authorizer = authorizer or OpenAuthorizer()
        self.large_bodies = LargeBodies(_LARGE_AT_A_TIME * self.settings.limits.request_bytes)
        self.is_closing = False
        """Whether the server is closing. Long responses check it at least once a second, and end."""

    def redact_paths(self, text: str) -> str:
        """Return the text without the folder and URLs of the store: clients must not learn them."""
        for location in self._store_locations():
            # Only where a path begins: a group called etl/data does not refer to a store in /data.
            pattern = rf"(?<![\w.-]){re.escape(location)}(/|(?![\w-]))"
            text = re.sub(pattern, lambda match: "" if match[1] else _STORE, text)
        return text

    def problem_of(self, error: BaseException) -> HttpProblem:
        """Return the problem to answer an error with, without the store's paths."""
        return self.redact_problem(problem_of(error))

    def redact_problem(self, problem: HttpProblem) -> HttpProblem:
        """Remove the store's paths from a problem, and return it."""
        problem.message = self.redact_paths(problem.message)
        return problem

    def _store_locations(self) -> list[str]:
        """Return the store's folder and URLs, longest first: one may contain another."""
        store = self.store
        locations = {(location or "").rstrip("/") for location in (store.path, store.url, store.shipping.url)}
        return sorted((location for location in locations if location), key=len, reverse=True)

    @property
    def allow_writes(self) -> bool:
        """Whether clients may change the store: both the server and the store must allow it."""
        return self.settings.allow_writes and not self.store.read_only

    def principal(self, request: HTTPConnection) -> Principal:
        """Return the principal that sent the request."""
        principal = request.scope.get(PRINCIPAL, ANONYMOUS)
        assert isinstance(principal, Principal)
        return principal

    def limit_for(self, principal: Principal, total: int) -> int:
        """Return how much of ``total`` one principal may use: a quarter if clients authenticate, otherwise all."""
        return total if principal == ANONYMOUS else -(-total // 4)

    def allows(
        self, request: HTTPConnection, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME
    ) -> bool:
        """Return whether the sender of the request may perform the operation on the named resource."""
        return self.viewer(request).allows(operation, resource, name)

    def may_see(self, request: HTTPConnection, thing: Thing, name: str = "") -> bool:
        """Return whether the sender of the request may see the named thing."""
        return self.viewer(request).may_see(thing, name)

    def viewer(self, request: HTTPConnection) -> Viewer:
        """Return the sender of the request together with the access rules."""
        return Viewer(self.authorizer, self.principal(request), _host(request))

    def check(
        self, request: HTTPConnection, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME
    ) -> None:
        """Raise `Forbidden` if the sender of the request may not perform the operation."""
        if not self.allows(request, operation, resource, name):
            name_text = "the cluster" if resource is ResourceType.CLUSTER else f"{_readable(resource)} {name!r}"
            raise Forbidden(f"{self.principal(request)} may not {_readable(operation)} {name_text}")

    def check_writes(self) -> None:
        """Raise `Forbidden` unless the server and the store allow changes."""
        if not self.allow_writes:
            raise Forbidden("the store is read-only: nothing was changed" if self.store.read_only else READ_ONLY)


def _host(request: HTTPConnection) -> str:
    return request.client.host if request.client is not None else ""


def _readable(word: Operation | ResourceType) -> str:
    return word.name.lower().replace("_", " ")
