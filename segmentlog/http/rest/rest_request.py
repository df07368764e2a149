"""A request on its way: what it asks for, and what its handler may use."""

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
from segmentlog.http.large_bodies import ROOM
from segmentlog.http.rest import media_types
from segmentlog.http.rest.endpoint_table import PATH_TYPES, Endpoint, Problem
from segmentlog.http.rest.request_bodies import Body, Disconnected, decode
from segmentlog.http.rest.responses import Flow, Reply, encode_json
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.security.viewer import Thing

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from segmentlog.http.context import Site
    from segmentlog.http.rest.rest_context import Rest
    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog.http")

_T = TypeVar("_T")

_QUERY_FIELDS_MAX: Final = 100


class Prepared:
    """An endpoint, with what is the same for all of its requests made once."""

    __slots__ = ("decoders", "default_query", "endpoint", "offered", "takes")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.offered = endpoint.offered
        self.takes = frozenset(endpoint.takes)
        self.decoders = {
            content_type: msgspec.json.Decoder(kind)
            for content_type, kind in endpoint.body_types().items()
            if kind is not None
        }
        self.default_query = None if endpoint.query is None else endpoint.query()


class Call:
    """One request. Its handler checks who may do what, and answers."""

    __slots__ = (
        "_prepared",
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

    def __init__(self, rest: Rest, prepared: Prepared, scope: Scope, receive: Receive) -> None:
        """Raises `HttpProblem` for what can be told without its body: parameters, media types."""
        self.rest = rest
        self._prepared = prepared
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.connection = HTTPConnection(scope)
        self.body = Body(receive, scope[ROOM])
        self.path = _path_of(scope["path_params"])
        self.query = self._query()
        self.media = self._chosen()
        self.content_type = self._content_type()

    @property
    def site(self) -> Site:
        """The store, and who may do what."""
        return self.rest.site

    @property
    def store(self) -> LogStore:
        """The store."""
        return self.rest.site.store

    def _query(self) -> Any:
        query_string: bytes = self.scope["query_string"]
        query = self._prepared.endpoint.query
        if query is None or not query_string:
            return self._prepared.default_query
        try:
            pairs = parse_qsl(query_string.decode("ascii"), keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX,
                              errors="strict")  # fmt: skip
            return msgspec.convert(dict(pairs), query, strict=False)
        except msgspec.ValidationError as error:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, f"the query: {error}") from None
        except ValueError:
            raise HttpProblem(HTTPStatus.BAD_REQUEST, "the query is no form of names and values in UTF-8") from None

    def _chosen(self) -> str:
        offered = self._prepared.offered
        if not offered:
            return ""
        chosen = media_types.choose(self.headers.get("accept", ""), offered)
        if chosen is None:
            raise HttpProblem(HTTPStatus.NOT_ACCEPTABLE, f"there is {', '.join(offered)}, and none of that is accepted")
        return chosen

    def _content_type(self) -> str:
        endpoint = self._prepared.endpoint
        if not endpoint.takes:
            return ""
        given = media_types.base_type(self.headers.get("content-type", ""))
        if not given and not endpoint.must_say:
            return endpoint.takes[0]
        if given not in self._prepared.takes:
            if not given and endpoint.body_optional:
                return endpoint.takes[0]
            raise HttpProblem(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the content type is one of {', '.join(endpoint.takes)}"
            )
        return given

    async def document(self) -> Any:
        """The body, decoded; None where there is none, and there need not be."""
        body = await self.body.whole()
        if not body and self._prepared.endpoint.body_optional:
            return None
        return self.decode(body)

    def decode(self, body: bytes) -> Any:
        """A body as its content type has it. Raises `HttpProblem`."""
        return decode(self._prepared.decoders[self.content_type], body)

    # ------------------------------------------------------------ who may do what

    def check(self, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raises `Forbidden` where the rules do not allow it."""
        self.rest.site.check(self.connection, operation, resource, name)

    def check_topic(self, operation: Operation, topic: str) -> None:
        """The same for a topic."""
        self.rest.site.check(self.connection, operation, ResourceType.TOPIC, topic)

    def allows(self, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Whether the rules allow it."""
        return self.rest.site.allows(self.connection, operation, resource, name)

    def may_see(self, thing: Thing, name: str = "") -> bool:
        """Whether who asks may see the thing of this name."""
        return self.rest.site.may_see(self.connection, thing, name)

    def check_schemas(self) -> None:
        """Raises `Forbidden` where who asks may not see schemas."""
        self.check_topic(Operation.READ, SCHEMAS_TOPIC)

    def check_administration(self) -> None:
        """Raises `Forbidden` where this door lets nobody change anything."""
        self.rest.site.check_writes()

    # ------------------------------------------------------------ what takes time

    async def work(self, do: Callable[..., _T], *args: Any) -> _T:
        """Call it in a thread: what may wait for a disk, or a lock."""
        return await self.rest.work(do, *args)

    async def append(self, do: Callable[..., _T], *args: Any) -> _T:
        """The same for what appends with the query's ``ack``."""
        return await self.rest.append(self.query.ack, do, *args)

    @property
    def base_url(self) -> str:
        """Of this door, as the client knows it, without a slash at the end."""
        return str(self.connection.base_url).rstrip("/")


def _path_of(given: Mapping[str, str]) -> dict[str, Any]:
    """Parameters in the path, the numbers among them as such. Raises `HttpProblem` for what is no number."""
    path: dict[str, Any] = dict(given)
    for name in given:
        kind = PATH_TYPES.get(name)
        if kind is not None:
            try:
                path[name] = msgspec.convert(given[name], kind, strict=False)
            except msgspec.ValidationError:
                raise HttpProblem(HTTPStatus.NOT_FOUND, f"{given[name]!r} is no {name.replace('_', ' ')}") from None
    return path


class Path:
    """An ASGI application: the methods of one path."""

    def __init__(self, rest: Rest, endpoints: Mapping[str, Endpoint]) -> None:
        self._rest = rest
        self._by_method = {method: Prepared(endpoint) for method, endpoint in endpoints.items()}
        if "GET" in self._by_method:
            self._by_method["HEAD"] = self._by_method["GET"]
        self._allow = ", ".join(sorted(self._by_method)).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        prepared = self._by_method.get(scope["method"])
        if prepared is None:
            message = f"this path has {self._allow.decode()}"
            await problem_reply(
                HttpProblem(HTTPStatus.METHOD_NOT_ALLOWED, message, headers={"allow": self._allow.decode()})
            )(scope, receive, send)
            return
        reply: Any = None
        try:
            call = Call(self._rest, prepared, scope, receive)
            reply = await prepared.endpoint.handle(call)
            await reply(scope, receive, send)
        except Disconnected:
            pass
        except Exception as error:
            problem = self._rest.site.without_place(prepared.endpoint.problem_of(error))
            is_begun = isinstance(reply, Flow) and reply.is_begun
            if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.error("%s %s", scope["method"], scope["path"], exc_info=error)
            elif is_begun:
                logger.warning("%s %s: broken off: %s", scope["method"], scope["path"], error)
            if not is_begun:
                await problem_reply(problem)(scope, receive, send)


def problem_reply(problem: HttpProblem) -> Reply:
    """A problem as JSON."""
    headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in problem.headers.items()]
    return Reply(encode_json(Problem(problem.error_code, problem.message)), problem.status, headers=headers)
