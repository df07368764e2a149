"""Convert record batches to Arrow batches, column by column, so that all work per record happens in C."""

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
# Limits of an Arrow batch. Larger batches are not faster, and a batch of 800 MB killed a driver.


class ArrowRows:
    """Converter of record batches to Arrow batches of one schema. It decodes only the schema's columns.

    Not thread-safe.
    """

    def __init__(self, schema: StructType, invalid_text: InvalidText = "error") -> None:
        self._schema = arrow_schema(schema)
        makers = _MAKERS | {name: _blob_maker(name, column, invalid_text) for name, column in _BLOBS.items()}
        self._makers = [(makers[field.name], field.type) for field in self._schema]
        self._measure = {"key", "value", "headers"} & set(self._schema.names)
        self._not_null_columns = [at for at, field in enumerate(self._schema) if _is_not_null(field)]

    def convert(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the same records in Arrow batches of at most about 65,536 rows or 8 MiB."""
        waiting: list[RecordBatch] = []
        rows = size_bytes = 0
        for batch in batches:
            count = len(batch)
            size = batch.raw_size_bytes if self._measure else 0
            if waiting and (rows + count > _ROWS or size_bytes + size > _BYTES):
                yield self._make_batch(waiting)
                waiting, rows, size_bytes = [], 0, 0
            waiting.append(batch)
            rows += count
            size_bytes += size
        if waiting:
            yield self._make_batch(waiting)

    def _make_batch(self, batches: list[RecordBatch]) -> pa.RecordBatch:
        arrays = [make(batches, kind) for make, kind in self._makers]
        for at in self._not_null_columns:
            if _has_forbidden_null(arrays[at], self._schema.field(at)):
                raise SegmentlogError(_describe_null(arrays[at], self._schema.field(at), batches))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _is_not_null(field: pa.Field) -> bool:
    """Return whether a column, or a part of it, is NOT NULL. Spark trusts the schema, and fails on a null."""
    return not field.nullable or any(map(_is_not_null, _child_fields(field.type)))


def _child_fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(at) for at in range(kind.num_fields)]


def _has_forbidden_null(array: pa.Array, field: pa.Field) -> bool:
    """Return whether an array has a null where its field forbids it."""
    if not field.nullable and array.null_count:
        return True
    flat = array.flatten() if array.type.num_fields else []
    inner = [flat] if pa.types.is_list(array.type) else flat
    return any(map(_has_forbidden_null, inner, _child_fields(array.type)))


def _describe_null(array: pa.Array, field: pa.Field, batches: list[RecordBatch]) -> str:
    row = next(row for row in range(len(array)) if _has_forbidden_null(array.slice(row, 1), field))
    for batch in batches:
        if row < len(batch):
            break
        row -= len(batch)
    where = f"{batch.topic}/{batch.partition} offset {batch.offsets[row]}"
    return f"column {field.name!r} is null at {where}, but NOT NULL in the schema; remove NOT NULL from the schema"


_Maker = Callable[[list[RecordBatch], pa.DataType], pa.Array]


def _blob_maker(name: str, column: Callable[[RecordBatch], pa.Array], invalid_text: InvalidText) -> _Maker:
    def make(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
        if name == "key" and not any(batch.has_keys for batch in batches):
            return pa.nulls(sum(map(len, batches)), kind)
        arrays = [column(batch) for batch in batches]
        array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        if kind == pa.binary():
            return array
        try:
            return array.cast(kind)  # to text: the cast checks for UTF-8
        except pa.ArrowInvalid:
            if invalid_text == "error":
                raise SegmentlogError(_describe_invalid_text(name, batches, column)) from None
            return pa.array([_decode_text(blob, invalid_text) for blob in array.to_pylist()], kind)

    return make


def _decode_text(blob: bytes | None, invalid_text: InvalidText) -> str | None:
    try:
        return None if blob is None else blob.decode()
    except UnicodeDecodeError:
        return None if blob is None or invalid_text == "null" else blob.decode(errors="replace")


def _describe_invalid_text(name: str, batches: list[RecordBatch], column: Callable[[RecordBatch], pa.Array]) -> str:
    for batch in batches:
        for offset, blob in zip(batch.offsets.tolist(), column(batch).to_pylist(), strict=True):
            try:
                (blob or b"").decode()
            except UnicodeDecodeError:
                where = f"{batch.topic}/{batch.partition} offset {offset}"
                return f"the {name} at {where} is not UTF-8 text; {_TEXT_REMEDY}"
    return f"a {name} is not UTF-8 text; {_TEXT_REMEDY}"


_TEXT_REMEDY: Final = "read it as binary, or set .option('invalidText', 'null') or 'replace'"


def _topics(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _repeat_texts([(batch.topic, len(batch)) for batch in batches], kind)


def _partitions(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _to_arrow(np.repeat([batch.partition for batch in batches], list(map(len, batches))).astype(np.int32), kind)


def _offsets(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    return _to_arrow(_concatenate([batch.offsets for batch in batches]), kind)


def _timestamps(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    stamps = _concatenate([batch.timestamps for batch in batches])
    if kind == pa.int64():  # milliseconds: they can hold any timestamp
        return _to_arrow(stamps, kind)
    # Spark counts microseconds in 64 bits, and older versions of segmentlog stored timestamps outside that range.
    # Such a timestamp must not fail the query for all other records: it becomes null, as in an archive.
    beyond = (stamps > LATEST_MS) | (stamps < -LATEST_MS)
    return pa.array(stamps * 1000, mask=beyond if beyond.any() else None).cast(kind)


def _timestamp_types(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    types = [int(bool(batch.header.attributes & LOG_APPEND_TIME)) for batch in batches]
    return _to_arrow(np.repeat(types, list(map(len, batches))).astype(np.int32), kind)


def _headers(batches: list[RecordBatch], kind: pa.DataType) -> pa.Array:
    if not any(batch.has_headers for batch in batches):
        return pa.nulls(sum(map(len, batches)), kind)
    # A record without headers has null, as in Spark's Kafka source.
    return pa.array([list(headers) or None for batch in batches for headers in batch.headers], kind)


def _to_arrow(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(numbers, kind)


def _concatenate(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _repeat_texts(texts: list[tuple[str, int]], kind: pa.DataType) -> pa.Array:
    if len({text for text, _ in texts}) == 1:
        return pa.repeat(pa.scalar(texts[0][0], kind), sum(count for _, count in texts))
    return pa.concat_arrays([pa.repeat(pa.scalar(text, kind), count) for text, count in texts])


_BLOBS: Final[dict[str, Callable[[RecordBatch], pa.Array]]] = {
    "key": methodcaller("keys_to_arrow"),  # call by name: a client's batch overrides the methods
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
