"""What the headers of a request say about its body: each is honoured or refused, for every path, before it is read.

Content-Encoding            gzip, zstd and deflate are decompressed; others are refused (415)
Content-Type                its charset is UTF-8 or ASCII, or it is refused (415)
Content-Digest and the like the digest is compared once the body has arrived (400)
Transfer-Encoding           chunked; others are refused (501)
Content-Range               a part of a body is refused (400)
Content-Transfer-Encoding   of mail; what is not the bytes themselves is refused (415)
Expect                      100-continue; others are refused (417)

A header that may come once only and comes twice is refused (400): what checks it and what uses it could differ.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from segmentlog.http.error_responses import HttpProblem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.types import Message, Receive

CODINGS: Final = ("gzip", "zstd", "deflate")
_ACCEPTED: Final = ", ".join(CODINGS)
_ONCE: Final = frozenset(("host", "content-type", "authorization"))
_DIGESTS: Final = frozenset(("content-digest", "repr-digest", "digest", "content-md5"))
_NAMES: Final = {
    name.encode(): name
    for name in (
        *_ONCE, *_DIGESTS, "content-encoding", "transfer-encoding", "content-range", "content-transfer-encoding",
        "expect",
    )
}  # fmt: skip
_CHARSETS: Final = frozenset(("utf-8", "utf8", "us-ascii", "ascii"))
_AS_IT_IS: Final = frozenset(("binary", "8bit", "7bit", "identity"))
_ALGORITHMS: Final = {"md5": "md5", "sha": "sha1", "sha-256": "sha256", "sha-512": "sha512"}
_STRUCTURED: Final = re.compile(r"([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/=]*):")


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers that are about a body, by their names in lower case; those that came twice are joined.

    Raises `HttpProblem` for one that may come once only. (In one pass: Starlette's `Headers` take 30 us more.)
    """
    found: dict[str, str] = {}
    for name, value in raw:
        key = _NAMES.get(name)
        if key is not None:
            text = value.decode("latin-1").strip()
            if key in found:
                if key in _ONCE:
                    raise _refused(HTTPStatus.BAD_REQUEST, f"the header {key} came more than once")
                text = f"{found[key]}, {text}"
            found[key] = text
    return found


def content_coding(headers: Mapping[str, str]) -> str | None:
    """Check what `read_headers` found; return the coding that the body is compressed by. Raises `HttpProblem`."""
    coding = _coding(headers["content-encoding"]) if "content-encoding" in headers else None
    transfer = headers.get("transfer-encoding", "chunked").lower()
    if transfer != "chunked":
        raise _refused(HTTPStatus.NOT_IMPLEMENTED, f"Transfer-Encoding is chunked or nothing, and not {transfer!r}")
    if "content-range" in headers:
        raise _refused(HTTPStatus.BAD_REQUEST, "Content-Range: a part of a body cannot be used; send all of it")
    mail = headers.get("content-transfer-encoding", "binary").lower()
    if mail not in _AS_IT_IS:
        raise _refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Transfer-Encoding: {mail!r} is not decoded; send the bytes"
        )
    if headers.get("expect", "100-continue").lower() != "100-continue":
        raise _refused(HTTPStatus.EXPECTATION_FAILED, f"Expect: {headers['expect']!r} cannot be met")
    charset = _charset(headers.get("content-type", ""))
    if charset not in _CHARSETS:
        raise _refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"charset={charset}: text is in UTF-8; send it so, or as application/octet-stream without a charset",
        )
    return coding


def _refused(status: HTTPStatus, message: str, **headers: str) -> HttpProblem:
    return HttpProblem(status, message, headers={"connection": "close", **headers})


def _coding(text: str) -> str | None:
    given = [one.strip().lower() for one in text.split(",")]
    found = [one.removeprefix("x-") for one in given if one not in ("", "identity")]
    if not found:
        return None
    if len(found) > 1 or found[0] not in CODINGS:
        raise _refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding is one of {_ACCEPTED}, and not {', '.join(found)!r}; nothing of the body was used",
            **{"accept-encoding": _ACCEPTED},
        )
    return found[0]


def _charset(content_type: str) -> str:
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"').lower()
    return "utf-8"


# ------------------------------------------------------------ digests


def verified(receive: Receive, headers: Mapping[str, str]) -> Receive:
    """``receive``, which raises `HttpProblem` (400) behind a body that does not have the digest that a header says.

    Digests are of the body as it was sent, compressed where it was. Raises `HttpProblem` for digests that cannot be
    compared.
    """
    if headers.keys().isdisjoint(_DIGESTS):
        return receive
    return _Verified(receive, _digests(headers))


def _digests(headers: Mapping[str, str]) -> list[tuple[str, str, bytes]]:
    """(header, algorithm, digest)."""
    given: dict[str, list[tuple[str, str]]] = {}
    for name in _DIGESTS & headers.keys():
        text = headers[name]
        if name == "content-md5":
            given[name] = [("md5", text)]
        elif name == "digest":
            parts = (part.partition("=") for part in text.split(","))
            given[name] = [(algorithm.strip().lower(), value.strip()) for algorithm, _, value in parts]
        else:
            given[name] = _STRUCTURED.findall(text)
    found = []
    for name, pairs in given.items():
        usable = [pair for pair in pairs if pair[0] in _ALGORITHMS]
        if not usable:
            raise _refused(HTTPStatus.BAD_REQUEST, f"{name}: a digest is of {', '.join(_ALGORITHMS)}, in base64")
        for algorithm, value in usable:
            try:
                found.append((name, _ALGORITHMS[algorithm], base64.b64decode(value, validate=True)))
            except (binascii.Error, ValueError):
                raise _refused(HTTPStatus.BAD_REQUEST, f"{name}: {value[:100]!r} is not base64") from None
    return found


class _Verified:
    """Hashes what it passes on."""

    def __init__(self, receive: Receive, wanted: list[tuple[str, str, bytes]]) -> None:
        self._receive = receive
        self._wanted = wanted
        self._hashes: dict[str, Any] = {
            algorithm: hashlib.new(algorithm, usedforsecurity=False) for _, algorithm, _ in wanted
        }

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and self._hashes:
            for one in self._hashes.values():
                one.update(message.get("body", b""))
            if not message.get("more_body", False):
                self._compare()
        return message

    def _compare(self) -> None:
        hashes, self._hashes = self._hashes, {}
        for name, algorithm, digest in self._wanted:
            if not hmac.compare_digest(hashes[algorithm].digest(), digest):
                raise _refused(HTTPStatus.BAD_REQUEST, f"the body is not the one that {name} is of: it was changed")
