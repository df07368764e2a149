"""The application: what the doors behind it answer to, and how problems are told."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from segmentlog.errors import SegmentlogError
from segmentlog.http import console
from segmentlog.http.console.schema_decoding import decoding_by
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.middleware import HEALTH, PAGES, Guard
from segmentlog.http.registry.registry_routes import routes as registry_routes
from segmentlog.http.rest import rest_routes as rest
from segmentlog.schemas.any_values import document_decoder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Scope

    from segmentlog.http.accounts import Accounts
    from segmentlog.http.console import Console
    from segmentlog.http.context import Site

logger = logging.getLogger("segmentlog.http")


def make_app(
    pages: Console, accounts: Accounts | None = None, *, host: str = "127.0.0.1", is_tls: bool = False
) -> ASGIApp:
    """All doors behind their guard: ``pages``, and what their site has for programs. ``host`` is where it listens."""
    site = pages.site

    async def on_error(request: Request, error: Exception) -> Response:
        return await _on_error(site, request, error)

    app = Starlette(
        routes=_routes(pages),
        exception_handlers={
            HTTPException: _on_http,
            SegmentlogError: on_error,
            OSError: on_error,
            Exception: on_error,
        },
    )
    app.router.redirect_slashes = False
    return Guard(app, site, accounts, host, is_tls, _render)


def _routes(pages: Console) -> list[BaseRoute]:
    site = pages.site

    def home(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{PAGES}/")
        return JSONResponse({})  # what programs ask for to see whether there is anybody

    async def health(request: Request) -> Response:
        if site.store.is_closed:
            return PlainTextResponse("the store is closed\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return PlainTextResponse("ok\n")

    return [
        Route("/", home),
        Route(HEALTH, health),
        Route(PAGES, lambda request: RedirectResponse(f"{PAGES}/")),
        Mount(PAGES, routes=console.routes(pages, decoding_by(site), document_decoder(site.store.schemas))),
        *registry_routes(site),
        *rest.routes(site),
    ]


# ------------------------------------------------------------ problems


def _render(scope: Scope, problem: HttpProblem) -> Response:
    """For people a page, for programs JSON."""
    path = scope["path"]
    if path == PAGES or path.startswith(f"{PAGES}/"):
        return PlainTextResponse(f"{problem.message}\n", problem.status, headers=problem.headers)
    return JSONResponse(
        {"error_code": problem.error_code, "message": problem.message}, problem.status, headers=problem.headers
    )


async def _on_http(request: Request, error: Exception) -> Response:
    """What the router says: there is no such path, or no such method."""
    assert isinstance(error, HTTPException)
    return _render(request.scope, HttpProblem(error.status_code, error.detail, headers=error.headers))


async def _on_error(site: Site, request: Request, error: Exception) -> Response:
    problem = site.problem_of(error)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        # The path as it came: names of topics are in it, values of records never are.
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
    return _render(request.scope, problem)
