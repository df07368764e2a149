"""Where a consumer is in one partition, record by record."""

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
    """A partition, the position in it, and the records of the batch that is being handed out."""

    __slots__ = ("_handed_out", "_position", "_records", "end_offset", "epoch", "in_hand", "log", "paused", "tp")

    def __init__(self, tp: TopicPartition, log: Partition, position: int, end_offset: int) -> None:
        self.tp = tp
        self.log = log
        self.end_offset = end_offset
        self.paused = False
        self.epoch = -1
        """Of the batch that was handed out last."""
        self.in_hand: int | None = None
        """First offset of a batch that was handed out as a whole, and that the application may be working on."""
        self._position = position
        self._records: list[Record[Any, Any]] = []
        self._handed_out: Iterator[Record[Any, Any]] = iter(self._records)

    def hand_out(
        self, batch: RecordBatch[Any, Any], records: list[Record[Any, Any]] | None = None
    ) -> Iterator[Record[Any, Any]]:
        """The records of a batch, one by one; the position follows without any work for each of them.

        ``records`` are those of the batch, where somebody has them already.
        """
        self._records = list(batch.records()) if records is None else records
        self._handed_out = iter(self._records)
        self._position = batch.next_offset
        self.epoch, self.in_hand = batch.epoch, None
        return self._handed_out

    def take(self, count: int) -> list[Record[Any, Any]]:
        """The next ``count`` records of the batch that is being handed out, or as many as are left of it."""
        return list(islice(self._handed_out, count))

    @property
    def position(self) -> int:
        """The offset after the last record that was handed out."""
        left = length_hint(self._handed_out)
        return self._records[-left].offset if left else self._position

    @position.setter
    def position(self, offset: int) -> None:
        self.stop()
        self._position = offset
        self.in_hand = None

    @property
    def settled_position(self) -> int:
        """The position before what was handed out last."""
        if self.in_hand is not None:
            return self.in_hand
        handed_out = len(self._records) - length_hint(self._handed_out)
        return self._records[handed_out - 1].offset if handed_out else self.position

    def read_before(self, offset: int) -> bool:
        """Whether the record before ``offset`` is of the batch that was handed out last."""
        return offset == self.position or bool(self._records and self._records[0].offset < offset <= self.position)

    @property
    def has_left(self) -> bool:
        """Whether records of a batch are still to be handed out."""
        return length_hint(self._handed_out) > 0

    def stop(self) -> None:
        """Hand out no more of the batch: it is read again from where this is now."""
        self._position, self.in_hand = self.position, self.settled_position
        for _ in self._handed_out:
            pass
        self._records = []


def offset_of_last(log: Partition, count: int, end_offset: int) -> int:
    """Where to begin so that ``count`` records come before ``end_offset``, or all that there are.

    Walks back by offsets, so that the length of the log does not matter; where compaction or
    a crash left gaps it has to look further.
    """
    begin = end_offset
    width = missing = count
    while missing > 0 and begin > log.log_start_offset:
        upto, begin = begin, max(begin - width, log.log_start_offset)
        try:
            found = _count(log, begin, upto)
        except LogTruncated as truncated:  # begins inside a range that a crash took: nothing there to count
            lost = truncated.lost
            begin, found = max(lost.base_offset, log.log_start_offset), _count(log, lost.end_offset, upto)
        missing -= found
        width = max(missing, 2 * width)
        if missing < 0:
            return _skip(log, begin, -missing)
    return begin


def _count(log: Partition, begin: int, upto: int) -> int:
    """How many records lie in the range of offsets."""
    found = 0
    for batch in log.read(begin) if begin < upto else ():
        if batch.base_offset >= upto:
            break
        found += len(batch) if batch.next_offset <= upto else int((batch.offsets < upto).sum())
    return found


def _skip(log: Partition, begin: int, count: int) -> int:
    """The offset of the record that has ``count`` others before it, from ``begin`` on."""
    for batch in log.read(begin):
        if count < len(batch):
            return int(batch.offsets[count])
        count -= len(batch)
    return begin
