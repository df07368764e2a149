"""Batches of Kafka's that follow each other, as they lie: what a server sends by the thousand, however small they are.

    position     ours, 96 bytes | Kafka's | ours, 96 bytes | Kafka's | ...
                                ^ sent -> ^                ^ sent -> ^

`walk` checks what `batch` does, in one loop without an object for each batch (1.0 us a batch here, 4.1 through
`RecordBatch`). It stops at whatever is not as it should be, or is no batch of Kafka's: others look at that, and say
what it is. What it has found is a `WireRun`: where each batch lies. From then on no batch costs a step of Python (here,
1 MiB of batches of one record: 20 ns a batch whose lengths vary, 8 where all are equally long).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from segmentlog.format.batch import (
    CHECKED_SIZE,
    HEADER,
    HEADER_SIZE,
    KAFKA_LAYOUT,
    LEADER_EPOCH_MASK,
    MAGIC,
    PLACE_SIZE,
    hash_of,
)
from segmentlog.format.codecs import Buffer
from segmentlog.format.columns import Int64Array
from segmentlog.format.gather import copy_pieces

_PLACE: Final = struct.Struct(">qiI")
_BATCH_LENGTH_FROM: Final = 12
assert _PLACE.size == PLACE_SIZE

_COPIED_MAX: Final = 2048
"""Batches that are smaller on average are copied together. Larger ones are sent from where they lie."""


class WireRun(NamedTuple):
    """Where batches of Kafka's lie that follow each other in one segment, and that were checked. Never changed."""

    position: int
    """Of the first one, our header in front of it."""
    offsets: Int64Array
    """The base offset of each, and the offset behind the last one."""
    sizes: Int64Array
    """The bytes of Kafka's in front of each, from the first one on, and of all of them."""

    @property
    def batch_count(self) -> int:
        """How many batches."""
        return len(self.offsets) - 1

    @property
    def base_offset(self) -> int:
        return int(self.offsets[0])

    @property
    def end_offset(self) -> int:
        """The offset behind the last one."""
        return int(self.offsets[-1])

    @property
    def end_position(self) -> int:
        """Behind the last one."""
        return self.position + int(self.sizes[-1]) + HEADER_SIZE * self.batch_count

    def joined(self, other: WireRun) -> WireRun:
        """With one that begins where this one ends."""
        assert (other.position, other.base_offset) == (self.end_position, self.end_offset)
        offsets = np.concatenate((self.offsets, other.offsets[1:]))
        return WireRun(self.position, offsets, np.concatenate((self.sizes, self.sizes[-1] + other.sizes[1:])))

    def find(self, offset: int, bound: int, room: int) -> tuple[int, int]:
        """(the batch that holds ``offset``, the one where to stop); ``bound`` and ``room`` are as in `walk`."""
        first = max(int(self.offsets.searchsorted(np.int64(offset), "right")) - 1, 0)
        stop = int(self.offsets[:-1].searchsorted(np.int64(min(bound, _OFFSET_MAX))))
        fitting = int(self.sizes.searchsorted(self.sizes[first] + np.int64(room), "right")) - 1
        return first, max(min(stop, fitting), first)

    def take(self, view: memoryview, first: int, stop: int) -> list[Buffer]:
        """Kafka's bytes of the batches ``[first, stop)``: small ones copied together, large ones as they lie."""
        count = stop - first
        if count <= 0:
            return []
        ends = self.sizes[first : stop + 1] - self.sizes[first]
        begin = self.position + int(self.sizes[first]) + HEADER_SIZE * (first + 1)
        starts = ends[:-1] + np.arange(begin, begin + HEADER_SIZE * count, HEADER_SIZE)
        if int(ends[-1]) >= count * _COPIED_MAX:
            stops = starts + np.diff(ends)
            return [view[start:end] for start, end in zip(starts.tolist(), stops.tolist(), strict=True)]
        return [_together(view, starts, ends)]


_OFFSET_MAX: Final = 2**63 - 1


def walk(
    view: memoryview, position: int, end: int, expected: int, offset: int, bound: int, room: int
) -> WireRun | None:
    """The batches that end behind ``offset``, from the batch at ``position`` on; None without any.

    ``expected`` is the base offset of the batch at ``position``, and ``end`` where the bytes end that count. No batch
    begins at ``bound`` or behind it, and all together they take at most ``room`` bytes.
    """
    unpack, place_of, hashed = HEADER.unpack_from, _PLACE.unpack_from, hash_of
    offsets: list[int] = []
    sizes = [0]
    begin, size = position, 0
    while position + HEADER_SIZE <= end and expected < bound:
        (
            magic, attributes, _, base_offset, epoch, last_delta, _, _, _, _, _, payload_size, _, _, _, _, _,
            payload_checksum, header_checksum,
        ) = unpack(view, position)  # fmt: skip
        start = position + HEADER_SIZE
        stop = start + payload_size
        if magic != MAGIC or base_offset != expected or stop > end:
            break
        following = base_offset + last_delta + 1
        if following > offset:
            size += payload_size
            if (
                size > room
                or not attributes & KAFKA_LAYOUT
                or hashed(view[position : position + CHECKED_SIZE]) != header_checksum
                or hashed(view[start + PLACE_SIZE : stop]) != payload_checksum
                or place_of(view, start) != (base_offset, payload_size - _BATCH_LENGTH_FROM, epoch & LEADER_EPOCH_MASK)
            ):
                break
            offsets.append(base_offset)
            sizes.append(size)
        else:
            begin = stop
        position, expected = stop, following
    if not offsets:
        return None
    offsets.append(expected)
    return WireRun(begin, np.array(offsets, np.int64), np.array(sizes, np.int64))


def _together(view: memoryview, starts: Int64Array, ends: Int64Array) -> Buffer:
    """The bytes that begin at ``starts``, one behind the other, to end at ``ends[1:]``."""
    count, total = len(starts), int(ends[-1])
    sizes = np.diff(ends)
    widest = int(sizes.max())
    if widest * count == total:
        rows = np.ndarray((count,), f"V{widest}", view, int(starts[0]), (HEADER_SIZE + widest,))
        return rows.copy().view(np.uint8).data
    joined = np.empty(total + widest, np.uint8)
    copy_pieces(view, starts, sizes, joined, ends[:-1])
    return joined.data[:total]
