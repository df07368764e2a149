"""A stored Kafka batch with the interface of `RecordBatch`, decoded on first use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, cast

import numpy as np

from segmentlog.format.batch import LOG_APPEND_TIME, BatchHeader
from segmentlog.format.columns import Int64Array, array_of
from segmentlog.format.key_hashes import KeyIdentities, identities_of, key_identities
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire_records import WireRecords, decode_records
from segmentlog.records import Headers, Record

if TYPE_CHECKING:
    import pyarrow


class WireRecordBatch(RecordBatch):
    """Records of one batch of a Kafka client as columns. The contract of `RecordBatch` applies."""

    __slots__ = ("_found", "_is_dense")

    def __init__(
        self, header: BatchHeader, payload: memoryview, *, topic: str = "", partition: int = 0, path: str = "",
        position: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(header, payload, topic=topic, partition=partition, path=path, position=position)
        self._found: WireRecords | None = None
        self._is_dense = header.record_count == header.last_offset_delta + 1

    @property
    def wire_records(self) -> WireRecords:
        """The records of the whole batch, every field checked. Raises `UnreadableBatch` if they do not decode."""
        if self._found is None:
            header = self.header
            try:
                self._found = decode_records(self._payload, header.codec, header.record_count, header.last_offset_delta)
            except ValueError as error:
                raise self._corrupt(error) from None
        return self._found

    @property
    def raw_size_bytes(self) -> int:
        """Approximate bytes of the whole batch's records in memory."""
        return self.wire_records.size_bytes

    def check(self) -> None:
        """Check every field. Raise `UnreadableBatch`; after this call no access to the batch raises it."""
        _ = self.wire_records

    # ------------------------------------------------------------ offsets

    @property
    def base_offset(self) -> int:
        """Offset of the first record that this batch (or slice) shows."""
        if self._is_dense:
            return self.header.base_offset + self._start
        return int(self.offsets[0]) if len(self) else self.next_offset

    @property
    def next_offset(self) -> int:
        """The offset after the last record of this batch (or slice), at which a reader continues."""
        if self._stop == self.header.record_count:
            return self.header.next_offset
        if self._is_dense:
            return self.header.base_offset + self._stop
        return int(self._all_offsets()[self._stop])

    @property
    def has_gaps(self) -> bool:
        """Whether offsets are missing between the records of the whole batch, or before or after them."""
        return not self._is_dense

    def skip_to(self, offset: int) -> bool:
        """Drop records below ``offset`` and return whether any is left.

        Changes the batch, so only the reader that created it may call this. Other callers use `slice`.
        """
        base = self.header.base_offset
        if offset > base:
            if self._is_dense:
                self._start = min(offset - base, self._stop)
            else:
                self._start = int(np.searchsorted(self._all_offsets(), np.int64(offset)))
        return self._start < self._stop

    def _all_offsets(self) -> Int64Array:
        header = self.header
        if self._is_dense:
            return np.arange(header.base_offset, header.next_offset, dtype=np.int64)
        return self.wire_records.offset_deltas + np.int64(header.base_offset)

    # ------------------------------------------------------------ columns

    @property
    def values(self) -> list[bytes | None]:
        """The values; None is a null value (a tombstone in a compacted topic)."""
        if self._values is None:
            self._values = self._cut(self.wire_records.values())
        return self._values

    @property
    def keys(self) -> list[bytes | None]:
        """The keys; None is a null key."""
        if self._keys is None:
            self._keys = self._cut(self._all_keys())
        return self._keys

    @property
    def headers(self) -> list[Headers]:
        """For each record a tuple of (name, value) pairs, empty for a record without headers."""
        if self._headers is None:
            self._headers = self._cut(self.wire_records.headers())
        return self._headers

    @property
    def timestamps(self) -> Int64Array:
        """Milliseconds since 1970 UTC; -1 for a record without a timestamp."""
        if self._timestamps is None:
            header = self.header
            if header.attributes & LOG_APPEND_TIME:
                self._timestamps = np.full(len(self), header.max_timestamp, np.int64)
            else:
                deltas = self.wire_records.timestamp_deltas[self._start : self._stop]
                self._timestamps = deltas + np.int64(header.base_timestamp)
        return self._timestamps

    @property
    def has_keys(self) -> bool:
        """Whether a record of the whole batch has a key."""
        return self.wire_records.any_key

    @property
    def has_headers(self) -> bool:
        """Whether a record of the whole batch has headers."""
        return self.wire_records.any_headers

    def values_may_be_null(self) -> bool:
        """Return whether a value is null."""
        return self.wire_records.any_null_value

    def key_identities(self, seed: int = 0) -> KeyIdentities:
        """Return a 16-byte identity of each key, see `segmentlog.format.key_hashes`."""
        if not self.has_keys:
            return key_identities(memoryview(b""), len(self), seed)
        return identities_of(self.keys, seed)

    @property
    def keys_column(self) -> memoryview:
        """The keys of the whole batch, encoded as a column; empty when all are null."""
        return memoryview(array_of(self._all_keys()) if self.has_keys else b"")

    @property
    def values_column(self) -> memoryview:
        """The values of the whole batch, encoded as a column."""
        return memoryview(array_of(self.wire_records.values()))

    def _all_keys(self) -> list[bytes | None]:
        found = self.wire_records
        return found.keys() if found.any_key else [None] * found.count

    # ------------------------------------------------------------ other forms

    def slice(self, start: int, stop: int | None = None) -> RecordBatch:
        """Return the records ``[start, stop)`` of this batch as a batch that shares the decompressed records."""
        part = cast(WireRecordBatch, super().slice(start, stop))
        part._found = self._found
        return part

    def records(self) -> Iterator[Record]:
        """Iterate over the records."""
        headers: Iterator[Headers] = iter(self.headers) if self.has_headers else repeat(())
        return map(
            Record,
            repeat(self.topic),
            repeat(self.partition),
            self.offsets.tolist(),
            self.timestamps.tolist(),
            self.keys,
            self.values,
            headers,
            repeat(self.header.partition_epoch),
        )

    __iter__ = records

    def values_to_arrow(self) -> pyarrow.Array:
        """Return the values as a binary array. Needs pyarrow."""
        import pyarrow as pa

        return pa.array(self.values, pa.binary())

    def keys_to_arrow(self) -> pyarrow.Array:
        """Return the keys as a binary array. Needs pyarrow."""
        import pyarrow as pa

        return pa.array(self.keys, pa.binary())
