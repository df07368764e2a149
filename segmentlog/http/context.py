"""What every page and every API is given: the store, and who may do what with it."""

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
"""Under this key the scope of a request has who sent it."""
_LARGE_AT_A_TIME: Final = 4
"""Bodies of the largest size, or as many bytes in more that are smaller."""
_STORE: Final = "the store"
READ_ONLY: Final = "this door is read-only: start it with --allow-writes"


class Site:
    """One store, behind one door. Thread-safe. The store stays its caller's."""

    def __init__(
        self, store: LogStore, settings: HttpSettings | None = None, authorizer: Authorizer | None = None
    ) -> None:
        self.store = store
        self.settings = settings or HttpSettings()
        self.authorizer = authorizer or OpenAuthorizer()
        self.large_bodies = LargeBodies(_LARGE_AT_A_TIME * self.settings.limits.request_bytes)
        self.is_closing = False
        """Whether the door is being closed: answers that go on for long end then. They look within a second."""

    def told(self, text: str) -> str:
        """A text without the place where the store lies: that is nobody's business who does not run it."""
        for place in self._places():
            # Where a path begins: a store in /data is not meant by a group that is called etl/data.
            found = rf"(?<![\w.-]){re.escape(place)}(/|(?![\w-]))"
            text = re.sub(found, lambda match: "" if match[1] else _STORE, text)
        return text

    def problem_of(self, error: BaseException) -> HttpProblem:
        """What an error is answered with, without that place."""
        return self.without_place(problem_of(error))

    def without_place(self, problem: HttpProblem) -> HttpProblem:
        """The same problem, without that place."""
        problem.message = self.told(problem.message)
        return problem

    def _places(self) -> list[str]:
        """The longest first: one may lie in another."""
        store = self.store
        places = {(place or "").rstrip("/") for place in (store.path, store.url, store.shipping.url)}
        return sorted((place for place in places if place), key=len, reverse=True)

    @property
    def allow_writes(self) -> bool:
        """Whether people may change something here, and the store lets them."""
        return self.settings.allow_writes and not self.store.read_only

    def principal(self, request: HTTPConnection) -> Principal:
        """Who asks."""
        found = request.scope.get(PRINCIPAL, ANONYMOUS)
        assert isinstance(found, Principal)
        return found

    def share(self, principal: Principal, of_all: int) -> int:
        """Of what there is for all, what one may have: a quarter, where people say who they are."""
        return of_all if principal == ANONYMOUS else -(-of_all // 4)

    def allows(
        self, request: HTTPConnection, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME
    ) -> bool:
        """Whether who asks may do that to the resource of this name."""
        return self.viewer(request).allows(operation, resource, name)

    def may_see(self, request: HTTPConnection, thing: Thing, name: str = "") -> bool:
        """Whether who asks may see the thing of this name."""
        return self.viewer(request).may_see(thing, name)

    def viewer(self, request: HTTPConnection) -> Viewer:
        """Who asks, and what the rules let them see."""
        return Viewer(self.authorizer, self.principal(request), _host(request))

    def check(
        self, request: HTTPConnection, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME
    ) -> None:
        """Raises `Forbidden` where `allows` says no."""
        if not self.allows(request, operation, resource, name):
            what = "the cluster" if resource is ResourceType.CLUSTER else f"{_words(resource)} {name!r}"
            raise Forbidden(f"{self.principal(request)} may not {_words(operation)} {what}")

    def check_writes(self) -> None:
        """Raises `Forbidden` unless people may change something here."""
        if not self.allow_writes:
            raise Forbidden("the store is read-only" if self.store.read_only else READ_ONLY)


def _host(request: HTTPConnection) -> str:
    return request.client.host if request.client is not None else ""


def _words(word: Operation | ResourceType) -> str:
    return word.name.lower().replace("_", " ")
