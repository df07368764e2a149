"""Map the bytes of a segment file to ranges of objects, from the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from segmentlog.format.manifest import Chunk, ShippedPartition, Stored, Tail

TAILS: Final = "tails/"
"""Prefix of the names of tail objects."""


class ObjectRange(NamedTuple):
    """Bytes ``[position, position + size_bytes)`` of a segment file, and where they are stored.

    The bytes are stored in object ``key`` from ``start`` on, and have the checksum ``xxh3_64`` (XXH3-64). Bytes that
    the manifest stores inline are in ``data``; then no object has the name ``key``.
    """

    position: int
    size_bytes: int
    key: str
    start: int
    xxh3_64: str
    data: bytes = b""

    @property
    def end(self) -> int:
        """Position after the last byte, in the segment file."""
        return self.position + self.size_bytes

    @property
    def is_sealed(self) -> bool:
        """Return whether the object is a whole sealed segment or a part of it, not a tail with chunks."""
        return not self.key.startswith(TAILS)


ObjectRanges = tuple[ObjectRange, ...]
"""The ranges of one file, ascending and without gaps."""


def file_size(ranges: ObjectRanges) -> int:
    """Return the size of the file in bytes."""
    return ranges[-1].end if ranges else 0


def segment_ranges(partition: ShippedPartition, tails: Mapping[int, Tail]) -> dict[int, ObjectRanges]:
    """Return the ranges of every segment file of a partition, by base offset. The active segment may have none."""
    found: dict[int, ObjectRanges] = {}
    for segment in partition.segments:
        found[segment.base_offset] = object_ranges(segment.log)
    for chunk in partition.chunks:
        found[chunk.segment] = (*found.get(chunk.segment, ()), _chunk_range(chunk, tails[chunk.tail]))
    found.setdefault(partition.active_base, ())
    return found


def chunk_data(chunk: Chunk, tail: Tail) -> bytes:
    """Return the bytes of a chunk whose tail is stored in the manifest."""
    return tail.data[chunk.start : chunk.start + chunk.size_bytes]


def _chunk_range(chunk: Chunk, tail: Tail) -> ObjectRange:
    if tail.object is not None:
        return ObjectRange(chunk.position, chunk.size_bytes, tail.object.key, chunk.start, chunk.xxh3_64)
    key = f"{TAILS}{tail.number:020d}"
    return ObjectRange(chunk.position, chunk.size_bytes, key, chunk.start, chunk.xxh3_64, chunk_data(chunk, tail))


def object_ranges(log: Stored) -> ObjectRanges:
    """Return the ranges of a segment file that was uploaded whole."""
    ranges: list[ObjectRange] = []
    position = 0
    for part in log.objects:
        if part.size_bytes:
            ranges.append(ObjectRange(position, part.size_bytes, part.key, 0, part.xxh3_64))
            position += part.size_bytes
    return tuple(ranges)
