"""Builds the OpenAPI document from the table of endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import PATH_TYPES, Endpoint, Problem, ResponseSpec

_ALWAYS: Final = (400, 401, 403, 408, 413, 415, 417, 421, 500, 501, 503)
"""Error statuses that every request may get."""
_REF: Final = "#/components/schemas/{name}"
_PROBLEM: Final = {"$ref": _REF.format(name="Problem")}
_WHY: Final = {
    400: "The request is malformed.",
    401: "Authentication is required.",
    403: "The access rules deny the request, or the server is read-only.",
    404: "The resource does not exist.",
    406: "The response is not available in an accepted media type.",
    408: "The body arrived too slowly.",
    409: "The state of the resource does not allow the request.",
    410: "The records or the topic were deleted or lost.",
    413: "The body is too large.",
    415: "The media type, charset or Content-Encoding of the body is not supported.",
    416: "The partition does not have this offset.",
    417: "The Expect header is not supported.",
    421: "The server does not accept this host name.",
    422: "The request is well-formed, but its content is invalid.",
    500: "Internal error.",
    501: "The Transfer-Encoding is not supported.",
    503: "The server is busy; retry later.",
    507: "The disk is full.",
}


def document(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    endpoints = list(endpoints)
    types = _types(endpoints)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    names = _Schemas(dict(zip(map(_key, types), schemas, strict=True)))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, names)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "segmentlog REST",
            "version": version,
            "description": "Versions 2 and 3 of the Confluent REST Proxy's API, and endpoints that return records by"
            " offset, append lines, and stream server-sent events.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "responses": {
                str(status): {"description": why, "content": {media_types.JSON: {"schema": _PROBLEM}}}
                for status, why in _WHY.items()
            },
            "securitySchemes": {"password": {"type": "http", "scheme": "basic"}},
        },
        "security": [{}, {"password": []}],
    }


def _types(endpoints: Iterable[Endpoint]) -> list[Any]:
    """Return every type of a request or response, once."""
    found: dict[Any, Any] = {_key(Problem): Problem}
    for endpoint in endpoints:
        for kind in (*endpoint.body_types().values(), *(response.type for response in endpoint.responses.values())):
            if kind is not None:
                found[_key(kind)] = kind
    return list(found.values())


def _key(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '')}:{kind!r}"


class _Schemas:
    """JSON schemas by type."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known

    def of(self, kind: Any) -> Any:
        """Return the schema of a type; an empty schema for None."""
        return {} if kind is None else self._known[_key(kind)]


def _operation(endpoint: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint)],
        "responses": _responses(endpoint, schemas),
    }
    if endpoint.accepts:
        operation["requestBody"] = {
            "required": not endpoint.body_optional,
            "content": {
                content_type: {"schema": {"type": "string"} if kind is None else schemas.of(kind)}
                for content_type, kind in endpoint.body_types().items()
            },
        }
    return operation


def _operation_id(endpoint: Endpoint) -> str:
    words = re.findall(r"[A-Za-z0-9]+|-", endpoint.path)
    return "_".join((endpoint.method.lower(), *("all" if word == "-" else word for word in words)))


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": msgspec.json.schema(PATH_TYPES.get(name, str)),
        }
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]


def _query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    if endpoint.query is None:
        return []
    _, components = msgspec.json.schema_components([endpoint.query], ref_template=_REF)
    parameters = []
    for name, schema in components[endpoint.query.__name__]["properties"].items():
        description = schema.pop("description", None) or _described(schema)
        if schema.get("default", ...) is None:
            del schema["default"]
        parameter = {"name": name, "in": "query", "required": False, "schema": _without_null(schema)}
        if description:
            parameter["description"] = description
        parameters.append(parameter)
    return parameters


def _described(schema: dict[str, Any]) -> str | None:
    """Return a description that msgspec put on one alternative of an ``anyOf``."""
    for one in schema.get("anyOf", ()):
        if "description" in one:
            return str(one.pop("description"))
    return None


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from the schema of a query parameter: clients omit the parameter instead."""
    others = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(others) == 1:
        return {**{key: value for key, value in schema.items() if key != "anyOf"}, **others[0]}
    if None in schema.get("enum", ()):
        return {**schema, "enum": [one for one in schema["enum"] if one is not None]}
    return {**schema, "anyOf": others} if others else schema


def _responses(endpoint: Endpoint, schemas: _Schemas) -> dict[str, Any]:
    responses = {str(status): _response(status, spec, schemas) for status, spec in endpoint.responses.items()}
    for status in sorted({*_ALWAYS, *endpoint.problems}):
        responses.setdefault(
            str(status),
            {"$ref": f"#/components/responses/{status}"},
        )
    return responses


def _response(status: int, spec: ResponseSpec, schemas: _Schemas) -> dict[str, Any]:
    response: dict[str, Any] = {"description": spec.description or HTTPStatus(status).phrase}
    content: dict[str, Any] = {
        one: {"schema": {"type": "string"} if spec.type is None else schemas.of(spec.type)} for one in spec.media
    }
    content |= {one: {"schema": {"type": "string"}} for one in spec.other_media}
    if content:
        response["content"] = content
    return response
