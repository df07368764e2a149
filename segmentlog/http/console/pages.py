"""State and helpers shared by the console's pages: templates, addresses, routes and access checks."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

import jinja2
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from segmentlog.clock import Clock
from segmentlog.errors import SegmentlogError
from segmentlog.http.console import formatting
from segmentlog.http.console.charts import LagHistory
from segmentlog.http.console.forms import Form, parse_number, read_form
from segmentlog.http.console.topic_overview import OverviewCache, StoreOverview
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.middleware import PAGES
from segmentlog.quantities import format_duration_ms
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.texts import visible

if TYPE_CHECKING:
    from segmentlog.http.context import HttpContext
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

Page = Callable[[Request], Response]

_STATIC: Final = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_COUNTED_MAX: Final = 1000
"""With an ACL file and more topics, groups and producers than this, the navigation shows no counts."""
_YEAR: Final = "public, max-age=31536000, immutable"
# Messages on the page after a form, by the `done` parameter of its address.
_DONE: Final = {
    "altered": "Configuration changed.",
    "unchanged": "No changes: all values are as before.",
    "deleted": "Topic deleted.",
    "reset": "Committed offsets changed.",
    "aborted": "Transaction aborted, and its producer fenced.",
    "ended": "Nothing to abort: the transaction had already ended.",
}


class Console:
    """Templates, caches and access checks that all pages of the console share. Thread-safe."""

    def __init__(self, context: HttpContext) -> None:
        self.context = context
        self.store = context.store
        clock = Clock()
        self.now_ms = clock.now_ms
        self.overviews = OverviewCache(context.store, clock, lambda: self.is_closing)
        self.lags = LagHistory()
        self._named: tuple[StoreOverview, list[str], list[str]] | None = None
        """An overview, and the groups and the producers with an open transaction at that time."""
        self._files = {name: _read_static(name) for name in _STATIC}
        self._templates = _templates()
        self._templates.filters["redacted"] = lambda text: visible(context.redact_paths(str(text)))
        self._templates.globals["static"] = {
            name: f"{PAGES}/static/{name}?{hashlib.sha256(data).hexdigest()[:12]}" for name, data in self._files.items()
        }

    # ------------------------------------------------------------ responses

    def render(self, request: Request, template: str, status: int = HTTPStatus.OK, /, **values: Any) -> Response:
        """Return a page. The template escapes all values."""
        params = request.query_params
        text = self._templates.get_template(template).render(
            allow_writes=self.context.allow_writes,
            params=params,
            done=_DONE.get(params.get("done", "")),
            counts=self._counts(request),
            **values,
        )
        # Refresh the overview once the response is sent.
        refresh = BackgroundTask(self.refresh_overview) if self.overviews.is_stale() else None
        return HTMLResponse(text, status, background=refresh)

    def _counts(self, request: Request) -> dict[str, int]:
        """Return the counts for the navigation, limited to things that the principal may see.

        The counts are as old as the cached overview. With an ACL file and many topics, counting would take too long,
        and the counts are omitted.
        """
        overview = self.overviews.latest
        if overview is None:
            return {}
        try:
            if self._named is None or self._named[0] is not overview:
                open_producers = [name for name, state in self.store.transactions.states().items() if state.is_open]
                self._named = (overview, self.store.groups.names(), open_producers)
        except (SegmentlogError, OSError):
            return {}
        _, groups, open_producers = self._named
        topics = [topic for topic in overview.topics.values() if not topic.is_internal]
        if not self.context.authorizer.is_open:
            if len(topics) + len(groups) + len(open_producers) > _COUNTED_MAX:
                return {}
            topics = [topic for topic in topics if self.may_see_topic(request, topic.name)]
            groups = [name for name in groups if self.may_see(request, Thing.GROUP, name)]
            open_producers = [name for name in open_producers if self.may_see(request, Thing.TRANSACTIONAL_ID, name)]
        return {
            "topics": len(topics),
            "groups": len(groups),
            "transactions": len(open_producers),
            "damage": sum(topic.severity > 0 for topic in topics),
        }

    def refresh_overview(self) -> None:
        """Refresh the cached overview so that the next page need not wait for it."""
        try:
            self.overviews.refresh()
        except (SegmentlogError, OSError) as error:  # the next request for the overview gets the error
            logger.debug("console: cannot refresh the overview of topics: %s", error)

    def problem(self, request: Request, error: BaseException) -> Response:
        """Return the page that shows an error."""
        problem = self.context.problem_of(error)
        if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("%s %s", request.method, request.url.path, exc_info=error)
        answer = self.render(
            request, "problem.html", problem.status, message=problem.message, title=_title_of(problem.status), nav=""
        )
        answer.headers.update(problem.headers)
        return answer

    def route(self, path: str, page: Page) -> Route:
        """Return the route of a page."""

        @functools.wraps(page)
        def endpoint(request: Request) -> Response:
            try:
                return page(request)
            except (SegmentlogError, OSError) as error:
                return self.problem(request, error)

        return Route(path, endpoint, methods=["GET"])

    def form(self, path: str, answer: Callable[[Request, Form], Response]) -> Route:
        """Return the route that a form is sent to; ``answer`` runs in a thread."""

        def in_thread(request: Request, form: Form) -> Response:
            try:
                return answer(request, form)
            except (SegmentlogError, OSError) as error:
                return self.problem(request, error)

        async def endpoint(request: Request) -> Response:
            try:
                self.context.check_writes()  # before the body is read
                form = await read_form(request)
            except SegmentlogError as error:
                return await run_in_threadpool(self.problem, request, error)
            return await run_in_threadpool(in_thread, request, form)

        return Route(path, endpoint, methods=["POST"])

    def not_found(self, request: Request) -> Response:
        """Answer an unknown path below the console."""
        return self.problem(request, HttpProblem(HTTPStatus.NOT_FOUND, "the console has no such page"))

    @property
    def is_closing(self) -> bool:
        """Whether endless responses must end."""
        return self.context.is_closing or self.store.is_closed

    def static(self, request: Request) -> Response:
        """Return a static file. Its address contains a hash of its content."""
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return Response(self._files[name], media_type=_STATIC[name], headers={"cache-control": _YEAR})

    # ------------------------------------------------------------ access

    def topic(self, request: Request, operation: Operation = Operation.DESCRIBE) -> Topic:
        """Return the topic of the request. Raises `UnknownTopic`, `Forbidden`."""
        self.check_topic(request, operation)
        return self.store.topic(request.path_params["topic"])

    def check_topic(self, request: Request, operation: Operation) -> None:
        """Raise `Forbidden` if the principal may not perform the operation on the topic of the request."""
        self.context.check(request, operation, ResourceType.TOPIC, request.path_params["topic"])

    def may_see_topic(self, request: Request, name: str) -> bool:
        """Return whether the principal may see a topic."""
        return self.may_see(request, Thing.TOPIC, name)

    def may_see(self, request: Request, thing: Thing, name: str = "") -> bool:
        """Return whether the principal may see the named thing."""
        return self.context.may_see(request, thing, name)

    def store_location(self, request: Request) -> str | None:
        """Return the store's folder or URL, if the principal may see the cluster."""
        if not self.may_see(request, Thing.CLUSTER):
            return None
        return self.store.url or os.path.abspath(self.store.path)

    def command(self, request: Request, *words: object) -> str:
        """Return the equivalent `segmentlog` command, with ``--dir`` for principals that may see the store's folder."""
        store_location = self.store_location(request)
        return formatting.command(*words, *(() if store_location is None else ("--dir", store_location)))

    def may_write(self, request: Request, operation: Operation, resource: ResourceType, name: str) -> bool:
        """Return whether the principal may perform a change, so that the page shows its form."""
        return self.context.allow_writes and self.context.allows(request, operation, resource, name)

    def check_write(self, request: Request, operation: Operation, resource: ResourceType, name: str) -> None:
        """Raise `Forbidden` if the principal may not perform a change."""
        self.context.check_writes()
        self.context.check(request, operation, resource, name)

    def overview(self) -> StoreOverview:
        """Return the cached overview of all topics."""
        return self.overviews.current()


def redirect_after_post(path: str, /, **params: object) -> Response:
    """Redirect to the page that shows the result of a form."""
    return RedirectResponse(address(path, **params), HTTPStatus.SEE_OTHER)


def address(path: str, /, **params: object) -> str:
    """Return the address of a page of the console. Parameters that are None or empty are omitted."""
    given = {name: str(value) for name, value in params.items() if value is not None and value != ""}
    return f"{PAGES}{path}" + (f"?{urlencode(given, errors='surrogateescape')}" if given else "")


def topic_address(name: str, below: str = "", /, **params: object) -> str:
    """Return the address of a page about a topic."""
    return address(f"/topics/{quote(name, safe='')}{below}", **params)


class Paging:
    """One page of a list, and the addresses of the other pages."""

    def __init__(self, request: Request, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.last = max((count - 1) // size, 0) + 1
        self.page = parse_number(request.query_params.get("page", ""), 1, 1, self.last)
        self.begin = (self.page - 1) * size
        self.end = min(self.begin + size, count)
        self._given = dict(request.query_params)
        self._path = request.url.path

    def address(self, page: int) -> str:
        """Return the address of another page of the list."""
        given = {**self._given, "page": str(page)}
        given.pop("done", None)
        return f"{self._path}?{urlencode(given, errors='surrogateescape')}"


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("segmentlog.http.console"), autoescape=True, auto_reload=False,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        num=lambda amount: f"{amount:,}",
        count=formatting.count,
        size=formatting.size,
        duration=format_duration_ms,
        seconds=formatting.seconds,
        rate=formatting.rate,
        utc=formatting.utc,
        quoted=lambda text: quote(text, safe=""),
        visible=lambda text: visible(str(text)),
    )
    environment.globals.update(address=address, topic_address=topic_address)
    environment.globals["m"] = environment.get_template("macros.html").module
    return environment


def _read_static(name: str) -> bytes:
    return (resources.files("segmentlog.http.console") / "static" / name).read_bytes()


def _title_of(status: int) -> str:
    return {
        HTTPStatus.FORBIDDEN: "Not allowed",
        HTTPStatus.NOT_FOUND: "Not found",
        HTTPStatus.CONFLICT: "Conflict",
        HTTPStatus.SERVICE_UNAVAILABLE: "Try again later",
    }.get(HTTPStatus(status), "Request failed")
