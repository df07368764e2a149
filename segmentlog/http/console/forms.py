"""Parses form bodies and query parameters."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.large_bodies import REQUEST_MEMORY, RequestMemory

if TYPE_CHECKING:
    from starlette.requests import Request

_FORM_BYTES: Final = 2 << 20
_FIELDS_MAX: Final = 20_000

Form = Mapping[str, list[str]]


async def read_form(request: Request) -> Form:
    """Return the fields of a form. Raises `HttpProblem` if the form is malformed, too large or has too many fields."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HttpProblem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "a form must be sent as application/x-www-form-urlencoded; nothing was changed",
        )
    body = bytearray()
    memory: RequestMemory = request.scope[REQUEST_MEMORY]
    async for part in request.stream():
        body += part
        await memory.reserve("body", len(body))
        if len(body) > _FORM_BYTES:
            raise HttpProblem(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a form may have at most {_FORM_BYTES:,} bytes; nothing was changed",
            )
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=_FIELDS_MAX)
    except ValueError as error:
        raise HttpProblem(
            HTTPStatus.BAD_REQUEST, f"the form cannot be decoded, and nothing was changed: {error}"
        ) from None
    form: dict[str, list[str]] = {}
    for name, value in pairs:
        form.setdefault(name, []).append(value)
    return form


def first_value(form: Form, name: str, default: str = "") -> str:
    """Return the first value of a field."""
    return form.get(name, [default])[0]


def parse_number(text: str, default: int, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return a whole number from a query, clamped to the range; ``default`` if the text is not a number."""
    text = text.strip()
    if not (text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20):
        return default
    return min(max(int(text), least), most)
