"""Read one partition into a table, from the table's position on, and detect truncations of its log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from segmentlog.errors import LogTruncated, OffsetOutOfRange
from segmentlog.format.batch import CONTROL
from segmentlog.format.record_batch import RecordBatch
from segmentlog.tables.key_table import Flags, KeyTable

if TYPE_CHECKING:
    from segmentlog.log.partition import Isolation, Partition

_CHUNK_RECORDS: Final = 1 << 19
"""Number of records that are sorted together. With half as many, reading took 8 % longer; sorting takes 75 MB."""


class TableOutdated(Exception):
    """The table must be built again from the log: records that it has read were truncated, or a partition was added.

    The table does not keep the earlier values of the keys of truncated records.
    """


class TableSource:
    """One partition, and the position up to which a table has read it. Not thread-safe.

    limit   the offset at which the table ends; None: it continues to the end of the log
    seed    seed of the hashes that identify keys
    """

    def __init__(
        self, log: Partition, seed: int, *, isolation: Isolation, durable_only: bool, limit: int | None
    ) -> None:
        self.log = log
        self.number = log.number
        self.limit = limit
        self.keyless_count = 0
        self._seed = seed
        self._isolation: Isolation = isolation
        self._durable_only = durable_only
        self._epoch = log.epoch
        self.start = self.position = log.log_start_offset

    # ------------------------------------------------------------ history of the log

    def end_offset(self) -> int:
        """Return the offset up to which the table may read now: its limit, or the end of the log if that is lower."""
        end_offset = self.log.end_offset(isolation=self._isolation, durable_only=self._durable_only)
        return end_offset if self.limit is None else min(self.limit, end_offset)

    def has_changed(self) -> bool:
        """Return whether the log has changed since the last `catch_up`. Reads only a few numbers from shared memory."""
        log = self.log
        if self.position < self.end_offset():
            return True
        return self.start != log.log_start_offset or self._epoch != log.epoch

    def check_limit(self) -> None:
        """Raise `OffsetOutOfRange` if the log cannot show the state at the limit.

        The limit is above the log's end, or retention or compaction removed records below it.
        """
        if self.limit is None:
            return
        log = self.log
        first = max(log.log_start_offset, log.compacted_below)
        end_offset = log.end_offset(isolation=self._isolation, durable_only=self._durable_only)
        if not first <= self.limit <= end_offset:
            raise OffsetOutOfRange(f"{log.topic}/{log.number}", self.limit, first, end_offset)

    def _check_history(self) -> None:
        """Raise `TableOutdated` if records below the position were truncated since the last call."""
        epoch = self.log.epoch
        if epoch != self._epoch:
            if any(lost.epoch > self._epoch and lost.base_offset < self.position for lost in self.log.lost_ranges()):
                raise TableOutdated
            self._epoch = epoch

    # ------------------------------------------------------------ reading

    def catch_up(self, keys: KeyTable) -> int:
        """Remove entries of deleted records, add new records, and return the number of new records.

        Raises `TableOutdated` or `LogTruncated` if the table must be built again.
        """
        self._check_history()
        read = 0
        while True:
            start = self.log.log_start_offset
            if start > self.start:
                keys.remove_below(self.number, start)
                self.start = start
                self.position = max(self.position, start)
            try:
                for chunk in self._chunks(self.end_offset()):
                    chunk.add_to(keys, self.number)
                    self.keyless_count += chunk.keyless_count
                    self.position = max(self.position, chunk.next_offset)
                    read += chunk.record_count
                return read
            except OffsetOutOfRange:
                if self.log.log_start_offset == start:
                    raise TableOutdated from None

    def _chunks(self, end_offset: int) -> Iterator[_Chunk]:
        if self.position >= end_offset:
            return
        chunk = _Chunk(self._seed)
        for batch in self.batches(self.position, end_offset):
            chunk.add(batch)
            if chunk.record_count >= _CHUNK_RECORDS:
                yield chunk
                chunk = _Chunk(self._seed)
        chunk.next_offset = end_offset
        yield chunk

    # ------------------------------------------------------------ batches

    def batches(self, offset: int, end_offset: int) -> Iterator[RecordBatch]:
        """Yield the records from ``offset`` up to ``end_offset``. Raises `OffsetOutOfRange`, `LogTruncated`."""
        if offset >= end_offset:
            return
        for batch in self.log.read(offset, isolation=self._isolation, durable_only=self._durable_only):
            if batch.base_offset >= end_offset:
                return
            if batch.header.attributes & CONTROL:
                continue
            if batch.next_offset > end_offset:
                batch = batch.slice(0, int(np.searchsorted(batch.offsets, np.int64(end_offset))))
            yield batch

    def surviving_batches(self, offset: int, end_offset: int) -> Iterator[RecordBatch]:
        """Yield what `batches` yields, but skip records that are deleted or truncated meanwhile."""
        while offset < end_offset:
            try:
                for batch in self.batches(offset, end_offset):
                    offset = batch.next_offset
                    yield batch
                return
            except OffsetOutOfRange:
                start = self.log.log_start_offset
                if start <= offset:
                    return
                offset = start
            except LogTruncated as error:
                offset = error.lost.end_offset

    def batch_at(self, offset: int) -> RecordBatch | None:
        """Return the part from ``offset`` on of the batch that contains it, or else the next batch.

        Return None if the log has no such batch, or if it was deleted or truncated.
        """
        with contextlib.suppress(OffsetOutOfRange, LogTruncated):
            return next(self.log.read(offset, 1), None)
        return None


class _Chunk:
    """Records of one partition as columns: low and high half of the key identity, offsets, times, tombstones."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._columns: list[tuple[Any, ...]] = []
        self.record_count = 0
        self.keyless_count = 0
        self.next_offset = 0

    def add(self, batch: RecordBatch) -> None:
        dead = _find_tombstones(batch)  # decompresses all columns at once
        low, high, is_null = batch.key_identities(self._seed)
        columns: tuple[Any, ...] = (low, high, batch.offsets, batch.timestamps, dead)
        if is_null is not None:
            self.keyless_count += int(np.count_nonzero(is_null))
            columns = tuple(column[~is_null] for column in columns)
        self._columns.append(columns)
        self.record_count += len(batch)
        self.next_offset = batch.next_offset

    def add_to(self, keys: KeyTable, partition: int) -> None:
        if self._columns:
            keys.add(partition, *map(np.concatenate, zip(*self._columns, strict=True)))


def _find_tombstones(batch: RecordBatch) -> Flags:
    if batch.values_may_be_null():
        values = batch.values
        if None in values:
            return np.fromiter((value is None for value in values), np.bool_, len(batch))
    return np.zeros(len(batch), np.bool_)
