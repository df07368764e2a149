"""Media types, and the choice between those that a client accepts (RFC 9110, section 12.5.1)."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"
V2: Final = "application/vnd.kafka.v2+json"
V2_EMBEDDED: Final = {
    "binary": "application/vnd.kafka.binary.v2+json",
    "json": "application/vnd.kafka.json.v2+json",
    "avro": "application/vnd.kafka.avro.v2+json",
    "jsonschema": "application/vnd.kafka.jsonschema.v2+json",
    "protobuf": "application/vnd.kafka.protobuf.v2+json",
}
"""Media types of REST v2 by the format of keys and values."""

_KEPT: Final = 256
_RANGES_MAX: Final = 64


def base_type(header: str) -> str:
    """Return a content type without its parameters, in lower case."""
    return header.partition(";")[0].strip().lower()


@lru_cache(maxsize=_KEPT)
def choose(accept: str, offered: tuple[str, ...]) -> str | None:
    """Return the offered media type that the client prefers; None if it accepts none of them.

    If it prefers several types equally, return the first of them in ``offered``.
    """
    ranges = _ranges(accept)
    if not ranges:
        return offered[0]
    best, best_quality = None, 0.0
    for media in offered:
        quality = _quality(media, ranges)
        if quality > best_quality:
            best, best_quality = media, quality
    return best


def _ranges(accept: str) -> list[tuple[str, float]]:
    found = []
    for part in accept.split(",")[:_RANGES_MAX]:
        media, *parameters = part.split(";")
        if not media.strip():
            continue
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "q":
                try:
                    quality = min(max(float(value), 0.0), 1.0)
                except ValueError:
                    quality = 0.0
        found.append((media.strip().lower(), quality))
    return found


def _quality(media: str, ranges: list[tuple[str, float]]) -> float:
    """Return the quality of the most specific range that contains the media type."""
    kind = media.partition("/")[0]
    for pattern in (media, f"{kind}/*", "*/*"):
        qualities = [quality for media_range, quality in ranges if media_range == pattern]
        if qualities:
            return max(qualities)
    return 0.0
