"""All of REST as routes of the HTTP door, and the document that describes them."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from segmentlog.http.path_names import NameRoute
from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import Endpoint, Gives
from segmentlog.http.rest.native import native_endpoints as own
from segmentlog.http.rest.openapi import document
from segmentlog.http.rest.responses import Reply, encode_json
from segmentlog.http.rest.rest_context import Rest
from segmentlog.http.rest.rest_request import Call, Path
from segmentlog.http.rest.v2 import v2_endpoints as v2
from segmentlog.http.rest.v3 import v3_endpoints as v3

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from segmentlog.http.context import Site

_rendered: list[bytes] = []


async def _openapi(call: Call) -> Reply:
    """The document, made when it is first asked for."""
    if not _rendered:
        _rendered.append(encode_json(openapi()))
    return Reply(_rendered[0])


ENDPOINTS: Final = (
    *v2.ENDPOINTS,
    *own.ENDPOINTS,
    *v3.ENDPOINTS,
    Endpoint(
        method="GET", path="/openapi.json", handle=_openapi, summary="This document", tag="Document",
        gives={200: Gives(dict[str, Any], (media_types.JSON,))}, problems=(406,),
    ),
)  # fmt: skip
"""In the order in which paths are tried: what is asked for most comes first."""


def openapi() -> dict[str, Any]:
    """The OpenAPI document of all of it."""
    return document(ENDPOINTS, version("segmentlog"))


def routes(site: Site) -> list[BaseRoute]:
    """For the root of the port."""
    rest = Rest(site)
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    return [NameRoute(path, Path(rest, endpoints)) for path, endpoints in by_path.items()]
