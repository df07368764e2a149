"""Decode the records of a Kafka batch with the scan of `segmentlog.speedups.records`, and return them as columns."""

from __future__ import annotations

from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from segmentlog.format.columns import Int64Array, MalformedColumn
from segmentlog.format.varints import varint
from segmentlog.records import Headers
from segmentlog.speedups import records as core

DELTA_MAX: Final = 2**31 - 1
"""The largest offset delta of a Kafka batch."""
_TABLE_MAX: Final = 1 << 16
"""Largest batch, in records, whose table of fields is filled at once: it takes up to 14 times the records' bytes."""

_REASONS: Final = {
    core.BAD_LENGTH: "its length is malformed, or extends beyond the records of the batch",
    core.BAD_TIMESTAMP: "its timestamp delta is malformed, or extends beyond the record",
    core.BAD_OFFSET: "its offset delta is malformed, does not ascend, or lies outside the batch",
    core.BAD_KEY: "its key extends beyond the record, or has a malformed length",
    core.BAD_VALUE: "its value extends beyond the record, or has a malformed length",
    core.TOO_MANY_HEADERS: f"with it the batch has more than {core.HEADERS_MAX:,} headers",
    core.BAD_HEADER_COUNT: "its number of headers is malformed or negative",
    core.BAD_HEADER_NAME: "the name of a header is null, or extends beyond the record",
    core.BAD_HEADER_VALUE: "the value of a header extends beyond the record, or has a malformed length",
    core.BYTES_LEFT_IN_RECORD: "bytes follow its last field",
    core.BYTES_LEFT: "bytes follow the last record that the batch announces",
}


class MalformedRecord(MalformedColumn):
    """A record of a Kafka batch whose bytes contradict themselves or the header of the batch."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index = index
        """Index of the first malformed record; the number of records if bytes follow the last record."""
        self.reason = reason
        """The fault of the record, in plain words."""

    def __str__(self) -> str:
        return f"record {self.index}: {self.reason}"


def named_error(data: bytes, size: int, count: int, last_offset_delta: int, error: MalformedColumn) -> MalformedColumn:
    """Return an error that names the first malformed record, or ``error`` if the scan accepts every record."""
    refusal, *_ = core.scan_records(data, size, count, last_offset_delta, None)
    return _malformed(refusal) if refusal else error


def _malformed(refusal: int) -> MalformedRecord:
    index, reason = divmod(refusal, core.REASONS_MAX)
    return MalformedRecord(index, _REASONS[reason])


class ScannedRecords:
    """The records of one Kafka batch, all of them checked. Not thread-safe."""

    __slots__ = (
        "_data", "_last_offset_delta", "_table", "any_headers", "any_key", "any_null_value", "count", "null_key_count",
        "size_bytes",
        "timestamp_delta_range",
    )  # fmt: skip

    def __init__(
        self, data: bytes, size: int, count: int, last_offset_delta: int, *, wants_fields: bool = True
    ) -> None:
        """Check the records, which are the first ``size`` bytes of ``data``. Raise `MalformedRecord`.

        With ``wants_fields`` false, the first method that needs the fields scans the records again.
        """
        self._data = data
        self.count = count
        self.size_bytes = size
        self._last_offset_delta = last_offset_delta
        self._table: Int64Array | None = None
        if wants_fields and count <= _TABLE_MAX:
            self._table = np.empty((core.ROW_COUNT, count), np.int64)
        scanned = core.scan_records(data, size, count, last_offset_delta, self._table)
        refusal, least, largest, null_keys, null_values, with_headers = scanned
        if refusal:
            raise _malformed(refusal)
        self.timestamp_delta_range: tuple[int, int] = least, largest
        """The least and the largest timestamp delta, in milliseconds; zeros without records."""
        self.null_key_count: int = null_keys
        self.any_key: bool = null_keys < count
        self.any_null_value: bool = null_values > 0
        self.any_headers: bool = with_headers > 0

    def _fields(self) -> Int64Array:
        """Return the table that `core.scan_records` fills."""
        if self._table is None:
            table = np.empty((core.ROW_COUNT, self.count), np.int64)
            core.scan_records(self._data, self.size_bytes, self.count, self._last_offset_delta, table)
            self._table = table
        return self._table

    @property
    def timestamp_deltas(self) -> Int64Array:
        """Milliseconds, int64[count], relative to the base timestamp of the batch."""
        deltas: Int64Array = self._fields()[core.TIMESTAMP_DELTA]
        return deltas

    @property
    def offset_deltas(self) -> Int64Array:
        """int64[count], relative to the base offset of the batch."""
        deltas: Int64Array = self._fields()[core.OFFSET_DELTA]
        return deltas

    def keys(self) -> list[bytes | None]:
        """Return the keys, None for null."""
        return core.cut_field(self._data, self._fields(), core.KEY, 0, self.count)

    def values(self) -> list[bytes | None]:
        """Return the values, None for null."""
        return core.cut_field(self._data, self._fields(), core.VALUE, 0, self.count)

    def headers(self) -> list[Headers]:
        """Return the (name, value) pairs of each record. Invalid UTF-8 in a name becomes U+FFFD, as in Java."""
        return core.cut_headers(self._data, self._fields(), 0, self.count) if self.any_headers else [()] * self.count

    def null_keys(self) -> npt.NDArray[np.bool_]:
        """Return which records have a null key, bool[count]."""
        null: npt.NDArray[np.bool_] = self._fields()[core.KEY_SIZE] < 0
        return null

    def body_sizes(self) -> Int64Array:
        """Return the size in bytes of each record without its length field."""
        table = self._fields()
        sizes: Int64Array = table[core.END] - table[core.BODY]
        return sizes

    def kept(self, kept: npt.NDArray[np.bool_] | None, rebased_by: int = 0) -> bytes:
        """Return the bytes of the records for which ``kept`` is true (None: all).

        Add ``rebased_by`` milliseconds to their timestamp deltas, and change nothing else.
        """
        if kept is None and not rebased_by:
            return self._data[: self.size_bytes]
        table = self._fields()
        if rebased_by:
            rebased = self.timestamp_deltas + np.int64(rebased_by)
            rows = table[core.BODY], table[core.AFTER_TIMESTAMP], table[core.END], rebased
            return rebase_records(self._data, *rows, kept)
        return keep_records(self._data, self.size_bytes, table[core.START], table[core.END], kept)


def keep_records(
    data: bytes, size: int, starts: Int64Array, ends: Int64Array, kept: npt.NDArray[np.bool_] | None
) -> bytes:
    """Return the bytes of the records for which ``kept`` is true (None: all, which are the first ``size`` bytes of
    ``data``).
    """
    if kept is None:
        return data[:size]
    spans = zip(starts[kept].tolist(), ends[kept].tolist(), strict=True)
    return b"".join([data[start:end] for start, end in spans])


def rebase_records(
    data: bytes, bodies: Int64Array, after_timestamps: Int64Array, ends: Int64Array, deltas: Int64Array,
    kept: npt.NDArray[np.bool_] | None,
) -> bytes:  # fmt: skip
    """Return the records for which ``kept`` is true (None: all), with their timestamp deltas replaced by ``deltas``.

    ``bodies`` are the positions after the lengths, ``after_timestamps`` those after the timestamp deltas.
    """
    # Only the length and the bytes before the offset delta change.
    rows = zip(bodies.tolist(), after_timestamps.tolist(), ends.tolist(), deltas.tolist(), strict=True)
    parts: list[bytes] = []
    for body, rest, end, delta in rows if kept is None else compress(rows, kept.tolist()):
        head = data[body : body + 1] + varint(delta)
        parts += (varint(len(head) + end - rest), head, data[rest:end])
    return b"".join(parts)
