"""Consuming: records of any number of partitions, from a start to the end, or following it."""

from __future__ import annotations

import fnmatch
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from operator import length_hint
from typing import TYPE_CHECKING, Literal

from segmentlog.errors import CorruptBatch, InvalidConfig, OffsetOutOfRange, StoreClosed, UnknownTopic
from segmentlog.format.names import check_topic_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.records import Record, TopicPartition
from segmentlog.storage.watch import Watch
from segmentlog.workers import logger

if TYPE_CHECKING:
    from segmentlog.partition.partition import Isolation, Partition
    from segmentlog.store import LogStore

Start = Literal["earliest", "latest"] | int | datetime
"""Where reading begins: an end of the log, an offset, or the first record at or after a time."""

OffsetReset = Literal["earliest", "latest", "error"]

_WAIT_S = 1.0
_PATTERN_CHARACTERS = frozenset("*?[")


class _Cursor:
    """Where this consumer is in one partition."""

    __slots__ = ("_handed_out", "_position", "_records", "end_offset", "log", "paused", "tp")

    def __init__(self, tp: TopicPartition, log: Partition, position: int, end_offset: int) -> None:
        self.tp = tp
        self.log = log
        self.end_offset = end_offset
        self.paused = False
        self._position = position
        self._records: list[Record] = []
        self._handed_out: Iterator[Record] = iter(self._records)

    def hand_out(self, batch: RecordBatch) -> Iterator[Record]:
        """The records of a batch, one by one; the position follows without any work for each of them."""
        self._records = list(batch.records())
        self._handed_out = iter(self._records)
        self._position = batch.next_offset
        return self._handed_out

    @property
    def position(self) -> int:
        """The offset after the last record that was handed out."""
        left = length_hint(self._handed_out)
        return self._records[-left].offset if left else self._position

    @position.setter
    def position(self, offset: int) -> None:
        self.stop()
        self._position = offset

    def stop(self) -> None:
        """Hand out no more of the batch: it is read again from where this is now."""
        self._position = self.position
        for _ in self._handed_out:
            pass


class Consumer:
    """Reads records of topics, of single partitions (``("clicks", 0)``), or of a pattern (``"events-*"``).

    start         "earliest", "latest", an offset, or a datetime (a naive one is local time)
    follow        go on waiting for records; without it iteration ends at the log ends it met
    isolation     "read_committed" shows no record of an open or aborted transaction
    durable_only  shows only what no crash can take back
    fetch_bytes   how much is read of one partition before it is the next one's turn
    skip_damaged  step over damaged bytes; `skipped` tells which offsets
    auto_offset_reset  where to go on when retention has deleted what comes next: "earliest" (what is
                  left), "latest", or "error", which raises `OffsetOutOfRange`; `resets` tells

    Within a partition records come in order. Partitions and topics of a pattern that appear
    while it follows are read from their beginning. Use it from one thread; only `close` and
    `wakeup` may be called from another.
    """

    def __init__(
        self,
        store: LogStore,
        topics: Sequence[str | tuple[str, int]],
        *,
        start: Start = "earliest",
        follow: bool = False,
        isolation: Isolation = "read_uncommitted",
        durable_only: bool = False,
        fetch_bytes: int = 1 << 20,
        skip_damaged: bool = False,
        auto_offset_reset: OffsetReset = "error",
    ) -> None:
        if not topics:
            raise InvalidConfig("topics", topics, "at least one topic, (topic, partition) or pattern")
        if isinstance(start, bool) or not (start in ("earliest", "latest") or isinstance(start, int | datetime)):
            raise InvalidConfig("start", start, "'earliest', 'latest', an offset, or a datetime")
        if isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidConfig("isolation", isolation, "'read_uncommitted' or 'read_committed'")
        if not isinstance(fetch_bytes, int) or fetch_bytes < 1:
            raise InvalidConfig("fetch_bytes", fetch_bytes, "a number of bytes from 1 on")
        if auto_offset_reset not in ("earliest", "latest", "error"):
            raise InvalidConfig("auto_offset_reset", auto_offset_reset, "'earliest', 'latest' or 'error'")
        self._store = store
        self._reset: OffsetReset = auto_offset_reset
        self._topics = list(topics)
        self._start = start
        self._follow = follow
        self._isolation: Isolation = isolation
        self._durable_only = durable_only
        self._fetch_bytes = fetch_bytes
        self._skip_damaged = skip_damaged
        self._cursors: dict[TopicPartition, _Cursor] = {}
        self._turn: deque[TopicPartition] = deque()
        self._watch: Watch | None = None
        self._closed = False
        self._woken = False
        self._waiting = threading.RLock()
        self.skipped: list[tuple[TopicPartition, int, int, CorruptBatch]] = []
        """With ``skip_damaged``: the offsets ``[base, end)`` of a partition that were damaged, and the damage."""
        self.resets: list[tuple[TopicPartition, int, int]] = []
        """Jumps that ``auto_offset_reset`` made: the partition, from which offset, to which."""
        self._assign(start)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------ what is read

    def _assign(self, start: Start) -> None:
        """Take in the partitions that there are now and that are not read yet."""
        for tp in self._wanted():
            if tp not in self._cursors:
                log = self._store.topic(tp.topic).partition(tp.partition)
                position = self._resolve(log, start)
                self._cursors[tp] = _Cursor(tp, log, position, self._end_of(log))
                self._turn.append(tp)
                if self._watch is not None:
                    self._watch.add(log.handle.lock_path)

    def _wanted(self) -> Iterator[TopicPartition]:
        for wanted in self._topics:
            if not isinstance(wanted, str):
                topic, partition = wanted
                yield TopicPartition(check_topic_name(topic, internal=True), partition)
                continue
            if _PATTERN_CHARACTERS & set(wanted):
                names = fnmatch.filter(self._store.topics(), wanted)
            else:
                names = [wanted]
            for name in names:
                for partition in range(self._store.topic(name).partition_count):
                    yield TopicPartition(name, partition)

    def _resolve(self, log: Partition, start: Start) -> int:
        if start == "earliest":
            return log.log_start_offset
        if start == "latest":
            return self._end_of(log)
        if isinstance(start, datetime):
            offset = log.offset_for_timestamp(round(start.timestamp() * 1000))
            return self._end_of(log) if offset is None else offset
        assert isinstance(start, int)
        log.read(start)  # raises for an offset that is not there
        return start

    def _end_of(self, log: Partition) -> int:
        return log.end_offset(isolation=self._isolation, durable_only=self._durable_only)

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read."""
        return list(self._cursors)

    # ------------------------------------------------------------ reading

    def __iter__(self) -> Iterator[Record]:
        """Records; the position moves with each one."""
        for cursor, batch in self._fetches():
            yield from cursor.hand_out(batch)

    def batches(self) -> Iterator[RecordBatch]:
        """Batches of columns: the fast path. The position moves with each one."""
        for cursor, batch in self._fetches():
            cursor.position = batch.next_offset
            yield batch

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Records, without blocking the event loop: fetching and waiting happen in a thread."""
        import asyncio  # 30 ms that only this needs

        fetches = self._fetches()
        try:
            while (fetched := await asyncio.to_thread(next, fetches, None)) is not None:
                cursor, batch = fetched
                for record in cursor.hand_out(batch):
                    yield record
        finally:
            self.wakeup()

    def _fetches(self) -> Iterator[tuple[_Cursor, RecordBatch]]:
        """Batches with the cursor they move, partition by partition in turn; ends, or waits for more."""
        self._check_open()
        for cursor in self._cursors.values():
            cursor.end_offset = self._end_of(cursor.log)
        while True:
            progress = False
            for _ in range(len(self._turn)):
                tp = self._turn[0]
                self._turn.rotate(-1)
                cursor = self._cursors[tp]
                try:
                    for batch in self._fetch(cursor):
                        progress = True
                        yield cursor, batch
                        if self._closed:
                            return
                except OffsetOutOfRange as error:
                    self._move_into_range(cursor, error)
                    progress = True
            if progress:
                continue
            if not self._follow or not self._wait():
                return

    def _move_into_range(self, cursor: _Cursor, error: OffsetOutOfRange) -> None:
        """Go on where `auto_offset_reset` says, or raise."""
        if self._reset == "error":
            raise error
        position = cursor.position
        cursor.position = self._resolve(cursor.log, self._reset)
        cursor.end_offset = max(cursor.end_offset, cursor.position)
        self.resets.append((cursor.tp, position, cursor.position))
        logger.warning("%s: %s; going on at offset %d", cursor.tp, error, cursor.position)

    def _fetch(self, cursor: _Cursor) -> Iterator[RecordBatch]:
        if cursor.paused:
            return
        if self._follow:
            cursor.end_offset = self._end_of(cursor.log)
        started_at = cursor.position
        if started_at >= cursor.end_offset:
            return

        def note(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
            self.skipped.append((cursor.tp, base_offset, end_offset, damage))
            cursor.position = end_offset
            logger.warning("%s: skipped offsets %d to %d: %s", cursor.tp, base_offset, end_offset - 1, damage)

        for batch in cursor.log.read(
            started_at,
            self._fetch_bytes,
            isolation=self._isolation,
            durable_only=self._durable_only,
            on_skip=note if self._skip_damaged else None,
        ):
            if batch.base_offset >= cursor.end_offset:
                return
            yield batch
            if cursor.position != batch.next_offset or cursor.paused:
                return  # a seek, or a pause, while the batch was out
        if cursor.position == started_at:
            cursor.position = cursor.end_offset  # nothing up to there: a gap that a crash or compaction left

    def _wait(self) -> bool:
        """Sleep until there may be more; False when the consumer was closed or woken."""
        with self._waiting:
            return self._wait_watching()

    def _wait_watching(self) -> bool:
        if self._watch is None:
            self._watch = Watch()
            self._watch.add(self._store.path, folder=True)
            for cursor in self._cursors.values():
                self._watch.add(cursor.log.handle.lock_path)
        while not self._is_ended():
            self._watch.drain()
            if self._is_ended():
                break  # said so just before the drain, which took the reason to wake up with it
            # Said before looking: who appends after this look wakes us.
            polled = False
            for cursor in self._cursors.values():
                polled |= not cursor.log.handle.announce_waiting(2 * _WAIT_S)
            if self._has_more():
                return True
            self._assign("earliest")
            for cursor in self._cursors.values():
                cursor.log.handle.check_usable()
            if self._has_more():
                return True
            self._watch.wait(_WAIT_S, poll=polled)
        self._woken = False
        return False

    def _is_ended(self) -> bool:
        """Whether another thread said so."""
        return self._closed or self._woken

    def _has_more(self) -> bool:
        """Whether a partition that is not paused has something behind the position."""
        return any(
            not cursor.paused and self._end_of(cursor.log) > cursor.position for cursor in self._cursors.values()
        )

    # ------------------------------------------------------------ positions

    def position(self, topic: str, partition: int = 0) -> int:
        """Offset of the next record that this consumer gets of a partition."""
        return self._cursor(topic, partition).position

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of every partition."""
        return {tp: cursor.position for tp, cursor in self._cursors.items()}

    def seek(self, topic: str, partition: int, to: Start) -> int:
        """Go on from another place; returns the offset. Raises `OffsetOutOfRange`, `LogTruncated`."""
        cursor = self._cursor(topic, partition)
        cursor.position = self._resolve(cursor.log, to)
        return cursor.position

    def lag(self) -> dict[TopicPartition, int]:
        """How many offsets lie between the position and the end, for every partition."""
        return {tp: max(self._end_of(cursor.log) - cursor.position, 0) for tp, cursor in self._cursors.items()}

    def pause(self, topic: str, partition: int = 0) -> None:
        """Read no more of a partition until `resume`."""
        cursor = self._cursor(topic, partition)
        cursor.paused = True
        cursor.stop()

    def resume(self, topic: str, partition: int = 0) -> None:
        """Go on reading a paused partition."""
        self._cursor(topic, partition).paused = False

    def _cursor(self, topic: str, partition: int) -> _Cursor:
        try:
            return self._cursors[TopicPartition(topic, partition)]
        except KeyError:
            raise UnknownTopic(topic, f"partition {partition} is not read by this consumer") from None

    # ------------------------------------------------------------ ending

    def wakeup(self) -> None:
        """End an iteration that waits, from any thread or a signal handler; iterating again goes on."""
        self._woken = True
        if self._watch is not None:
            self._watch.interrupt()

    def close(self) -> None:
        """End. Idempotent."""
        if not self._closed:
            self._closed = True
            self.wakeup()
            with self._waiting:  # not while another thread still sleeps on it
                if self._watch is not None:
                    self._watch.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("consumer")
