"""Routes of the REST API, and its OpenAPI document."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from segmentlog.http.path_names import NameRoute
from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import Endpoint, ResponseSpec
from segmentlog.http.rest.native import native_endpoints as own
from segmentlog.http.rest.openapi import document
from segmentlog.http.rest.responses import RestResponse, encode_json
from segmentlog.http.rest.rest_context import RestContext
from segmentlog.http.rest.rest_request import PathApp, RestRequest
from segmentlog.http.rest.v2 import v2_endpoints as v2
from segmentlog.http.rest.v3 import v3_endpoints as v3

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from segmentlog.http.context import HttpContext

_rendered: list[bytes] = []


async def _openapi(request: RestRequest) -> RestResponse:
    """Return the OpenAPI document, built at the first request."""
    if not _rendered:
        _rendered.append(encode_json(openapi()))
    return RestResponse(_rendered[0])


ENDPOINTS: Final = (
    *v2.ENDPOINTS,
    *own.ENDPOINTS,
    *v3.ENDPOINTS,
    Endpoint(
        method="GET", path="/openapi.json", handle=_openapi, summary="This document", tag="Document",
        responses={200: ResponseSpec(dict[str, Any], (media_types.JSON,))}, problems=(406,),
    ),
)  # fmt: skip
"""All endpoints, in the order in which paths are matched: frequent requests come first."""


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of all endpoints."""
    return document(ENDPOINTS, version("segmentlog"))


def routes(context: HttpContext) -> list[BaseRoute]:
    """Return the REST routes for the root of the port."""
    rest = RestContext(context)
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [NameRoute(path, PathApp(rest, endpoints)) for path, endpoints in by_path.items()]
