"""Where the records of a chunk go: to a partition each, and there all of them with one append."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.log.append.batch_encoding import CheckedColumns
from segmentlog.policy.partitioner import HashPartitioner, Partitioner, Rows, error_of_rows, ranks_of, rows_by_partition
from segmentlog.producing.delivery import EVERY_PARTITION, Chunk
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.topics.topic_registry import Topics
from segmentlog.transactions.producer_identity import ProducerIdentity

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack, Partition
    from segmentlog.topics.topic_registry import Topic

T = TypeVar("T")


class Spreader:
    """Spreads chunks over the partitions of their topics: for one thread a topic at a time."""

    def __init__(
        self, topics: Topics, identity: ProducerIdentity | None, partitioner: Partitioner | None, ack: Ack | None
    ) -> None:
        self.topics: dict[str, Topic] = {}
        """Those that records were sent to, by name."""
        self.spread_over: dict[str, int] = {}
        """How many partitions the last chunk of a topic went to."""
        self._all_topics = topics
        self._identity = identity
        self._partitioner = partitioner or HashPartitioner()
        self._ack: Ack | None = ack
        self._sticky: dict[str, int] = {}

    def ask(self, name: str, what: Callable[[Topic], T]) -> T:
        """What a topic that is known says of itself; once it is gone, what the one says that has its name by now.

        Records are sent to names.
        """
        try:
            return what(self.topics[name])
        except UnknownTopic:
            anew = self.topics[name] = self._all_topics.topic(name)
            return what(anew)

    def append(self, chunk: Chunk) -> None:
        """Append a chunk's records to their partitions; what an earlier call was interrupted in is gone on with.

        What fails in one partition does not keep it from the others: the first error is raised at the end.
        """
        partitions = chunk.given_places
        if partitions is None:  # else it was interrupted: what is in its place already is not to go elsewhere
            if EVERY_PARTITION in chunk.withheld:
                raise chunk.withheld[EVERY_PARTITION]
            count = self.ask(chunk.topic, lambda topic: topic.partition_count)  # it may have grown
            partitions = self._partitions_of(chunk, count)
        topic = self.topics[chunk.topic]
        rows_of = rows_by_partition(partitions)
        self.spread_over[chunk.topic] = len(rows_of)
        chunk.placed(partitions, ranks_of(rows_of))
        if self._identity is None or not self._identity.has_transactions:
            self._append_all(topic, chunk, rows_of)
        else:
            with self._identity.sending(chunk.topic, list(rows_of)):
                self._append_all(topic, chunk, rows_of)

    def _partitions_of(self, chunk: Chunk, count: int) -> npt.NDArray[np.int32]:
        """The partition of each record: as it says, else by its key, else the one whose turn it is."""
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

    def _append_all(self, topic: Topic, chunk: Chunk, rows_of: Mapping[int, Rows | None]) -> None:
        first: Exception | None = None
        for number, rows in rows_of.items():
            try:
                if number in chunk.withheld:
                    chunk.errors[number] = chunk.withheld[number]
                log = chunk.logs[number] = topic.partition(number)
                # After an interrupt: not what is appended, nor what failed, which may be there all the same.
                if number not in chunk.base_offsets and number not in chunk.errors:
                    chunk.base_offsets[number] = self._append(log, chunk, rows)
            except (SegmentlogError, OSError) as error:
                if is_interrupt(error):
                    raise
                chunk.errors[number] = error_of_rows(error, rows)
            first = first or chunk.errors.get(number)
        if first is not None:
            raise first

    def _append(self, log: Partition, chunk: Chunk, rows: Rows | None) -> int:
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
    """The error for a record that names a partition which its topic does not have."""
    return UnknownTopic(topic, f"it has no partition {number}, only 0 to {count - 1}")
