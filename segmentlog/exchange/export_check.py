"""Fingerprints of records, to compare the log with an exported file that is read as `segmentlog import` reads it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

if TYPE_CHECKING:
    from segmentlog.exchange.record_files import ParsedRecords
    from segmentlog.format.record_batch import RecordBatch


class Fingerprint:
    """Count and checksum (XXH3-128) of records in their order: partition, timestamp, key, value, headers.

    Two fingerprints are equal if the same records were added in the same order. The sizes of the batches do not matter.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self.records = 0
        self._hash = xxhash.xxh3_128()
        self._encode = msgspec.msgpack.Encoder().encode

    def add_batch(self, batch: RecordBatch) -> None:
        """Add records that were read from the log."""
        keys: Iterable[Any] = batch.keys if batch.has_keys else repeat(None)
        headers: Iterable[Any] = batch.headers if batch.has_headers else repeat(())
        self._add(repeat(batch.partition), batch.timestamps.tolist(), keys, batch.values, headers)

    def add_rows(self, rows: ParsedRecords) -> None:
        """Add records that were read from an exported file."""
        missing: Iterable[Any] = repeat(None)
        self._add(
            rows.partitions or missing, rows.timestamps or missing, rows.keys or missing, rows.values,
            rows.headers or repeat(()),
        )  # fmt: skip

    def _add(self, partitions: Any, timestamps: Any, keys: Any, values: Any, headers: Any) -> None:
        self.records += len(values)
        # ``values`` must be first: the other columns may be infinite.
        columns = zip(values, partitions, timestamps, keys, headers, strict=False)
        self._hash.update(b"".join(map(self._encode, columns)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return (self.records, self._hash.digest()) == (other.records, other._hash.digest())

    __hash__ = None  # type: ignore[assignment]
