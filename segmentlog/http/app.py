"""The ASGI application: console, registry and REST routes inside the middleware, and the rendering of errors."""

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
from segmentlog.http.console.schema_decoding import schema_decoder
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.middleware import HEALTH, PAGES, Middleware
from segmentlog.http.registry.registry_routes import routes as registry_routes
from segmentlog.http.rest import rest_routes as rest
from segmentlog.schemas.any_values import document_decoder

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Scope

    from segmentlog.http.accounts import Accounts
    from segmentlog.http.console import Console
    from segmentlog.http.context import HttpContext

logger = logging.getLogger("segmentlog.http")


def make_app(
    console_pages: Console, accounts: Accounts | None = None, *, host: str = "127.0.0.1", is_tls: bool = False
) -> ASGIApp:
    """Return the application that serves the console, the registry and REST.

    ``host`` is the address that the server listens on: without authentication only its names are accepted.
    """
    context = console_pages.context

    async def on_error(request: Request, error: Exception) -> Response:
        return await _on_error(context, request, error)

    app = Starlette(
        routes=_routes(console_pages),
        exception_handlers={
            HTTPException: _on_http,
            SegmentlogError: on_error,
            OSError: on_error,
            Exception: on_error,
        },
    )
    app.router.redirect_slashes = False
    return Middleware(app, context, accounts, host, is_tls, _render)


def _routes(console_pages: Console) -> list[BaseRoute]:
    context = console_pages.context

    def home(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{PAGES}/")
        return JSONResponse({})  # clients of a schema registry check with this path whether a server is running

    async def health(request: Request) -> Response:
        if context.store.is_closed:
            return PlainTextResponse("the store is closed\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return PlainTextResponse("ok\n")

    return [
        Route("/", home),
        Route(HEALTH, health),
        Route(PAGES, lambda request: RedirectResponse(f"{PAGES}/")),
        Mount(
            PAGES,
            routes=console.routes(console_pages, schema_decoder(context), document_decoder(context.store.schemas)),
        ),
        *registry_routes(context),
        *rest.routes(context),
    ]


# ------------------------------------------------------------ problems


def _render(scope: Scope, problem: HttpProblem) -> Response:
    """Render a problem as text for the console's paths, else as JSON."""
    path = scope["path"]
    if path == PAGES or path.startswith(f"{PAGES}/"):
        return PlainTextResponse(f"{problem.message}\n", problem.status, headers=problem.headers)
    return JSONResponse(
        {"error_code": problem.error_code, "message": problem.message}, problem.status, headers=problem.headers
    )


async def _on_http(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException)
    return _render(request.scope, HttpProblem(error.status_code, error.detail, headers=error.headers))


async def _on_error(context: HttpContext, request: Request, error: Exception) -> Response:
    problem = context.problem_of(error)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        # The path may contain topic names, but never values of records.
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
    return _render(request.scope, problem)
