"""Encode Kafka records as tables, if all keys have the same length and all values have the same length.

The sizes of such records differ only by the sizes of their two deltas, which change rarely: an offset delta takes two
bytes from 64 on, and three from 8,192 on. The records between two changes are the rows of a table, which numpy fills
column by column: 60 ns per record of 100 bytes; `wire_encode` takes 190.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from segmentlog.format.columns import Int64Array
from segmentlog.format.splice import Table
from segmentlog.format.varints import varint

_MARK_BYTES: Final = 2
"""Bytes of MessagePack's mark before each byte string of a table."""
_ATTRIBUTES: Final = b"\0"
"""The attributes of a record: always 0."""
_NO_HEADERS: Final = b"\0"
_NULL: Final = -1
_ROWS_MIN: Final = 32
"""Smallest average number of rows for which tables are worth it."""


def encode_tables(
    keys: Table | None, values: Table, timestamp_deltas: Int64Array, offset_deltas: Int64Array
) -> memoryview | None:
    """Return the encoded records, without headers, or None if the sizes of their deltas change too often for tables."""
    count = len(values)
    stamps, offsets = zigzag(timestamp_deltas), zigzag(offset_deltas)
    stamp_sizes, offset_sizes = varint_sizes(stamps), varint_sizes(offsets)
    changes = np.flatnonzero((np.diff(stamp_sizes) != 0) | (np.diff(offset_sizes) != 0)) + 1
    bounds = [0, *changes.tolist(), count]
    if count < (len(bounds) - 1) * _ROWS_MIN:
        return None
    key_width = 0 if keys is None else keys.shape[1] - _MARK_BYTES
    value_width = values.shape[1] - _MARK_BYTES
    key_mark, value_mark = varint(_NULL if keys is None else key_width), varint(value_width)
    fixed = len(_ATTRIBUTES) + len(key_mark) + key_width + len(value_mark) + value_width + len(_NO_HEADERS)
    bodies = [fixed + int(stamp_sizes[start]) + int(offset_sizes[start]) for start in bounds[:-1]]
    heads = [varint(body) for body in bodies]
    widths = [len(head) + body for head, body in zip(heads, bodies, strict=True)]
    rows = [stop - start for start, stop in pairwise(bounds)]
    records = np.empty(sum(width * count for width, count in zip(widths, rows, strict=True)), np.uint8)
    begin = 0
    for (start, stop), head, width in zip(pairwise(bounds), heads, widths, strict=True):
        table = records[begin : begin + (stop - start) * width].reshape(stop - start, width)
        begin += table.size
        at = put_same(table, 0, head + _ATTRIBUTES)
        at = put_varints(table, at, stamps[start:stop], int(stamp_sizes[start]))
        at = put_varints(table, at, offsets[start:stop], int(offset_sizes[start]))
        at = put_same(table, at, key_mark)
        if keys is not None:
            table[:, at : at + key_width] = keys[start:stop, _MARK_BYTES:]
            at += key_width
        at = put_same(table, at, value_mark)
        table[:, at : at + value_width] = values[start:stop, _MARK_BYTES:]
        put_same(table, at + value_width, _NO_HEADERS)
    return records.data


def put_same(table: Table, at: int, same: bytes) -> int:
    """Write the same bytes into each row at column ``at``, and return the column after them."""
    for column, byte in enumerate(same, at):
        table[:, column] = byte
    return at + len(same)


def put_varints(table: Table, at: int, numbers: npt.NDArray[np.uint64], size: int) -> int:
    """Write varints of ``size`` bytes each at column ``at``, and return the column after them."""
    if size == 2:  # the most common size: write both bytes at once
        pairs = np.ndarray((len(table),), "<u2", table, at, (table.strides[0],))
        pairs[:] = (numbers << np.uint64(1) & np.uint64(0x7F00)) | (numbers & np.uint64(0x7F)) | np.uint64(0x80)
        return at + size
    for shift in range(size - 1):
        table[:, at + shift] = (numbers >> np.uint64(7 * shift)).astype(np.uint8) | 0x80
    table[:, at + size - 1] = numbers >> np.uint64(7 * (size - 1)) if size > 1 else numbers
    return at + size


def zigzag(numbers: Int64Array) -> npt.NDArray[np.uint64]:
    """Return the numbers in zigzag encoding, in which numbers near 0 are small, whatever their sign."""
    doubled = numbers << np.int64(1)
    if int(numbers.min()) < 0:
        doubled ^= numbers >> np.int64(63)
    return doubled.view(np.uint64)


def varint_sizes(numbers: npt.NDArray[np.uint64]) -> Int64Array:
    """Return the size of each number as a varint, in bytes."""
    sizes = np.ones(len(numbers), np.int64)
    largest, shift = int(numbers.max()), 7
    while largest >> shift:
        sizes += numbers >= np.uint64(1 << shift)
        shift += 7
    return sizes
