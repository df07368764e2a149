"""Restore records at their original offsets.

Workers encode batches that contain their base offset and stage them in files, as `segmentlog.staging.staging` does. One
`Restorer` per partition appends each batch when the log end offset is the batch's base offset. Gaps (from compaction,
aborted transactions and control batches) are filled with batches without records. So an interrupted restore can resume
at the log end offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError
from segmentlog.format.batch_split import encode_in_parts
from segmentlog.format.columns import Int64Array
from segmentlog.format.encode import EncodedBatch, encode_batch, encode_gap
from segmentlog.log.append.batch_encoding import MAX_BATCH_RECORDS, CheckedColumns, check_items
from segmentlog.log.partition import Partition
from segmentlog.records import TopicPartition
from segmentlog.staging.staged_files import Staged, StagedFile, map_staged, read_run
from segmentlog.storage.fs import FileSystem

_BATCH_BYTES: Final = 512 * 1024
_APPENDED_AT_ONCE_BYTES: Final = 64 << 20
_GAP_MAX: Final = 1 << 32
# Maximum gap of one batch without records.
_SPAN_MAX: Final = 1 << 31
# Maximum range of offsets in one batch. A longer gap ends its segment, whose index has 32-bit relative offsets.


class OffsetTaken(SegmentlogError):
    """The log already has another record at an offset that is to be restored. Nothing was overwritten."""

    def __init__(self, log: str, offset: int, log_end_offset: int) -> None:
        super().__init__(log, offset, log_end_offset)
        self.log, self.offset, self.log_end_offset = log, offset, log_end_offset

    def __str__(self) -> str:
        return (
            f"{self.log}: offset {self.offset} cannot be restored, because the log already ends at"
            f" {self.log_end_offset}. Restore into a new topic"
        )


# ---------------------------------------------------------------- a task


class OffsetEncoder:
    """Encodes records as batches that contain their offsets, to restore records and to verify a restore."""

    def __init__(self, config: TopicConfig) -> None:
        """Encode batches within the size and record limits of ``config``."""
        self._limit_bytes = config.max_message_bytes
        self._limit_records = min(MAX_BATCH_RECORDS, config.segment_records or MAX_BATCH_RECORDS)
        self._compression = config.compression

    def batches(
        self, offsets: Int64Array, columns: CheckedColumns, size_bytes: int
    ) -> Iterator[tuple[int, EncodedBatch]]:
        """Yield (base offset, batch) of records of about ``size_bytes`` with ascending offsets and timestamps.

        Raises `InvalidRecord`, `RecordTooLarge`.
        """
        check_items(columns)
        count = len(offsets)
        parts = max(1, min(-(-size_bytes // _BATCH_BYTES), count), -(-count // self._limit_records))
        for part in range(parts):
            begin, end = count * part // parts, count * (part + 1) // parts
            for start, stop in _within_reach(offsets, begin, end):
                yield from encode_in_parts(partial(self._encode, offsets, columns), start, stop)

    def _encode(self, offsets: Int64Array, columns: CheckedColumns, start: int, stop: int) -> tuple[int, EncodedBatch]:
        """Return (base offset, batch) of the records ``[start, stop)``."""
        offsets, columns = offsets[start:stop], columns.part(start, stop)
        base_offset = int(offsets[0])
        has_gaps = int(offsets[-1]) - base_offset != len(offsets) - 1
        batch = encode_batch(
            columns.values,
            columns.keys,
            columns.timestamps,
            columns.headers,
            now_ms=0,
            compression=self._compression,
            limit_bytes=self._limit_bytes,
            offset_deltas=(offsets - base_offset).astype(np.uint32) if has_gaps else None,
        )
        return base_offset, batch


class OffsetStager:
    """Stages records as batches that contain their offsets. Not thread-safe; records must come in offset order."""

    def __init__(self, fs: FileSystem, path: str, task: int, topic: str, config: TopicConfig) -> None:
        self._file = StagedFile(fs, path, task)
        self._topic = topic
        self._encoder = OffsetEncoder(config)

    def add(self, partition: int, offsets: Int64Array, columns: CheckedColumns, size_bytes: int) -> None:
        """Stage records of about ``size_bytes`` with ascending offsets and timestamps.

        Raises `InvalidRecord`, `RecordTooLarge`, `DiskFull`.
        """
        tp = TopicPartition(self._topic, partition)
        for base_offset, batch in self._encoder.batches(offsets, columns, size_bytes):
            self._file.write(tp, batch, base_offset)

    def finish(self) -> Staged:
        """Close the file; return its path and its batches by partition."""
        return self._file.finish()

    def discard(self) -> None:
        """Delete the file after a failure of the task."""
        self._file.discard()


def _within_reach(offsets: Int64Array, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split the records ``[start, stop)`` into ranges whose offsets fit into one batch each."""
    while start < stop:
        end = min(stop, int(np.searchsorted(offsets, offsets[start] + _SPAN_MAX)))
        yield start, end
        start = end


# ---------------------------------------------------------------- appending


class Restorer:
    """Appends batches to one partition, each at its offset. Meanwhile, no other process may append to the partition."""

    def __init__(self, log: Partition) -> None:
        self._log = log
        self._name = f"{log.topic}/{log.number}"
        self._batches: list[EncodedBatch] = []
        self._size_bytes = 0
        self._begin = self._next = log.log_end_offset

    @property
    def next_offset(self) -> int:
        """The offset after the last batch that was queued."""
        return self._next

    def put(self, base_offset: int, batch: EncodedBatch) -> None:
        """Queue ``batch`` to be appended at ``base_offset``, and before it batches without records that fill a gap.

        The batch is appended when enough batches are queued, or by the next `flush`.

        Raises `OffsetTaken` and the errors of `Partition.append_batches`.
        """
        if base_offset < self._next:
            raise OffsetTaken(self._name, base_offset, self._next)
        self.fill_to(base_offset)
        self._queue(batch)

    def fill_to(self, offset: int) -> None:
        """Queue batches without records, so that the next batch gets ``offset``."""
        is_leading = self._log.log_end_offset == 0 and self._next == 0
        filled = offset - self._next
        while self._next < offset:
            self._queue(encode_gap(min(offset - self._next, _GAP_MAX)))
        if filled > 0 and (is_leading or filled >= _SPAN_MAX):
            self.flush()
            self._log.roll()  # so that a trim can delete the gap, and no index has to span it

    def _queue(self, batch: EncodedBatch) -> None:
        self._batches.append(batch)
        self._size_bytes += batch.size_bytes
        self._next += batch.last_offset_delta + 1
        if self._size_bytes >= _APPENDED_AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Append the queued batches. Raises `OffsetTaken` if another process has appended meanwhile.

        If appending fails, the batches stay queued for the next call, so that no later batch gets their offsets.
        """
        if not self._batches:
            return
        if self._log.log_end_offset != self._begin:
            raise OffsetTaken(self._name, self._begin, self._log.log_end_offset)
        placed_at = self._log.append_batches(self._batches)
        self._batches, self._size_bytes = [], 0
        if placed_at != self._begin:
            raise OffsetTaken(self._name, self._begin, placed_at)
        self._begin = self._next


def restore_staged(fs: FileSystem, logs: dict[int, Restorer], staged: Staged) -> int:
    """Append all records that one task has staged, by offset; return their number. Raises `CorruptBatch`."""
    if not staged.runs:
        return 0
    view = map_staged(fs, staged.path)
    for run in staged.runs:
        restorer = logs[run.partition]
        for base_offset, batch in read_run(view, staged.path, run):
            restorer.put(base_offset, batch)
        restorer.flush()  # its batches are views of this file
    return staged.record_count
