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
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

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
from segmentlog.format.batch_codecs import Buffer
from segmentlog.format.columns import Int64Array
from segmentlog.format.gather import copy_pieces

_PLACE: Final = struct.Struct(">qiI")
_BATCH_LENGTH_FROM: Final = 12
assert _PLACE.size == PLACE_SIZE

Numbers = npt.NDArray[np.uint32] | Int64Array
"""That ascend from 0."""
_NARROW_MAX: Final = 2**32 - 1
_COPIED_MAX: Final = 2048
"""Batches that are smaller on average are copied together. Larger ones are sent from where they lie."""


class WireRun(NamedTuple):
    """Where batches of Kafka's lie that follow each other in one segment, and that were checked. Never changed."""

    position: int
    """Of the first one, our header in front of it."""
    base_offset: int
    offsets: Numbers
    """Of each from there on, and the one behind the last."""
    sizes: Numbers
    """The bytes of Kafka's in front of each, from the first one on, and of all of them."""

    @classmethod
    def of(cls, position: int, offsets: Sequence[int], sizes: Sequence[int]) -> WireRun:
        """Of the base offsets, and the offset behind the last one; sizes as they are kept."""
        base = offsets[0]
        return cls(position, base, _numbers([offset - base for offset in offsets]), _numbers(sizes))

    @property
    def batch_count(self) -> int:
        """How many batches."""
        return len(self.offsets) - 1

    def offset_of(self, number: int) -> int:
        """The base offset of a batch; of the one behind the last, where that ends."""
        return self.base_offset + int(self.offsets[number])

    @property
    def end_offset(self) -> int:
        """The offset behind the last one."""
        return self.offset_of(-1)

    @property
    def end_position(self) -> int:
        """Behind the last one."""
        return self.position + int(self.sizes[-1]) + HEADER_SIZE * self.batch_count

    def joined(self, other: WireRun) -> WireRun:
        """With one that begins where this one ends."""
        assert (other.position, other.base_offset) == (self.end_position, self.end_offset)
        return WireRun(
            self.position,
            self.base_offset,
            _appended(self.offsets, other.offsets),
            _appended(self.sizes, other.sizes),
        )

    def find(self, offset: int, bound: int, room: int) -> tuple[int, int, bool]:
        """(the batch that holds ``offset``, the one where to stop, whether for want of room), as `walk` has it."""
        first = max(bisect_right(self.offsets.data, offset - self.base_offset) - 1, 0)
        stop = bisect_left(self.offsets.data, bound - self.base_offset, 0, self.batch_count)
        fitting = bisect_right(self.sizes.data, int(self.sizes[first]) + room) - 1
        return first, max(min(stop, fitting), first), fitting < stop

    def take(self, view: memoryview, first: int, stop: int) -> list[Buffer]:
        """Kafka's bytes of the batches ``[first, stop)``: small ones copied together, large ones as they lie."""
        count = stop - first
        if count <= 0:
            return []
        if self._total(first, stop) >= count * _COPIED_MAX or count == 1:  # one: what who follows a log gets each time
            at, sizes = self.position, self.sizes[first : stop + 1].tolist()
            spans = enumerate(pairwise(sizes), first + 1)
            return [
                view[at + HEADER_SIZE * number + begin : at + HEADER_SIZE * number + end]
                for number, (begin, end) in spans
            ]
        ends = self.sizes[first : stop + 1].astype(np.int64) - np.int64(self.sizes[first])
        begin = self.position + int(self.sizes[first]) + HEADER_SIZE * (first + 1)
        starts = ends[:-1] + np.arange(begin, begin + HEADER_SIZE * count, HEADER_SIZE)
        return [_together(view, starts, ends)]

    def _total(self, first: int, stop: int) -> int:
        return int(self.sizes[stop]) - int(self.sizes[first])


def _numbers(ascending: Sequence[int]) -> Numbers:
    """An array of them, as narrow as it may be."""
    return np.array(ascending, np.uint32) if ascending[-1] <= _NARROW_MAX else np.array(ascending, np.int64)


def _narrowed(numbers: Int64Array) -> Numbers:
    """The same in half the bytes, if they go in."""
    return numbers.astype(np.uint32) if int(numbers[-1]) <= _NARROW_MAX else numbers


def _appended(numbers: Numbers, others: Numbers) -> Numbers:
    """With those that begin at 0 where these end."""
    following = others[1:].astype(np.int64) + np.int64(numbers[-1])
    return _narrowed(np.concatenate((numbers.astype(np.int64), following)))


def walk(
    view: memoryview, position: int, end: int, expected: int, offset: int, bound: int, room: int
) -> tuple[WireRun | None, bool]:
    """(the batches that end behind ``offset``, from the batch at ``position`` on, None without any; is there no room).

    ``expected`` is the base offset of the batch at ``position``, and ``end`` where the bytes end that count. No batch
    begins at ``bound`` or behind it, and all together they take at most ``room`` bytes: what would be next, and has no
    room, was not checked.
    """
    unpack, place_of, hashed = HEADER.unpack_from, _PLACE.unpack_from, hash_of
    offsets: list[int] = []
    sizes = [0]
    begin, size, is_full = position, 0, False
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
            if not attributes & KAFKA_LAYOUT:
                break
            if size > room:
                is_full = True
                break
            if (
                hashed(view[position : position + CHECKED_SIZE]) != header_checksum
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
        return None, is_full
    offsets.append(expected)
    return WireRun.of(begin, offsets, sizes), is_full


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
