"""The position of a consumer in one partition, tracked record by record."""

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
    """A partition, the position in it, and the records of the current batch that are not returned yet."""

    __slots__ = ("_handed_out", "_position", "_records", "end_offset", "epoch", "in_hand", "log", "paused", "tp")

    def __init__(self, tp: TopicPartition, log: Partition, position: int, end_offset: int) -> None:
        self.tp = tp
        self.log = log
        self.end_offset = end_offset
        self.paused = False
        self.epoch = -1
        """Leader epoch of the last returned batch; -1 before the first."""
        self.in_hand: int | None = None
        """Base offset of a batch that was returned as a whole and that the application may be processing."""
        self._position = position
        self._records: list[Record[Any, Any]] = []
        self._handed_out: Iterator[Record[Any, Any]] = iter(self._records)

    def iterate(
        self, batch: RecordBatch[Any, Any], records: list[Record[Any, Any]] | None = None
    ) -> Iterator[Record[Any, Any]]:
        """Return an iterator over the records of a batch; `position` follows the iterator.

        ``records``: the records of the batch, if the caller has them already.
        """
        self._records = list(batch.records()) if records is None else records
        self._handed_out = iter(self._records)
        self._position = batch.next_offset
        self.epoch, self.in_hand = batch.epoch, None
        return self._handed_out

    def take(self, count: int) -> list[Record[Any, Any]]:
        """Return the next ``count`` records of the current batch, or as many as are left."""
        return list(islice(self._handed_out, count))

    @property
    def position(self) -> int:
        """The offset after the last returned record."""
        left = length_hint(self._handed_out)
        return self._records[-left].offset if left else self._position

    @position.setter
    def position(self, offset: int) -> None:
        self.stop()
        self._position = offset
        self.in_hand = None

    @property
    def settled_position(self) -> int:
        """The offset of the record, or of the first record of the batch, that was returned last."""
        if self.in_hand is not None:
            return self.in_hand
        handed_out = len(self._records) - length_hint(self._handed_out)
        return self._records[handed_out - 1].offset if handed_out else self.position

    def read_before(self, offset: int) -> bool:
        """Return whether the record before ``offset`` belongs to the last returned batch."""
        return offset == self.position or bool(self._records and self._records[0].offset < offset <= self.position)

    @property
    def has_left(self) -> bool:
        """Whether records of the current batch are left."""
        return length_hint(self._handed_out) > 0

    def stop(self) -> None:
        """Drop the rest of the batch; it is read again from the current position."""
        self._position, self.in_hand = self.position, self.settled_position
        for _ in self._handed_out:
            pass
        self._records = []


def offset_of_last(log: Partition, count: int, end_offset: int) -> int:
    """Return the offset of the first of the last ``count`` records before ``end_offset``.

    If there are fewer records, returns the log start offset.

    Searches backwards from ``end_offset``, so that the length of the log does not matter. It takes more steps if
    offsets are missing, because of compaction or a lost range.
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
    """Return the offset of the record after the first ``count`` records from ``begin`` on."""
    for batch in log.read(begin):
        if count < len(batch):
            return int(batch.offsets[count])
        count -= len(batch)
    return begin
