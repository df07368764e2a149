"""The position of a consumer in one partition. It advances with every record that the consumer returns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any

from segmentlog.errors import LogTruncated
from segmentlog.format.record_batch import RecordBatch
from segmentlog.records import Record, TopicPartition

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition


class Cursor:
    """The read position in one partition, and the records of the current batch that are not returned yet."""

    __slots__ = (
        "_position",
        "_records",
        "_unreturned",
        "end_offset",
        "epoch",
        "log",
        "paused",
        "processing_offset",
        "tp",
    )

    def __init__(self, tp: TopicPartition, log: Partition, position: int, end_offset: int) -> None:
        self.tp = tp
        self.log = log
        self.end_offset = end_offset
        self.paused = False
        self.epoch = -1
        """Leader epoch of the last returned batch; -1 before the first."""
        self.processing_offset: int | None = None
        """Base offset of a batch or list that was returned as a whole, and that the application may be processing."""
        self._position = position
        self._records: list[Record[Any, Any]] = []
        self._unreturned: Iterator[Record[Any, Any]] = iter(self._records)

    def iterate(
        self, batch: RecordBatch[Any, Any], records: list[Record[Any, Any]] | None = None
    ) -> Iterator[Record[Any, Any]]:
        """Return an iterator over the records of a batch. `position` advances with each record that it returns.

        ``records``: the records of the batch, if the caller has them already.
        """
        self._records = list(batch.records()) if records is None else records
        self._unreturned = iter(self._records)
        self._position = batch.next_offset
        self.epoch, self.processing_offset = batch.epoch, None
        return self._unreturned

    def take(self, count: int) -> list[Record[Any, Any]]:
        """Return the next ``count`` records of the current batch, or as many as are left."""
        return list(islice(self._unreturned, count))

    @property
    def position(self) -> int:
        """The offset after the last returned record."""
        left = length_hint(self._unreturned)
        return self._records[-left].offset if left else self._position

    @position.setter
    def position(self, offset: int) -> None:
        self.stop()
        self._position = offset
        self.processing_offset = None

    @property
    def processing_position(self) -> int:
        """The offset of the last returned record; if a batch or list was returned, the offset of its first record."""
        if self.processing_offset is not None:
            return self.processing_offset
        returned = len(self._records) - length_hint(self._unreturned)
        return self._records[returned - 1].offset if returned else self.position

    def read_before(self, offset: int) -> bool:
        """Return whether the record before ``offset`` belongs to the last returned batch."""
        return offset == self.position or bool(self._records and self._records[0].offset < offset <= self.position)

    @property
    def has_remaining(self) -> bool:
        """Whether the current batch has records that are not returned yet."""
        return length_hint(self._unreturned) > 0

    def stop(self) -> None:
        """Drop the rest of the current batch. The next fetch reads it again."""
        self._position, self.processing_offset = self.position, self.processing_position
        for _ in self._unreturned:
            pass
        self._records = []


def offset_of_last(log: Partition, count: int, end_offset: int) -> int:
    """Return the offset from which a read up to ``end_offset`` returns ``count`` records.

    If the log has fewer records, return the log start offset. The search begins at ``end_offset``, so the length of the
    log does not matter. It takes more steps if offsets have no records, because of compaction or a lost range.
    """
    begin = end_offset
    width = missing = count
    while missing > 0 and begin > log.log_start_offset:
        upto, begin = begin, max(begin - width, log.log_start_offset)
        try:
            found = _count(log, begin, upto)
        except LogTruncated as truncated:  # begin is inside a lost range, which has no records
            lost = truncated.lost
            begin, found = max(lost.base_offset, log.log_start_offset), _count(log, lost.end_offset, upto)
        missing -= found
        width = max(missing, 2 * width)
        if missing < 0:
            return _skip(log, begin, -missing)
    return begin


def _count(log: Partition, begin: int, upto: int) -> int:
    """Return the number of records in a range of offsets."""
    found = 0
    for batch in log.read(begin) if begin < upto else ():
        if batch.base_offset >= upto:
            break
        found += len(batch) if batch.next_offset <= upto else int((batch.offsets < upto).sum())
    return found


def _skip(log: Partition, begin: int, count: int) -> int:
    """Return the offset of the record that follows the first ``count`` records from ``begin`` on."""
    for batch in log.read(begin):
        if count < len(batch):
            return int(batch.offsets[count])
        count -= len(batch)
    return begin
