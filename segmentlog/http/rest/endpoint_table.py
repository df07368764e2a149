"""Table entries of the REST API: method, path, handler, and types of requests and responses.

Both the routes and the OpenAPI document (`openapi.py`) are built from these entries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import media_types
from segmentlog.http.rest.rest_error_codes import native_problem

Handler = Callable[[Any], Awaitable[Any]]
"""Function from a `RestRequest` to an ASGI application that sends the response."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PartitionNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

PATH_TYPES: Final[Mapping[str, Any]] = {
    "partition": PartitionNumber,
    "partition_id": PartitionNumber,
    "broker_id": Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)],
}
"""Types of path parameters that are not text."""


class Problem(msgspec.Struct):
    """Error response: a code for programs and a message for people."""

    error_code: int
    message: str


class ResponseSpec(msgspec.Struct, frozen=True):
    """Content of a response: a type in one or several media types. Without a type it is text or a stream."""

    type: Any = None
    media: tuple[str, ...] = (media_types.JSON,)
    description: str = ""
    other_media: tuple[str, ...] = ()
    """Further media types of this response that are not a JSON document."""


NO_CONTENT: Final = ResponseSpec(media=(), description="Success, without content.")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP method and a path, with their handler and the types of its requests and responses."""

    method: str
    path: str
    handle: Handler
    summary: str
    tag: str
    responses: Mapping[int, ResponseSpec]
    query: type[msgspec.Struct] | None = None
    accepts: tuple[str, ...] = ()
    """Media types of the body. The first is the default, unless ``requires_content_type``."""
    body: Any = None
    """Type of a JSON body, for decoding and for the OpenAPI document."""
    bodies: Mapping[str, Any] = {}
    """Types of the body by media type, if they differ between media types."""
    body_optional: bool = False
    requires_content_type: bool = False
    problems: tuple[int, ...] = ()
    """Error statuses besides those that every request may get."""
    problem_of: Callable[[BaseException], HttpProblem] = native_problem

    @property
    def offered(self) -> tuple[str, ...]:
        """Media types of successful responses."""
        found: dict[str, None] = {}
        for status, response in self.responses.items():
            if status < HTTPStatus.BAD_REQUEST:
                found |= dict.fromkeys((*response.media, *response.other_media))
        return tuple(found)

    def body_types(self) -> dict[str, Any]:
        """Return the type of the body by media type; None if the body is not a document."""
        return {one: self.bodies.get(one, self.body) for one in self.accepts}
