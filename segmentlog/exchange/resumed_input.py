"""Which records of an input a named producer has sent already.

A record's partition is a function of the input alone: the one that it names, else its key's, else
that of its block of `BLOCK_RECORDS` records, in turn. So the records of a partition are the same, in the
same order, in every run, and how many of them the producer has appended there says which is next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from segmentlog.errors import OtherInput, SegmentlogError
from segmentlog.policy.partitioner import Rows, partitions_for_keys, rows_by_partition
from segmentlog.records import TopicPartition

if TYPE_CHECKING:
    from segmentlog.producing.producer import Producer
    from segmentlog.topics.topic_registry import Topic
    from segmentlog.transactions.transaction_coordinator import Transactions

BLOCK_RECORDS: Final = 1024
"""So many records without a key go to one partition before it is the next one's turn."""

Column = Sequence[bytes | None]
_Record = tuple[bytes | None, bytes | None]


class Share(NamedTuple):
    """What is still to be sent to a partition of a list of records."""

    partition: int
    rows: Rows
    upto: int
    """How many records the partition has of this input once they are there."""


class Resumption:
    """Follows an input from its beginning, next to what the partitions have of it."""

    def __init__(self, topic: Topic, producer: Producer, transactions: Transactions) -> None:
        self._topic = topic
        self._producer = producer
        self._transactions = transactions
        self._count: int | None = None
        self._number = 0
        """Of the next record of the input."""
        self._rows: dict[int, Rows] = {}
        """By partition: rows of the records that `shares` was asked about last."""
        self._met: dict[int, int] = {}
        """By partition: how many of its records the input had so far."""
        self._sent: dict[int, int] = {}
        """By partition: how many of its records are in the log."""
        self._unchecked: dict[int, _Record] = {}
        """By partition: the last record that an earlier run sent, as (key, value)."""

    def shares(self, values: Column, keys: Column | None, partition: int | None) -> list[Share]:
        """What is missing of the next records; ``partition``: the one that is given for all of them.

        Raises ClickException when they are not those that were sent before.
        """
        shares = []
        self._rows = self._rows_of(len(values), keys, partition)
        for number, rows in self._rows.items():
            sent, met = self._sent_to(number), self._met.get(number, 0)
            if number in self._unchecked and met < sent <= met + len(rows):
                row = int(rows[sent - met - 1])
                self._check_same(number, row, (keys[row] if keys else None, values[row]))
            missing = rows[max(sent - met, 0) :]
            if len(missing):
                shares.append(Share(number, missing, met + len(rows)))
        return shares

    def note_sent(self, share: Share) -> None:
        """A share is appended."""
        self._sent[share.partition] = share.upto

    def advance(self) -> None:
        """All shares are appended: what is asked about next are the records that follow."""
        for number, rows in self._rows.items():
            self._met[number] = self._met.get(number, 0) + len(rows)
            self._number += len(rows)

    def check_complete(self, partition: int | None) -> None:
        """At the end of the input: raises ClickException when it has less than was sent before."""
        numbers = range(self._topic.partition_count) if partition is None else (partition,)
        short = [
            f"{self._met.get(number, 0):,} of {sent:,} for {self._topic.name}/{number}"
            for number in numbers
            if self._met.get(number, 0) < (sent := self._sent_to(number))
        ]
        if short:
            raise OtherInput(
                f"the input has fewer records than producer {self._producer.name!r} has sent already:"
                f" {', '.join(short[:4])}{', ...' if len(short) > 4 else ''}; it was cut, or is another one,"
                " which needs a --producer NAME of its own"
            )

    # ------------------------------------------------------------ where records belong

    def _rows_of(self, length: int, keys: Column | None, partition: int | None) -> dict[int, Rows]:
        """Rows by partition, in order."""
        if partition is not None:
            return {partition: np.arange(length)} if length else {}
        count = self._partition_count()
        blocks = (np.arange(self._number, self._number + length) // BLOCK_RECORDS) % count
        if keys is None:
            partitions = blocks
        else:
            partitions = partitions_for_keys([b"" if key is None else key for key in keys], count, 0).astype(np.int64)
            has_key = np.fromiter((key is not None for key in keys), np.bool_, length)
            partitions = np.where(has_key, partitions, blocks)
        found = rows_by_partition(partitions)
        return {number: np.arange(length) if rows is None else rows for number, rows in found.items()}

    def _partition_count(self) -> int:
        """How many partitions the topic had when the job began: those that were added since get nothing of it."""
        if self._count is None:
            now = self._topic.partition_count
            self._count = self._producer.note_resume(self._topic.name, now)
            if self._count > now:
                raise OtherInput(
                    f"producer {self._producer.name!r} began with {self._count} partitions of {self._topic.name}, which"
                    f" has {now} now, so it is another topic: take another --producer NAME"
                )
        return self._count

    # ------------------------------------------------------------ what is there

    def _sent_to(self, number: int) -> int:
        sent = self._sent.get(number)
        if sent is None:
            sent = self._sent[number] = self._producer.last_sequence(self._topic.name, number) + 1
            last = self._last_record(number) if sent else None
            if last is not None:
                self._unchecked[number] = last
        return sent

    def _last_record(self, number: int) -> _Record | None:
        """The last record that an earlier run appended; None when nobody can tell any more."""
        state = self._transactions.states().get(self._producer.name or "")
        log = self._topic.partition(number)
        entry = log.producer(state.producer_id) if state is not None else None
        if entry is None or not entry.runs:
            return None
        offset = entry.runs[-1].offset + entry.runs[-1].count - 1
        with contextlib.suppress(SegmentlogError):  # deleted by retention, say
            for batch in log.read(offset):
                record = next(iter(batch.slice(0, 1).records()))
                return (record.key, record.value) if record.offset == offset else None  # compacted away
        return None

    def _check_same(self, number: int, row: int, record: _Record) -> None:
        if self._unchecked.pop(number) != record:
            tp = TopicPartition(self._topic.name, number)
            raise OtherInput(
                f"record {self._number + row + 1} of the input is not the one that producer {self._producer.name!r} has"
                f" sent to {tp} in its place: the input is another one, which needs a --producer NAME of its own, or"
                " was changed"
            )
