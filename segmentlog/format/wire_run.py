"""Batches of Kafka's that follow each other, as they lie: what a server sends by the thousand, however small they are.

The checks are those of `batch`, in one loop without an object for each batch (1.0 us a batch here, 4.1 through
`RecordBatch`). It stops at whatever is not as it should be, or is no batch of Kafka's: others look at that, and say
what it is.
"""

from __future__ import annotations

import struct
from typing import Final

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

_PLACE: Final = struct.Struct(">qiI")
_BATCH_LENGTH_FROM: Final = 12
assert _PLACE.size == PLACE_SIZE


def wire_run(
    view: memoryview, position: int, end: int, expected: int, offset: int, bound: int, room: int
) -> tuple[list[memoryview], int]:
    """(the batches that end behind ``offset``, the offset behind them), from the batch at ``position`` on.

    ``expected`` is the base offset of the batch at ``position``, and ``end`` where the bytes end that count. No batch
    begins at ``bound`` or behind it, and all together they take at most ``room`` bytes.
    """
    unpack, place_of, hashed = HEADER.unpack_from, _PLACE.unpack_from, hash_of
    batches: list[memoryview] = []
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
            room -= payload_size
            if (
                room < 0
                or not attributes & KAFKA_LAYOUT
                or hashed(view[position : position + CHECKED_SIZE]) != header_checksum
                or hashed(view[start + PLACE_SIZE : stop]) != payload_checksum
                or place_of(view, start) != (base_offset, payload_size - _BATCH_LENGTH_FROM, epoch & LEADER_EPOCH_MASK)
            ):
                break
            batches.append(view[start:stop])
        position, expected = stop, following
    return batches, expected if batches else offset
