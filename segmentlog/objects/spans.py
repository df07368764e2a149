"""Where the bytes of a segment file lie in an object store, as the manifest says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from segmentlog.format.manifest import ShippedPartition, Stored


class Span(NamedTuple):
    """Bytes ``[position, position + size_bytes)`` of a file: those of an object from ``start`` on; their XXH3-64."""

    position: int
    size_bytes: int
    key: str
    start: int
    xxh3_64: str

    @property
    def end(self) -> int:
        """Behind its last byte in the file."""
        return self.position + self.size_bytes


Spans = tuple[Span, ...]
"""All of one file, ascending, without a gap."""


def size_of(spans: Spans) -> int:
    """Of the file, in bytes."""
    return spans[-1].end if spans else 0


def segment_spans(partition: ShippedPartition, tails: Mapping[int, Stored]) -> dict[int, Spans]:
    """Of every segment file of a partition, by base offset; the active one is there, with nothing in it perhaps."""
    found: dict[int, Spans] = {}
    for segment in partition.segments:
        found[segment.base_offset] = _spans_of(segment.log)
    for chunk in partition.chunks:
        span = Span(chunk.position, chunk.size_bytes, tails[chunk.tail].key, chunk.start, chunk.xxh3_64)
        found[chunk.segment] = (*found.get(chunk.segment, ()), span)
    found.setdefault(partition.active_base, ())
    return found


def _spans_of(log: Stored) -> Spans:
    """Of a file that lies there whole."""
    spans: list[Span] = []
    position = 0
    for part in log.objects:
        if part.size_bytes:
            spans.append(Span(position, part.size_bytes, part.key, 0, part.xxh3_64))
            position += part.size_bytes
    return tuple(spans)
