"""Which path is whose, who may ask for it, and how problems are told."""

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
from segmentlog.http.large_bodies import ROOM, RequestRoom
from segmentlog.http.path_names import NameRoute
from segmentlog.http.registry import config_endpoints, schema_endpoints, subject_endpoints
from segmentlog.http.registry.registry_request import Call
from segmentlog.schemas.registry_errors import RegistryUnavailable, SchemaError, registration_problem
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from starlette.requests import Request

    from segmentlog.http.context import Site

logger = logging.getLogger("segmentlog.http")

MEDIA_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_READ_ONLY_CODE: Final = 42205
_STORE_CODE: Final = 50001
_BODY_BYTES_MAX: Final = 8 << 20
"""A schema has a million characters at most, of which JSON may make six each."""


class _Door(NamedTuple):
    """What is answered to a method at a path, and what that takes of whoever asks."""

    method: str
    path: str
    answer: Callable[[Call], Any]
    operation: Operation = Operation.READ
    administers: bool = False
    """Whether it changes what others rely on, so that the door has to allow writes."""


_SUBJECT: Final = "/subjects/{subject:path}"
_CHECK: Final = "/compatibility/subjects/{subject:path}/versions"
_DOORS: Final = (
    # A subject may have any character in it. Some clients write its slashes as they are: the longer path comes first.
    _Door("GET", "/subjects", subject_endpoints.names),
    _Door("GET", f"{_SUBJECT}/versions/{{version}}/schema", subject_endpoints.text),
    _Door("GET", f"{_SUBJECT}/versions/{{version}}/referencedby", subject_endpoints.referenced_by),
    _Door("GET", f"{_SUBJECT}/versions/{{version}}", subject_endpoints.version),
    _Door("DELETE", f"{_SUBJECT}/versions/{{version}}", subject_endpoints.delete_version, Operation.DELETE, True),
    _Door("GET", f"{_SUBJECT}/versions", subject_endpoints.versions),
    _Door("POST", f"{_SUBJECT}/versions", subject_endpoints.register, Operation.WRITE),
    _Door("POST", _SUBJECT, subject_endpoints.lookup),
    _Door("DELETE", _SUBJECT, subject_endpoints.delete, Operation.DELETE, True),
    _Door("GET", "/schemas", schema_endpoints.every),
    _Door("GET", "/schemas/types", schema_endpoints.types),
    _Door("GET", "/schemas/ids/{id}", schema_endpoints.by_id),
    _Door("GET", "/schemas/ids/{id}/schema", schema_endpoints.text),
    _Door("GET", "/schemas/ids/{id}/subjects", schema_endpoints.subjects),
    _Door("GET", "/schemas/ids/{id}/versions", schema_endpoints.versions),
    _Door("GET", "/contexts", schema_endpoints.contexts),
    _Door("POST", f"{_CHECK}/{{version}}", subject_endpoints.check),
    _Door("POST", _CHECK, subject_endpoints.check),
    _Door("GET", "/config", config_endpoints.config, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/config", config_endpoints.set_config, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/config", config_endpoints.delete_config, Operation.ALTER_CONFIGS, True),
    _Door("GET", "/config/{subject:path}", config_endpoints.config, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/config/{subject:path}", config_endpoints.set_config, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/config/{subject:path}", config_endpoints.delete_config, Operation.ALTER_CONFIGS, True),
    _Door("GET", "/mode", config_endpoints.mode, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/mode", config_endpoints.set_mode, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/mode", config_endpoints.delete_mode, Operation.ALTER_CONFIGS, True),
    _Door("GET", "/mode/{subject:path}", config_endpoints.mode, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/mode/{subject:path}", config_endpoints.set_mode, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/mode/{subject:path}", config_endpoints.delete_mode, Operation.ALTER_CONFIGS, True),
)


def routes(site: Site) -> list[BaseRoute]:
    """The registry of the site's store. Reading takes READ on the topic of schemas, registering WRITE.

    Deleting takes DELETE, and settings ALTER_CONFIGS; both are done where the door allows writes.
    """
    return [NameRoute(door.path, _endpoint(site, door), methods=[door.method]) for door in _DOORS]


def _endpoint(site: Site, door: _Door) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        def answer() -> Any:
            return door.answer(Call(site.store.schemas, request.path_params, request.query_params, body))

        try:
            site.check(request, door.operation, ResourceType.TOPIC, SCHEMAS_TOPIC)
            if door.administers:
                site.check_writes()
            body = b"" if door.method in ("GET", "DELETE") else await _body_of(request)
            result = await run_in_threadpool(answer)
        except ClientDisconnect:
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
        except Exception as error:
            raise _problem(request, error, may_see=site.may_see(request, Thing.SCHEMAS)) from error
        if isinstance(result, Response):
            return result
        return Response(msgspec.json.encode(result), media_type=MEDIA_TYPE)

    return endpoint


async def _body_of(request: Request) -> bytes:
    parts, size_bytes = [], 0
    room: RequestRoom = request.scope[ROOM]
    async for part in request.stream():
        parts.append(part)
        size_bytes += len(part)
        await room.hold("body", size_bytes)
        if size_bytes > _BODY_BYTES_MAX:
            why = f"a request to the registry has at most {_BODY_BYTES_MAX:,} bytes"
            raise HttpProblem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why, headers={"connection": "close"})
    return b"".join(parts)


def _problem(request: Request, error: Exception, *, may_see: bool) -> HttpProblem:
    """With the codes that clients of a registry know; ``may_see``: whether the client may read schemas."""
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
