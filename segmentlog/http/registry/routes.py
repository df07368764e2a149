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
from segmentlog.format.names import SCHEMAS_TOPIC
from segmentlog.http.large_bodies import ROOM, RequestRoom
from segmentlog.http.paths import NameRoute
from segmentlog.http.problems import Forbidden, HttpProblem, problem_of
from segmentlog.http.registry import schemas, settings, subjects
from segmentlog.http.registry.call import Call
from segmentlog.schemas.errors import RegistryUnavailable, SchemaError, registration_problem
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from starlette.requests import Request

    from segmentlog.http.site import Site

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
    _Door("GET", "/subjects", subjects.names),
    _Door("GET", f"{_SUBJECT}/versions/{{version}}/schema", subjects.text),
    _Door("GET", f"{_SUBJECT}/versions/{{version}}/referencedby", subjects.referenced_by),
    _Door("GET", f"{_SUBJECT}/versions/{{version}}", subjects.version),
    _Door("DELETE", f"{_SUBJECT}/versions/{{version}}", subjects.delete_version, Operation.DELETE, True),
    _Door("GET", f"{_SUBJECT}/versions", subjects.versions),
    _Door("POST", f"{_SUBJECT}/versions", subjects.register, Operation.WRITE),
    _Door("POST", _SUBJECT, subjects.lookup),
    _Door("DELETE", _SUBJECT, subjects.delete, Operation.DELETE, True),
    _Door("GET", "/schemas", schemas.every),
    _Door("GET", "/schemas/types", schemas.types),
    _Door("GET", "/schemas/ids/{id}", schemas.by_id),
    _Door("GET", "/schemas/ids/{id}/schema", schemas.text),
    _Door("GET", "/schemas/ids/{id}/subjects", schemas.subjects),
    _Door("GET", "/schemas/ids/{id}/versions", schemas.versions),
    _Door("GET", "/contexts", schemas.contexts),
    _Door("POST", f"{_CHECK}/{{version}}", subjects.check),
    _Door("POST", _CHECK, subjects.check),
    _Door("GET", "/config", settings.config, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/config", settings.set_config, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/config", settings.delete_config, Operation.ALTER_CONFIGS, True),
    _Door("GET", "/config/{subject:path}", settings.config, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/config/{subject:path}", settings.set_config, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/config/{subject:path}", settings.delete_config, Operation.ALTER_CONFIGS, True),
    _Door("GET", "/mode", settings.mode, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/mode", settings.set_mode, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/mode", settings.delete_mode, Operation.ALTER_CONFIGS, True),
    _Door("GET", "/mode/{subject:path}", settings.mode, Operation.DESCRIBE_CONFIGS),
    _Door("PUT", "/mode/{subject:path}", settings.set_mode, Operation.ALTER_CONFIGS, True),
    _Door("DELETE", "/mode/{subject:path}", settings.delete_mode, Operation.ALTER_CONFIGS, True),
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
