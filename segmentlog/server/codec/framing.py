"""The size and the header that precede each message on a connection.

size             i32   size of the rest in bytes
-- request
api_key          i16
api_version      i16
correlation_id   i32   repeated in the response
client_id        string or null; not compact, even in flexible versions
tagged fields          in flexible versions
-- response
correlation_id   i32
tagged fields          in flexible versions, except of ApiVersions
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from segmentlog.server.codec.apis import APIS, Api
from segmentlog.server.codec.primitives import (
    SHORT,
    TAKE,
    TRUNCATED,
    Buffer,
    MalformedMessage,
    long_nullable_string,
    skip_tags,
    truncated,
    write_string,
)

SIZE_BYTES: Final = 4

_size: Final = Struct(">i")
_unpack_request: Final = Struct(">hhih").unpack_from
_pack_request: Final = Struct(">hhi").pack
_pack_response: Final = Struct(">ii").pack
_pack_tagged_response: Final = Struct(">iix").pack
_unpack_correlation_id: Final = Struct(">i").unpack_from


class RequestHeader(NamedTuple):
    """Header of a request, and the position of its body."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_at: int


def decode_header(data: memoryview, at: int = 0) -> RequestHeader:
    """Decode the header of a request that begins at ``at``, after its size. Raise `MalformedMessage`.

    For an API that the codec does not support, ``body_at`` is the position after the client id.
    """
    try:
        api_key, api_version, correlation_id, size = _unpack_request(data, at)
        at += 10
        client_id: str | None
        if 0 <= size < SHORT:
            client_id = TAKE[size](data, at)[0].decode()
            at += size
        else:
            client_id, at = long_nullable_string(data, at, size)
        api = APIS.get(api_key)
        if api is not None and api.is_flexible(api_version):
            tag_count = data[at]
            at += 1
            if tag_count:
                at = skip_tags(data, at, tag_count)
    except TRUNCATED as problem:
        raise MalformedMessage(f"request header: {problem}") from None
    if at > len(data):
        raise truncated()
    return RequestHeader(api_key, api_version, correlation_id, client_id, at)


def frame_request(
    api: Api, version: int, correlation_id: int, client_id: str | None, body: list[Buffer]
) -> list[Buffer]:
    """Return the buffers of a request: its size and header, then ``body``."""
    header = _pack_request(api.key, version, correlation_id) + write_string(client_id)
    if api.is_flexible(version):
        header += b"\0"
    return [_size.pack(len(header) + sum(map(len, body))) + header, *body]


def frame_response(api: Api, version: int, correlation_id: int, body: list[Buffer]) -> list[Buffer]:
    """Return the buffers of a response: its size and header, then ``body``."""
    size = sum(map(len, body))
    if api.has_tagged_response_header(version):
        return [_pack_tagged_response(size + 5, correlation_id), *body]
    return [_pack_response(size + 4, correlation_id), *body]


def decode_response_header(data: memoryview, api: Api, version: int, at: int = 0) -> tuple[int, int]:
    """Decode the header of a response after its size. Return (correlation id, position of the body).

    Raise `MalformedMessage`.
    """
    try:
        (correlation_id,) = _unpack_correlation_id(data, at)
        at += 4
        if api.has_tagged_response_header(version):
            at = skip_tags(data, at + 1, data[at])
    except TRUNCATED as problem:
        raise MalformedMessage(f"response header: {problem}") from None
    return correlation_id, at
