"""The batch that readers return: columns that are decoded on first use."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import repeat
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from segmentlog.errors import UnreadableBatch
from segmentlog.format.batch import LOG_APPEND_TIME, BatchHeader, decompress
from segmentlog.format.columns import (
    Int64Array,
    MalformedColumn,
    decode_blobs,
    decode_headers,
    decode_offsets,
    decode_timestamps,
)
from segmentlog.format.key_hashes import KeyIdentities, key_identities
from segmentlog.records import Headers, K, Record, V

if TYPE_CHECKING:
    import pyarrow


T = TypeVar("T")

_NIL = 0xC0


class RecordBatch(Generic[K, V]):
    """Records of one batch (or a slice of them) as columns, in offset order.

    ``values``, ``keys`` and ``headers`` are lists of ``len(batch)`` items, ``offsets`` and
    ``timestamps`` are int64 arrays of that length. Each is decoded on first use and then cached.
    The reader has verified the payload's checksum; a column that still does not decode raises
    `UnreadableBatch`. Iteration yields `records`. Not thread-safe. You can keep a batch for any
    length of time: it holds its segment's memory map, but no open file.
    """

    __slots__ = (
        "_columns", "_headers", "_keys", "_offsets", "_path", "_payload", "_position", "_start", "_stop",
        "_timestamps", "_values", "header", "partition", "topic",
    )  # fmt: skip

    def __init__(
        self,
        header: BatchHeader,
        payload: memoryview,
        *,
        topic: str = "",
        partition: int = 0,
        path: str = "",
        position: int = 0,
    ) -> None:
        self.header = header
        self.topic = topic
        self.partition = partition
        self._payload = payload
        self._path = path
        self._position = position
        self._start, self._stop = 0, header.record_count
        self._columns: memoryview | None = None
        self._values: list[V] | None = None
        self._keys: list[K] | None = None
        self._headers: list[Headers] | None = None
        self._offsets: Int64Array | None = None
        self._timestamps: Int64Array | None = None

    def __len__(self) -> int:
        return self._stop - self._start

    def __repr__(self) -> str:
        return (
            f"<RecordBatch {self.topic}/{self.partition} [{self.base_offset}, {self.next_offset}) epoch {self.epoch}>"
        )

    @property
    def epoch(self) -> int:
        """The partition epoch in which the batch was appended."""
        return self.header.partition_epoch

    @property
    def base_offset(self) -> int:
        """Offset of the first record that this batch (or slice) shows."""
        if not self.header.offset_deltas_size:
            return self.header.base_offset + self._start
        return int(self.offsets[0]) if len(self) else self.next_offset

    @property
    def next_offset(self) -> int:
        """The offset after the last record of this batch (or slice), at which a reader continues."""
        if self._stop == self.header.record_count:
            return self.header.next_offset
        if not self.header.offset_deltas_size:
            return self.header.base_offset + self._stop
        return int(self._all_offsets()[self._stop])

    @property
    def size_bytes(self) -> int:
        """Bytes on disk of the whole batch, including the header."""
        return self.header.size_bytes

    @property
    def raw_size_bytes(self) -> int:
        """Approximate bytes of the whole batch's records in memory."""
        return self.header.raw_size

    @property
    def payload(self) -> memoryview:
        """The stored payload of the whole batch, perhaps compressed: columns, or a Kafka batch."""
        return self._payload

    @property
    def has_keys(self) -> bool:
        """Whether a record of the whole batch may have a key."""
        return self.header.keys_size > 0

    @property
    def has_headers(self) -> bool:
        """Whether a record of the whole batch may have headers."""
        return self.header.headers_size > 0

    @property
    def has_gaps(self) -> bool:
        """Whether offsets are missing between the records of the whole batch, or before the first."""
        return self.header.offset_deltas_size > 0

    @property
    def is_cut(self) -> bool:
        """Whether this slice ends before the last record of the whole batch."""
        return self._stop < self.header.record_count

    @property
    def values(self) -> list[V]:
        """The values; None is a null value (a tombstone in a compacted topic)."""
        if self._values is None:
            self._values = cast("list[V]", self._cut(self._blobs(self.values_column)))
        return self._values

    @property
    def keys(self) -> list[K]:
        """The keys; None is a null key."""
        if self._keys is None:
            keys = self._cut(self._blobs(self.keys_column)) if self.header.keys_size else [None] * len(self)
            self._keys = cast("list[K]", keys)
        return self._keys

    @property
    def headers(self) -> list[Headers]:
        """For each record a tuple of (name, value) pairs, empty for a record without headers."""
        if self._headers is None:
            if self.header.headers_size:
                try:
                    self._headers = self._cut(decode_headers(self.headers_column, self.header.record_count))
                except MalformedColumn as error:
                    raise self._corrupt(error) from None
            else:
                self._headers = [()] * len(self)
        return self._headers

    @property
    def offsets(self) -> Int64Array:
        """The offsets, ascending; with gaps if compaction has removed records."""
        if self._offsets is None:
            self._offsets = self._all_offsets()[self._start : self._stop]
        return self._offsets

    def check(self) -> None:
        """Decode every column. Raise `UnreadableBatch`; after this call no access to the batch raises it."""
        _ = self.values, self.keys, self.headers, self.offsets, self.timestamps

    def key_identities(self, seed: int = 0) -> KeyIdentities:
        """Return a 16-byte identity of each key, see `segmentlog.format.key_hashes`."""
        header = self.header
        start = header.offset_deltas_size + header.timestamps_size
        column = self._column(start, header.keys_size) if header.keys_size else memoryview(b"")
        try:
            found = key_identities(column, header.record_count, seed)
        except MalformedColumn as error:
            raise self._corrupt(error) from None
        if len(self) == header.record_count:
            return found
        part = slice(self._start, self._stop)
        return KeyIdentities(found.low[part], found.high[part], None if found.is_null is None else found.is_null[part])

    def _all_offsets(self) -> Int64Array:
        """Return the offsets of the whole batch, also for a slice."""
        size = self.header.offset_deltas_size
        column = self._column(0, size) if size else memoryview(b"")
        try:
            offsets = decode_offsets(column, self.header.record_count, self.header.base_offset)
            if size and (bool((offsets[1:] <= offsets[:-1]).any()) or int(offsets[-1]) >= self.header.next_offset):
                raise MalformedColumn(f"the offsets do not ascend, or exceed {self.header.next_offset - 1}")
        except MalformedColumn as error:
            raise self._corrupt(error) from None
        return offsets

    @property
    def timestamps(self) -> Int64Array:
        """Milliseconds since 1970 UTC."""
        if self._timestamps is None:
            header = self.header
            size = header.timestamps_size
            if header.attributes & LOG_APPEND_TIME:  # one timestamp for all records: the column is ignored
                size = 0
            column = self._column(header.offset_deltas_size, size) if size else memoryview(b"")
            base_timestamp = header.base_timestamp if size else self._common_timestamp
            try:
                timestamps = decode_timestamps(column, header.record_count, base_timestamp)
            except MalformedColumn as error:
                raise self._corrupt(error) from None
            self._timestamps = timestamps[self._start : self._stop]
        return self._timestamps

    @property
    def _common_timestamp(self) -> int:
        """The timestamp of every record of a batch whose column of timestamps is absent or ignored."""
        header = self.header
        # Compaction may have replaced the base timestamp with a delete horizon.
        return header.max_timestamp if header.attributes & LOG_APPEND_TIME else header.base_timestamp

    @property
    def keys_column(self) -> memoryview:
        """The encoded keys of the whole batch; empty when all are null."""
        header = self.header
        size_after = header.values_size + header.headers_size
        return self._column(header.raw_size - size_after - header.keys_size, header.keys_size)

    @property
    def values_column(self) -> memoryview:
        """The encoded values of the whole batch."""
        header = self.header
        return self._column(header.raw_size - header.headers_size - header.values_size, header.values_size)

    @property
    def headers_column(self) -> memoryview:
        """The encoded headers of the whole batch; empty when no record has headers."""
        size = self.header.headers_size
        return self._column(self.header.raw_size - size, size)

    @property
    def blobs_columns(self) -> memoryview:
        """The encoded keys, if there are any, followed by the encoded values of the whole batch."""
        header = self.header
        size = header.keys_size + header.values_size
        return self._column(header.raw_size - header.headers_size - size, size)

    def values_may_be_null(self) -> bool:
        """Return whether a value may be null. A fast scan of bytes: also true for some values that are not UTF-8."""
        return bool((np.frombuffer(self.values_column, np.uint8) == _NIL).any())

    def with_objects(self, keys: list[Any] | None, values: list[Any] | None) -> RecordBatch[Any, Any]:
        """Return a batch of the same records with these keys or values in place of their own; None keeps their own.

        Methods that use encoded columns, for example `to_arrow`, still return the original bytes.
        """
        other: RecordBatch[Any, Any] = copy(self)
        other._keys = self._keys if keys is None else keys
        other._values = self._values if values is None else values
        return other

    def slice(self, start: int, stop: int | None = None) -> RecordBatch[K, V]:
        """Return the records ``[start, stop)`` of this batch as a batch that shares the decompressed columns."""
        length = len(self)
        start = min(max(start, 0), length)
        stop = length if stop is None else max(min(stop, length), start)
        if stop - start == length:
            return self
        part = self.__class__(
            self.header,
            self._payload,
            topic=self.topic,
            partition=self.partition,
            path=self._path,
            position=self._position,
        )
        part._columns = self._columns
        part._start, part._stop = self._start + start, self._start + stop
        part._keys = None if self._keys is None else self._keys[start:stop]
        part._values = None if self._values is None else self._values[start:stop]
        part._headers = None if self._headers is None else self._headers[start:stop]
        part._offsets = None if self._offsets is None else self._offsets[start:stop]
        part._timestamps = None if self._timestamps is None else self._timestamps[start:stop]
        return part

    def skip_to(self, offset: int) -> bool:
        """Drop records below ``offset`` and return whether any is left.

        Changes the batch, so only the reader that created it may call this. Other callers use `slice`.
        """
        base = self.header.base_offset
        if offset > base:
            if self.header.offset_deltas_size:
                self._start = int(np.searchsorted(self._all_offsets(), np.int64(offset)))
            else:
                self._start = min(offset - base, self._stop)
        return self._start < self._stop

    def records(self) -> Iterator[Record[K, V]]:
        """Iterate over the records. They are built in C: about 0.1 us each, plus decoding of the columns."""
        self._column(0, 0)  # decompress once, before any column is used
        headers: Iterator[Headers] = iter(self.headers) if self.header.headers_size else repeat(())
        return map(
            Record,
            repeat(self.topic),
            repeat(self.partition),
            self.offsets.tolist(),
            self.timestamps.tolist() if self.header.timestamps_size else repeat(self._common_timestamp),
            self.keys,
            self.values,
            headers,
            repeat(self.header.partition_epoch),
        )

    __iter__ = records

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return columns ``offset``, ``timestamp`` (ms, UTC), ``key``, ``value``, ``headers``. Needs pyarrow."""
        import pyarrow as pa

        pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
        return pa.record_batch(
            {
                "offset": pa.array(self.offsets),
                "timestamp": pa.array(self.timestamps).cast(pa.timestamp("ms", tz="UTC")),
                "key": self.keys_to_arrow(),
                "value": self.values_to_arrow(),
                "headers": pa.array(
                    [[{"key": name, "value": value} for name, value in headers] for headers in self.headers],
                    pa.list_(pair),
                ),
            }
        )

    def values_to_arrow(self) -> pyarrow.Array:
        """Return the values as a binary array. Needs pyarrow."""
        return self._blobs_to_arrow(self.values_column)

    def keys_to_arrow(self) -> pyarrow.Array:
        """Return the keys as a binary array. Needs pyarrow."""
        if self.header.keys_size:
            return self._blobs_to_arrow(self.keys_column)
        import pyarrow as pa

        return pa.nulls(len(self), pa.binary())

    def _blobs_to_arrow(self, column: memoryview) -> pyarrow.Array:
        from segmentlog.format.arrow_columns import blob_array

        try:
            array = blob_array(column, self.header.record_count)
        except MalformedColumn as error:
            raise self._corrupt(error) from None
        return array if len(array) == len(self) else array.slice(self._start, len(self))

    def _column(self, start: int, size: int) -> memoryview:
        if self._columns is None:
            try:
                self._columns = decompress(self.header, self._payload)
            except ValueError as error:
                raise self._corrupt(error) from None
        return self._columns[start : start + size]

    def _blobs(self, column: memoryview) -> list[bytes | None]:
        try:
            return decode_blobs(column, self.header.record_count)
        except MalformedColumn as error:
            raise self._corrupt(error) from None

    def _cut(self, column: list[T]) -> list[T]:
        if len(self) == len(column):
            return column
        return column[self._start : self._stop]

    def _corrupt(self, error: Exception) -> UnreadableBatch:
        header = self.header
        return UnreadableBatch(
            self._path, self._position, str(error), header.base_offset, header.next_offset, header.record_count
        )
