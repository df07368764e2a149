"""Names in paths: any name of a group, a member or a subject can be written in one, with slashes too.

ASGI's decoded path has lost which slashes were written as ``%2F``. So paths are matched with ``%2F`` (and ``%25``) left
as they are, and these are decoded in the parameters alone: ``/consumers/team%2Fa`` is the group ``team/a``.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote_to_bytes

from starlette.routing import Match, Route

from segmentlog.http.error_responses import HttpProblem

if TYPE_CHECKING:
    from starlette.types import Scope

_PATH: Final = "segmentlog.path"
"""Under this key the scope of a request has its path, prepared for matching."""
_KEPT: Final = re.compile(rb"%(2[fF5])")


class NameRoute(Route):
    """A route, as Starlette's, whose parameters are matched by the path as it was sent."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As Starlette's. Raises `HttpProblem` (400) for a path that is not UTF-8."""
        if scope["type"] != "http":
            return Match.NONE, {}
        path = scope.get(_PATH)
        if path is None:
            path = scope[_PATH] = _prepared(scope)
        match = self.path_regex.match(path)
        if match is None:
            return Match.NONE, {}
        found = {
            name: self.param_convertors[name].convert(value.replace("%2F", "/").replace("%25", "%"))
            for name, value in match.groupdict().items()
        }
        child = {"endpoint": self.endpoint, "path_params": {**scope.get("path_params", {}), **found}}
        if self.methods and scope["method"] not in self.methods:
            return Match.PARTIAL, child
        return Match.FULL, child


def _prepared(scope: Scope) -> str:
    """The path decoded, except ``%2F`` and ``%25``."""
    raw: bytes | None = scope.get("raw_path")
    if raw is None or b"%" not in raw:
        path: str = scope["path"]
        return path
    try:
        return unquote_to_bytes(_KEPT.sub(lambda found: b"%25" + found[1].upper(), raw)).decode()
    except UnicodeDecodeError:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, "the path is not UTF-8") from None


def segment(name: object) -> str:
    """A name as one segment of a path.

    Clients remove the segments ``.`` and ``..`` from a path unless they are written in percents.
    """
    text = quote(str(name), safe=":")
    return text.replace(".", "%2E") if text in (".", "..") else text
