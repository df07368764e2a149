"""One REST request: its validated parameters, and the services that its handler may use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from segmentlog.format.file_names import SCHEMAS_TOPIC
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.large_bodies import REQUEST_MEMORY
from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import PATH_TYPES, Endpoint, Problem
from segmentlog.http.rest.request_bodies import ClientDisconnected, RequestBody, decode
from segmentlog.http.rest.responses import RestResponse, StreamedResponse, encode_json
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from segmentlog.http.context import HttpContext
    from segmentlog.http.rest.rest_context import RestContext
    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog.http")

_T = TypeVar("_T")

_QUERY_FIELDS_MAX: Final = 100


class PreparedEndpoint:
    """An endpoint with the values that are the same for all of its requests."""

    __slots__ = ("accepts", "decoders", "default_query", "endpoint", "offered")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.offered = endpoint.offered
        self.accepts = frozenset(endpoint.accepts)
        self.decoders = {
            content_type: msgspec.json.Decoder(kind)
            for content_type, kind in endpoint.body_types().items()
            if kind is not None
        }
        self.default_query = None if endpoint.query is None else endpoint.query()


class RestRequest:
    """One request. Its handler must check access rights."""

    __slots__ = (
        "_endpoint",
        "body",
        "connection",
        "content_type",
        "headers",
        "media",
        "path",
        "query",
        "rest",
        "scope",
    )

    def __init__(self, rest: RestContext, prepared: PreparedEndpoint, scope: Scope, receive: Receive) -> None:
        """Check parameters and media types. Raises `HttpProblem`."""
        self.rest = rest
        self._endpoint = prepared
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.connection = HTTPConnection(scope)
        self.body = RequestBody(receive, scope[REQUEST_MEMORY])
        self.path = _path_of(scope["path_params"])
        self.query = self._query()
        self.media = self._negotiate()
        self.content_type = self._content_type()

    @property
    def context(self) -> HttpContext:
        """The store and the access rules."""
        return self.rest.context

    @property
    def store(self) -> LogStore:
        """The store."""
        return self.rest.context.store

    def _query(self) -> Any:
        query_string: bytes = self.scope["query_string"]
        query = self._endpoint.endpoint.query
        if query is None or not query_string:
            return self._endpoint.default_query
        try:
            pairs = parse_qsl(query_string.decode("ascii"), keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX,
                              errors="strict")  # fmt: skip
            return msgspec.convert(dict(pairs), query, strict=False)
        except msgspec.ValidationError as error:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, f"invalid query: {error}") from None
        except ValueError:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, "invalid query: it must be names and values in UTF-8") from None

    def _negotiate(self) -> str:
        offered = self._endpoint.offered
        if not offered:
            return ""
        chosen = media_types.choose(self.headers.get("accept", ""), offered)
        if chosen is None:
            raise HttpProblem(
                HTTPStatus.NOT_ACCEPTABLE, f"the client accepts none of the available media types: {', '.join(offered)}"
            )
        return chosen

    def _content_type(self) -> str:
        endpoint = self._endpoint.endpoint
        if not endpoint.accepts:
            return ""
        given = media_types.base_type(self.headers.get("content-type", ""))
        if not given and not endpoint.requires_content_type:
            return endpoint.accepts[0]
        if given not in self._endpoint.accepts:
            if not given and endpoint.body_optional:
                return endpoint.accepts[0]
            raise HttpProblem(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"unsupported Content-Type {given!r}; use one of {', '.join(endpoint.accepts)}",
            )
        return given

    async def document(self) -> Any:
        """Return the decoded body; None if it is optional and empty."""
        body = await self.body.read_all()
        if not body and self._endpoint.endpoint.body_optional:
            return None
        return self.decode(body)

    def decode(self, body: bytes) -> Any:
        """Decode a body according to its content type. Raises `HttpProblem`."""
        return decode(self._endpoint.decoders[self.content_type], body)

    # ------------------------------------------------------------ access rights

    def check(self, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise `Forbidden` if the principal may not perform the operation."""
        self.rest.context.check(self.connection, operation, resource, name)

    def check_topic(self, operation: Operation, topic: str) -> None:
        """Raise `Forbidden` if the principal may not perform the operation on the topic."""
        self.rest.context.check(self.connection, operation, ResourceType.TOPIC, topic)

    def allows(self, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return whether the principal may perform the operation."""
        return self.rest.context.allows(self.connection, operation, resource, name)

    def may_see(self, thing: Thing, name: str = "") -> bool:
        """Return whether the principal may see the named thing."""
        return self.rest.context.may_see(self.connection, thing, name)

    def check_schemas(self) -> None:
        """Raise `Forbidden` if the principal may not read schemas."""
        self.check_topic(Operation.READ, SCHEMAS_TOPIC)

    def check_administration(self) -> None:
        """Raise `Forbidden` if the server is read-only."""
        self.rest.context.check_writes()

    # ------------------------------------------------------------ blocking calls

    async def work(self, do: Callable[..., _T], *args: Any) -> _T:
        """Run a function that may block in a thread."""
        return await self.rest.work(do, *args)

    async def append(self, do: Callable[..., _T], *args: Any) -> _T:
        """Run an append with the query's ``ack`` in a thread."""
        return await self.rest.append(self.query.ack, do, *args)

    @property
    def base_url(self) -> str:
        """URL of this server as the client knows it, without a final slash."""
        return str(self.connection.base_url).rstrip("/")


def _path_of(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the path parameters with numbers converted. Raises `HttpProblem` (404) for an invalid number."""
    path: dict[str, Any] = dict(given)
    for name in given:
        kind = PATH_TYPES.get(name)
        if kind is not None:
            try:
                path[name] = msgspec.convert(given[name], kind, strict=False)
            except msgspec.ValidationError:
                raise HttpProblem(
                    HTTPStatus.NOT_FOUND, f"{given[name]!r} is not a valid {name.replace('_', ' ')}"
                ) from None
    return path


class PathApp:
    """ASGI application for all methods of one path."""

    def __init__(self, rest: RestContext, endpoints: Mapping[str, Endpoint]) -> None:
        self._rest = rest
        self._by_method = {method: PreparedEndpoint(endpoint) for method, endpoint in endpoints.items()}
        if "GET" in self._by_method:
            self._by_method["HEAD"] = self._by_method["GET"]
        self._allow = ", ".join(sorted(self._by_method)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        prepared = self._by_method.get(scope["method"])
        if prepared is None:
            message = f"method {scope['method']} is not allowed; this path supports {self._allow.decode()}"
            await problem_response(
                HttpProblem(HTTPStatus.METHOD_NOT_ALLOWED, message, headers={"allow": self._allow.decode()})
            )(scope, receive, send)
            return
        reply: Any = None
        try:
            request = RestRequest(self._rest, prepared, scope, receive)
            reply = await prepared.endpoint.handle(request)
            await reply(scope, receive, send)
        except ClientDisconnected:
            pass
        except Exception as error:
            problem = self._rest.context.redact_problem(prepared.endpoint.problem_of(error))
            has_started = isinstance(reply, StreamedResponse) and reply.has_started
            if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error("%s %s", scope["method"], scope["path"], exc_info=error)
            elif has_started:
                logger.warning("%s %s: response aborted: %s", scope["method"], scope["path"], error)
            if not has_started:
                await problem_response(problem)(scope, receive, send)


def problem_response(problem: HttpProblem) -> RestResponse:
    """Return a problem as a JSON response."""
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in problem.headers.items()]
    return RestResponse(encode_json(Problem(problem.error_code, problem.message)), problem.status, headers=headers)
