"""The partitions that a consumer reads, their positions and ends, and the order in which they are read."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from typing import Any

from segmentlog.arguments import as_topic_partition
from segmentlog.consuming.consumer_options import ConsumerOptions, OffsetReset, Source, Start
from segmentlog.consuming.cursor import Cursor, offset_of_last
from segmentlog.errors import CorruptBatch, DeserializationError, InvalidConfig, OffsetOutOfRange, UnknownTopic
from segmentlog.format.file_names import check_topic_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.groups.committed_offsets import CommittedOffset
from segmentlog.groups.group_folder import is_pattern
from segmentlog.log.partition import Partition
from segmentlog.quantities import milliseconds_of
from segmentlog.records import TopicPartition
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")


_PREFETCH_MAX_RECORDS = 20_000
_HOW_TO_WAIT = (
    "it does not exist. Create it with create_topic(..., exist_ok=True) or 'segmentlog create --if-not-exists',"
    " or pass follow=True (-f on the command line): then the consumer waits until it is created"
)


class PrefetchedBatches:
    """Batches of a partition that were fetched but not returned yet."""

    __slots__ = ("batches", "cursor", "end_position", "position")

    def __init__(self, cursor: Cursor, position: int) -> None:
        self.cursor = cursor
        self.position = position
        """Position that the cursor must have for the next batch. If it has another, the batches are out of date."""
        self.batches: deque[RecordBatch[Any, Any]] = deque()
        self.end_position = position
        """Position of the cursor after all batches were returned."""

    def drop_after(self, count: int) -> None:
        """Drop all batches after the first ``count``. The next fetch reads them again."""
        while len(self.batches) > count:
            self.batches.pop()
        self.end_position = self.batches[-1].next_offset


class CursorSet:
    """The cursors of a consumer, which are read in turn. They do not keep the consumer from being garbage-collected.

    It is the `PartitionReader` of a group session.
    """

    def __init__(self, topics: Topics, sources: Sequence[Source], options: ConsumerOptions) -> None:
        self._topics = topics
        self._sources = sources
        self._options = options
        self._reset: OffsetReset = options.auto_offset_reset or "error"
        self.by_partition: dict[TopicPartition, Cursor] = {}
        self._turn: deque[TopicPartition] = deque()
        self.processing: Cursor | None = None
        """Cursor of the record, batch or list that the application may be processing."""
        self._awaited: set[str] = set()
        """Named topics that do not exist yet. A consumer that follows waits until they are created."""
        self._deleted: set[TopicPartition] = set()
        """Partitions of a group member whose topics do not exist any more."""
        self.skipped: list[tuple[TopicPartition, int, int, CorruptBatch]] = []
        self.resets: list[tuple[TopicPartition, int, int]] = []

    def __iter__(self) -> Iterator[Cursor]:
        return iter(self.by_partition.copy().values())

    def of(self, topic: str, partition: int) -> Cursor:
        """Return the cursor of a partition. Raises `UnknownTopic` if this consumer does not read it."""
        try:
            return self.by_partition[as_topic_partition(topic, partition)]
        except KeyError:
            raise UnknownTopic(topic, f"partition {partition} is not read by this consumer") from None

    # ------------------------------------------------------------ without a group

    def assign(self, start: Start) -> bool:
        """Add existing partitions that are not read yet; return whether there were any.

        If the consumer does not follow, raises `UnknownTopic` for a missing named topic.
        """
        is_any = False
        for tp, is_named in self._partitions():
            if tp in self.by_partition:
                continue
            try:
                log = self._topics.topic(tp.topic).partition(tp.partition)
            except UnknownTopic:
                if is_named:
                    raise
                continue  # deleted after the folder was listed
            self._take(tp, log, self.resolve(log, start))
            is_any = True
        return is_any

    def _partitions(self) -> Iterator[tuple[TopicPartition, bool]]:
        """Yield each partition, and whether its topic is named: False if only a pattern matches the topic."""
        for source in self._sources:
            if not isinstance(source, str):
                topic, partition = source
                if not self._is_awaited(check_topic_name(topic, internal=True)):
                    yield TopicPartition(topic, partition), True
            elif is_pattern(source):
                for name in fnmatch.filter(self._topics.names(), source):
                    with contextlib.suppress(UnknownTopic):
                        for partition in range(self._topics.topic(name).partition_count):
                            yield TopicPartition(name, partition), False
            elif not self._is_awaited(check_topic_name(source, internal=True)):
                for partition in range(self._topics.topic(source).partition_count):
                    yield TopicPartition(source, partition), True

    def _is_awaited(self, topic: str) -> bool:
        """Return whether a named topic does not exist yet and the consumer waits for it.

        Logs a warning once, because the name may be mistyped. Raises `UnknownTopic` unless the consumer follows. The
        consumer does not wait for a topic that it has read before: it was deleted or renamed, and `UnknownTopic`
        reports that.
        """
        if self._topics.has(topic) or any(tp.topic == topic for tp in self.by_partition):
            self._awaited.discard(topic)
            return False
        if not self._options.follow:
            raise UnknownTopic(topic, _HOW_TO_WAIT)
        if topic not in self._awaited:
            self._awaited.add(topic)
            logger.warning("topic %r does not exist yet; the consumer waits until it is created", topic)
        return True

    def _take(self, tp: TopicPartition, log: Partition, position: int, epoch: int | None = None) -> None:
        cursor = Cursor(tp, log, position, self.end_of(log))
        if epoch is not None:
            cursor.epoch = epoch
        # No interrupt can occur between these two statements.
        self.by_partition[tp] = cursor
        self._turn.append(tp)

    # ------------------------------------------------------------ in a group

    def subscription(self, group: str) -> list[str]:
        """Return the topics and patterns to which this consumer subscribes as a member of a group.

        Raises `UnknownTopic`, or `InvalidConfig` for a single partition, because the group assigns the partitions.
        """
        names = []
        for source in self._sources:
            if not isinstance(source, str):
                raise InvalidConfig(
                    "topics", source, f"give a topic or a pattern: group {group!r} assigns the partitions"
                )
            if not is_pattern(source):
                self._is_awaited(check_topic_name(source, internal=True))
            names.append(source)
        return names

    def start_partition(
        self, tp: TopicPartition, topic_id: str, committed: CommittedOffset | None, *, is_new: bool
    ) -> None:
        """Start reading a partition at its committed offset. Without one, the consumer's options decide."""
        log = self._topics.open_partition(tp.topic, tp.partition, topic_id)
        reset = self._options.auto_offset_reset
        if committed is not None:
            position = committed.offset
        elif reset == "error":
            expected = f"'earliest' or 'latest', because the group has no committed offset for {tp}"
            raise InvalidConfig("auto_offset_reset", "error", expected)
        else:
            position = self.resolve(log, "earliest" if is_new else reset or self._options.start)
        self._take(tp, log, position, None if committed is None else committed.epoch)

    def reads(self, tp: TopicPartition) -> bool:
        """Return whether the consumer reads a partition."""
        return tp in self.by_partition

    def stop(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop returning records of these partitions, but keep their positions."""
        for tp in partitions:
            cursor = self.by_partition[tp]
            cursor.paused = True
            cursor.stop()

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Remove these partitions and their positions."""
        for tp in partitions:
            cursor = self.by_partition.pop(tp, None)
            if cursor is not None:
                cursor.paused = True
                cursor.stop()
                self._turn = deque(other for other in self._turn if other != tp)

    def take_deleted(self) -> list[TopicPartition]:
        """Return partitions whose topics were deleted or renamed since the last call."""
        gone = sorted(self._deleted)
        self._deleted.clear()
        return gone

    def positions_to_commit(self, *, is_processing: bool) -> dict[TopicPartition, tuple[int, int]]:
        """Return the offset to commit and its epoch, by partition.

        With ``is_processing``, the record or batch that the application is processing does not count as processed.
        """
        return {
            cursor.tp: (
                cursor.processing_position if is_processing and cursor is self.processing else cursor.position,
                cursor.epoch,
            )
            for cursor in self
        }

    def epoch_at(self, tp: TopicPartition, offset: int) -> int:
        """Return the epoch of the record before ``offset``; -1 if it is unknown."""
        cursor = self.by_partition.get(tp)
        return cursor.epoch if cursor is not None and cursor.read_before(offset) else -1

    # ------------------------------------------------------------ offsets

    def end_of(self, log: Partition) -> int:
        """Return the offset up to which this consumer may read a partition now."""
        options = self._options
        return log.end_offset(
            isolation=options.isolation, durable_only=options.durable_only, shipped_only=options.shipped_only
        )

    def resolve(self, log: Partition, start: Start) -> int:
        """Convert ``start`` to an offset of this partition. Raises `OffsetOutOfRange`, `LogTruncated`."""
        if start == "earliest":
            return log.log_start_offset
        if start == "latest":
            return self.end_of(log)
        if isinstance(start, date | timedelta):
            offset = log.offset_for_timestamp(_timestamp_of(start, log))
            return self.end_of(log) if offset is None else offset
        assert isinstance(start, int)
        if start < 0:
            return offset_of_last(log, -start, self.end_of(log))
        log.read(start)  # raises if the offset does not exist
        return start

    def refresh_ends(self) -> None:
        """Set the end offset of each cursor to the current end of its partition."""
        for cursor in self:
            if self.check_exists(cursor):
                cursor.end_offset, cursor.processing_offset = self.end_of(cursor.log), None

    def has_more(self) -> bool:
        """Return whether a partition that is not paused has records after its position."""
        return any(
            not cursor.paused and self.end_of(cursor.log) > cursor.position for cursor in self.by_partition.values()
        )

    # ------------------------------------------------------------ reading

    def in_turn(self) -> Iterator[Cursor]:
        """Yield each cursor once. If the caller stops early, the next call begins with the following cursor."""
        for _ in range(len(self._turn)):
            if not self._turn:
                return  # meanwhile all were assigned to other members
            tp = self._turn[0]
            self._turn.rotate(-1)
            yield self.by_partition[tp]

    def fetch(self, cursor: Cursor) -> Iterator[RecordBatch[Any, Any]]:
        """Yield batches from the cursor's position on, about ``fetch_bytes``. The caller must move the cursor."""
        if cursor.paused:
            return
        options = self._options
        if options.follow:
            cursor.end_offset = self.end_of(cursor.log)
        started_at = cursor.position
        if started_at >= cursor.end_offset:
            return
        left_bytes = options.fetch_bytes

        def on_skip(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
            self.skipped.append((cursor.tp, base_offset, end_offset, damage))
            cursor.position = end_offset
            logger.warning("%s: skipped offsets %d to %d: %s", cursor.tp, base_offset, end_offset - 1, damage)

        for batch in cursor.log.read(
            started_at,
            options.fetch_bytes,
            isolation=options.isolation,
            durable_only=options.durable_only,
            shipped_only=options.shipped_only,
            on_skip=on_skip if options.skip_damaged else None,
        ):
            if batch.base_offset >= cursor.end_offset:
                break
            left_bytes -= batch.size_bytes
            if options.decoding is not None:
                yield from self._decoded(cursor, batch)
            else:
                yield batch
            if cursor.position != batch.next_offset or cursor.paused:
                return  # the caller called seek or pause while it had the batch
        if left_bytes > 0 and cursor.position < cursor.end_offset:
            # The rest has no records to return: lost or compacted offsets, control batches, or aborted records.
            cursor.position = cursor.end_offset

    def prefetch(self, cursor: Cursor) -> PrefetchedBatches | None:
        """Return the next batches that `fetch` would yield, without moving the cursor; None if there are none.

        A pool thread runs this, but only the event loop's thread moves the cursor. If the next offsets have no records,
        the result is empty, and its `end_position` is the offset after them. An error before the first batch is
        raised; an error after it is raised by the next call.
        """
        copy = Cursor(cursor.tp, cursor.log, cursor.position, cursor.end_offset)
        copy.paused = cursor.paused
        found = PrefetchedBatches(cursor, copy.position)
        record_count = 0
        try:
            for batch in self.fetch(copy):
                copy.position = batch.next_offset
                found.batches.append(batch)
                record_count += len(batch)
                if record_count >= _PREFETCH_MAX_RECORDS:
                    break
        except Exception:
            if cursor.position != found.position:
                return self.prefetch(cursor)  # the application called seek: these batches are out of date
            if not found.batches:  # otherwise the next call starts after these batches, and raises the error
                cursor.position = copy.position
                raise
        cursor.end_offset = copy.end_offset
        found.end_position = copy.position
        return found if found.batches or found.end_position != found.position else None

    def _decoded(self, cursor: Cursor, batch: RecordBatch) -> Iterator[RecordBatch[Any, Any]]:
        """Yield the records of a batch with deserialized keys and values.

        Moves the cursor past records that are skipped, or to the record whose error is raised.
        """
        assert self._options.decoding is not None
        try:
            for part in self._options.decoding.decoded(batch):
                yield part
                if cursor.position != part.next_offset or cursor.paused:
                    return
        except DeserializationError as error:
            cursor.position = error.offset
            raise
        if cursor.position != batch.next_offset:  # the last records were skipped
            cursor.position = batch.next_offset

    def move_into_range(self, cursor: Cursor, error: OffsetOutOfRange) -> None:
        """Move the cursor as `auto_offset_reset` says, or raise ``error``."""
        if self._reset == "error":
            raise error
        position = cursor.position
        cursor.position = self.resolve(cursor.log, self._reset)
        cursor.end_offset = max(cursor.end_offset, cursor.position)
        self.resets.append((cursor.tp, position, cursor.position))
        logger.warning("%s: %s; continuing at offset %d", cursor.tp, error, cursor.position)

    def check_exists(self, cursor: Cursor) -> bool:
        """Return whether the cursor's topic still exists. Raises `UnknownTopic` if a source names the deleted topic.

        A deleted topic that only a pattern matched is not read any more.
        """
        try:
            cursor.log.handle.check_usable()
            return True
        except UnknownTopic as error:
            topic = cursor.tp.topic
            if any(source == topic or (not isinstance(source, str) and source[0] == topic) for source in self._sources):
                raise
            if cursor.tp not in self._deleted:
                logger.info("%s: the consumer stops reading it: %s", cursor.tp, error)
            if self._options.group is None:
                self.drop([cursor.tp])
            else:  # the group must revoke the partition: a member must read a new topic of the same name
                self._deleted.add(cursor.tp)
                self.stop([cursor.tp])
            return False

    def reopen_stale(self) -> None:
        """Reopen partitions that were opened read-only before their first append."""
        for cursor in self:
            if self.check_exists(cursor) and cursor.log.is_stale:
                tp = cursor.tp
                cursor.log = self._topics.open_partition(tp.topic, tp.partition, cursor.log.topic_id)


def _timestamp_of(start: date | timedelta, log: Partition) -> int:
    if isinstance(start, timedelta):
        return log.handle.clock.now_ms() - start // timedelta(milliseconds=1)
    return milliseconds_of(start)
