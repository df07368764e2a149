"""Appends the records of a request, with one append for each partition. A partition gets all of its records or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from segmentlog.errors import SegmentlogError
from segmentlog.http.rest.rest_error_codes import unknown_partition
from segmentlog.policy.partitioner import Rows, error_of_rows, partitions_for_keys, rows_by_partition
from segmentlog.records import Headers

if TYPE_CHECKING:
    from segmentlog.store import LogStore
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

_NON_BLOCKING_PARTITIONS: Final = 16

AckName = Literal["written", "durable", "shipped"]


class RecordLists(msgspec.Struct):
    """Records to append, as lists of equal length. Missing columns are None."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    partitions: Sequence[int | None] | None = None
    """Partition of each record; None means by key, or round-robin."""
    timestamps: Sequence[int | None] | None = None
    headers: Sequence[Headers] | None = None


class BatchResult(msgspec.Struct):
    """Outcome of a request that appends records. ``rows`` are the indices of a partition's records; None for all."""

    count: int
    parts: list[tuple[int, int, Rows | None]]
    """(partition, offset of its first record, rows)."""
    errors: list[tuple[int, Exception, Rows | None]]
    """(partition, error, rows) for each partition that nothing was appended to."""

    def outcomes(self) -> list[tuple[int, int, Exception | None]]:
        """Return (partition, offset, error) of each record in request order; the offset is -1 with an error."""
        if len(self.parts) == 1 and not self.errors:
            partition, base_offset, _ = self.parts[0]
            return list(zip(repeat(partition), range(base_offset, base_offset + self.count), repeat(None)))
        found: list[Any] = [None] * self.count
        for partition, base_offset, rows in self.parts:
            for offset, row in enumerate(_numbers(rows, self.count), base_offset):
                found[row] = (partition, offset, None)
        for partition, error, rows in self.errors:
            for row in _numbers(rows, self.count):
                found[row] = (partition, -1, error)
        return found


def _numbers(rows: Rows | None, count: int) -> Sequence[int]:
    return range(count) if rows is None else rows.tolist()


class BatchAppender:
    """Appends for all requests of a server. Thread-safe."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._round_robin: dict[str, int] = {}
        self._opened: dict[str, int] = {}
        """By topic id: the number of partitions that `open_partitions` has opened."""

    def is_non_blocking(self, topic_name: str, ack: AckName | None) -> bool:
        """Return whether an append to this topic cannot block, so that the event loop may run it itself.

        A thread costs as much time as the append, because both compete for the interpreter's lock. An append cannot
        block if the partitions are open, the topic's policy needs no fsync, and no other process appends: a suspended
        process would block all clients of the event loop.
        """
        if ack not in (None, "written"):
            return False
        topic = self._store.topic(topic_name)
        opened = self._opened.get(topic.id, 0)
        if not opened or topic.partition_count != opened or opened > _NON_BLOCKING_PARTITIONS:
            return False
        for number in range(opened):
            handle = topic.partition(number).handle
            if handle.config.fsync.kind not in ("ms", "never") or handle.page.writing:
                return False
        return True

    def open_partitions(self, topic_name: str) -> None:
        """Open the partitions of a small topic, in a thread, so that the next append may be non-blocking."""
        topic = self._store.topic(topic_name)
        count = topic.partition_count
        if count <= _NON_BLOCKING_PARTITIONS and self._opened.get(topic.id) != count:
            topic.partitions()
            self._opened[topic.id] = count

    def append(
        self, topic_name: str, records: RecordLists, ack: AckName | None = None, partition: int | None = None
    ) -> BatchResult:
        """Append records, all to ``partition`` if it is given. A failing partition does not affect other partitions.

        Raises `UnknownTopic`, and `HttpProblem` for an unknown partition. Then nothing was appended.
        """
        topic = self._store.topic(topic_name)
        total = len(records.values)
        rows_of = self._assign_partitions(topic, records, partition, topic.partition_count)
        result = BatchResult(total, [], [])
        for number, rows in rows_of.items():
            try:
                result.parts.append((number, _append(topic, number, records, rows, ack), rows))
            except (SegmentlogError, OSError) as error:
                if not isinstance(error, SegmentlogError):  # the response omits file names and details
                    logger.error("cannot append to %s/%d", topic_name, number, exc_info=error)
                result.errors.append((number, error_of_rows(error, rows), rows))
        return result

    def next_round_robin(self, topic: Topic, count: int) -> int:
        """Return the next partition for records without a key."""
        keyless_partition = (self._round_robin.get(topic.id, -1) + 1) % count
        self._round_robin[topic.id] = keyless_partition  # not locked: two threads may get the same partition
        return keyless_partition

    def _assign_partitions(
        self, topic: Topic, records: RecordLists, partition: int | None, count: int
    ) -> dict[int, Rows | None]:
        if partition is not None:
            if partition >= count:
                raise unknown_partition(topic.name, partition)
            return {partition: None}
        given, keys = records.partitions, records.keys
        if given is None and count == 1:
            return {0: None}
        keyless_partition = self.next_round_robin(topic, count)
        if given is None and keys is None:
            return {keyless_partition: None}
        places: npt.NDArray[np.int32]
        if keys is None or count == 1:
            places = np.full(len(records.values), keyless_partition, np.int32)
        else:
            places = partitions_for_keys(keys, count, keyless_partition)
        for row, number in enumerate(given or ()):
            if number is not None:
                if number >= count:
                    raise unknown_partition(topic.name, number)
                places[row] = number
        return dict(rows_by_partition(places))


def _append(topic: Topic, number: int, records: RecordLists, rows: Rows | None, ack: AckName | None) -> int:
    values, keys, headers, stamps = records.values, records.keys, records.headers, records.timestamps
    if rows is not None:
        numbers = rows.tolist()
        values = list(map(values.__getitem__, numbers))
        keys = None if keys is None else list(map(keys.__getitem__, numbers))
        headers = None if headers is None else list(map(headers.__getitem__, numbers))
        stamps = None if stamps is None else list(map(stamps.__getitem__, numbers))
    if keys is not None and keys.count(None) == len(keys):
        keys = None
    timestamps = None
    if stamps is not None and any(stamp is not None for stamp in stamps):
        now_ms = time.time_ns() // 1_000_000
        timestamps = [now_ms if stamp is None else stamp for stamp in stamps]
    return topic.partition(number).append(values, keys, timestamps, headers, ack)
