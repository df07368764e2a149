"""Check a caller's columns, split them where they exceed a batch, and encode them as batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidRecord, RecordTooLarge
from segmentlog.format.batch import TRANSACTIONAL
from segmentlog.format.batch_split import encode_in_parts
from segmentlog.format.columns import (
    Int64Array,
    as_timestamps,
    check_blobs,
    check_headers,
    encode_columns,
    has_null,
)
from segmentlog.format.encode import EncodedBatch, encode_batch
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.policy.timestamps import refused_timestamps
from segmentlog.quantities import UNLIMITED_MS
from segmentlog.records import Headers

MAX_BATCH_RECORDS = 1 << 16
"""Longer columns become several batches, because a reader decodes a whole column at a time."""


_NO_PRODUCER = ProducerStamp(-1, -1, -1)


class CheckedColumns(msgspec.Struct, frozen=True, gc=False):
    """Checked records to append: lists of equal length, timestamps in milliseconds or None for the current time."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None
    timestamps: Int64Array | None
    headers: Sequence[Headers] | None

    def with_timestamps(self, timestamp_ms: int) -> CheckedColumns:
        """Return the columns with timestamps: their own, or ``timestamp_ms`` for all records."""
        if self.timestamps is not None:
            return self
        return CheckedColumns(self.values, self.keys, np.full(len(self.values), timestamp_ms, np.int64), self.headers)

    def part(self, start: int, stop: int) -> CheckedColumns:
        """Return the records ``[start, stop)``. A column without content in that range is None."""
        keys = None if self.keys is None else self.keys[start:stop]
        headers = None if self.headers is None else self.headers[start:stop]
        return CheckedColumns(
            self.values[start:stop],
            None if keys is None or keys.count(None) == len(keys) else keys,
            None if self.timestamps is None else self.timestamps[start:stop],
            headers if headers is not None and any(headers) else None,
        )


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffer = bytearray()


_scratch = _Scratch()


def check_columns(values: Any, keys: Any, timestamps: Any, headers: Any) -> CheckedColumns:
    """Check that a caller's columns have equal lengths. Raises `InvalidRecord` with the column and the index.

    The types of values and keys are checked when they are encoded, or by `check_items`.
    """
    if values.__class__ is not list:
        values = as_list("values", values)
    if keys is not None:
        if keys.__class__ is not list:
            keys = as_list("keys", keys)
        if len(keys) != len(values):
            raise InvalidRecord("keys", len(keys), f"{len(keys)} items", f"{len(values)} items, one for each value")
    if timestamps is not None:
        timestamps = as_timestamps(timestamps, len(values))
    if headers is not None:
        headers = check_headers(headers)
        if len(headers) != len(values):
            raise InvalidRecord(
                "headers", len(headers), f"{len(headers)} items", f"{len(values)} items, one for each value"
            )
        if not any(headers):
            headers = None
    return CheckedColumns(values, keys, timestamps, headers)


def check_items(columns: CheckedColumns) -> None:
    """Raise `InvalidRecord` unless every value and key is bytes-like or None."""
    check_blobs("values", columns.values)
    if columns.keys is not None:
        check_blobs("keys", columns.keys)


def check_timestamps(timestamps: Int64Array, config: TopicConfig, now_ms: int) -> None:
    """Raise `InvalidRecord` for timestamps that are further from the clock than the topic accepts."""
    if config.message_timestamp_after_max_ms is None and config.message_timestamp_before_max_ms == UNLIMITED_MS:
        return  # `as_timestamps` has already checked that readers can represent them
    if len(timestamps) == 0:
        return
    if refused := refused_timestamps(timestamps, config, now_ms):
        first = refused.indices[0]
        raise InvalidRecord("timestamps", first, str(refused.found_ms), refused.accepted, refused.indices)


def check_size(columns: CheckedColumns, config: TopicConfig) -> None:
    """Raise `RecordTooLarge` if a record is too large even for a batch that contains nothing else."""
    scratch = bytearray()
    encode_columns(scratch, columns.values, columns.keys, columns.timestamps, columns.headers, None, 0)
    if len(scratch) > config.max_message_bytes:
        raise RecordTooLarge(len(scratch), config.max_message_bytes)


def require_a_key(index: int, indices: tuple[int, ...] | None = None) -> InvalidRecord:
    """Return the error for the record ``index``, which lacks a key that the topic requires.

    ``indices``, if given, are the indices of all records without a key.
    """
    expected = "a key for each record: the topic is compacted (cleanup.policy) and retains the last record of each key"
    return InvalidRecord("keys", index, "None", expected, indices)


def _require_keys(columns: CheckedColumns) -> None:
    """Raise `InvalidRecord` for a record without a key."""
    if columns.keys is None:
        raise require_a_key(0)
    if has_null(columns.keys):
        raise require_a_key(list(columns.keys).index(None))


def as_list(column: str, items: Any) -> list[Any]:
    """Return a caller's column as a list. Raises `InvalidRecord` for a single value instead of a sequence."""
    if isinstance(items, str | bytes | bytearray | memoryview | dict) or not hasattr(items, "__iter__"):
        raise InvalidRecord(column, 0, f"part of one {type(items).__name__}", f"a list of {column}: [b'...', ...]")
    return list(items)


def encode_columns_as_batches(
    columns: CheckedColumns,
    config: TopicConfig,
    now_ms: int,
    scratch: bytearray | None = None,
    stamp: ProducerStamp | None = None,
) -> list[EncodedBatch]:
    """Encode the columns as batches within the topic's limits, in order, with the numbers of ``stamp`` if given.

    Raises `InvalidRecord`, and `RecordTooLarge` if a single record exceeds the limits. Without ``scratch`` a batch may
    use a buffer of this thread: place it before encoding anything else in this thread.
    """
    if config.compacts:
        _require_keys(columns)
    count = len(columns.values)
    limit = MAX_BATCH_RECORDS if config.segment_records is None else min(MAX_BATCH_RECORDS, config.segment_records)
    if count <= limit:
        try:
            return [_encode(columns, config, now_ms, _scratch.buffer if scratch is None else scratch, stamp)]
        except RecordTooLarge:
            pass
    else:
        check_items(columns)  # first, so that an error has the index in the whole column, not in a part
    encode_part = partial(_encode_part, columns, config, now_ms, stamp)
    batches: list[EncodedBatch] = []
    for start in range(0, count, limit):
        batches += encode_in_parts(encode_part, start, min(start + limit, count))
    return batches


def _encode_part(
    columns: CheckedColumns, config: TopicConfig, now_ms: int, stamp: ProducerStamp | None, start: int, stop: int
) -> EncodedBatch:
    part_stamp = None if stamp is None else stamp.after(start)
    return _encode(columns.part(start, stop), config, now_ms, bytearray(), part_stamp)


def _encode(
    columns: CheckedColumns, config: TopicConfig, now_ms: int, scratch: bytearray, stamp: ProducerStamp | None
) -> EncodedBatch:
    stamp = stamp or _NO_PRODUCER
    return encode_batch(
        columns.values,
        columns.keys,
        columns.timestamps,
        columns.headers,
        now_ms=now_ms,
        compression=config.compression,
        limit_bytes=config.max_message_bytes,
        scratch=scratch,
        attributes=TRANSACTIONAL if stamp.transactional else 0,
        producer_id=stamp.producer_id,
        producer_epoch=stamp.epoch,
        base_sequence=stamp.sequence,
    )
