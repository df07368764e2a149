"""The table of what REST answers: for each path and method, what it takes and gives, and who sees to it.

The routes are made from it, and so is the OpenAPI document (`openapi.py`): there is no other source for either.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.rest import media_types
from segmentlog.http.rest.rest_error_codes import own_problem

Handler = Callable[[Any], Awaitable[Any]]
"""From a `Call` to an ASGI application that answers it."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
PartitionNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

PATH_TYPES: Final[Mapping[str, Any]] = {
    "partition": PartitionNumber,
    "partition_id": PartitionNumber,
    "broker_id": Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)],
}
"""Of parameters in paths that are no texts."""


class Problem(msgspec.Struct):
    """Why a request was not done: a number for programs, a sentence for people."""

    error_code: int
    message: str


class Gives(msgspec.Struct, frozen=True):
    """What an answer holds: a type, as one or several media types. No type: text, or a stream."""

    type: Any = None
    media: tuple[str, ...] = (media_types.JSON,)
    what: str = ""
    also: tuple[str, ...] = ()
    """Media types of the same answer that are no JSON document."""


NOTHING: Final = Gives(media=(), what="Done.")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One path and method."""

    method: str
    path: str
    handle: Handler
    summary: str
    tag: str
    gives: Mapping[int, Gives]
    query: type[msgspec.Struct] | None = None
    takes: tuple[str, ...] = ()
    """Media types of the body. The first is meant where a client does not say, unless ``must_say``."""
    body: Any = None
    """Its type, where it is JSON: what it is decoded into, and what the document says."""
    bodies: Mapping[str, Any] = {}
    """Its types by their media types, where they differ."""
    body_optional: bool = False
    must_say: bool = False
    problems: tuple[int, ...] = ()
    """Statuses beyond those that any request may have."""
    problem_of: Callable[[BaseException], HttpProblem] = own_problem

    @property
    def offered(self) -> tuple[str, ...]:
        """The media types of what it answers when all is well."""
        found: dict[str, None] = {}
        for status, gives in self.gives.items():
            if status < HTTPStatus.BAD_REQUEST:
                found |= dict.fromkeys((*gives.media, *gives.also))
        return tuple(found)

    def body_types(self) -> dict[str, Any]:
        """The type of the body by its media types; None for what is no document."""
        return {one: self.bodies.get(one, self.body) for one in self.takes}
