"""Split a list of records into batches that do not exceed the size limit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final, TypeVar

from segmentlog.errors import RecordTooLarge

_T = TypeVar("_T")

_PARTS_MAX: Final = 1024


def encode_in_parts(encode: Callable[[int, int], _T], start: int, stop: int) -> list[_T]:
    """Encode the records ``[start, stop)``: all at once, or in parts if a batch of all would be too large.

    Raise `RecordTooLarge` with the index of a record that alone exceeds the limit.
    """
    try:
        return [encode(start, stop)]
    except RecordTooLarge as error:
        count = stop - start
        if count == 1:
            raise RecordTooLarge(error.size_bytes, error.limit_bytes, start) from None
        # An eighth more parts than the size needs: records differ in size, and a part that is too large is encoded
        # again.
        parts = max(2, min(count, -(-error.size_bytes * 9 // (8 * error.limit_bytes)), _PARTS_MAX))
    bounds = [start + count * part // parts for part in range(parts + 1)]
    made: list[_T] = []
    for begin, end in pairwise(bounds):
        made += encode_in_parts(encode, begin, end)
    return made
