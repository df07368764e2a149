"""Find the records of an input that a named producer has not sent yet.

A record's partition depends only on the input: the record names the partition, or its key selects it. Records with
neither are assigned in blocks of `BLOCK_RECORDS`, each block to the next partition. So every run assigns the same
records to a partition in the same order. If the producer has appended n records to a partition, the next record to
append is therefore the partition's record n of the input, counted from 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from segmentlog.errors import InputMismatch, SegmentlogError
from segmentlog.policy.partitioner import Rows, partitions_for_keys, rows_by_partition
from segmentlog.records import TopicPartition

if TYPE_CHECKING:
    from segmentlog.producing.producer import Producer
    from segmentlog.topics.topic_registry import Topic
    from segmentlog.transactions.transaction_coordinator import Transactions

BLOCK_RECORDS: Final = 1024
"""Number of consecutive records without a key that are assigned to one partition."""

Column = Sequence[bytes | None]
_Record = tuple[bytes | None, bytes | None]


class PartitionShare(NamedTuple):
    """The records of a list that must still be appended to one partition."""

    partition: int
    rows: Rows
    upto: int
    """Number of records of this input in the partition after the share is appended."""


class ResumedInput:
    """Compares an input, from its beginning, with the records that earlier runs have appended to the partitions."""

    def __init__(self, topic: Topic, producer: Producer, transactions: Transactions) -> None:
        self._topic = topic
        self._producer = producer
        self._transactions = transactions
        self._count: int | None = None
        self._number = 0
        """Index of the next record of the input."""
        self._rows: dict[int, Rows] = {}
        """By partition: rows of the records of the last call of `shares`."""
        self._read: dict[int, int] = {}
        """By partition: number of its records in the input so far."""
        self._sent: dict[int, int] = {}
        """By partition: number of its records in the log."""
        self._unchecked: dict[int, _Record] = {}
        """By partition: (key, value) of the last record that an earlier run sent, until it is compared."""

    def shares(self, values: Column, keys: Column | None, partition: int | None) -> list[PartitionShare]:
        """Return the records of the next list of the input that are not in the log yet, by partition.

        ``partition`` is the partition of all these records. If it is None, the key or the number of each record selects
        its partition.

        Raises `InputMismatch` if the input differs from what was sent before.
        """
        shares = []
        self._rows = self._rows_of(len(values), keys, partition)
        for number, rows in self._rows.items():
            sent, read = self._sent_to(number), self._read.get(number, 0)
            if number in self._unchecked and read < sent <= read + len(rows):
                row = int(rows[sent - read - 1])
                self._check_same(number, row, (keys[row] if keys else None, values[row]))
            missing = rows[max(sent - read, 0) :]
            if len(missing):
                shares.append(PartitionShare(number, missing, read + len(rows)))
        return shares

    def mark_sent(self, share: PartitionShare) -> None:
        """Note that a share was appended."""
        self._sent[share.partition] = share.upto

    def advance(self) -> None:
        """Move past the records of the last call of `shares`; call this once all its shares are appended."""
        for number, rows in self._rows.items():
            self._read[number] = self._read.get(number, 0) + len(rows)
            self._number += len(rows)

    def check_complete(self, partition: int | None) -> None:
        """Raise `InputMismatch` at the end of the input if it has fewer records than were sent before."""
        numbers = range(self._topic.partition_count) if partition is None else (partition,)
        short = [
            f"{self._read.get(number, 0):,} of {sent:,} for {self._topic.name}/{number}"
            for number in numbers
            if self._read.get(number, 0) < (sent := self._sent_to(number))
        ]
        if short:
            raise InputMismatch(
                f"the input has fewer records than producer {self._producer.name!r} has sent already:"
                f" {', '.join(short[:4])}{', ...' if len(short) > 4 else ''}. If the input was truncated, use the whole"
                " input. If it is another input, use another --producer NAME"
            )

    # ------------------------------------------------------------ where records belong

    def _rows_of(self, length: int, keys: Column | None, partition: int | None) -> dict[int, Rows]:
        """Return the indexes of the records of each partition, in ascending order."""
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
        """Return the number of partitions that the topic had when the first run began.

        Partitions that were added later get no records of this input.
        """
        if self._count is None:
            now = self._topic.partition_count
            self._count = self._producer.note_resume(self._topic.name, now)
            if self._count > now:
                raise InputMismatch(
                    f"topic {self._topic.name} has {now} partitions, but had {self._count} when producer"
                    f" {self._producer.name!r} began this input. So it is another topic of the same name, created"
                    " since. Use another --producer NAME"
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
        """Return the last record that an earlier run appended to a partition, if it can still be read."""
        state = self._transactions.states().get(self._producer.name or "")
        log = self._topic.partition(number)
        entry = log.producer(state.producer_id) if state is not None else None
        if entry is None or not entry.runs:
            return None
        offset = entry.runs[-1].offset + entry.runs[-1].count - 1
        with contextlib.suppress(SegmentlogError):  # for example because retention deleted it
            for batch in log.read(offset):
                record = next(iter(batch.slice(0, 1).records()))
                return (record.key, record.value) if record.offset == offset else None  # compacted away
        return None

    def _check_same(self, number: int, row: int, record: _Record) -> None:
        if self._unchecked.pop(number) != record:
            tp = TopicPartition(self._topic.name, number)
            raise InputMismatch(
                f"record {self._number + row + 1} of the input differs from the record that producer"
                f" {self._producer.name!r}"
                f" sent to {tp} in its place. If this is another input, use another --producer NAME. If the input was"
                " changed, use the original input"
            )
