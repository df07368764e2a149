"""How pages are made: templates, addresses, and who may see what."""

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
from segmentlog.http.console.forms import Form, number, read_form
from segmentlog.http.console.topic_overview import Look, Survey
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.middleware import PAGES
from segmentlog.quantities import format_duration_ms, format_size
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.texts import visible

if TYPE_CHECKING:
    from segmentlog.http.context import Site
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

Page = Callable[[Request], Response]

_STATIC: Final = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_YEAR: Final = "public, max-age=31536000, immutable"
# What a page says after it was sent away to by a form, by the word in its address.
_DONE: Final = {
    "altered": "The configuration was changed.",
    "unchanged": "Nothing was changed: every value is as it was.",
    "deleted": "The topic was deleted.",
    "reset": "The positions were moved.",
    "aborted": "The transaction was aborted, and its producer fenced.",
    "ended": "There was no open transaction left to abort.",
}


class Console:
    """What all pages share. Thread-safe."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.store = site.store
        clock = Clock()
        self.now_ms = clock.now_ms
        self.survey = Survey(site.store, clock, lambda: self.is_closing)
        self.lags = LagHistory()
        self._files = {name: _read_static(name) for name in _STATIC}
        self._templates = _templates()
        self._templates.filters["told"] = lambda text: visible(site.told(str(text)))
        self._templates.globals["static"] = {
            name: f"{PAGES}/static/{name}?{hashlib.sha256(data).hexdigest()[:12]}" for name, data in self._files.items()
        }

    # ------------------------------------------------------------ answers

    def render(self, request: Request, template: str, status: int = HTTPStatus.OK, /, **values: Any) -> Response:
        """A page. What goes into it is escaped by the template."""
        params = request.query_params
        text = self._templates.get_template(template).render(
            allow_writes=self.site.allow_writes,
            params=params,
            done=_DONE.get(params.get("done", "")),
            **values,
        )
        # The next look at everything is made when this one is on its way.
        again = BackgroundTask(self.look_ahead) if self.survey.is_due() else None
        return HTMLResponse(text, status, background=again)

    def look_ahead(self) -> None:
        """Look at everything, so that whoever comes next finds that done."""
        try:
            self.survey.refresh()
        except (SegmentlogError, OSError) as error:  # who asks next is told
            logger.debug("cannot look at the topics: %s", error)

    def problem(self, request: Request, error: BaseException) -> Response:
        """The page that says what is wrong."""
        problem = self.site.problem_of(error)
        if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("%s %s", request.method, request.url.path, exc_info=error)
        answer = self.render(
            request, "problem.html", problem.status, message=problem.message, title=_title_of(problem.status), nav=""
        )
        answer.headers.update(problem.headers)
        return answer

    def route(self, path: str, page: Page) -> Route:
        """A page to look at."""

        @functools.wraps(page)
        def endpoint(request: Request) -> Response:
            try:
                return page(request)
            except (SegmentlogError, OSError) as error:
                return self.problem(request, error)

        return Route(path, endpoint, methods=["GET"])

    def form(self, path: str, answer: Callable[[Request, Form], Response]) -> Route:
        """Where a form is sent to; ``answer`` is called in a thread."""

        def in_thread(request: Request, form: Form) -> Response:
            try:
                return answer(request, form)
            except (SegmentlogError, OSError) as error:
                return self.problem(request, error)

        async def endpoint(request: Request) -> Response:
            try:
                self.site.check_writes()  # before anything of it is read
                form = await read_form(request)
            except SegmentlogError as error:
                return await run_in_threadpool(self.problem, request, error)
            return await run_in_threadpool(in_thread, request, form)

        return Route(path, endpoint, methods=["POST"])

    def nowhere(self, request: Request) -> Response:
        """Below the console's path, and no page."""
        return self.problem(request, HttpProblem(HTTPStatus.NOT_FOUND, "there is no such page"))

    @property
    def is_closing(self) -> bool:
        """Whether what goes on for ever is to end."""
        return self.site.is_closing or self.store.is_closed

    def static(self, request: Request) -> Response:
        """A file that pages refer to; its address changes with what is in it."""
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return Response(self._files[name], media_type=_STATIC[name], headers={"cache-control": _YEAR})

    # ------------------------------------------------------------ who may see what

    def topic(self, request: Request, operation: Operation = Operation.DESCRIBE) -> Topic:
        """The topic of the address. Raises `UnknownTopic`, `Forbidden`."""
        self.check_topic(request, operation)
        return self.store.topic(request.path_params["topic"])

    def check_topic(self, request: Request, operation: Operation) -> None:
        """Raises `Forbidden` unless who asks may do that to the topic of the address."""
        self.site.check(request, operation, ResourceType.TOPIC, request.path_params["topic"])

    def may_topic(self, request: Request, name: str) -> bool:
        """Whether who asks may see a topic."""
        return self.may_see(request, Thing.TOPIC, name)

    def may_see(self, request: Request, thing: Thing, name: str = "") -> bool:
        """Whether who asks may see the thing of this name."""
        return self.site.may_see(request, thing, name)

    def place(self, request: Request) -> str | None:
        """The store's folder or URL, for those who may see the cluster; None for others."""
        if not self.may_see(request, Thing.CLUSTER):
            return None
        return self.store.url or os.path.abspath(self.store.path)

    def command(self, request: Request, *words: object) -> str:
        """A line for the shell: the command line's program with these words, and ``--dir`` for those who may see it."""
        place = self.place(request)
        return formatting.command(*words, *(() if place is None else ("--dir", place)))

    def may_write(self, request: Request, operation: Operation, resource: ResourceType, name: str) -> bool:
        """Whether there is to be a form for that."""
        return self.site.allow_writes and self.site.allows(request, operation, resource, name)

    def check_write(self, request: Request, operation: Operation, resource: ResourceType, name: str) -> None:
        """Raises `Forbidden`."""
        self.site.check_writes()
        self.site.check(request, operation, resource, name)

    def look(self) -> Look:
        """All topics, as of a moment ago."""
        return self.survey.look()


def away(path: str, /, **params: object) -> Response:
    """To the page that shows what a form has done."""
    return RedirectResponse(address(path, **params), HTTPStatus.SEE_OTHER)


def address(path: str, /, **params: object) -> str:
    """The address of a page below the console's own; parameters that are None or empty are left out."""
    given = {name: str(value) for name, value in params.items() if value is not None and value != ""}
    return f"{PAGES}{path}" + (f"?{urlencode(given, errors='surrogateescape')}" if given else "")


def topic_address(name: str, below: str = "", /, **params: object) -> str:
    """The address of a topic's page."""
    return address(f"/topics/{quote(name, safe='')}{below}", **params)


class Paging:
    """Some of a list, and where the others are."""

    def __init__(self, request: Request, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.last = max((count - 1) // size, 0) + 1
        self.page = number(request.query_params.get("page", ""), 1, 1, self.last)
        self.begin = (self.page - 1) * size
        self.end = min(self.begin + size, count)
        self._given = dict(request.query_params)
        self._path = request.url.path

    def address(self, page: int) -> str:
        """Of another one."""
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
        size=format_size,
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
        HTTPStatus.CONFLICT: "Not now",
        HTTPStatus.SERVICE_UNAVAILABLE: "Not now",
    }.get(HTTPStatus(status), "That did not work")
