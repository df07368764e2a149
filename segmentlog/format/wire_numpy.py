"""Decode the records of a Kafka batch with numpy: the fast path if the core is not compiled.

A record begins at the end of the record before it. A loop finds these positions, unless records have the same size.
numpy then finds the fields of all records together. In batches of 1,000 records of 100 bytes the loop takes 130 ns a
record, the deltas 50, the other fields 50, the values 90. Python decodes the headers, if there are any.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from segmentlog.format.columns import Int64Array, MalformedColumn
from segmentlog.format.wire_scan import keep_records, named_error, rebase_records
from segmentlog.records import Headers
from segmentlog.speedups.records import HEADERS_MAX

_INT_LAST: Final = 28, 15
"""The shift of the fifth and last byte of a varint of 32 bits, and the largest value of that byte."""
_LONG_LAST: Final = 63, 1
"""The shift of the tenth and last byte of a varint of 64 bits, and the largest value of that byte."""
_ONE: Final = np.uint64(1)
_RUN_MIN: Final = 24
"""Smallest run of records of the same size that is found faster with numpy than in the loop."""
_STEP_MIN: Final = 64
_NONE: Final = np.empty(0, np.int64)

Uint64Array = npt.NDArray[np.uint64]


class NumpyRecords:
    """The records of one Kafka batch, all of them checked. Not thread-safe."""

    __slots__ = ("_bodies", "_data", "_ends", "_fields", "_headers", "_starts", "count", "offset_deltas", "size_bytes",
                 "timestamp_deltas")  # fmt: skip

    def __init__(self, data: bytes, size: int, count: int, last_offset_delta: int) -> None:
        """Decode the first ``size`` bytes of ``data``; `PADDING` zeros must follow. Raise `MalformedRecord`."""
        self._data = data
        self.count = count
        self.size_bytes = size
        try:
            self._starts = _walk(data, size, count)
            self._ends = np.empty(count, np.int64)
            self._ends[:-1] = self._starts[1:]
            self._ends[-1:] = size
            lengths, self._bodies = _varints(data, self._starts, _INT_LAST)
            if (lengths < 0).any():
                raise MalformedColumn("a record has a negative length")
            self.timestamp_deltas, at = _varints(data, self._bodies + 1, _LONG_LAST)
            self.offset_deltas, after_deltas = _varints(data, at, _INT_LAST)
            deltas = self.offset_deltas
            if count and (deltas[0] < 0 or deltas[-1] > last_offset_delta or (deltas[1:] <= deltas[:-1]).any()):
                raise MalformedColumn(f"the offset deltas do not ascend, or exceed {last_offset_delta}")
            self._fields = _find_fields(data, after_deltas, self._ends)
            self._headers = self._decode_headers()
        except MalformedColumn as error:
            raise named_error(data, size, count, last_offset_delta, error) from None

    def _decode_headers(self) -> list[Headers]:
        *_, counts, starts = self._fields
        found: list[Headers] = [()] * self.count
        for index in np.flatnonzero(counts).tolist():
            found[index] = _read_headers(self._data, int(starts[index]), int(self._ends[index]), int(counts[index]))
        return found

    def keys(self) -> list[bytes | None]:
        """Return the keys, None for null."""
        starts, sizes, *_ = self._fields
        return self._cut(starts, sizes)

    def values(self) -> list[bytes | None]:
        """Return the values, None for null."""
        _, _, starts, sizes, *_ = self._fields
        return self._cut(starts, sizes)

    @property
    def timestamp_delta_range(self) -> tuple[int, int]:
        """The least and the largest timestamp delta, in milliseconds; zeros without records."""
        deltas = self.timestamp_deltas
        return (int(deltas.min()), int(deltas.max())) if self.count else (0, 0)

    @property
    def any_key(self) -> bool:
        """Whether a record has a key."""
        return bool((self._fields[1] >= 0).any())

    @property
    def null_key_count(self) -> int:
        """How many records have a null key."""
        return int(np.count_nonzero(self._fields[1] < 0))

    def null_keys(self) -> npt.NDArray[np.bool_]:
        """Return which records have a null key, bool[count]."""
        null: npt.NDArray[np.bool_] = self._fields[1] < 0
        return null

    @property
    def any_null_value(self) -> bool:
        """Whether the value of a record is null."""
        return bool((self._fields[3] < 0).any())

    @property
    def any_headers(self) -> bool:
        """Whether a record has headers."""
        return bool(self._fields[4].any())

    def headers(self) -> list[Headers]:
        """Return the (name, value) pairs of each record. Invalid UTF-8 in a name becomes U+FFFD, as in Java."""
        return self._headers

    def body_sizes(self) -> Int64Array:
        """Return the size in bytes of each record without its length field."""
        return self._ends - self._bodies

    def kept(self, kept: npt.NDArray[np.bool_] | None, rebased_by: int = 0) -> bytes:
        """Return the bytes of the records for which ``kept`` is true (None: all).

        Add ``rebased_by`` milliseconds to their timestamp deltas, and change nothing else.
        """
        if not rebased_by:
            return keep_records(self._data, self.size_bytes, self._starts, self._ends, kept)
        _, after_timestamps = _varints(self._data, self._bodies + 1, _LONG_LAST)
        rebased = self.timestamp_deltas + np.int64(rebased_by)
        return rebase_records(self._data, self._bodies, after_timestamps, self._ends, rebased, kept)

    def _cut(self, starts: Int64Array, sizes: Int64Array) -> list[bytes | None]:
        data = self._data
        ends = (starts + sizes).tolist()
        cut: list[bytes | None] = [data[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
        null = np.flatnonzero(sizes < 0)
        if len(null):
            if len(null) == self.count:
                return [None] * self.count
            for index in null.tolist():
                cut[index] = None
        return cut


def _find_fields(
    data: bytes, after_deltas: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]:
    """Return the positions of the fields of all records.

    For each record: start and size of the key, start and size of the value, number of headers, start of the headers.
    """
    key_sizes, key_starts = _varints(data, after_deltas, _INT_LAST)
    value_sizes, value_starts = _varints(data, _field_ends(key_starts, key_sizes, ends), _INT_LAST)
    header_counts, header_starts = _varints(data, _field_ends(value_starts, value_sizes, ends), _INT_LAST)
    # A header takes at least two bytes.
    if (header_counts < 0).any() or (header_counts * 2 > ends - header_starts).any():
        raise MalformedColumn("the number of headers of a record is negative, or too large for its length")
    if ((header_counts == 0) & (header_starts != ends)).any():
        raise MalformedColumn("bytes follow the last field of a record")
    if int(header_counts.sum()) > HEADERS_MAX:
        raise MalformedColumn(f"the batch has more than {HEADERS_MAX:,} headers")
    return key_starts, key_sizes, value_starts, value_sizes, header_counts, header_starts


def _walk(data: bytes, size: int, count: int) -> Int64Array:
    """Return the position of each record in the data."""
    parts: list[Int64Array] = []
    position, left, step = 0, count, _STEP_MIN
    try:
        while left:
            run, width = _run_of_one_size(data, position, size, left)
            if run >= _RUN_MIN:
                parts.append(np.arange(position, position + run * width, width))
                position += run * width
                left -= run
                continue
            starts, position = _walk_some(data, position, min(step, left))
            parts.append(np.array(starts, np.int64))
            left -= len(starts)
            step *= 2  # if sizes differ, searching for a run is rarely worth it
    except IndexError:
        raise MalformedColumn("a record extends beyond the end of the batch") from None
    if position != size:
        raise MalformedColumn(f"the {count} records end at byte {position} of {size}")
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [_NONE])


def _run_of_one_size(data: bytes, position: int, size: int, left: int) -> tuple[int, int]:
    """Return (number of consecutive records of the same size from ``position`` on, at most ``left``; that size)."""
    length = data[position]
    wide = length >= 128
    if wide:
        following = data[position + 1]
        if following >= 128:
            return 0, 0
        length += (following << 7) - 128
    width = 1 + wide + (length >> 1)
    many = min(left, (size - position) // width)
    if many < _RUN_MIN:
        return 0, 0
    marks = np.ndarray((many,), "<u2" if wide else "u1", data, position, (width,))
    differ = marks != marks[0]
    first = int(differ.argmax())
    return (many if not differ[first] else first), width


def _walk_some(data: bytes, position: int, count: int) -> tuple[list[int], int]:
    """Return (position of each of ``count`` records, end of the last record).

    Raise IndexError at the end of ``data``.
    """
    starts: list[int] = []
    append = starts.append
    for _ in range(count):
        append(position)
        length = data[position]
        if length < 128:
            position += 1 + (length >> 1)
            continue
        following = data[position + 1]
        if following < 128:
            position += 2 + (length - 128 >> 1) + (following << 6)
        else:
            position = _end_of_long(data, position)
    return starts, position


def _end_of_long(data: bytes, position: int) -> int:
    """Return the end of the record at ``position``, whose length field takes 3 to 5 bytes."""
    length = shift = 0
    while shift < 35:
        following = data[position]
        position += 1
        length |= (following & 0x7F) << shift
        if following < 128:
            return position + (length >> 1)
        shift += 7
    raise MalformedColumn("the length of a record takes more than 5 bytes")


def _varints(data: bytes, positions: Int64Array, last: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
    """Return (the signed number at each of ``positions``, the end position of each). ``last`` is `_INT_LAST` or
    `_LONG_LAST`.

    A position must not be after the end of the records.
    """
    numbers, ends = _varints_from(np.frombuffer(data, np.uint8), positions, 0, last)
    return (numbers >> _ONE).view(np.int64) ^ -(numbers & _ONE).view(np.int64), ends


def _varints_from(
    data: npt.NDArray[np.uint8], positions: Int64Array, shift: int, last: tuple[int, int]
) -> tuple[Uint64Array, Int64Array]:
    """Decode varints from their bytes at ``positions`` on, which contain the bits from ``shift`` on.

    Return (these bits of each number, end position of each number).
    """
    first = data.take(positions)
    last_shift, last_max = last
    if shift == last_shift and (first > last_max).any():
        raise MalformedColumn(f"a number has more than {shift + last_max.bit_length()} bits")
    numbers = first.astype(np.uint64) << np.uint64(shift)
    ends = positions + 1
    has_more = first >= 128
    count = np.count_nonzero(has_more)
    if not count:
        return numbers, ends
    mark = np.uint64(128 << shift)  # the continuation bit
    if count == len(positions):
        rest, ends = _varints_from(data, ends, shift + 7, last)
        return numbers + (rest - mark), ends
    longer = np.flatnonzero(has_more)
    rest, at = _varints_from(data, ends[longer], shift + 7, last)
    numbers[longer] += rest - mark
    ends[longer] = at
    return numbers, ends


def _field_ends(starts: Int64Array, sizes: Int64Array, ends: Int64Array) -> Int64Array:
    """Return the end of each byte string. Raise `MalformedColumn` if one extends beyond its record."""
    # Compare without adding: the sum could exceed 64 bits.
    least = int(sizes.min()) if len(sizes) else 0
    if least < -1 or (sizes >= ends - starts).any():
        raise MalformedColumn("a key or a value extends beyond its record")
    return starts + sizes if least >= 0 else starts + np.maximum(sizes, 0)


def _read_headers(data: bytes, position: int, end: int, count: int) -> Headers:
    pairs: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        size, position = _varint_at(data, position, end)
        if not 0 <= size <= end - position:
            raise MalformedColumn("the name of a header extends beyond its record")
        name = data[position : position + size].decode("utf-8", "replace")
        position += size
        size, position = _varint_at(data, position, end)
        if not -1 <= size <= end - position:
            raise MalformedColumn("the value of a header extends beyond its record")
        pairs.append((name, data[position : position + size] if size >= 0 else None))
        position += max(size, 0)
    if position != end:
        raise MalformedColumn("bytes follow the last header of a record")
    return tuple(pairs)


def _varint_at(data: bytes, position: int, end: int) -> tuple[int, int]:
    number = shift = 0
    last_shift, last_max = _INT_LAST
    while position < end:
        following = data[position]
        if shift == last_shift and following > last_max:
            break
        position += 1
        number |= (following & 0x7F) << shift
        if following < 128:
            return number >> 1 ^ -(number & 1), position
        shift += 7
    raise MalformedColumn("a number extends beyond its record, or has more than 32 bits")
