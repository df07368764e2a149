"""Cutting records out of a keys or values column, and putting such cuts together.

A column is a MessagePack array: a prefix, then the items one behind the other. Where all items
are short and of one length the column is a table, and rows are taken out of it without making
an object of any: 10 ns an item. Others are decoded, chosen from and encoded again, which takes
90 ns an item of 100 bytes here, and is less than finding out where each begins (105).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from segmentlog.format.columns import Int64Array, Values, array_of, array_prefix, array_prefix_of

Table = npt.NDArray[np.uint8]
"""The items of a column as rows, marks included: u8[n, bytes an item]."""
Flags = npt.NDArray[np.bool_]

_BIN8: Final = 0xC4
_BIN16: Final = 0xC5
_ROUNDS: Final = 4
"""How often bytes that look like marks and are none are sorted out."""
_WIDEST: Final = 2 + 255
_NIL: Final = b"\xc0"

T = TypeVar("T")


def as_table(column: memoryview, count: int) -> Table | None:
    """The items as rows, if all are byte strings of one length up to 255; then none is null.

    Raises `MalformedColumn` for a column that announces another number of items.
    """
    prefix = len(array_prefix(column, count))
    width, odd = divmod(len(column) - prefix, max(count, 1))
    if odd or not 2 <= width <= _WIDEST:
        return None
    marks = np.ndarray((count,), "<u2", column, prefix, (width,))
    if not (marks == (width - 2 << 8 | _BIN8)).all():
        return None
    return np.frombuffer(column, np.uint8)[prefix:].reshape(count, width)


class Places(NamedTuple):
    """Where the bytes of each item of a column lie, without their marks."""

    starts: Int64Array
    sizes: Int64Array


def places_of(column: memoryview, count: int) -> Places | None:
    """Where the items lie, if they are byte strings below 64 KiB and none is null; None if that is not seen fast.

    The marks are searched for, and found right by what they say: each item ends where the next one begins, and the last
    one with the column. Bytes that merely look like marks lead nowhere, and are sorted out. (30 ns an item of 100 bytes
    here, where a step from item to item takes 105.) Raises `MalformedColumn` for a column that announces another
    number.
    """
    prefix, end = len(array_prefix(column, count)), len(column)
    cells = np.frombuffer(column, np.uint8)
    if not count:
        return None
    at = np.flatnonzero(cells[prefix:-1] & np.uint8(0xFE) == _BIN8)
    at += prefix
    for _ in range(_ROUNDS):
        if len(at) < count:
            return None
        starts = at + 2
        sizes = cells[at + 1].astype(np.int64)
        longer = np.flatnonzero(cells[at] == _BIN16)
        if len(longer):
            sizes[longer] = sizes[longer] << 8 | cells[np.minimum(at[longer] + 2, end - 1)]
            starts[longer] += 1
        ends = starts + sizes
        if len(at) == count:
            chained = bool((ends[:-1] == at[1:]).all()) and int(at[0]) == prefix and int(ends[-1]) == end
            return Places(starts, sizes) if chained else None
        marked = np.zeros(end + 1, np.bool_)
        marked[at] = marked[end] = True
        leads = ends <= end
        leads[leads] = marked[ends[leads]]
        marked[:] = False
        marked[ends[leads]] = marked[prefix] = True
        at = at[leads & marked[at]]
    return None


def items_of(table: Table) -> list[bytes]:
    """The items of a table, without their marks."""
    whole, width = table[:, 2:].tobytes(), table.shape[1] - 2
    return [whole[at : at + width] for at in range(0, len(whole), width)] if width else [b""] * len(table)


def cut_rows(table: Table, kept: Flags | None) -> bytes:
    """The bytes of the items for which ``kept`` is true (None: all)."""
    return table.tobytes() if kept is None else table.take(np.flatnonzero(kept), axis=0).tobytes()


def those(items: list[T], kept: Flags | None) -> list[T]:
    """The items for which ``kept`` is true (None: all)."""
    return items if kept is None else list(compress(items, kept.tolist()))


def encode_items(items: Values) -> bytes:
    """The bytes of items that were decoded."""
    return array_of(items)[len(array_prefix_of(len(items))) :]


def null_items(count: int) -> bytes:
    """The bytes of so many nulls."""
    return _NIL * count


def join_items(parts: Sequence[bytes], count: int) -> bytes:
    """A column of ``count`` items from cuts."""
    return array_prefix_of(count) + b"".join(parts)
