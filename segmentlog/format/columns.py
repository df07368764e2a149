"""The payload of a batch: its records as columns, one after another.

    offset deltas   u32[n]          only after compaction; else record i has delta i
    timestamps      i32[n] | i64[n] milliseconds relative to the base timestamp; absent when all equal it
    keys            MessagePack array of n (bin | nil); absent when every key is null
    values          MessagePack array of n (bin | nil); always there
    headers         MessagePack array of n arrays of [str, bin | nil]; absent when no record has any

The sizes of the columns stand in the batch header, so that one column is decoded without
touching the others. MessagePack rather than lengths and one blob because msgspec reads
and writes it in one C call (23 and 14 ns a value here; slicing a blob in Python took 88).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from segmentlog.errors import InvalidRecord
from segmentlog.quantities import EARLIEST_MS, LATEST_MS, NO_TIMESTAMP, TIMESTAMPS_ACCEPTED, milliseconds_of
from segmentlog.records import Headers

Values = Sequence[bytes | None]
Int64Array = npt.NDArray[np.int64]

_encoder = msgspec.msgpack.Encoder()
_blobs_decoder = msgspec.msgpack.Decoder(list[bytes | None])
_headers_decoder = msgspec.msgpack.Decoder(list[Headers])

_INT32_MAX = 2**31 - 1
_PLAIN_TYPES = frozenset((bytes, bytearray, type(None)))


class ColumnSizes(msgspec.Struct, frozen=True, gc=False):
    """Size in bytes of each column, in their order in the payload."""

    offset_deltas: int
    timestamps: int
    keys: int
    values: int
    headers: int


# ---------------------------------------------------------------- checking what a caller gave


def check_blobs(column: str, blobs: Sequence[Any]) -> None:
    """Raise `InvalidRecord` unless every item is bytes-like or None.

    msgspec would write a `str` without complaint and refuse it only when it is read back.
    ``bytes.startswith`` with a tuple looks at the type of every item in C and at nothing
    else once its start lies behind the end: 7 ns an item, against 15 for ``bytes.join`` or
    ``msgspec.convert`` and 26 for ``set(map(type, ...))``.
    """
    try:
        b"".startswith(tuple(blobs), 1)
    except (TypeError, ValueError, BufferError):  # a null; or a view that was released, or has gaps
        if not set(map(type, blobs)) <= _PLAIN_TYPES:
            _check_each(column, blobs)


def has_null(blobs: Sequence[Any]) -> bool:
    """Whether an item is None. A yes is rare: no is what costs little."""
    try:
        b"".startswith(tuple(blobs), 1)
        return False
    except (TypeError, ValueError, BufferError):
        return any(blob is None for blob in blobs)


def _check_each(column: str, blobs: Sequence[Any]) -> None:
    """The same, item by item: to say which one it is."""
    for index, blob in enumerate(blobs):
        if isinstance(blob, memoryview):
            _check_view(column, index, blob)
        elif blob is not None and not isinstance(blob, bytes | bytearray):
            hint = " (encode it first: .encode())" if isinstance(blob, str) else ""
            raise InvalidRecord(column, index, type(blob).__name__, f"bytes or None{hint}")


def _check_view(column: str, index: int, view: memoryview) -> None:
    try:
        flaw = "" if view.c_contiguous else "a memoryview with gaps"
    except ValueError as error:
        flaw = str(error)
    if flaw:
        raise InvalidRecord(column, index, flaw, "a contiguous memoryview: make it bytes first")


def check_headers(headers: Sequence[Any]) -> list[Headers]:
    """Normalise one sequence of (name, value) pairs a record; None and () mean no headers."""
    if not hasattr(headers, "__iter__") or isinstance(headers, type):
        raise InvalidRecord("headers", 0, type(headers).__name__, "for each record pairs of (str, bytes or None)")
    filled = [() if pairs is None else pairs for pairs in headers]
    try:
        checked = msgspec.convert(filled, list[Headers], builtin_types=(bytes,))
    except UnicodeEncodeError:
        raise InvalidRecord("headers", 0, ascii(headers)[:40], "pairs of (str, bytes or None)") from None
    except msgspec.ValidationError as error:
        raise InvalidRecord("headers", _index_in(str(error)), str(error), "pairs of (str, bytes or None)") from None
    for index, pairs in enumerate(checked):
        for name, _ in pairs:
            if not name.isascii() and not _is_utf8(name):  # a lone surrogate, as the command line makes of bad bytes
                raise InvalidRecord("headers", index, ascii(name), "names that UTF-8 can encode")
    return checked


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
        return True
    except UnicodeEncodeError:
        return False


def _index_in(message: str) -> int:
    """The record that a msgspec path such as ``$[3][0]`` speaks of."""
    _, found, path = message.partition("`$[")
    return int(path.split("]", 1)[0]) if found else 0


def as_timestamps(timestamps: Any, count: int) -> Int64Array:
    """The caller's timestamps (ints or an integer array, milliseconds; or datetimes) as int64, checked.

    A naive datetime is local time, one of numpy is UTC as ever. -1 is a record without a timestamp, which Kafka's
    clients may send. Raises `InvalidRecord` for a wrong type, a wrong number of them, or one outside
    [`EARLIEST_MS`, `LATEST_MS`].
    """
    try:
        array = np.asarray(timestamps)
        if (
            array.dtype.kind == "O"
            and array.ndim == 1
            and all(isinstance(timestamp, int | datetime) for timestamp in timestamps)
        ):
            array = np.array([_milliseconds(timestamp) for timestamp in timestamps], np.int64)
        elif array.dtype.kind == "M":
            array = _milliseconds_of_numpy(array)
    except (ValueError, OverflowError) as error:
        raise InvalidRecord("timestamps", 0, str(error), "integers, milliseconds since 1970") from None
    if array.ndim == 1 and not len(array):
        array = array.astype(np.int64)  # numpy takes an empty list for floats
    if array.dtype.kind not in "iu" or array.ndim != 1:
        found = f"{array.ndim}-dimensional {array.dtype}"
        raise InvalidRecord("timestamps", 0, found, "integers, milliseconds since 1970")
    if len(array) != count:
        raise InvalidRecord("timestamps", len(array), f"{len(array)} items", f"{count} items, one a value")
    wide = array.astype(np.int64, copy=False)
    if count and (int(wide.min()) < EARLIEST_MS or int(array.max()) > LATEST_MS):
        index = int(np.flatnonzero((wide < EARLIEST_MS) | (array > LATEST_MS))[0])
        raise InvalidRecord("timestamps", index, str(int(array[index])), TIMESTAMPS_ACCEPTED)
    return wide


def _milliseconds_of_numpy(moments: npt.NDArray[np.datetime64]) -> Int64Array:
    """Raises `InvalidRecord` for NaT, and for a moment that 64 bits of milliseconds cannot hold: numpy wraps around."""
    rounded = moments.astype("datetime64[ms]")
    wrong = rounded.astype("datetime64[Y]") != moments.astype("datetime64[Y]")
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise InvalidRecord("timestamps", index, repr(moments.flat[index]), TIMESTAMPS_ACCEPTED)
    return rounded.astype(np.int64)


def _milliseconds(timestamp: int | datetime) -> int:
    """Since 1970; the part of a millisecond that a datetime has is left out."""
    if not isinstance(timestamp, datetime):
        return timestamp
    if (milliseconds := milliseconds_of(timestamp)) == NO_TIMESTAMP:
        raise ValueError(f"{timestamp}, the one millisecond that stands for no timestamp")
    return milliseconds


# ---------------------------------------------------------------- encoding


def encode_columns(
    scratch: bytearray,
    values: Values,
    keys: Values | None,
    timestamps: Int64Array | None,
    headers: Sequence[Headers] | None,
    offset_deltas: npt.NDArray[np.uint32] | None = None,
    base_timestamp: int = 0,
) -> ColumnSizes:
    """Write the columns into ``scratch``, replacing what it held. Raises `InvalidRecord`.

    ``timestamps`` are absolute, or None when all equal ``base_timestamp``. The scratch
    buffer is reused from batch to batch: fresh memory of this size costs its page faults.
    Types are checked once the columns are encoded: the items are in the cache then, and the
    check takes half as long.
    """
    head, deltas_size, timestamps_size = encode_numbers(timestamps, offset_deltas, base_timestamp)
    keys_size = headers_size = 0
    try:
        if keys is not None:
            encoded = _encoder.encode(keys)
            keys_size = len(encoded)
            head = head + encoded if head else encoded
        end = len(head)
        if end:
            # Not encoded in place: the buffer would shrink to the keys, and grow again for the values.
            scratch[:end] = head
        _encoder.encode_into(values, scratch, end)
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        if keys is not None:
            _check_each("keys", keys)
        _check_each("values", values)
        raise InvalidRecord("values", 0, str(error), "bytes, bytearray or memoryview") from None
    if keys is not None:
        check_blobs("keys", keys)
    check_blobs("values", values)
    values_size = len(scratch) - end
    if headers is not None:
        end += values_size
        _encoder.encode_into(headers, scratch, end)
        headers_size = len(scratch) - end
    return ColumnSizes(deltas_size, timestamps_size, keys_size, values_size, headers_size)


def encode_numbers(
    timestamps: Int64Array | None, offset_deltas: npt.NDArray[np.uint32] | None, base_timestamp: int
) -> tuple[bytes, int, int]:
    """(offset deltas and timestamps as they stand in front of the keys, size of the deltas, of the timestamps)."""
    head = b""
    if offset_deltas is not None:
        head = offset_deltas.astype("<u4", copy=False).tobytes()
    deltas_size = len(head)
    if timestamps is not None:
        relative = timestamps - np.int64(base_timestamp)
        narrow = max(-int(relative.min()), int(relative.max())) <= _INT32_MAX
        head += relative.astype("<i4" if narrow else "<i8", copy=False).tobytes()
    return head, deltas_size, len(head) - deltas_size


# ---------------------------------------------------------------- decoding


class MalformedColumn(ValueError):
    """A column that its checksum covers and that still does not decode: written wrong, or forged."""


def decode_blobs(column: memoryview, count: int) -> list[bytes | None]:
    """A keys or values column. Raises `MalformedColumn`."""
    array_prefix(column, count)
    try:
        return _blobs_decoder.decode(column)
    except msgspec.DecodeError as error:
        raise MalformedColumn(str(error)) from None


def decode_headers(column: memoryview, count: int) -> list[Headers]:
    """A headers column. Raises `MalformedColumn`."""
    array_prefix(column, count)
    try:
        return _headers_decoder.decode(column)
    except (msgspec.DecodeError, UnicodeDecodeError, MemoryError) as error:
        raise MalformedColumn(str(error)) from None


def decode_timestamps(column: memoryview, count: int, base_timestamp: int) -> Int64Array:
    """Absolute timestamps, int64[count]. Raises `MalformedColumn`."""
    if not len(column):
        return np.full(count, base_timestamp, np.int64)
    if len(column) == 4 * count:
        return np.frombuffer(column, "<i4").astype(np.int64) + base_timestamp
    if len(column) == 8 * count:
        return np.frombuffer(column, "<i8") + np.int64(base_timestamp)
    raise MalformedColumn(f"{len(column)} bytes of timestamps for {count} records")


def decode_offsets(column: memoryview, count: int, base_offset: int) -> Int64Array:
    """Absolute offsets, int64[count]. Raises `MalformedColumn`."""
    if not len(column):
        return np.arange(base_offset, base_offset + count, dtype=np.int64)
    if len(column) != 4 * count:
        raise MalformedColumn(f"{len(column)} bytes of offset deltas for {count} records")
    return np.frombuffer(column, "<u4").astype(np.int64) + base_offset


def array_prefix(column: memoryview, count: int) -> bytes:
    """The bytes before the first item. The MessagePack array must announce exactly ``count`` items.

    Checked before anything is allocated for them. Raises `MalformedColumn`.
    """
    prefix = array_prefix_of(count)
    if column[: len(prefix)] != prefix:
        raise MalformedColumn(f"a MessagePack array of {count} items expected, found {bytes(column[:5]).hex()}")
    return prefix


def array_prefix_of(count: int) -> bytes:
    """What a MessagePack array of ``count`` items begins with."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def array_of(items: Sequence[Any]) -> bytes:
    """A keys, values or headers column of items that are known to be of the right type."""
    return _encoder.encode(items)
