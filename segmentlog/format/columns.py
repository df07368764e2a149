"""The payload of a batch: its records as columns, stored one after another.

    offset deltas   u32[n]          only after compaction; else record i has delta i
    timestamps      i32[n] | i64[n] milliseconds relative to the base timestamp; absent when all equal it
    keys            MessagePack array of n (bin | nil); absent when every key is null
    values          MessagePack array of n (bin | nil); never absent
    headers         MessagePack array of n arrays of [str, bin | nil]; absent when no record has any

The batch header contains the sizes of the columns, so that a column is decoded without touching the
others. *Rejected:* lengths and one blob. msgspec reads and writes MessagePack in one C call (measured:
23 and 14 ns a value); slicing a blob in Python took 88 ns.
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


# ---------------------------------------------------------------- checking a caller's columns


def check_blobs(column: str, blobs: Sequence[Any]) -> None:
    """Raise `InvalidRecord` unless every item is bytes-like or None.

    msgspec would encode a `str` without an error; only the decoder would refuse it.
    ``bytes.startswith`` accepts a tuple and checks the type of every item in C. A start after the end of the bytes
    prevents any comparison. This takes 7 ns an item, ``bytes.join`` or ``msgspec.convert`` 15, and
    ``set(map(type, ...))`` 26.
    """
    try:
        b"".startswith(tuple(blobs), 1)
    except (TypeError, ValueError, BufferError):  # A null, or a memoryview that was released or has gaps.
        if not set(map(type, blobs)) <= _PLAIN_TYPES:
            _check_each(column, blobs)


def has_null(blobs: Sequence[Any]) -> bool:
    """Return whether an item is None. Fast if none is, which is the common case."""
    try:
        b"".startswith(tuple(blobs), 1)
        return False
    except (TypeError, ValueError, BufferError):
        return any(blob is None for blob in blobs)


def _check_each(column: str, blobs: Sequence[Any]) -> None:
    """Check item by item, for an error that names the index of the bad item."""
    for index, blob in enumerate(blobs):
        if isinstance(blob, memoryview):
            _check_view(column, index, blob)
        elif blob is not None and not isinstance(blob, bytes | bytearray):
            hint = " (encode it first: .encode())" if isinstance(blob, str) else ""
            raise InvalidRecord(column, index, type(blob).__name__, f"bytes or None{hint}")


def _check_view(column: str, index: int, view: memoryview) -> None:
    try:
        flaw = "" if view.c_contiguous else "a memoryview that is not contiguous"
    except ValueError as error:
        flaw = str(error)
    if flaw:
        raise InvalidRecord(column, index, flaw, "a contiguous memoryview (convert it first: bytes(view))")


def check_headers(headers: Sequence[Any]) -> list[Headers]:
    """Return a tuple of (name, value) pairs for each record. None and () mean no headers. Raise `InvalidRecord`."""
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
            if not name.isascii() and not _is_utf8(name):  # a lone surrogate: Python decodes invalid arguments to them
                raise InvalidRecord("headers", index, ascii(name), "names that UTF-8 can encode")
    return checked


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
        return True
    except UnicodeEncodeError:
        return False


def _index_in(message: str) -> int:
    """Return the index of the record in a msgspec path such as ``$[3][0]``."""
    _, found, path = message.partition("`$[")
    return int(path.split("]", 1)[0]) if found else 0


def as_timestamps(timestamps: Any, count: int) -> Int64Array:
    """Return the caller's timestamps as int64, checked: ints or an integer array in milliseconds, or datetimes.

    A naive datetime is local time; a numpy datetime is UTC. -1 means a record without a timestamp, which Kafka
    clients may send. Raise `InvalidRecord` for a wrong type, for another number of timestamps than ``count``, and
    for a timestamp outside [`EARLIEST_MS`, `LATEST_MS`].
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
        array = array.astype(np.int64)  # numpy makes floats of an empty list
    if array.dtype.kind not in "iu" or array.ndim != 1:
        found = f"{array.ndim}-dimensional {array.dtype}"
        raise InvalidRecord("timestamps", 0, found, "integers, milliseconds since 1970")
    if len(array) != count:
        raise InvalidRecord("timestamps", len(array), f"{len(array)} items", f"{count} items, one for each value")
    wide = array.astype(np.int64, copy=False)
    if count and (int(wide.min()) < EARLIEST_MS or int(array.max()) > LATEST_MS):
        index = int(np.flatnonzero((wide < EARLIEST_MS) | (array > LATEST_MS))[0])
        raise InvalidRecord("timestamps", index, str(int(array[index])), TIMESTAMPS_ACCEPTED)
    return wide


def _milliseconds_of_numpy(moments: npt.NDArray[np.datetime64]) -> Int64Array:
    """Convert to milliseconds. Raise `InvalidRecord` for NaT, and for a time outside 64 bits, which numpy wraps."""
    rounded = moments.astype("datetime64[ms]")
    wrong = rounded.astype("datetime64[Y]") != moments.astype("datetime64[Y]")
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise InvalidRecord("timestamps", index, repr(moments.flat[index]), TIMESTAMPS_ACCEPTED)
    return rounded.astype(np.int64)


def _milliseconds(timestamp: int | datetime) -> int:
    """Return the milliseconds since 1970, without the fraction of a millisecond."""
    if not isinstance(timestamp, datetime):
        return timestamp
    if (milliseconds := milliseconds_of(timestamp)) == NO_TIMESTAMP:
        raise ValueError(f"{timestamp}, which is the millisecond -1 and means no timestamp")
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
    """Write the columns into ``scratch``, replacing its contents. Raise `InvalidRecord`.

    ``timestamps`` are absolute, or None when all equal ``base_timestamp``. Callers reuse the scratch buffer from
    batch to batch: new memory of this size costs page faults. Types are checked after the columns are encoded:
    the items are in the cache then, and the check takes half as long.
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
            # Copied instead of encoded in place: the buffer would shrink to the keys, and grow again for the values.
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
    """Return (the columns of offset deltas and timestamps, size of the deltas, size of the timestamps)."""
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
    """A column does not decode although its checksum is right: it was written wrong, or forged."""


def decode_blobs(column: memoryview, count: int) -> list[bytes | None]:
    """Return the items of a keys or values column. Raise `MalformedColumn`."""
    array_prefix(column, count)
    try:
        return _blobs_decoder.decode(column)
    except msgspec.DecodeError as error:
        raise MalformedColumn(str(error)) from None


def decode_headers(column: memoryview, count: int) -> list[Headers]:
    """Return the (name, value) pairs of each record. Raise `MalformedColumn`."""
    array_prefix(column, count)
    try:
        return _headers_decoder.decode(column)
    except (msgspec.DecodeError, UnicodeDecodeError, MemoryError) as error:
        raise MalformedColumn(str(error)) from None


def decode_timestamps(column: memoryview, count: int, base_timestamp: int) -> Int64Array:
    """Return absolute timestamps, int64[count]. Raise `MalformedColumn`."""
    if not len(column):
        return np.full(count, base_timestamp, np.int64)
    if len(column) == 4 * count:
        return np.frombuffer(column, "<i4").astype(np.int64) + base_timestamp
    if len(column) == 8 * count:
        return np.frombuffer(column, "<i8") + np.int64(base_timestamp)
    raise MalformedColumn(f"{len(column)} bytes of timestamps for {count} records")


def decode_offsets(column: memoryview, count: int, base_offset: int) -> Int64Array:
    """Return absolute offsets, int64[count]. Raise `MalformedColumn`."""
    if not len(column):
        return np.arange(base_offset, base_offset + count, dtype=np.int64)
    if len(column) != 4 * count:
        raise MalformedColumn(f"{len(column)} bytes of offset deltas for {count} records")
    return np.frombuffer(column, "<u4").astype(np.int64) + base_offset


def array_prefix(column: memoryview, count: int) -> bytes:
    """Return the bytes before the first item of a MessagePack array that announces exactly ``count`` items.

    The decoders call this before they allocate memory for items. Raise `MalformedColumn` for another number.
    """
    prefix = array_prefix_of(count)
    if column[: len(prefix)] != prefix:
        raise MalformedColumn(f"expected a MessagePack array of {count} items, found {bytes(column[:5]).hex()}")
    return prefix


def array_prefix_of(count: int) -> bytes:
    """Return the first bytes of a MessagePack array of ``count`` items."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def array_of(items: Sequence[Any]) -> bytes:
    """Return a keys, values or headers column of items. The caller has checked their types."""
    return _encoder.encode(items)
