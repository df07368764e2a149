"""Encode a large response to DescribeConfigs in parts of a few resources each.

    throttle time (4 bytes) | number of results | result ... | tags (1 byte, in flexible versions)

The encoder of a message creates a small object for each field and joins all of them at the end. For 10,000 topics with
synonyms, these objects take hundreds of MiB, although the response has 25 MB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from segmentlog.server.codec.primitives import Buffer, uvarint

_RESULTS: Final = 128
"""Results encoded together; their objects take a few MiB."""
_THROTTLE_BYTES: Final = 4
_FLEXIBLE_FROM: Final = 4
"""First version whose counts are varints, of the count plus 1."""


def encode_configs(encode: Callable[[Any, int], list[Buffer]], message: Any, version: int) -> list[Buffer]:
    """Return the same bytes as ``encode`` for a DescribeConfigsResponse, in more buffers and with less memory.

    Raise the errors of ``encode``.
    """
    results = message.results
    if len(results) <= _RESULTS:
        return encode(message, version)
    head = struct.pack(">i", message.throttle_time_ms) + _count(len(results), version)
    tail_bytes = 1 if version >= _FLEXIBLE_FROM else 0
    pieces: list[Buffer] = [head]
    for begin in range(0, len(results), _RESULTS):
        part = results[begin : begin + _RESULTS]
        (data,) = encode(type(message)(results=part), version)
        pieces.append(memoryview(data)[_THROTTLE_BYTES + len(_count(len(part), version)) : len(data) - tail_bytes])
    if tail_bytes:
        pieces.append(b"\0")
    return pieces


def _count(count: int, version: int) -> bytes:
    return uvarint(count + 1) if version >= _FLEXIBLE_FROM else struct.pack(">i", count)
