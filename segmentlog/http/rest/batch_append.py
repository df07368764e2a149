"""Records of a request to the partitions of a topic: one append for each partition, so that each is all or nothing."""

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
from segmentlog.http.rest.rest_error_codes import no_partition
from segmentlog.policy.partitioner import Rows, error_of_rows, partitions_for_keys, rows_by_partition
from segmentlog.records import Headers

if TYPE_CHECKING:
    from segmentlog.store import LogStore
    from segmentlog.topics.topic_registry import Topic

logger = logging.getLogger("segmentlog.http")

_QUICK_PARTITIONS: Final = 16

AckName = Literal["written", "durable", "shipped"]


class Records(msgspec.Struct):
    """What is to be appended: lists of one length; None for a column that no record has."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    partitions: Sequence[int | None] | None = None
    """Where each goes; None: where its key says, or whose turn it is."""
    timestamps: Sequence[int | None] | None = None
    headers: Sequence[Headers] | None = None


class Placed(msgspec.Struct):
    """What became of them. ``rows`` is None for a partition that has all of them."""

    count: int
    parts: list[tuple[int, int, Rows | None]]
    """(partition, offset of its first record, which records)."""
    errors: list[tuple[int, Exception, Rows | None]]
    """Partitions that nothing was appended to, and why."""

    def outcomes(self) -> list[tuple[int, int, Exception | None]]:
        """(partition, offset, error) of each record, in the order they came; offset -1 with an error."""
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


class Appending:
    """Appends for all requests. Thread-safe."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._turns: dict[str, int] = {}
        self._opened: dict[str, int] = {}
        """By the id of a topic: of its partitions, those below this number were appended to by a thread."""

    def is_quick(self, topic_name: str, ack: AckName | None) -> bool:
        """Whether an append to this topic waits for nothing, so that the event loop itself may do it.

        A thread costs as much as the append, for the two that hold the interpreter's lock in turn. Without one, the
        partitions have to be open, no fsync is asked for by anybody, and no other process is in the middle of an
        append: one that was stopped there would hold up all clients of the loop.
        """
        if ack not in (None, "written"):
            return False
        topic = self._store.topic(topic_name)
        opened = self._opened.get(topic.id, 0)
        if not opened or topic.partition_count != opened or opened > _QUICK_PARTITIONS:
            return False
        for number in range(opened):
            handle = topic.partition(number).handle
            if handle.config.fsync.kind not in ("ms", "never") or handle.page.writing:
                return False
        return True

    def note_opened(self, topic_name: str) -> None:
        """Open the partitions of a topic with few of them, in a thread: the next time it may be quick."""
        topic = self._store.topic(topic_name)
        count = topic.partition_count
        if count <= _QUICK_PARTITIONS and self._opened.get(topic.id) != count:
            topic.partitions()
            self._opened[topic.id] = count

    def append(
        self, topic_name: str, records: Records, ack: AckName | None = None, partition: int | None = None
    ) -> Placed:
        """Append them, all to ``partition`` if it is given. What fails in one partition does not keep it from others.

        Raises `UnknownTopic`, and `HttpProblem` for a partition that there is not: nothing was appended.
        """
        topic = self._store.topic(topic_name)
        total = len(records.values)
        rows_of = self._places(topic, records, partition, topic.partition_count)
        placed = Placed(total, [], [])
        for number, rows in rows_of.items():
            try:
                placed.parts.append((number, _append(topic, number, records, rows, ack), rows))
            except (SegmentlogError, OSError) as error:
                if not isinstance(error, SegmentlogError):  # who asked is not told the half of it
                    logger.error("append to %s/%d", topic_name, number, exc_info=error)
                placed.errors.append((number, error_of_rows(error, rows), rows))
        return placed

    def next_turn(self, topic: Topic, count: int) -> int:
        """The partition whose turn it is to get records without a key."""
        turn = (self._turns.get(topic.id, -1) + 1) % count
        self._turns[topic.id] = turn  # of two threads one may skip a turn
        return turn

    def _places(self, topic: Topic, records: Records, partition: int | None, count: int) -> dict[int, Rows | None]:
        if partition is not None:
            if partition >= count:
                raise no_partition(topic.name, partition)
            return {partition: None}
        given, keys = records.partitions, records.keys
        if given is None and count == 1:
            return {0: None}
        turn = self.next_turn(topic, count)
        if given is None and keys is None:
            return {turn: None}
        places: npt.NDArray[np.int32]
        if keys is None or count == 1:
            places = np.full(len(records.values), turn, np.int32)
        else:
            places = partitions_for_keys(keys, count, turn)
        for row, number in enumerate(given or ()):
            if number is not None:
                if number >= count:
                    raise no_partition(topic.name, number)
                places[row] = number
        return dict(rows_by_partition(places))


def _append(topic: Topic, number: int, records: Records, rows: Rows | None, ack: AckName | None) -> int:
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
