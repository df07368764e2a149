"""Convert rows that Spark writes to records for staged batches, column by column, all in C."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidRecord
from segmentlog.format.arrow_columns import blob_column
from segmentlog.format.batch_split import encode_in_parts
from segmentlog.format.columns import array_of, check_headers
from segmentlog.format.encode import EncodedBatch, join_batch
from segmentlog.log.append.batch_encoding import MAX_BATCH_RECORDS, CheckedColumns, require_a_key
from segmentlog.policy.partitioner import HashPartitioner, Partitioner, Partitions, Rows, partitions_for_joined_keys
from segmentlog.policy.timestamps import refused_timestamps
from segmentlog.quantities import EARLIEST_MS, LATEST_MS
from segmentlog.records import Headers


class ArrowRecords:
    """Records as Arrow arrays of binary, timestamps in milliseconds, and headers as lists."""

    def __init__(
        self,
        values: pa.Array,
        keys: pa.Array | None,
        timestamps: npt.NDArray[np.int64],
        headers: Sequence[Headers] | None,
    ) -> None:
        self._values = values
        self._keys = keys
        self._timestamps = timestamps
        self._headers = headers

    def __len__(self) -> int:
        return len(self._values)

    def columns(self) -> CheckedColumns:
        """Return the same records as lists."""
        keys = None if self._keys is None else _as_list(self._keys)
        return CheckedColumns(_as_list(self._values), keys, self._timestamps, self._headers)

    def partitions(self, partitioner: Partitioner, count: int, sticky: int) -> Partitions:
        keys = self._keys
        if keys is None or count == 1:
            return np.full(len(self), sticky, np.int32)
        if not isinstance(partitioner, HashPartitioner):
            return partitioner.partitions(_as_list(keys), count, sticky)
        ends = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1]
        data = keys.buffers()[2]
        joined = b"" if data is None else bytes(memoryview(data)[ends[0] : ends[-1]])
        chosen = partitions_for_joined_keys(joined, np.diff(ends).astype(np.int64), count)
        if keys.null_count:
            chosen[keys.is_null().to_numpy(zero_copy_only=False)] = sticky
        return chosen

    def take(self, rows: Rows) -> ArrowRecords:
        keys, headers = self._keys, self._headers
        return ArrowRecords(
            self._values.take(rows),
            None if keys is None else keys.take(rows),
            self._timestamps[rows],
            None if headers is None else [headers[row] for row in rows.tolist()],
        )

    def part(self, start: int, stop: int) -> ArrowRecords:
        keys, headers = self._keys, self._headers
        return ArrowRecords(
            self._values.slice(start, stop - start),
            None if keys is None else keys.slice(start, stop - start),
            self._timestamps[start:stop],
            None if headers is None else headers[start:stop],
        )

    def followed_by(self, others: Sequence[ArrowRecords]) -> ArrowRecords:
        all_of_them = (self, *others)
        keys: pa.Array | None = None
        if any(part._keys is not None for part in all_of_them):
            keys = pa.concat_arrays(
                [pa.nulls(len(part), pa.binary()) if part._keys is None else part._keys for part in all_of_them]
            )
        headers: list[Headers] | None = None
        if any(part._headers is not None for part in all_of_them):
            headers = [pairs for part in all_of_them for pairs in (part._headers or [()] * len(part))]
        values = pa.concat_arrays([part._values for part in all_of_them])
        return ArrowRecords(values, keys, np.concatenate([part._timestamps for part in all_of_them]), headers)

    def first_null_value(self) -> int | None:
        return _find_first(self._values.is_null()) if self._values.null_count else None

    def encode(self, config: TopicConfig) -> list[EncodedBatch]:
        if config.compacts and (self._keys is None or self._keys.null_count):
            raise require_a_key(0 if self._keys is None else _find_first(self._keys.is_null()))
        if len(self) and (refused := refused_timestamps(self._timestamps, config, time.time_ns() // 1_000_000)):
            row = refused.indices[0]
            raise InvalidRecord("timestamp", row, f"{refused.found_ms} ms", refused.accepted, refused.indices)
        limit = min(MAX_BATCH_RECORDS, config.segment_records or MAX_BATCH_RECORDS)
        batches: list[EncodedBatch] = []
        for start in range(0, len(self), limit):
            batches += encode_in_parts(partial(self._encode, config), start, min(start + limit, len(self)))
        return batches

    def _encode(self, config: TopicConfig, start: int, stop: int) -> EncodedBatch:
        """Encode the records ``[start, stop)`` as one batch. Raises `RecordTooLarge`."""
        some = self if stop - start == len(self) else self.part(start, stop)
        headers = some._headers if some._headers is not None and any(some._headers) else None
        return join_batch(
            b"" if some._keys is None or some._keys.null_count == len(some) else blob_column(some._keys),
            blob_column(some._values),
            b"" if headers is None else array_of(headers),
            some._timestamps,
            None,
            count=stop - start,
            compression=config.compression,
            limit_bytes=config.max_message_bytes,
        )


# ---------------------------------------------------------------- from rows


TopicRecords = tuple[str, ArrowRecords, int, Partitions | None]
"""Topic, records, their approximate size in bytes, and the partition of each record (-1: by its key) or None."""


def convert_rows(batch: pa.RecordBatch, topic: str | None) -> Iterator[TopicRecords]:
    """Yield the records of rows, by topic. Raises `InvalidRecord`."""
    if not batch.num_rows:
        return
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if topic is not None:
        yield topic, *_convert_topic_rows(columns, batch.num_rows)
        return
    topics = columns["topic"].dictionary_encode()
    names = topics.dictionary.to_pylist()
    if topics.null_count:
        raise InvalidRecord(
            "topic", _find_first(topics.is_null()), "null", "a topic for each row, or .option('topic', ...) for all"
        )
    if len(names) == 1:
        yield names[0], *_convert_topic_rows(columns, batch.num_rows)
        return
    for index, name in enumerate(names):
        rows = pc.equal(topics.indices, index)
        part = batch.filter(rows)
        yield name, *_convert_topic_rows(dict(zip(part.schema.names, part.columns, strict=True)), part.num_rows)


def _convert_topic_rows(columns: dict[str, pa.Array], count: int) -> tuple[ArrowRecords, int, Partitions | None]:
    values = columns["value"]
    size_bytes = values.nbytes
    keys = columns.get("key")
    if keys is not None:
        size_bytes += keys.nbytes
        keys = None if keys.null_count == count else keys
    timestamps = columns.get("timestamp")
    headers = columns.get("headers")
    partitions = columns.get("partition")
    milliseconds = None if timestamps is None else _as_milliseconds(timestamps)
    if milliseconds is None:
        milliseconds = np.full(count, time.time_ns() // 1_000_000, np.int64)
    taken = ArrowRecords(
        _as_binary(values),
        None if keys is None else _as_binary(keys),
        milliseconds,
        None if headers is None else _as_headers(headers, count),
    )
    return taken, size_bytes, None if partitions is None else _as_partitions(partitions)


def _as_partitions(array: pa.Array) -> Partitions | None:
    """Return partition numbers; -1, for "by the key", where the row has null."""
    if array.null_count == len(array):
        return None
    numbers: npt.NDArray[np.int64] = array.cast(pa.int64()).fill_null(-1).to_numpy()
    wrong = (numbers > np.iinfo(np.int32).max) | (numbers < 0)
    wrong &= array.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise InvalidRecord("partition", row, str(numbers[row]), "a partition's number, or null: by the key")
    return numbers.astype(np.int32)


def _as_binary(array: pa.Array) -> pa.Array:
    return array if array.type == pa.binary() else array.cast(pa.binary())


def _as_list(array: pa.Array) -> list[bytes | None]:
    # This takes half the time of to_pylist(), which first creates a scalar for each element.
    blobs: list[bytes | None] = array.to_numpy(zero_copy_only=False).tolist()
    return blobs


def _find_first(mask: pa.Array) -> int:
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])


def _as_milliseconds(array: pa.Array) -> npt.NDArray[np.int64] | None:
    """Return milliseconds since 1970, where -1 is a record without a timestamp; None if all are null."""
    if array.null_count == len(array):
        return None
    numbers = array.cast(pa.int64())
    if pa.types.is_timestamp(array.type):
        per_ms = {"s": 1, "ms": 1, "us": 1000, "ns": 1_000_000}[array.type.unit]
        found: npt.NDArray[np.int64] = np.floor_divide(_fill_nulls(numbers, per_ms), per_ms)
        # Clip before multiplying: an overflow would give a valid time, but a clipped time is refused.
        return _check_range(np.clip(found, -LATEST_MS, LATEST_MS) * 1000 if array.type.unit == "s" else found)
    return _check_range(_fill_nulls(numbers, 1))


def _fill_nulls(numbers: pa.Array, per_ms: int) -> npt.NDArray[np.int64]:
    """Return the numbers, with the current time in place of nulls."""
    if numbers.null_count:
        numbers = numbers.fill_null(time.time_ns() // 1_000_000 * per_ms)
    filled: npt.NDArray[np.int64] = numbers.to_numpy()
    return filled


def _check_range(timestamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if int(timestamps.min()) < EARLIEST_MS:
        row = int(timestamps.argmin())
        raise InvalidRecord("timestamp", row, f"{timestamps[row]} ms", "a time from the year 1 on")
    return timestamps


def _as_headers(array: pa.Array, count: int) -> Sequence[Headers] | None:
    if array.null_count == count:
        return None
    rows = array.to_pylist()
    for row, structs in enumerate(rows):
        if structs is not None and None in structs:
            accepted = "headers that each have a key and a value; the array must not have null elements"
            raise InvalidRecord("headers", row, f"null at position {structs.index(None)}", accepted)
    pairs = [None if structs is None else [(pair["key"], pair["value"]) for pair in structs] for structs in rows]
    headers = check_headers(pairs)
    return headers if any(headers) else None
