"""Headers that describe a request's body. For every path, each of them is applied or refused before the body is read.

Content-Encoding            gzip, zstd and deflate are decompressed; others are refused (415)
Content-Type                the charset must be UTF-8 or ASCII (415)
Content-Digest and similar  the digest is compared once the body has arrived (400)
Transfer-Encoding           chunked; others are refused (501)
Content-Range               a partial body is refused (400)
Content-Transfer-Encoding   a mail header; only identity encodings are accepted (415)
Expect                      100-continue; others are refused (417)

If a header occurs twice that must occur once, the request is refused (400): the check and the handler could read
different values.
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
_SINGLE: Final = frozenset(("host", "content-type", "authorization"))
_DIGESTS: Final = frozenset(("content-digest", "repr-digest", "digest", "content-md5"))
_NAMES: Final = {
    name.encode(): name
    for name in (
        *_SINGLE, *_DIGESTS, "content-encoding", "transfer-encoding", "content-range", "content-transfer-encoding",
        "expect",
    )
}  # fmt: skip
_CHARSETS: Final = frozenset(("utf-8", "utf8", "us-ascii", "ascii"))
_IDENTITY_ENCODINGS: Final = frozenset(("binary", "8bit", "7bit", "identity"))
_ALGORITHMS: Final = {"md5": "md5", "sha": "sha1", "sha-256": "sha256", "sha-512": "sha512"}
_STRUCTURED: Final = re.compile(r"([a-z*][a-z0-9_.*-]*)=:([A-Za-z0-9+/=]*):")


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers about the body, by lower-case name; repeated headers are joined.

    Raises `HttpProblem` for a repeated header that must occur once. (One pass over the raw headers: Starlette's
    `Headers` take 30 us more.)
    """
    found: dict[str, str] = {}
    for name, value in raw:
        key = _NAMES.get(name)
        if key is not None:
            text = value.decode("latin-1").strip()
            if key in found:
                if key in _SINGLE:
                    raise _refused(HTTPStatus.BAD_REQUEST, f"the header {key} may occur only once")
                text = f"{found[key]}, {text}"
            found[key] = text
    return found


def content_coding(headers: Mapping[str, str]) -> str | None:
    """Check the result of `read_headers`, and return the compression of the body. Raises `HttpProblem`."""
    coding = _coding(headers["content-encoding"]) if "content-encoding" in headers else None
    transfer = headers.get("transfer-encoding", "chunked").lower()
    if transfer != "chunked":
        raise _refused(HTTPStatus.NOT_IMPLEMENTED, f"Transfer-Encoding {transfer!r} is not supported; only chunked is")
    if "content-range" in headers:
        raise _refused(HTTPStatus.BAD_REQUEST, "Content-Range is not supported; send the whole body")
    mail = headers.get("content-transfer-encoding", "binary").lower()
    if mail not in _IDENTITY_ENCODINGS:
        raise _refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Transfer-Encoding {mail!r} is not supported; send the bytes unencoded",
        )
    if headers.get("expect", "100-continue").lower() != "100-continue":
        raise _refused(
            HTTPStatus.EXPECTATION_FAILED, f"Expect {headers['expect']!r} is not supported; only 100-continue is"
        )
    charset = _charset(headers.get("content-type", ""))
    if charset not in _CHARSETS:
        raise _refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"charset {charset} is not supported; send UTF-8, or application/octet-stream without a charset",
        )
    return coding


def _refused(status: HTTPStatus, message: str, **headers: str) -> HttpProblem:
    return HttpProblem(status, message, headers={"connection": "close", **headers})


def _coding(text: str) -> str | None:
    texts = [one.strip().lower() for one in text.split(",")]
    found = [one.removeprefix("x-") for one in texts if one not in ("", "identity")]
    if not found:
        return None
    if len(found) > 1 or found[0] not in CODINGS:
        raise _refused(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding {', '.join(found)!r} is not supported: use one of {_ACCEPTED};"
            " nothing was appended or changed",
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


def verify_digests(receive: Receive, headers: Mapping[str, str]) -> Receive:
    """Return a receive function that raises `HttpProblem` (400) after a body whose digest does not match.

    Digests cover the body as sent, before decompression. Raises `HttpProblem` for digests in an unknown form.
    """
    if headers.keys().isdisjoint(_DIGESTS):
        return receive
    return _DigestVerifier(receive, _digests(headers))


def _digests(headers: Mapping[str, str]) -> list[tuple[str, str, bytes]]:
    """Return (header, algorithm, digest) for each digest."""
    texts: dict[str, list[tuple[str, str]]] = {}
    for name in _DIGESTS & headers.keys():
        text = headers[name]
        if name == "content-md5":
            texts[name] = [("md5", text)]
        elif name == "digest":
            parts = (part.partition("=") for part in text.split(","))
            texts[name] = [(algorithm.strip().lower(), value.strip()) for algorithm, _, value in parts]
        else:
            texts[name] = _STRUCTURED.findall(text)
    found = []
    for name, pairs in texts.items():
        usable = [pair for pair in pairs if pair[0] in _ALGORITHMS]
        if not usable:
            raise _refused(
                HTTPStatus.BAD_REQUEST, f"header {name}: use one of the algorithms {', '.join(_ALGORITHMS)}, in base64"
            )
        for algorithm, value in usable:
            try:
                found.append((name, _ALGORITHMS[algorithm], base64.b64decode(value, validate=True)))
            except (binascii.Error, ValueError):
                raise _refused(HTTPStatus.BAD_REQUEST, f"header {name}: {value[:100]!r} is not base64") from None
    return found


class _DigestVerifier:
    """Receive function that hashes the body it passes on."""

    def __init__(self, receive: Receive, expected: list[tuple[str, str, bytes]]) -> None:
        self._receive = receive
        self._expected = expected
        self._hashes: dict[str, Any] = {
            algorithm: hashlib.new(algorithm, usedforsecurity=False) for _, algorithm, _ in expected
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
        for name, algorithm, digest in self._expected:
            if not hmac.compare_digest(hashes[algorithm].digest(), digest):
                raise _refused(
                    HTTPStatus.BAD_REQUEST,
                    f"the body does not match its header {name}: it was changed on the way; send it again",
                )
