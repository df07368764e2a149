"""Between batches of the log and Arrow's: columns to columns, each record's work done in C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from segmentlog.errors import InvalidRecord, SegmentlogError
from segmentlog.format.batch import LOG_APPEND_TIME
from segmentlog.format.columns import check_headers
from segmentlog.format.record_batch import RecordBatch
from segmentlog.partition.encoding import Columns
from segmentlog.records import Headers
from segmentlog.spark.schema import arrow_schema

_ROWS: Final = 1 << 16
_BYTES: Final = 8 << 20
# Of an Arrow batch. Larger ones are no faster, and 800 MB in one killed a driver.


class ArrowRows:
    """Makes Arrow batches of a schema; only the columns that it names are decoded. Not thread-safe."""

    def __init__(self, schema: StructType) -> None:
        self._schema = arrow_schema(schema)
        self._makers = [(_MAKERS[field.name], field.type) for field in self._schema]
        self._measure = {"key", "value", "headers"} & set(self._schema.names)

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same records in Arrow batches of tens of thousands of rows, or some megabytes."""
        waiting: list[RecordBatch] = []
        rows = size_bytes = 0
        for batch in batches:
            count = len(batch)
            size = batch.header.raw_size if self._measure else 0
            if waiting and (rows + count > _ROWS or size_bytes + size > _BYTES):
                yield self._make(waiting)
                waiting, rows, size_bytes = [], 0, 0
            waiting.append(batch)
            rows += count
            size_bytes += size
        if waiting:
            yield self._make(waiting)

    def _make(self, batches: list[RecordBatch]) -> pa.RecordBatch:
        arrays = [make(batches, kind) for make, kind in self._makers]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _blobs(
    name: str, column: Callable[[RecordBatch], pa.Array]
) -> Callable[[list[RecordBatch], pa.DataType], pa.Array]:
    def make(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
        arrays = [column(batch) for batch in batches]
        array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        if kind == pa.binary():
            return array
        try:
            return array.cast(kind)  # text: what is no UTF-8 is found here
        except pa.ArrowInvalid:
            raise SegmentlogError(_not_text(name, batches, column)) from None

    return make


def _not_text(name: str, batches: list[RecordBatch], column: Callable[[RecordBatch], pa.Array]) -> str:
    for batch in batches:
        for offset, blob in zip(batch.offsets.tolist(), column(batch).to_pylist(), strict=True):
            try:
                (blob or b"").decode()
            except UnicodeDecodeError:
                where = f"{batch.topic}/{batch.partition} offset {offset}"
                return f"the {name} at {where} is no UTF-8 text; read it as binary"
    return f"a {name} is no UTF-8 text; read it as binary"


def _keys(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    if not any(batch.header.keys_size for batch in batches):
        return pa.nulls(sum(map(len, batches)), kind)
    return _some_keys(batches, kind)


_some_keys = _blobs("key", RecordBatch.keys_to_arrow)


def _topics(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _repeated([(batch.topic, len(batch)) for batch in batches], kind)


def _partitions(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _numbers(np.repeat([batch.partition for batch in batches], list(map(len, batches))).astype(np.int32), kind)


def _offsets(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _numbers(_joined([batch.offsets for batch in batches]), kind)


def _timestamps(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return pa.array(_joined([batch.timestamps for batch in batches]) * 1000).cast(kind)


def _timestamp_types(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    types = [int(bool(batch.header.attributes & LOG_APPEND_TIME)) for batch in batches]
    return _numbers(np.repeat(types, list(map(len, batches))).astype(np.int32), kind)


def _headers(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    if not any(batch.header.headers_size for batch in batches):
        return pa.nulls(sum(map(len, batches)), kind)
    # Null without any, as in Spark's Kafka source.
    return pa.array([list(one) or None for batch in batches for one in batch.headers], kind)


def _numbers(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(numbers, kind)


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _repeated(texts: list[tuple[str, int]], kind: pa.DataType) -> pa.Array:
    if len({text for text, _ in texts}) == 1:
        return pa.repeat(pa.scalar(texts[0][0], kind), sum(count for _, count in texts))
    return pa.concat_arrays([pa.repeat(pa.scalar(text, kind), count) for text, count in texts])


_MAKERS: Final[dict[str, Callable[[list[RecordBatch], pa.DataType], pa.Array]]] = {
    "key": _keys,
    "value": _blobs("value", RecordBatch.values_to_arrow),
    "topic": _topics,
    "partition": _partitions,
    "offset": _offsets,
    "timestamp": _timestamps,
    "timestampType": _timestamp_types,
    "headers": _headers,
}


# ---------------------------------------------------------------- the other way


Taken = tuple[str, Columns, int, npt.NDArray[np.int32] | None]
"""Topic, columns, about how many bytes, the partition of each record (-1: by its key) or None."""


def records_of(batch: pa.RecordBatch, topic: str | None) -> Iterator[Taken]:
    """The records of rows that are to be written, by topic. Raises `InvalidRecord`."""
    if not batch.num_rows:
        return
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if topic is not None:
        yield topic, *_taken(columns, batch.num_rows)
        return
    topics = columns["topic"].dictionary_encode()
    names = topics.dictionary.to_pylist()
    if topics.null_count:
        row = int(np.flatnonzero(topics.is_null().to_numpy(zero_copy_only=False))[0])
        raise InvalidRecord("topic", row, "null", "a topic for each row, or .option('topic', ...) for all")
    if len(names) == 1:
        yield names[0], *_taken(columns, batch.num_rows)
        return
    for index, name in enumerate(names):
        rows = pc.equal(topics.indices, index)
        part = batch.filter(rows)
        yield name, *_taken(dict(zip(part.schema.names, part.columns, strict=True)), part.num_rows)


def _taken(columns: dict[str, pa.Array], count: int) -> tuple[Columns, int, npt.NDArray[np.int32] | None]:
    values = columns["value"]
    size_bytes = values.nbytes
    keys = columns.get("key")
    if keys is not None:
        size_bytes += keys.nbytes
        keys = None if keys.null_count == count else keys
    timestamps = columns.get("timestamp")
    headers = columns.get("headers")
    partitions = columns.get("partition")
    taken = Columns(
        _as_blobs(values),
        None if keys is None else _as_blobs(keys),
        None if timestamps is None else _as_milliseconds(timestamps),
        None if headers is None else _as_headers(headers, count),
    )
    return taken, size_bytes, None if partitions is None else _as_partitions(partitions)


def _as_partitions(array: pa.Array) -> npt.NDArray[np.int32] | None:
    """Null is -1: by the key."""
    if array.null_count == len(array):
        return None
    numbers: npt.NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy()
    wrong = (numbers > np.iinfo(np.int32).max) | (numbers < 0)
    wrong &= array.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InvalidRecord("partition", row, str(numbers[row]), "a partition's number, or null: by the key")
    return numbers.astype(np.int32)


def _as_blobs(array: pa.Array) -> list[bytes | None]:
    if not pa.types.is_binary(array.type):
        array = array.cast(pa.binary())
    # Half the time of to_pylist(), which makes a scalar of each first.
    blobs: list[bytes | None] = array.to_numpy(zero_copy_only=False).tolist()
    return blobs


def _as_milliseconds(array: pa.Array) -> npt.NDArray[np.int64] | None:
    if array.null_count == len(array):
        return None
    numbers = array.cast(pa.int64())
    if pa.types.is_timestamp(array.type):
        per_ms = {"s": 1, "ms": 1, "us": 1000, "ns": 1_000_000}[array.type.unit]
        found: npt.NDArray[np.int64] = np.floor_divide(_filled(numbers, per_ms), per_ms)
        return _not_negative(found * 1000 if array.type.unit == "s" else found)
    return _not_negative(_filled(numbers, 1))


def _filled(numbers: pa.Array, per_ms: int) -> npt.NDArray[np.int64]:
    """Now for those that are null."""
    if numbers.null_count:
        numbers = numbers.fill_null(time.time_ns() // 1_000_000 * per_ms)
    filled: npt.NDArray[np.int64] = numbers.to_numpy()
    return filled


def _not_negative(timestamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if int(timestamps.min()) < 0:
        row = int(timestamps.argmin())
        raise InvalidRecord("timestamp", row, f"{timestamps[row]} ms", "a time from 1970 on")
    return timestamps


def _as_headers(array: pa.Array, count: int) -> Sequence[Headers] | None:
    if array.null_count == count:
        return None
    pairs = [None if one is None else [(pair["key"], pair["value"]) for pair in one] for one in array.to_pylist()]
    headers = check_headers(pairs)
    return headers if any(headers) else None
