"""Choose a partition for each record of a chunk, and append the records of each partition together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.log.append.batch_encoding import CheckedColumns
from segmentlog.policy.partitioner import HashPartitioner, Partitioner, Rows, error_of_rows, ranks_of, rows_by_partition
from segmentlog.producing.delivery import EVERY_PARTITION, ProducerChunk
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.producer_identity import ProducerIdentity

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack, Partition
    from segmentlog.topics.topic_registry import Topic

T = TypeVar("T")


class PartitionDispatcher:
    """Splits chunks by partition and appends them. One thread at a time per topic."""

    def __init__(
        self, topics: Topics, identity: ProducerIdentity | None, partitioner: Partitioner | None, ack: Ack | None
    ) -> None:
        self.topics: dict[str, Topic] = {}
        """The topics to which records were sent, by name."""
        self.spread_counts: dict[str, int] = {}
        """By topic: how many partitions had records in the last chunk."""
        self._all_topics = topics
        self._identity = identity
        self._partitioner = partitioner or HashPartitioner()
        self._ack: Ack | None = ack
        self._sticky: dict[str, int] = {}

    def query_topic(self, name: str, query: Callable[[Topic], T]) -> T:
        """Return ``query`` of the topic that has this name.

        Records are sent to a name. If the topic was deleted, or renamed, and another topic has the name now, they go to
        the new topic.
        """
        try:
            return query(self.topics[name])
        except UnknownTopic:
            current = self.topics[name] = self._all_topics.topic(name)
            return query(current)

    def append(self, chunk: ProducerChunk) -> None:
        """Append a chunk's records to their partitions, or continue an interrupted call.

        An error in one partition does not affect the other partitions. The first error is raised at the end.
        """
        partitions = chunk.assigned_partitions
        if partitions is None:  # otherwise an earlier call was interrupted, and the records keep their partitions
            if EVERY_PARTITION in chunk.withheld:
                raise chunk.withheld[EVERY_PARTITION]
            count = self.query_topic(chunk.topic, lambda topic: topic.partition_count)  # partitions may have been added
            partitions = self._partitions_of(chunk, count)
        topic = self.topics[chunk.topic]
        rows_of = rows_by_partition(partitions)
        self.spread_counts[chunk.topic] = len(rows_of)
        chunk.set_partitions(partitions, ranks_of(rows_of))
        if self._identity is None or not self._identity.has_transactions:
            self._append_all(topic, chunk, rows_of)
        else:
            with self._identity.sending(chunk.topic, list(rows_of)):
                self._append_all(topic, chunk, rows_of)

    def _partitions_of(self, chunk: ProducerChunk, count: int) -> npt.NDArray[np.int32]:
        """Return the partition of each record: given by the caller, chosen by its key, or the sticky partition."""
        sticky = chunk.sticky
        if sticky < 0:
            sticky = self._sticky.get(chunk.topic, -1) + 1
            if sticky >= count:
                sticky = 0
            self._sticky[chunk.topic] = chunk.sticky = sticky
        total = len(chunk.values)
        if chunk.all_partition is not None:
            if chunk.all_partition >= count:
                raise no_partition(chunk.topic, chunk.all_partition, count)
            return np.full(total, chunk.all_partition, np.int32)
        if count == 1 or not chunk.keys:
            partitions = np.full(total, sticky, np.int32)
        else:
            partitions = self._partitioner.partitions(chunk.keys, count, sticky)
        for row, number in chunk.partitions.items():
            if number >= count:
                raise no_partition(chunk.topic, number, count)
            partitions[row] = number
        return partitions

    def _append_all(self, topic: Topic, chunk: ProducerChunk, rows_of: Mapping[int, Rows | None]) -> None:
        first: Exception | None = None
        for number, rows in rows_of.items():
            try:
                if number in chunk.withheld:
                    chunk.errors[number] = chunk.withheld[number]
                log = chunk.logs[number] = topic.partition(number)
                # After an interrupt, skip partitions whose append has succeeded or failed: a failed append may also
                # have stored records.
                if number not in chunk.base_offsets and number not in chunk.errors:
                    chunk.base_offsets[number] = self._append(log, chunk, rows)
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                chunk.errors[number] = error_of_rows(error, rows)
            first = first or chunk.errors.get(number)
        if first is not None:
            raise first

    def _append(self, log: Partition, chunk: ProducerChunk, rows: Rows | None) -> int:
        values, keys = chunk.values, chunk.keys
        timestamps, headers = chunk.timestamp_column(), chunk.header_column()
        if rows is not None:
            numbers = rows.tolist()
            values = list(map(values.__getitem__, numbers))
            keys = list(map(keys.__getitem__, numbers)) if keys else keys
            timestamps = None if timestamps is None else timestamps[rows]
            headers = None if headers is None else list(map(headers.__getitem__, numbers))
        columns = CheckedColumns(values, keys or None, timestamps, headers)
        if self._identity is not None:
            return self._identity.append(log, columns, self._ack, chunk.begun_ms)
        return log.append_columns(columns, self._ack, chunk.begun_ms)


def no_partition(topic: str, number: int, count: int) -> UnknownTopic:
    """Return the error for a record whose given partition does not exist."""
    return UnknownTopic(topic, f"it has no partition {number}, only 0 to {count - 1}")
