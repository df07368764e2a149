"""Batches of the log as Arrow's: columns to columns, each record's work done in C."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from segmentlog.errors import SegmentlogError
from segmentlog.format.batch import LOG_APPEND_TIME
from segmentlog.format.record_batch import RecordBatch
from segmentlog.quantities import LATEST_MS
from segmentlog.spark.schema import arrow_schema
from segmentlog.spark.source_options import InvalidText

_ROWS: Final = 1 << 16
_BYTES: Final = 8 << 20
# Of an Arrow batch. Larger ones are no faster, and 800 MB in one killed a driver.


class ArrowRows:
    """Makes Arrow batches of a schema; only the columns that it names are decoded. Not thread-safe."""

    def __init__(self, schema: StructType, invalid_text: InvalidText = "error") -> None:
        self._schema = arrow_schema(schema)
        makers = _MAKERS | {name: _blobs(name, column, invalid_text) for name, column in _BLOBS.items()}
        self._makers = [(makers[field.name], field.type) for field in self._schema]
        self._measure = {"key", "value", "headers"} & set(self._schema.names)
        self._may_not_be_null = [at for at, field in enumerate(self._schema) if _forbids_null(field)]

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same records in Arrow batches of tens of thousands of rows, or some megabytes."""
        waiting: list[RecordBatch] = []
        rows = size_bytes = 0
        for batch in batches:
            count = len(batch)
            size = batch.raw_size_bytes if self._measure else 0
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
        for at in self._may_not_be_null:
            if _holds_null(arrays[at], self._schema.field(at)):
                raise SegmentlogError(_not_filled(arrays[at], self._schema.field(at), batches))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _forbids_null(field: pa.Field) -> bool:
    """Whether a schema says ``not null`` of a column, or of a part of it: Spark takes its word for it, and fails."""
    return not field.nullable or any(map(_forbids_null, _parts(field.type)))


def _parts(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(at) for at in range(kind.num_fields)]


def _holds_null(array: pa.Array, field: pa.Field) -> bool:
    """Where none may be."""
    if not field.nullable and array.null_count:
        return True
    flat = array.flatten() if array.type.num_fields else []
    inner = [flat] if pa.types.is_list(array.type) else flat
    return any(map(_holds_null, inner, _parts(array.type)))


def _not_filled(array: pa.Array, field: pa.Field, batches: list[RecordBatch]) -> str:
    row = next(row for row in range(len(array)) if _holds_null(array.slice(row, 1), field))
    for batch in batches:
        if row < len(batch):
            break
        row -= len(batch)
    where = f"{batch.topic}/{batch.partition} offset {batch.offsets[row]}"
    return (
        f"there is a null in the column {field.name!r} at {where}, and the schema says NOT NULL; leave that out of it"
    )


_Maker = Callable[[list[RecordBatch], pa.DataType], pa.Array]


def _blobs(name: str, column: Callable[[RecordBatch], pa.Array], invalid_text: InvalidText) -> _Maker:
    def make(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
        if name == "key" and not any(batch.has_keys for batch in batches):
            return pa.nulls(sum(map(len, batches)), kind)
        arrays = [column(batch) for batch in batches]
        array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        if kind == pa.binary():
            return array
        try:
            return array.cast(kind)  # text: what is no UTF-8 is found here
        except pa.ArrowInvalid:
            if invalid_text == "error":
                raise SegmentlogError(_not_text(name, batches, column)) from None
            return pa.array([_as_text(blob, invalid_text) for blob in array.to_pylist()], kind)

    return make


def _as_text(blob: bytes | None, invalid_text: InvalidText) -> str | None:
    try:
        return None if blob is None else blob.decode()
    except UnicodeDecodeError:
        return None if blob is None or invalid_text == "null" else blob.decode(errors="replace")


def _not_text(name: str, batches: list[RecordBatch], column: Callable[[RecordBatch], pa.Array]) -> str:
    for batch in batches:
        for offset, blob in zip(batch.offsets.tolist(), column(batch).to_pylist(), strict=True):
            try:
                (blob or b"").decode()
            except UnicodeDecodeError:
                where = f"{batch.topic}/{batch.partition} offset {offset}"
                return f"the {name} at {where} is no UTF-8 text; {_INSTEAD}"
    return f"a {name} is no UTF-8 text; {_INSTEAD}"


_INSTEAD: Final = "read it as binary, or say .option('invalidText', 'null') or 'replace'"


def _topics(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _repeated([(batch.topic, len(batch)) for batch in batches], kind)


def _partitions(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _numbers(np.repeat([batch.partition for batch in batches], list(map(len, batches))).astype(np.int32), kind)


def _offsets(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _numbers(_joined([batch.offsets for batch in batches]), kind)


def _timestamps(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    stamps = _joined([batch.timestamps for batch in batches])
    if kind == pa.int64():  # milliseconds, which hold any timestamp
        return _numbers(stamps, kind)
    # Spark counts microseconds in 64 bits, and earlier versions stored timestamps that those cannot hold. One of them
    # must not keep a query from every other record: it is null, as in an archive.
    beyond = (stamps > LATEST_MS) | (stamps < -LATEST_MS)
    return pa.array(stamps * 1000, mask=beyond if beyond.any() else None).cast(kind)


def _timestamp_types(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    types = [int(bool(batch.header.attributes & LOG_APPEND_TIME)) for batch in batches]
    return _numbers(np.repeat(types, list(map(len, batches))).astype(np.int32), kind)


def _headers(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    if not any(batch.has_headers for batch in batches):
        return pa.nulls(sum(map(len, batches)), kind)
    # Null without any, as in Spark's Kafka source.
    return pa.array([list(headers) or None for batch in batches for headers in batch.headers], kind)


def _numbers(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(numbers, kind)


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _repeated(texts: list[tuple[str, int]], kind: pa.DataType) -> pa.Array:
    if len({text for text, _ in texts}) == 1:
        return pa.repeat(pa.scalar(texts[0][0], kind), sum(count for _, count in texts))
    return pa.concat_arrays([pa.repeat(pa.scalar(text, kind), count) for text, count in texts])


_BLOBS: Final[dict[str, Callable[[RecordBatch], pa.Array]]] = {
    "key": methodcaller("keys_to_arrow"),  # by name: a client's batch has methods of its own
    "value": methodcaller("values_to_arrow"),
}
_MAKERS: Final[dict[str, _Maker]] = {
    "topic": _topics,
    "partition": _partitions,
    "offset": _offsets,
    "timestamp": _timestamps,
    "timestampType": _timestamp_types,
    "headers": _headers,
}
