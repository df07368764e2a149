"""Names in paths: every group, member or subject name can be part of a path, even with slashes.

ASGI decodes the path before it calls the application, so ``%2F`` and a slash look the same. Routes therefore match a
path in which ``%2F`` and ``%25`` are still escaped, and decode these in the parameters: ``/consumers/team%2Fa`` is the
group ``team/a``.
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
"""Key of the ASGI scope that holds the path as routes match it."""
_ESCAPED_SLASH: Final = re.compile(rb"%(2[fF5])")


class NameRoute(Route):
    """A Starlette route whose parameters may contain escaped slashes."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a request as Starlette does. Raises `HttpProblem` (400) for a path that is not UTF-8."""
        if scope["type"] != "http":
            return Match.NONE, {}
        path = scope.get(_PATH)
        if path is None:
            path = scope[_PATH] = _decode_path(scope)
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


def _decode_path(scope: Scope) -> str:
    """Return the path decoded, except ``%2F`` and ``%25``."""
    raw: bytes | None = scope.get("raw_path")
    if raw is None or b"%" not in raw:
        path: str = scope["path"]
        return path
    try:
        return unquote_to_bytes(_ESCAPED_SLASH.sub(lambda found: b"%25" + found[1].upper(), raw)).decode()
    except UnicodeDecodeError:
        raise HttpProblem(HTTPStatus.BAD_REQUEST, "the path of the request is not UTF-8") from None


def path_segment(name: object) -> str:
    """Return a name escaped as one segment of a path.

    Clients remove the segments ``.`` and ``..`` from a path, so these two are percent-encoded.
    """
    text = quote(str(name), safe=":")
    return text.replace(".", "%2E") if text in (".", "..") else text
