"""What a consumer reads: which partitions, from where, up to where, and whose turn it is."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from typing import Any

from segmentlog.arguments import as_topic_partition
from segmentlog.consuming.consumer_options import ConsumerOptions, OffsetReset, Start, Wanted
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


_AHEAD_MAX_RECORDS = 20_000
_HOW_TO_WAIT = (
    "it does not exist. Create it with create_topic(..., exist_ok=True) or 'segmentlog create --if-not-exists',"
    " or pass follow=True (-f on the command line): then the consumer waits until it is created"
)


class Ahead:
    """Batches of a partition that were fetched before they are handed out."""

    __slots__ = ("batches", "cursor", "end_position", "position")

    def __init__(self, cursor: Cursor, position: int) -> None:
        self.cursor = cursor
        self.position = position
        """Where the cursor has to be for the next of them; elsewhere they are not wanted any more."""
        self.batches: deque[RecordBatch[Any, Any]] = deque()
        self.end_position = position
        """Where it is to go when all are handed out."""

    def cut(self, count: int) -> None:
        """Keep the first ``count`` batches. The others are read again from where those end."""
        while len(self.batches) > count:
            self.batches.pop()
        self.end_position = self.batches[-1].next_offset


class Cursors:
    """A consumer's cursors, and the turns that they take. Knows nothing of the consumer, which may be dropped.

    A group's session is told of it as its `PartitionReader`.
    """

    def __init__(self, topics: Topics, wanted: Sequence[Wanted], options: ConsumerOptions) -> None:
        self._topics = topics
        self._wanted = wanted
        self._options = options
        self._reset: OffsetReset = options.auto_offset_reset or "error"
        self.by_partition: dict[TopicPartition, Cursor] = {}
        self._turn: deque[TopicPartition] = deque()
        self.handing: Cursor | None = None
        """Whose record or batch the application may be working on."""
        self._awaited: set[str] = set()
        """Topics that were named and do not exist yet; a consumer that follows waits for them."""
        self._gone: set[TopicPartition] = set()
        """Partitions of a member whose topics are gone."""
        self.skipped: list[tuple[TopicPartition, int, int, CorruptBatch]] = []
        self.resets: list[tuple[TopicPartition, int, int]] = []

    def __iter__(self) -> Iterator[Cursor]:
        return iter(self.by_partition.copy().values())

    def of(self, topic: str, partition: int) -> Cursor:
        """The cursor of a partition. Raises `UnknownTopic` when it is not read."""
        try:
            return self.by_partition[as_topic_partition(topic, partition)]
        except KeyError:
            raise UnknownTopic(topic, f"partition {partition} is not read by this consumer") from None

    # ------------------------------------------------------------ without a group: what was asked for

    def assign(self, start: Start) -> bool:
        """Take in the partitions that there are now and that are not read yet; whether there were any.

        Raises `UnknownTopic` for a named topic that does not exist, unless the consumer follows.
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
                continue  # deleted since the folder was listed
            self._take(tp, log, self.resolve(log, start))
            is_any = True
        return is_any

    def _partitions(self) -> Iterator[tuple[TopicPartition, bool]]:
        """Each partition, and whether its topic was named and did not merely match a pattern."""
        for wanted in self._wanted:
            if not isinstance(wanted, str):
                topic, partition = wanted
                if not self._is_awaited(check_topic_name(topic, internal=True)):
                    yield TopicPartition(topic, partition), True
            elif is_pattern(wanted):
                for name in fnmatch.filter(self._topics.names(), wanted):
                    with contextlib.suppress(UnknownTopic):
                        for partition in range(self._topics.topic(name).partition_count):
                            yield TopicPartition(name, partition), False
            elif not self._is_awaited(check_topic_name(wanted, internal=True)):
                for partition in range(self._topics.topic(wanted).partition_count):
                    yield TopicPartition(wanted, partition), True

    def _is_awaited(self, topic: str) -> bool:
        """Whether a named topic does not exist yet and the consumer waits for it.

        Logs a warning once, since the name may be mistyped. Raises `UnknownTopic` unless the consumer follows. A topic
        that was read already is not waited for: it was deleted, or renamed, and `UnknownTopic` reports that.
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
        # No interrupt comes between these two.
        self.by_partition[tp] = cursor
        self._turn.append(tp)

    # ------------------------------------------------------------ in a group: what it gives and takes

    def subscription(self, group: str) -> list[str]:
        """The topics and patterns that a member asks for.

        Raises `UnknownTopic`, and `InvalidConfig` for a single partition: the group says who reads which.
        """
        names = []
        for wanted in self._wanted:
            if not isinstance(wanted, str):
                raise InvalidConfig("topics", wanted, f"a topic or a pattern: group {group!r} assigns the partitions")
            if not is_pattern(wanted):
                self._is_awaited(check_topic_name(wanted, internal=True))
            names.append(wanted)
        return names

    def start_partition(
        self, tp: TopicPartition, topic_id: str, committed: CommittedOffset | None, *, is_new: bool
    ) -> None:
        """Read a partition from its committed position, or from where the options say."""
        log = self._topics.open_partition(tp.topic, tp.partition, topic_id)
        reset = self._options.auto_offset_reset
        if committed is not None:
            position = committed.offset
        elif reset == "error":
            wanted = f"'earliest' or 'latest', or a committed position of {tp}: the group has none"
            raise InvalidConfig("auto_offset_reset", "error", wanted)
        else:
            position = self.resolve(log, "earliest" if is_new else reset or self._options.start)
        self._take(tp, log, position, None if committed is None else committed.epoch)

    def reads(self, tp: TopicPartition) -> bool:
        """Whether a cursor is there for it."""
        return tp in self.by_partition

    def stop(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no more of these."""
        for tp in partitions:
            cursor = self.by_partition[tp]
            cursor.paused = True
            cursor.stop()

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these no more."""
        for tp in partitions:
            cursor = self.by_partition.pop(tp, None)
            if cursor is not None:
                cursor.paused = True
                cursor.stop()
                self._turn = deque(other for other in self._turn if other != tp)

    def take_deleted(self) -> list[TopicPartition]:
        """Those of which nothing more can come, as their topics are gone; each is told of once."""
        gone = sorted(self._gone)
        self._gone.clear()
        return gone

    def positions_to_commit(self, *, settled: bool) -> dict[TopicPartition, tuple[int, int]]:
        """Offsets and epochs; ``settled``: without the record that the application is working on."""
        return {
            cursor.tp: (
                cursor.settled_position if settled and cursor is self.handing else cursor.position,
                cursor.epoch,
            )
            for cursor in self
        }

    def epoch_at(self, tp: TopicPartition, offset: int) -> int:
        """Epoch of the record before a position; -1 when it is not known any more."""
        cursor = self.by_partition.get(tp)
        return cursor.epoch if cursor is not None and cursor.read_before(offset) else -1

    # ------------------------------------------------------------ offsets

    def end_of(self, log: Partition) -> int:
        """Where reading a partition ends now."""
        options = self._options
        return log.end_offset(
            isolation=options.isolation, durable_only=options.durable_only, shipped_only=options.shipped_only
        )

    def resolve(self, log: Partition, start: Start) -> int:
        """The offset that is meant. Raises `OffsetOutOfRange`, `LogTruncated`."""
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
        log.read(start)  # raises for an offset that is not there
        return start

    def meet_ends(self) -> None:
        """Let reading end where the logs end now."""
        for cursor in self:
            if self.is_there(cursor):
                cursor.end_offset, cursor.in_hand = self.end_of(cursor.log), None

    def has_more(self) -> bool:
        """Whether a partition that is not paused has something behind the position."""
        return any(
            not cursor.paused and self.end_of(cursor.log) > cursor.position for cursor in self.by_partition.values()
        )

    # ------------------------------------------------------------ reading

    def turns(self) -> Iterator[Cursor]:
        """Each cursor once; who stops in the middle goes on with the next one."""
        for _ in range(len(self._turn)):
            if not self._turn:
                return  # all went to other members meanwhile
            tp = self._turn[0]
            self._turn.rotate(-1)
            yield self.by_partition[tp]

    def fetch(self, cursor: Cursor) -> Iterator[RecordBatch[Any, Any]]:
        """About ``fetch_bytes`` from the cursor's position on, which whoever takes the batches moves."""
        if cursor.paused:
            return
        options = self._options
        if options.follow:
            cursor.end_offset = self.end_of(cursor.log)
        started_at = cursor.position
        if started_at >= cursor.end_offset:
            return
        left_bytes = options.fetch_bytes

        def note(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
            self.skipped.append((cursor.tp, base_offset, end_offset, damage))
            cursor.position = end_offset
            logger.warning("%s: skipped offsets %d to %d: %s", cursor.tp, base_offset, end_offset - 1, damage)

        for batch in cursor.log.read(
            started_at,
            options.fetch_bytes,
            isolation=options.isolation,
            durable_only=options.durable_only,
            shipped_only=options.shipped_only,
            on_skip=note if options.skip_damaged else None,
        ):
            if batch.base_offset >= cursor.end_offset:
                break
            left_bytes -= batch.size_bytes
            if options.decoding is not None:
                yield from self._decoded(cursor, batch)
            else:
                yield batch
            if cursor.position != batch.next_offset or cursor.paused:
                return  # a seek, or a pause, while the batch was out
        if left_bytes > 0 and cursor.position < cursor.end_offset:
            # Nothing more up to there: a gap that a crash or compaction left, or what is not handed
            # out, the ends of transactions and what was aborted.
            cursor.position = cursor.end_offset

    def fetch_ahead(self, cursor: Cursor) -> Ahead | None:
        """What `fetch` has next, whole, without moving the cursor; None for nothing.

        Where there is none to hand out for now it says how far that reaches: the cursor is moved by who hands out, and
        who may move it elsewhere meanwhile. Raises what comes first.
        """
        copy = Cursor(cursor.tp, cursor.log, cursor.position, cursor.end_offset)
        copy.paused = cursor.paused
        found = Ahead(cursor, copy.position)
        record_count = 0
        try:
            for batch in self.fetch(copy):
                copy.position = batch.next_offset
                found.batches.append(batch)
                record_count += len(batch)
                if record_count >= _AHEAD_MAX_RECORDS:
                    break
        except Exception:
            if cursor.position != found.position:
                return self.fetch_ahead(cursor)  # somebody seeks: what lies here is not wanted any more
            if not found.batches:  # else it is raised again when those have been handed out
                cursor.position = copy.position
                raise
        cursor.end_offset = copy.end_offset
        found.end_position = copy.position
        return found if found.batches or found.end_position != found.position else None

    def _decoded(self, cursor: Cursor, batch: RecordBatch) -> Iterator[RecordBatch[Any, Any]]:
        """A batch with objects in place of bytes; the cursor is moved over what is skipped, up to what raises."""
        assert self._options.decoding is not None
        try:
            for part in self._options.decoding.decoded(batch):
                yield part
                if cursor.position != part.next_offset or cursor.paused:
                    return
        except DeserializationError as error:
            cursor.position = error.offset
            raise
        if cursor.position != batch.next_offset:  # what comes last was skipped
            cursor.position = batch.next_offset

    def move_into_range(self, cursor: Cursor, error: OffsetOutOfRange) -> None:
        """Go on where `auto_offset_reset` says, or raise."""
        if self._reset == "error":
            raise error
        position = cursor.position
        cursor.position = self.resolve(cursor.log, self._reset)
        cursor.end_offset = max(cursor.end_offset, cursor.position)
        self.resets.append((cursor.tp, position, cursor.position))
        logger.warning("%s: %s; going on at offset %d", cursor.tp, error, cursor.position)

    def is_there(self, cursor: Cursor) -> bool:
        """False when the topic is gone and only a pattern named it: it is read no more. Else raises `UnknownTopic`."""
        try:
            cursor.log.handle.check_usable()
            return True
        except UnknownTopic as error:
            topic = cursor.tp.topic
            if any(wanted == topic or (not isinstance(wanted, str) and wanted[0] == topic) for wanted in self._wanted):
                raise
            if cursor.tp not in self._gone:
                logger.info("%s: read no more: %s", cursor.tp, error)
            if self._options.group is None:
                self.drop([cursor.tp])
            else:  # the group's to take away: another topic may get the name, and somebody has to read that
                self._gone.add(cursor.tp)
                self.stop([cursor.tp])
            return False

    def reopen_stale(self) -> None:
        """Take the logs anew that were opened read-only before anybody had written to them."""
        for cursor in self:
            if self.is_there(cursor) and cursor.log.is_stale:
                tp = cursor.tp
                cursor.log = self._topics.open_partition(tp.topic, tp.partition, cursor.log.topic_id)


def _timestamp_of(start: date | timedelta, log: Partition) -> int:
    if isinstance(start, timedelta):
        return log.handle.clock.now_ms() - start // timedelta(milliseconds=1)
    return milliseconds_of(start)
