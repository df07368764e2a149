"""Making batches of Kafka's: of records that the library wrote, for Kafka's clients, and of those a compaction leaves.

The compiled core makes records of columns, as they are stored or made of lists: 45 to 70 ns a record here, with headers
85 to 170 (1,500 records of 100 bytes). Where it is not compiled numpy does. The numbers in front of the key or value of
a record are then one short byte string, made for all records at once as the rows of a table: 130 ns a record, keys and
values joined with them 230 to 330.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from segmentlog.format.batch import CODEC_MASK, DELETE_HORIZON, LEADER_EPOCH_MASK, LOG_APPEND_TIME
from segmentlog.format.batch_codecs import CODEC_NONE
from segmentlog.format.columns import Int64Array, MalformedColumn, Values, array_of
from segmentlog.format.splice import Table, items_of
from segmentlog.format.varints import varint
from segmentlog.format.wire import Buffer, pack_wire_batch
from segmentlog.format.wire_codecs import compress_records
from segmentlog.format.wire_pieces import Blobs, encode_pieces
from segmentlog.format.wire_tables import encode_tables, varint_sizes, zigzag
from segmentlog.quantities import NO_TIMESTAMP
from segmentlog.records import Headers
from segmentlog.speedups import COMPILED
from segmentlog.speedups import records as core

_NULL: Final = -1
_NULL_MARK: Final = 1
_NO_HEADERS: Final = b"\0"
_VARINTS: Final = [varint(number) for number in range(1 << 10)]

Uint64Array = npt.NDArray[np.uint64]


class Columns:
    """The keys, values and headers of a batch as the library stores them. The compiled core makes records of them."""

    __slots__ = ("_count", "headers", "keys", "values")

    def __init__(self, keys: Buffer, values: Buffer, headers: Buffer, count: int) -> None:
        self.keys = keys
        """Empty where all are null."""
        self.values = values
        self.headers = headers
        """Empty where no record has any."""
        self._count = count

    def __len__(self) -> int:
        return self._count

    @classmethod
    def of(cls, keys: Values | None, values: Values, headers: Sequence[Headers] | None) -> Columns:
        """The columns of such lists."""
        return cls(
            b"" if keys is None else array_of(keys),
            array_of(values),
            b"" if headers is None else array_of(headers),
            len(values),
        )


def encode_wire_batch(
    keys: Values | Table | None,
    values: Values | Table | Blobs | Columns,
    headers: Sequence[Headers] | None,
    timestamps: Int64Array,
    offset_deltas: Int64Array | None = None,
    *,
    base_offset: int,
    epoch: int,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    last_offset_delta: int | None = None,
    codec: int = CODEC_NONE,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """A batch of Kafka's of at least one record, with the ``attributes`` of its header but for the codec.

    ``offset_deltas`` default to 0, 1, 2 and so on, ``last_offset_delta`` to the last of them. ``timestamps`` are
    absolute, int64; keys and values may be tables (`splice.as_table`), or lie in columns both together (`Blobs`);
    `Columns` have keys and headers among them. Under LogAppendTime the largest timestamp is that of all records. Raises
    ValueError for a delta that has no place in 32 bits, `MalformedColumn` for columns that do not decode.
    """
    count = len(values)
    deltas = np.arange(count, dtype=np.int64) if offset_deltas is None else offset_deltas
    base_timestamp, max_timestamp = int(timestamps[0]), int(timestamps.max())
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
        attributes |= DELETE_HORIZON
    if attributes & LOG_APPEND_TIME:
        timestamps = np.full(count, max_timestamp, np.int64)
    records = _encode(keys, values, headers, timestamps - np.int64(base_timestamp), deltas)
    return pack_wire_batch(
        compress_records(codec, records),
        base_offset=base_offset,
        leader_epoch=epoch & LEADER_EPOCH_MASK,
        attributes=(attributes & ~CODEC_MASK) | codec,
        last_offset_delta=_last_delta(int(deltas[-1]) if last_offset_delta is None else last_offset_delta),
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=count,
    )


def empty_wire_batch(
    base_offset: int,
    last_offset_delta: int,
    epoch: int,
    *,
    attributes: int = 0,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
) -> bytes:
    """A batch of Kafka's without records: what its own compaction leaves of offsets that clients are to step over.

    Raises ValueError for more than 2^31 of them.
    """
    return pack_wire_batch(
        b"",
        base_offset=base_offset,
        leader_epoch=epoch & LEADER_EPOCH_MASK,
        attributes=attributes,
        last_offset_delta=_last_delta(last_offset_delta),
        base_timestamp=NO_TIMESTAMP,
        max_timestamp=NO_TIMESTAMP,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=0,
    )


def _last_delta(last_offset_delta: int) -> int:
    if not 0 <= last_offset_delta < 1 << 31:
        raise ValueError(f"a last offset delta of {last_offset_delta} in a batch of Kafka's")
    return last_offset_delta


def _encode(
    keys: Values | Table | None,
    values: Values | Table | Blobs | Columns,
    headers: Sequence[Headers] | None,
    timestamp_deltas: Int64Array,
    offset_deltas: Int64Array,
) -> Buffer:
    if isinstance(values, Columns):
        return encode_columns(values, timestamp_deltas, offset_deltas)
    if isinstance(values, Blobs):
        records = encode_pieces(values, timestamp_deltas, offset_deltas) if headers is None else None
        if records is not None:
            return records
        keys, values = values.as_lists()
    if isinstance(values, np.ndarray) and (keys is None or isinstance(keys, np.ndarray)) and headers is None:
        records = encode_tables(keys, values, timestamp_deltas, offset_deltas)
        if records is not None:
            return records
    listed = [items_of(items) if isinstance(items, np.ndarray) else items for items in (keys, values)]
    assert listed[1] is not None
    if COMPILED:
        return encode_columns(Columns.of(listed[0], listed[1], headers), timestamp_deltas, offset_deltas)
    return encode_records(listed[0], listed[1], headers, timestamp_deltas, offset_deltas)


def encode_columns(columns: Columns, timestamp_deltas: Int64Array, offset_deltas: Int64Array) -> bytearray:
    """Return the records as `wire_records` has them, uncompressed. Raise `MalformedColumn`."""
    keys, values, headers = bytes(columns.keys), bytes(columns.values), bytes(columns.headers)
    try:
        return core.encode_columns(keys, values, headers, len(columns), timestamp_deltas, offset_deltas)
    except ValueError as error:
        raise MalformedColumn(str(error)) from None


def encode_records(
    keys: Values | None,
    values: Values,
    headers: Sequence[Headers] | None,
    timestamp_deltas: Int64Array,
    offset_deltas: Int64Array,
) -> bytes:
    """The records as `wire_records` has them, uncompressed."""
    count = len(values)
    value_sizes, plain_values = _sized(values)
    tails = None if headers is None else [_encode_headers(pairs) for pairs in headers]
    tail_sizes = 1 if tails is None else np.fromiter(map(len, tails), np.int64, count)
    value_marks = _varints_of(value_sizes)
    numbers = [_varints_of(timestamp_deltas), _varints_of(offset_deltas)]
    body = 1 + numbers[0].sizes + numbers[1].sizes + value_marks.sizes + np.maximum(value_sizes, 0) + tail_sizes
    plain_keys: Values | None = None
    if keys is None:
        numbers.append(value_marks)
        body += 1
    else:
        key_sizes, plain_keys = _sized(keys)
        numbers.append(_varints_of(key_sizes))
        body += numbers[-1].sizes + np.maximum(key_sizes, 0)
    columns: list[Sequence[bytes | None]] = [_heads(_varints_of(body), numbers, no_keys=keys is None)]
    if plain_keys is not None:
        columns += [plain_keys, _varint_strings(value_marks.numbers)]
    columns.append(plain_values)
    columns.append([_NO_HEADERS] * count if tails is None else tails)
    pieces: list[bytes | None] = [None] * (len(columns) * count)
    for at, column in enumerate(columns):
        pieces[at :: len(columns)] = column
    return b"".join(pieces)  # type: ignore[arg-type]  # no column has a null any more


class _Varints(NamedTuple):
    """A number of each record, zigzagged, and how many bytes it takes."""

    numbers: Uint64Array
    sizes: Int64Array


def _varints_of(numbers: Int64Array) -> _Varints:
    zigzagged = zigzag(numbers)
    return _Varints(zigzagged, varint_sizes(zigzagged))


def _sized(items: Values) -> tuple[Int64Array, Values]:
    """(length of each, -1 for null; the items with nothing in place of null)."""
    count = len(items)
    try:
        return np.fromiter(map(len, items), np.int64, count), items  # type: ignore[arg-type]
    except TypeError:
        sizes = np.fromiter((_NULL if item is None else len(item) for item in items), np.int64, count)
        return sizes, [item or b"" for item in items]


def _varint_strings(numbers: Uint64Array) -> list[bytes]:
    """Each as the bytes of a varint; they are zigzagged already."""
    if int(numbers.max()) < 2 * len(_VARINTS) and not (numbers & np.uint64(1)).any():
        table = _VARINTS
        return [table[number] for number in (numbers >> np.uint64(1)).tolist()]
    return [varint(number >> 1 ^ -(number & 1)) for number in numbers.tolist()]


def _heads(body: _Varints, numbers: Sequence[_Varints], *, no_keys: bool) -> list[bytes]:
    """For each record its length, attributes and deltas, and the length of its key, or of its value without keys."""
    count = len(body.numbers)
    width = int((body.sizes + sum(column.sizes for column in numbers)).max()) + 3
    table = np.zeros((count, width), np.uint8)
    cells = table.reshape(-1)
    at = np.arange(0, count * width, width)
    _put(cells, at, body.numbers)
    at += body.sizes
    at += 1  # attributes, of which there are none
    for column in numbers[:-1]:
        _put(cells, at, column.numbers)
        at += column.sizes
    if no_keys:
        cells[at] = _NULL_MARK
        at += 1
    last = numbers[-1]
    _put(cells, at, last.numbers)
    if last.numbers.all():
        heads: list[bytes] = table.view(f"S{width}").reshape(-1).tolist()
        return heads
    # Numpy drops the zeros behind a byte string: a mark keeps them, and is cut off again.
    cells[at + last.sizes] = 1
    return [row[:-1] for row in table.view(f"S{width}").reshape(-1).tolist()]


def _put(cells: npt.NDArray[np.uint8], at: npt.NDArray[np.intp], numbers: Uint64Array) -> None:
    more = numbers >= np.uint64(128)
    cells[at] = (numbers & np.uint64(0x7F)).astype(np.uint8) | (more.view(np.uint8) << np.uint8(7))
    if more.any():
        _put(cells, at[more] + 1, numbers[more] >> np.uint64(7))


def _encode_headers(pairs: Headers) -> bytes:
    if not pairs:
        return _NO_HEADERS
    parts = [varint(len(pairs))]
    for name, value in pairs:
        encoded = name.encode("utf-8", "surrogatepass")
        parts += (varint(len(encoded)), encoded)
        parts += (varint(_NULL),) if value is None else (varint(len(value)), value)
    return b"".join(parts)
