"""The records of a Kafka batch as bytes: check them, find their fields, cut them into objects, encode them.

    length            varint    bytes that follow
    attributes        i8        unused
    timestamp_delta   varlong   milliseconds, relative to the base timestamp of the batch
    offset_delta      varint    relative to the base offset of the batch
    key_length        varint    -1: null
    key
    value_length      varint    -1: null
    value
    header_count      varint
    headers                     each: name_length varint, name, value_length varint (-1: null), value

A varint holds 7 bits a byte, lowest bits first; every byte except the last has its top bit set. Numbers are zigzagged:
0, -1, 1, -2 become 0, 1, 2, 3. A varint takes at most 5 bytes, a varlong at most 10.

This module runs as plain Python. Where a C compiler exists, the install compiles it with the types in ``records.pxd``.
Both forms return the same for every input, and a test compares them. The bytes come from untrusted clients: this source
itself compares the position with the end before every read.
"""

from __future__ import annotations

from time import sleep as _sleep
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]

# The rows of the table that `scan_records` fills, with a column for each record. Positions are in the data.
START = 0
BODY = 1
"""Position after the length."""
TIMESTAMP_DELTA = 2
AFTER_TIMESTAMP = 3
"""Position after the timestamp delta."""
OFFSET_DELTA = 4
KEY = 5
KEY_SIZE = 6
"""Size in bytes; -1 for null. VALUE_SIZE has the same form."""
VALUE = 7
VALUE_SIZE = 8
HEADER_COUNT = 9
HEADERS = 10
END = 11
ROW_COUNT = 12

# Copies for the compiled code. Its copies are C integers, which Python code cannot import.
_START, _BODY, _TIMESTAMP_DELTA, _AFTER_TIMESTAMP = START, BODY, TIMESTAMP_DELTA, AFTER_TIMESTAMP
_OFFSET_DELTA, _KEY, _KEY_SIZE, _VALUE, _VALUE_SIZE = OFFSET_DELTA, KEY, KEY_SIZE, VALUE, VALUE_SIZE
_HEADER_COUNT, _HEADERS, _END = HEADER_COUNT, HEADERS, END

# Reasons why `scan_records` refuses a record. A refusal divided by `REASONS_MAX` is the record, the remainder the
# reason.
REASONS_MAX = 16
BAD_LENGTH = 1
BAD_TIMESTAMP = 2
BAD_OFFSET = 3
BAD_KEY = 4
BAD_VALUE = 5
BAD_HEADER_COUNT = 6
BAD_HEADER_NAME = 7
BAD_HEADER_VALUE = 8
BYTES_LEFT_IN_RECORD = 9
BYTES_LEFT = 10
TOO_MANY_HEADERS = 11

HEADERS_MAX = 1_000_000
"""Limit for the headers of all records of a batch: as many as the protocol allows elements in an array.

An empty header takes two bytes in a batch, and a hundred as an object.
"""

_HEADERS_MAX = HEADERS_MAX
_INT_MAX_SIZE = 5
"""Bytes of the longest varint."""
_BODY_MAX = 2**31 - 1
"""Bytes of the longest record, without its length."""
_NUMBERS_MAX = 5 + 1 + 10 + 5 + 5 + 5 + 1
"""Largest size of a record without its key, value and headers: length, attributes, deltas, two lengths, header
count."""

_TURN_MASK = (1 << 14) - 1
"""Each time this many records are done, a loop calls ``sleep(0)``, which lets other threads run.

Otherwise the loops hold the GIL, and a batch may have 20 million records.
"""

# Kinds of MessagePack items: the mark that a size of one byte follows.
_BIN = 0xC4
_STR = 0xD9
_ARRAY = 0xDB


def scan_records(
    data: bytes, size: int, count: int, last_offset_delta: int, table: Numbers | None
) -> tuple[int, int, int, int, int, int]:
    """Check that the first ``size`` bytes of ``data`` are ``count`` records, and find their fields.

    ``table`` is an int64 array of shape (ROW_COUNT, count) that is overwritten, or None. Offset deltas must ascend,
    from at least 0 to at most ``last_offset_delta``. Return

        refusal                   0 if all records are valid; else index * REASONS_MAX + reason, of the first bad record
        least_timestamp_delta     0 without records
        largest_timestamp_delta   0 without records
        null_key_count            records whose key is null
        null_value_count
        with_headers_count        records with at least one header

    Raise IndexError when ``size`` is larger than the data or the table is too small.
    """
    if size > len(data) or count < 0:
        raise IndexError("scan_records: the size exceeds the data, or the count is negative")
    if table is not None and (table.shape[0] < ROW_COUNT or table.shape[1] < count):
        raise IndexError("scan_records: the table is too small")
    raw = data
    at = [0]
    position = 0
    previous = -1
    least = 0
    largest = 0
    null_keys = 0
    null_values = 0
    with_headers = 0
    all_headers = 0
    for index in range(count):
        if index & _TURN_MASK == _TURN_MASK:
            _sleep(0)
        at[0] = position
        length = _read_int(raw, at, size)
        body = at[0]
        if body < 0 or length < 1 or length > size - body:
            return _refuse(index, BAD_LENGTH)
        end = body + length
        at[0] = body + 1
        timestamp = _read_long(raw, at, end)
        after_timestamp = at[0]
        if after_timestamp < 0:
            return _refuse(index, BAD_TIMESTAMP)
        offset = _read_int(raw, at, end)
        if at[0] < 0 or offset <= previous or offset > last_offset_delta:
            return _refuse(index, BAD_OFFSET)
        previous = offset
        key_size = _read_int(raw, at, end)
        key = at[0]
        if key < 0 or key_size < -1 or key_size > end - key:
            return _refuse(index, BAD_KEY)
        if key_size < 0:
            null_keys += 1
        else:
            at[0] = key + key_size
        value_size = _read_int(raw, at, end)
        value = at[0]
        if value < 0 or value_size < -1 or value_size > end - value:
            return _refuse(index, BAD_VALUE)
        if value_size < 0:
            null_values += 1
        else:
            at[0] = value + value_size
        header_count = _read_int(raw, at, end)
        headers = at[0]
        if headers < 0 or header_count < 0:
            return _refuse(index, BAD_HEADER_COUNT)
        if header_count:
            with_headers += 1
            all_headers += header_count
            if all_headers > _HEADERS_MAX:
                return _refuse(index, TOO_MANY_HEADERS)
            for _ in range(header_count):
                part_size = _read_int(raw, at, end)
                part = at[0]
                if part < 0 or part_size < 0 or part_size > end - part:
                    return _refuse(index, BAD_HEADER_NAME)
                at[0] = part + part_size
                part_size = _read_int(raw, at, end)
                part = at[0]
                if part < 0 or part_size < -1 or part_size > end - part:
                    return _refuse(index, BAD_HEADER_VALUE)
                if part_size > 0:
                    at[0] = part + part_size
        if at[0] != end:
            return _refuse(index, BYTES_LEFT_IN_RECORD)
        if index == 0 or timestamp < least:
            least = timestamp
        if index == 0 or timestamp > largest:
            largest = timestamp
        if table is not None:
            table[_START, index] = position
            table[_BODY, index] = body
            table[_TIMESTAMP_DELTA, index] = timestamp
            table[_AFTER_TIMESTAMP, index] = after_timestamp
            table[_OFFSET_DELTA, index] = offset
            table[_KEY, index] = key
            table[_KEY_SIZE, index] = key_size
            table[_VALUE, index] = value
            table[_VALUE_SIZE, index] = value_size
            table[_HEADER_COUNT, index] = header_count
            table[_HEADERS, index] = headers
            table[_END, index] = end
        position = end
    if position != size:
        return _refuse(count, BYTES_LEFT)
    return 0, least, largest, null_keys, null_values, with_headers


def _refuse(index: int, reason: int) -> tuple[int, int, int, int, int, int]:
    return index * REASONS_MAX + reason, 0, 0, 0, 0, 0


def cut_field(data: bytes, table: Numbers, start_row: int, first: int, stop: int) -> list[bytes | None]:
    """Return a key or a value of each of the records ``[first, stop)``: ``start_row`` is KEY or VALUE.

    Raise IndexError for a record beyond the table or a field beyond the data.
    """
    size = len(data)
    if table is None or not 0 <= start_row < table.shape[0] - 1 or first < 0 or stop > table.shape[1]:
        raise IndexError("cut_field: the range exceeds the records of the table")
    raw = data
    items: list[bytes | None] = []
    for index in range(first, stop):
        if index & _TURN_MASK == _TURN_MASK:
            _sleep(0)
        start = table[start_row, index]
        length = table[start_row + 1, index]
        if length < 0:
            items.append(None)
            continue
        if start < 0 or start > size or length > size - start:
            raise IndexError("cut_field: a field extends beyond the end of the data")
        items.append(raw[start : start + length])
    return items


def cut_headers(data: bytes, table: Numbers, first: int, stop: int) -> list[tuple[tuple[str, bytes | None], ...]]:
    """Return the (name, value) pairs of each of the records ``[first, stop)``; invalid UTF-8 becomes U+FFFD.

    Raise IndexError as `cut_field` does.
    """
    size = len(data)
    if table is None or table.shape[0] < ROW_COUNT or first < 0 or stop > table.shape[1]:
        raise IndexError("cut_headers: the range exceeds the records of the table")
    raw = data
    at = [0]
    found: list[tuple[tuple[str, bytes | None], ...]] = []
    for index in range(first, stop):
        if index & _TURN_MASK == _TURN_MASK:
            _sleep(0)
        count = table[_HEADER_COUNT, index]
        if count == 0:
            found.append(())
            continue
        at[0] = table[_HEADERS, index]
        if at[0] < 0:
            raise IndexError("cut_headers: headers have a negative position")
        pairs: list[tuple[str, bytes | None]] = []
        for _ in range(count):
            length = _read_int(raw, at, size)
            start = at[0]
            if start < 0 or length < 0 or length > size - start:
                raise IndexError("cut_headers: a name extends beyond the end of the data")
            name = raw[start : start + length].decode("utf-8", "replace")
            at[0] = start + length
            length = _read_int(raw, at, size)
            start = at[0]
            if start < 0 or length > size - start:
                raise IndexError("cut_headers: a value extends beyond the end of the data")
            if length < 0:
                pairs.append((name, None))
            else:
                pairs.append((name, raw[start : start + length]))
                at[0] = start + length
        found.append(tuple(pairs))
    return found


def encode_columns(
    keys: bytes, values: bytes, headers: bytes, count: int, timestamp_deltas: Numbers, offset_deltas: Numbers
) -> bytearray:
    """Return the records of three MessagePack columns in one piece, uncompressed.

    ``keys`` and ``values`` are arrays of ``count`` items (bin | nil). ``headers`` is an array of ``count`` arrays of
    [str, bin | nil]. If ``keys`` is empty, every key is null. If ``headers`` is empty, no record has headers. The
    deltas are int64 arrays of at least ``count`` numbers. Names of headers are copied, whether they are UTF-8 or not.

    Raise ValueError for a malformed column or a record of more than 2 GiB, IndexError for too few deltas.
    """
    keys_end = len(keys)
    values_end = len(values)
    headers_end = len(headers)
    if count < 0 or len(timestamp_deltas) < count or len(offset_deltas) < count:
        raise IndexError("encode_columns: fewer deltas than records")
    raw_keys = keys
    raw_values = values
    raw_headers = headers
    key_at = [0]
    value_at = [0]
    header_at = [0]
    if keys_end and _read_size(raw_keys, key_at, keys_end, _ARRAY) != count:
        raise ValueError("the keys are not a MessagePack array of as many items as there are records")
    if _read_size(raw_values, value_at, values_end, _ARRAY) != count:
        raise ValueError("the values are not a MessagePack array of as many items as there are records")
    if headers_end and _read_size(raw_headers, header_at, headers_end, _ARRAY) != count:
        raise ValueError("the headers are not a MessagePack array of as many items as there are records")
    # A mark of MessagePack takes as many bytes as the varint of the same size, or more.
    capacity = keys_end + values_end + headers_end + count * _NUMBERS_MAX
    out = bytearray(capacity)
    raw = out
    position = 0
    for index in range(count):
        if index & _TURN_MASK == _TURN_MASK:
            _sleep(0)
        key_size = _read_item(raw_keys, key_at, keys_end, _BIN) if keys_end else -1
        value_size = _read_item(raw_values, value_at, values_end, _BIN)
        tail_size = _size_of_headers(raw_headers, header_at[0], headers_end) if headers_end else 1
        if key_size < -1 or value_size < -1 or tail_size < 1:
            raise ValueError(f"record {index}: its key, value or headers are malformed or of a wrong type")
        timestamp = timestamp_deltas[index]
        offset = offset_deltas[index]
        body = 1 + _varint_size(timestamp) + _varint_size(offset) + _varint_size(key_size) + _varint_size(value_size)
        body += tail_size
        if key_size > 0:
            body += key_size
        if value_size > 0:
            body += value_size
        if body > _BODY_MAX or body > capacity - position - _INT_MAX_SIZE:
            raise ValueError(f"record {index}: it exceeds 2 GiB or the size of its columns")
        position = _write_varint(raw, position, body)
        raw[position] = 0
        position = _write_varint(raw, position + 1, timestamp)
        position = _write_varint(raw, position, offset)
        position = _write_item(raw, position, raw_keys, key_at, key_size)
        position = _write_item(raw, position, raw_values, value_at, value_size)
        if headers_end:
            position = _write_headers(raw, position, raw_headers, header_at, headers_end)
        else:
            raw[position] = 0
            position += 1
    if key_at[0] != keys_end or value_at[0] != values_end or header_at[0] != headers_end:
        raise ValueError("bytes follow the last item of a column")
    del out[position:]
    return out


def _varint_size(number: int) -> int:
    size = 1
    rest = number if number >= 0 else -(number + 1)
    rest >>= 6
    while rest:
        size += 1
        rest >>= 7
    return size


def _write_varint(raw: bytearray, position: int, number: int) -> int:
    """Write a signed number and return the position after it. The caller has checked that there is room."""
    rest = number if number >= 0 else -(number + 1)
    byte = (rest & 63) << 1
    if number < 0:
        byte |= 1
    rest >>= 6
    while rest:
        raw[position] = byte | 128
        position += 1
        byte = rest & 127
        rest >>= 7
    raw[position] = byte
    return position + 1


def _write_item(raw: bytearray, position: int, source: bytes, at: list[int], size: int) -> int:
    """Write ``size`` (-1: null), then copy ``size`` bytes from ``at[0]`` on, and move ``at[0]`` after them.

    Return the position after the written bytes. The caller has checked that ``raw`` has room.
    """
    position = _write_varint(raw, position, size)
    start = at[0]
    for index in range(size):
        raw[position + index] = source[start + index]
    if size > 0:
        at[0] = start + size
        position += size
    return position


def _size_of_headers(source: bytes, start: int, end: int) -> int:
    """Return the encoded size of the headers whose column item is at ``start``, including their count; -1 if
    malformed.
    """
    at = [start]
    count = _read_size(source, at, end, _ARRAY)
    if count < 0:
        return -1
    size = _varint_size(count)
    for _ in range(count):
        if _read_size(source, at, end, _ARRAY) != 2:
            return -1
        part_size = _read_item(source, at, end, _STR)
        if part_size < 0:
            return -1
        at[0] += part_size
        size += _varint_size(part_size) + part_size
        part_size = _read_item(source, at, end, _BIN)
        if part_size < -1:
            return -1
        size += _varint_size(part_size)
        if part_size > 0:
            at[0] += part_size
            size += part_size
    return size


def _write_headers(raw: bytearray, position: int, source: bytes, at: list[int], end: int) -> int:
    """Write the headers at ``at[0]``, and move ``at[0]`` after them. `_size_of_headers` has checked them."""
    count = _read_size(source, at, end, _ARRAY)
    position = _write_varint(raw, position, count)
    for _ in range(count):
        _read_size(source, at, end, _ARRAY)
        part_size = _read_item(source, at, end, _STR)
        position = _write_item(raw, position, source, at, part_size)
        part_size = _read_item(source, at, end, _BIN)
        position = _write_item(raw, position, source, at, part_size)
    return position


def _read_item(raw: bytes, at: list[int], end: int, kind: int) -> int:
    """Return the size of the bin, str or nil (-1) at ``at[0]``, and move ``at[0]`` to its bytes; -2 if malformed."""
    size = _read_size(raw, at, end, kind)
    if size > end - at[0]:
        return -2
    return size


def _read_size(raw: bytes, at: list[int], end: int, kind: int) -> int:
    """Decode the MessagePack mark at ``at[0]``, and move ``at[0]`` after it.

    Return the size in bytes of a bin or str, or the number of items of an array, if the mark is of ``kind``. Return -1
    for nil, and -2 for any other mark.
    """
    position = at[0]
    if position < 0 or position >= end:
        return -2
    mark = raw[position]
    position += 1
    if mark == 0xC0:
        at[0] = position
        return -1
    if kind == _ARRAY and 0x90 <= mark <= 0x9F:
        at[0] = position
        return mark - 0x90
    if kind == _STR and 0xA0 <= mark <= 0xBF:
        at[0] = position
        return mark - 0xA0
    # Each kind has three consecutive marks, for sizes of 1, 2 and 4 bytes. Arrays have no mark for a size of 1 byte.
    if mark < kind or mark > kind + 2 or (mark == kind and kind == _ARRAY):
        return -2
    width = 1 << (mark - kind)
    if width > end - position:
        return -2
    size = 0
    for index in range(width):
        size = size << 8 | raw[position + index]
    at[0] = position + width
    return size


def _read_int(raw: bytes, at: list[int], end: int) -> int:
    """Return the varint of 32 bits at ``at[0]`` and move ``at[0]`` after it; set ``at[0]`` to -1 if there is none."""
    begin = at[0]
    number = _read_long(raw, at, end)
    if at[0] - begin > 5 or number > 2147483647 or number < -2147483648:
        at[0] = -1
    return number


def _read_long(raw: bytes, at: list[int], end: int) -> int:
    """Return the varlong of 64 bits at ``at[0]`` and move ``at[0]`` after it; set ``at[0]`` to -1 if there is none."""
    position = at[0]
    number = 0
    shift = 0
    while 0 <= position < end and shift < 70:
        byte = raw[position]
        position += 1
        part = byte & 127
        if shift == 63 and part > 1:
            break
        number |= part << shift
        if byte < 128:
            at[0] = position
            if number & 1:
                return -(number >> 1) - 1
            return number >> 1
        shift += 7
    at[0] = -1
    return 0
