"""Where the bytes of a segment file lie in an object store, as the manifest says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from segmentlog.format.manifest import Chunk, ShippedPartition, Stored, Tail

TAILS: Final = "tails/"
"""Names of tails begin so."""


class Span(NamedTuple):
    """Bytes ``[position, position + size_bytes)`` of a file: those of an object from ``start`` on; their XXH3-64.

    Or ``data``, where the manifest has them itself: then there is no object of that name.
    """

    position: int
    size_bytes: int
    key: str
    start: int
    xxh3_64: str
    data: bytes = b""

    @property
    def end(self) -> int:
        """Behind its last byte in the file."""
        return self.position + self.size_bytes

    @property
    def is_sealed(self) -> bool:
        """Whether it is of a sealed segment, and not a chunk in a tail."""
        return not self.key.startswith(TAILS)


Spans = tuple[Span, ...]
"""All of one file, ascending, without a gap."""


def size_of(spans: Spans) -> int:
    """Of the file, in bytes."""
    return spans[-1].end if spans else 0


def segment_spans(partition: ShippedPartition, tails: Mapping[int, Tail]) -> dict[int, Spans]:
    """Of every segment file of a partition, by base offset; the active one is there, with nothing in it perhaps."""
    found: dict[int, Spans] = {}
    for segment in partition.segments:
        found[segment.base_offset] = spans_of(segment.log)
    for chunk in partition.chunks:
        found[chunk.segment] = (*found.get(chunk.segment, ()), _span_of(chunk, tails[chunk.tail]))
    found.setdefault(partition.active_base, ())
    return found


def chunk_data(chunk: Chunk, tail: Tail) -> bytes:
    """Its bytes, where they lie in the manifest."""
    return tail.data[chunk.start : chunk.start + chunk.size_bytes]


def _span_of(chunk: Chunk, tail: Tail) -> Span:
    if tail.object is not None:
        return Span(chunk.position, chunk.size_bytes, tail.object.key, chunk.start, chunk.xxh3_64)
    key = f"{TAILS}{tail.number:020d}"
    return Span(chunk.position, chunk.size_bytes, key, chunk.start, chunk.xxh3_64, chunk_data(chunk, tail))


def spans_of(log: Stored) -> Spans:
    """Of a file that lies there whole."""
    spans: list[Span] = []
    position = 0
    for part in log.objects:
        if part.size_bytes:
            spans.append(Span(position, part.size_bytes, part.key, 0, part.xxh3_64))
            position += part.size_bytes
    return tuple(spans)
