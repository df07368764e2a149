"""Routes of the schema registry: path, handler, required access rights, and error codes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute

from segmentlog.errors import SegmentlogError
from segmentlog.format.file_names import SCHEMAS_TOPIC
from segmentlog.http.error_responses import Forbidden, HttpProblem, problem_of
from segmentlog.http.large_bodies import REQUEST_MEMORY, RequestMemory
from segmentlog.http.path_names import NameRoute
from segmentlog.http.registry import config_endpoints, schema_endpoints, subject_endpoints
from segmentlog.http.registry.registry_request import RegistryRequest
from segmentlog.schemas.registry_errors import RegistryUnavailable, SchemaError, registration_problem
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from starlette.requests import Request

    from segmentlog.http.context import HttpContext

logger = logging.getLogger("segmentlog.http")

MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_READ_ONLY_CODE: Final = 42205
_STORE_CODE: Final = 50001
_BODY_BYTES_MAX: Final = 8 << 20
"""A schema has at most a million characters, and JSON may need six bytes for each."""


class _RegistryEndpoint(NamedTuple):
    """A method and path, their handler, and the operation that the principal must be allowed to perform."""

    method: str
    path: str
    answer: Callable[[RegistryRequest], Any]
    operation: Operation = Operation.READ
    is_administrative: bool = False
    """Whether the server must allow writes: the change affects other clients."""


_SUBJECT: Final = "/subjects/{subject:path}"
_CHECK: Final = "/compatibility/subjects/{subject:path}/versions"
_ENDPOINTS: Final = (
    # A subject may contain any character, and some clients do not escape its slashes: longer paths come first.
    _RegistryEndpoint("GET", "/subjects", subject_endpoints.list_subjects),
    _RegistryEndpoint("GET", f"{_SUBJECT}/versions/{{version}}/schema", subject_endpoints.get_schema_text),
    _RegistryEndpoint("GET", f"{_SUBJECT}/versions/{{version}}/referencedby", subject_endpoints.list_references),
    _RegistryEndpoint("GET", f"{_SUBJECT}/versions/{{version}}", subject_endpoints.get_version),
    _RegistryEndpoint(
        "DELETE", f"{_SUBJECT}/versions/{{version}}", subject_endpoints.delete_version, Operation.DELETE, True
    ),
    _RegistryEndpoint("GET", f"{_SUBJECT}/versions", subject_endpoints.list_versions),
    _RegistryEndpoint("POST", f"{_SUBJECT}/versions", subject_endpoints.register_schema, Operation.WRITE),
    _RegistryEndpoint("POST", _SUBJECT, subject_endpoints.find_schema),
    _RegistryEndpoint("DELETE", _SUBJECT, subject_endpoints.delete_subject, Operation.DELETE, True),
    _RegistryEndpoint("GET", "/schemas", schema_endpoints.list_schemas),
    _RegistryEndpoint("GET", "/schemas/types", schema_endpoints.list_types),
    _RegistryEndpoint("GET", "/schemas/ids/{id}", schema_endpoints.get_schema),
    _RegistryEndpoint("GET", "/schemas/ids/{id}/schema", schema_endpoints.get_schema_text),
    _RegistryEndpoint("GET", "/schemas/ids/{id}/subjects", schema_endpoints.list_subjects),
    _RegistryEndpoint("GET", "/schemas/ids/{id}/versions", schema_endpoints.list_versions),
    _RegistryEndpoint("GET", "/contexts", schema_endpoints.list_contexts),
    _RegistryEndpoint("POST", f"{_CHECK}/{{version}}", subject_endpoints.check_compatibility),
    _RegistryEndpoint("POST", _CHECK, subject_endpoints.check_compatibility),
    _RegistryEndpoint("GET", "/config", config_endpoints.get_config, Operation.DESCRIBE_CONFIGS),
    _RegistryEndpoint("PUT", "/config", config_endpoints.set_config, Operation.ALTER_CONFIGS, True),
    _RegistryEndpoint("DELETE", "/config", config_endpoints.delete_config, Operation.ALTER_CONFIGS, True),
    _RegistryEndpoint("GET", "/config/{subject:path}", config_endpoints.get_config, Operation.DESCRIBE_CONFIGS),
    _RegistryEndpoint("PUT", "/config/{subject:path}", config_endpoints.set_config, Operation.ALTER_CONFIGS, True),
    _RegistryEndpoint(
        "DELETE", "/config/{subject:path}", config_endpoints.delete_config, Operation.ALTER_CONFIGS, True
    ),
    _RegistryEndpoint("GET", "/mode", config_endpoints.get_mode, Operation.DESCRIBE_CONFIGS),
    _RegistryEndpoint("PUT", "/mode", config_endpoints.set_mode, Operation.ALTER_CONFIGS, True),
    _RegistryEndpoint("DELETE", "/mode", config_endpoints.delete_mode, Operation.ALTER_CONFIGS, True),
    _RegistryEndpoint("GET", "/mode/{subject:path}", config_endpoints.get_mode, Operation.DESCRIBE_CONFIGS),
    _RegistryEndpoint("PUT", "/mode/{subject:path}", config_endpoints.set_mode, Operation.ALTER_CONFIGS, True),
    _RegistryEndpoint("DELETE", "/mode/{subject:path}", config_endpoints.delete_mode, Operation.ALTER_CONFIGS, True),
)


def routes(context: HttpContext) -> list[BaseRoute]:
    """Return the routes of the store's registry.

    Reading requires READ on the topic of schemas, registering WRITE, deleting DELETE, and settings ALTER_CONFIGS.
    Deleting and settings also require a server that allows writes.
    """
    return [NameRoute(spec.path, _endpoint(context, spec), methods=[spec.method]) for spec in _ENDPOINTS]


def _endpoint(context: HttpContext, spec: _RegistryEndpoint) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        def answer() -> Any:
            return spec.answer(RegistryRequest(context.store.schemas, request.path_params, request.query_params, body))

        try:
            context.check(request, spec.operation, ResourceType.TOPIC, SCHEMAS_TOPIC)
            if spec.is_administrative:
                context.check_writes()
            body = b"" if spec.method in ("GET", "DELETE") else await _body_of(request)
            result = await run_in_threadpool(answer)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # the client cannot read it
        except Exception as error:
            raise _problem(request, error, may_see=context.may_see(request, Thing.SCHEMAS)) from error
        if isinstance(result, Response):
            return result
        return Response(msgspec.json.encode(result), media_type=MEDIA_TYPE)

    return endpoint


async def _body_of(request: Request) -> bytes:
    parts, size_bytes = [], 0
    memory: RequestMemory = request.scope[REQUEST_MEMORY]
    async for part in request.stream():
        parts.append(part)
        size_bytes += len(part)
        await memory.reserve("body", size_bytes)
        if size_bytes > _BODY_BYTES_MAX:
            why = f"a request to the registry may have at most {_BODY_BYTES_MAX:,} bytes; nothing was registered"
            raise HttpProblem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why, headers={"connection": "close"})
    return b"".join(parts)


def _problem(request: Request, error: Exception, *, may_see: bool) -> HttpProblem:
    """Return the response for an error, with the error codes of a schema registry.

    ``may_see``: whether the client may read schemas.
    """
    if isinstance(error, SchemaError) and not isinstance(error, RegistryUnavailable):
        return HttpProblem(error.code // 100, registration_problem(error, may_see=may_see), error_code=error.code)
    problem = problem_of(error)
    if isinstance(error, Forbidden):
        return HttpProblem(HTTPStatus.FORBIDDEN, problem.message, error_code=HTTPStatus.FORBIDDEN)
    if isinstance(error, HttpProblem):
        return problem
    if not isinstance(error, SegmentlogError | OSError):
        logger.error("%s %s", request.method, request.url.path, exc_info=error)
    code = _READ_ONLY_CODE if problem.status == HTTPStatus.FORBIDDEN else _STORE_CODE
    return HttpProblem(problem.status, problem.message, error_code=code)
