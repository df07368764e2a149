"""Consuming: records of any number of partitions, from a start to the end, or following it."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from itertools import islice
from typing import Any, Literal

from segmentlog.arguments import as_bool, as_int, as_partition, as_text, as_topic_partition
from segmentlog.consuming.cursor import Cursor, offset_of_last
from segmentlog.errors import ConsumerBusy, CorruptBatch, InvalidConfig, OffsetOutOfRange, StoreClosed, UnknownTopic
from segmentlog.format.names import check_topic_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.groups.admin import Groups
from segmentlog.groups.folder import is_pattern
from segmentlog.groups.positions import CommittedOffset, Encoded
from segmentlog.groups.session import GroupSession
from segmentlog.groups.session import Rebalanced as Rebalanced
from segmentlog.log.partition import Isolation, Partition
from segmentlog.records import Record, TopicPartition
from segmentlog.storage import forks
from segmentlog.storage.watch import Watch
from segmentlog.topics.topics import Topics

logger = logging.getLogger("segmentlog")

Start = Literal["earliest", "latest"] | int | datetime | date | timedelta
"""Where reading begins: an end of the log, an offset, so many before the end, the first record at or after a time."""

OffsetReset = Literal["earliest", "latest", "error"]

_WAIT_S = 1.0
_FINISH_S = 0.25
"""How often a waiting reader of committed transactions looks for those of dead producers."""
_HANDOVER_S = 2.0
"""How long an iteration that does not follow waits for partitions that others have yet to let go of."""


class Consumer:
    """Reads records of topics, of single partitions (``("clicks", 0)``), or of a pattern (``"events-*"``).

    start         "earliest", "latest", an offset; -5: the last five of each partition; a datetime (a naive one is
                  local time), a date (its first moment), or a timedelta: so long ago
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

    With ``group`` it shares the topics with the group's other members, in whatever process:
    each partition is read by one of them at a time, and goes on behind what was committed.

    start, auto_offset_reset  where a partition without a committed position begins: at ``start``, unless
                  ``auto_offset_reset`` is given, which then says it ("error" raises)
    auto_commit   commit what was processed, at polls every ``auto_commit_interval_ms``, when partitions
                  go to others, and at `close`; not the record that the loop body is at
    assignment_strategy   "sticky", "range" or "roundrobin", the same for all members
    max_poll_interval_ms  a member that asks for no record for so long is evicted: others get its partitions
    max_poll_records      so many records are handed out before the next poll of the group
    on_assigned, on_revoked, on_lost  called with a list of partitions, by the thread that consumes:
                  when it begins to read them; before it hands them over (it may still commit);
                  when it was evicted and they are gone (without it `on_revoked` is called)

    It is a member from its construction on, and reads from its first poll on: iterating, or `poll_group`.
    Without ``follow`` an iteration ends when the partitions that it was given are read to the ends it
    met; for those that another member has yet to let go of it waits two seconds. A consumer
    that is not closed leaves the group when it is garbage-collected, without committing.
    """

    def __init__(
        self,
        all_topics: Topics,
        topics: Sequence[str | tuple[str, int]],
        *,
        groups: Groups | None,
        finish_transactions: Callable[[], object],
        start: Start = "earliest",
        follow: bool = False,
        isolation: Isolation = "read_uncommitted",
        durable_only: bool = False,
        fetch_bytes: int = 1 << 20,
        skip_damaged: bool = False,
        auto_offset_reset: OffsetReset | None = None,
        group: str | None = None,
        auto_commit: bool = False,
        auto_commit_interval_ms: int = 5000,
        assignment_strategy: str = "sticky",
        max_poll_interval_ms: int = 300_000,
        max_poll_records: int = 500,
        client_id: str = "",
        on_assigned: Rebalanced | None = None,
        on_revoked: Rebalanced | None = None,
        on_lost: Rebalanced | None = None,
    ) -> None:
        topics = _flat(topics)
        _check_start(start)
        follow, durable_only = as_bool("follow", follow), as_bool("durable_only", durable_only)
        skip_damaged, auto_commit = as_bool("skip_damaged", skip_damaged), as_bool("auto_commit", auto_commit)
        max_poll_interval_ms = as_int("max_poll_interval_ms", max_poll_interval_ms, 1)
        max_poll_records = as_int("max_poll_records", max_poll_records, 1)
        auto_commit_interval_ms = as_int("auto_commit_interval_ms", auto_commit_interval_ms, 1)
        fetch_bytes = as_int("fetch_bytes", fetch_bytes, 1)
        client_id = as_text("client_id", client_id)
        for name, call in (("on_assigned", on_assigned), ("on_revoked", on_revoked), ("on_lost", on_lost)):
            if call is not None and not callable(call):
                raise InvalidConfig(name, call, "a function that takes a list of partitions")
        if not isinstance(isolation, str) or isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidConfig("isolation", isolation, "'read_uncommitted' or 'read_committed'")
        if not isinstance(auto_offset_reset, str | None) or auto_offset_reset not in (
            None,
            "earliest",
            "latest",
            "error",
        ):
            raise InvalidConfig("auto_offset_reset", auto_offset_reset, "'earliest', 'latest' or 'error'")
        self._all_topics = all_topics
        self._finish_dead = finish_transactions
        self._reset: OffsetReset = auto_offset_reset or "error"
        self._without_position: OffsetReset | None = auto_offset_reset
        self._topics = list(topics)
        self._start = start
        self._follow = follow
        self._isolation: Isolation = isolation
        self._durable_only = durable_only
        self._fetch_bytes = fetch_bytes
        self._skip_damaged = skip_damaged
        self._cursors: dict[TopicPartition, Cursor] = {}
        self._turn: deque[TopicPartition] = deque()
        self._watch: Watch | None = None
        self._closed = self._closing = self._ended = False
        self._woken = False
        self._waiting = forks.reentrant_lock(self, "_waiting")
        self._user: int | None = None
        """The thread whose iteration is under way."""
        self._single: Iterator[Record] | None = None
        self.skipped: list[tuple[TopicPartition, int, int, CorruptBatch]] = []
        """With ``skip_damaged``: the offsets ``[base, end)`` of a partition that were damaged, and the damage."""
        self.resets: list[tuple[TopicPartition, int, int]] = []
        """Jumps that ``auto_offset_reset`` made: the partition, from which offset, to which."""
        self._handing: Cursor | None = None
        """Whose record or batch the application may be working on."""
        self._max_poll_records = max_poll_records
        self._finish_due_s = 0.0
        self._session: GroupSession | None = None
        if group is None:
            if auto_commit:
                raise InvalidConfig("auto_commit", auto_commit, "False without a group, which would keep the positions")
            self._assign(start)
            return
        assert groups is not None
        all_topics.check_writable("join a group")
        member = groups.member(
            group, self._subscription(group), strategy=assignment_strategy, client_id=client_id,
            max_poll_interval_ms=max_poll_interval_ms,
        )  # fmt: skip
        self._session = GroupSession(
            all_topics, groups.positions, finish_transactions, group, member, _Reader(self), auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost,
        )  # fmt: skip

    def _subscription(self, group: str) -> list[str]:
        names = []
        for wanted in self._topics:
            if not isinstance(wanted, str):
                raise InvalidConfig("topics", wanted, f"a topic or a pattern: group {group!r} assigns the partitions")
            if not is_pattern(wanted):
                self._all_topics.topic(wanted)
            names.append(wanted)
        return names

    def __enter__(self) -> Consumer:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ------------------------------------------------------------ what is read

    def _assign(self, start: Start) -> None:
        """Take in the partitions that there are now and that are not read yet."""
        for tp, is_named in self._wanted():
            if tp in self._cursors:
                continue
            try:
                log = self._all_topics.topic(tp.topic).partition(tp.partition)
            except UnknownTopic:
                if is_named:
                    raise
                continue  # deleted since the folder was listed
            position = self._resolve(log, start)
            self._cursors[tp] = Cursor(tp, log, position, self._end_of(log))
            self._turn.append(tp)
            if self._watch is not None:
                self._watch.add(log.handle.lock_path)

    def _wanted(self) -> Iterator[tuple[TopicPartition, bool]]:
        """Each partition, and whether its topic was named and did not merely match a pattern."""
        for wanted in self._topics:
            if not isinstance(wanted, str):
                topic, partition = wanted
                yield TopicPartition(check_topic_name(topic, internal=True), partition), True
            elif is_pattern(wanted):
                for name in fnmatch.filter(self._all_topics.names(), wanted):
                    with contextlib.suppress(UnknownTopic):
                        for partition in range(self._all_topics.topic(name).partition_count):
                            yield TopicPartition(name, partition), False
            else:
                for partition in range(self._all_topics.topic(wanted).partition_count):
                    yield TopicPartition(wanted, partition), True

    def _resolve(self, log: Partition, start: Start) -> int:
        if start == "earliest":
            return log.log_start_offset
        if start == "latest":
            return self._end_of(log)
        if isinstance(start, date | timedelta):
            offset = log.offset_for_timestamp(self._timestamp_of(start, log))
            return self._end_of(log) if offset is None else offset
        assert isinstance(start, int)
        if start < 0:
            return offset_of_last(log, -start, self._end_of(log))
        log.read(start)  # raises for an offset that is not there
        return start

    @staticmethod
    def _timestamp_of(start: date | timedelta, log: Partition) -> int:
        if isinstance(start, timedelta):
            return log.handle.clock.now_ms() - start // timedelta(milliseconds=1)
        if not isinstance(start, datetime):
            start = datetime.combine(start, time_of_day.min)
        return round(start.timestamp() * 1000)

    def _end_of(self, log: Partition) -> int:
        return log.end_offset(isolation=self._isolation, durable_only=self._durable_only)

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read."""
        return list(self._cursors) if self._session is None else sorted(self._cursors)

    # ------------------------------------------------------------ as a member of a group

    @property
    def member_id(self) -> str:
        """This member's name in the group; it has another one after it was evicted."""
        return self._of_group("member id").member.id

    @property
    def generation(self) -> int:
        """Of the group's assignment, as this member knows it: each has a higher one."""
        return self._of_group("generation").member.generation

    def poll_group(self, wait_s: float = 0.0) -> list[TopicPartition]:
        """Take part in the group without reading; returns the partitions that are read now.

        Waits up to ``wait_s`` until everything that is assigned is there. Iterating does it by itself.
        """
        session = self._of_group("assignment by one")
        self._check_open()
        ends_s = time.monotonic() + wait_s
        while True:
            session.poll()
            if session.is_settled or self._is_ended() or time.monotonic() >= ends_s:
                return self.assignment()
            time.sleep(session.wait_s)

    def commit(self, positions: Mapping[Any, int] | None = None, *, metadata: str = "", sync: bool = True) -> None:
        """Say how far the group has read: by default up to and with the record that was handed out last.

        positions   offsets to go on at, by `TopicPartition` or (topic, partition)
        metadata    a text of at most 4096 bytes to keep with them
        sync        return when they are on disk; without, once they are written: a power cut may take the last second's

        All of them are committed, or none. Raises `ConsumerFenced` when a partition is not this
        member's any more, `UnknownTopic`, `InvalidConfig` for what is no offset.
        """
        session = self._of_group("positions to commit")
        self._check_open()
        session.commit(positions, metadata=as_text("metadata", metadata), sync=as_bool("sync", sync))

    def commit_async(self, positions: Mapping[Any, int] | None = None, *, metadata: str = "") -> None:
        """`commit` without waiting for anything, cheap enough for every record: one in 10 ms is written, the last.

        The death of the process may take what was not written yet, which then is read again.
        Written at the latest when the consumer next asks for records of another batch, commits
        in another way, or is closed. Raises what `commit` does, now or at the call that writes it.
        """
        session = self._of_group("positions to commit")
        self._check_open()
        session.commit_soon(positions, metadata=as_text("metadata", metadata))

    def committing(
        self, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> contextlib.AbstractContextManager[Encoded]:
        """For a transaction: keys and values to append to ``__consumer_offsets`` within the context.

        Raises `ConsumerFenced` as `commit` does; as long as it lasts nobody else can take the partitions.
        """
        self._check_open()
        return self._of_group("positions to commit").committing(positions, metadata=metadata)

    def committed(self, topic: str, partition: int = 0) -> CommittedOffset | None:
        """What the group has committed of a partition, whoever reads it; None when it has not."""
        return self._of_group("committed positions").committed(as_topic_partition(topic, partition))

    def _of_group(self, what: str) -> GroupSession:
        if self._session is None:
            wanted = f"a group's name, given to `store.consumer`: a consumer without a group has no {what}"
            raise InvalidConfig("group", None, wanted)
        return self._session

    def _begin(self, tp: TopicPartition, topic_id: str, committed: CommittedOffset | None, is_new: bool) -> None:
        """Read a partition that the group has given to this member."""
        log = self._all_topics.open_partition(tp.topic, tp.partition, topic_id)
        if committed is not None:
            position = committed.offset
        elif self._without_position == "error":
            wanted = f"'earliest' or 'latest', or a committed position of {tp}: the group has none"
            raise InvalidConfig("auto_offset_reset", "error", wanted)
        else:
            position = self._resolve(log, "earliest" if is_new else self._without_position or self._start)
        cursor = self._cursors[tp] = Cursor(tp, log, position, self._end_of(log))
        if committed is not None:
            cursor.epoch = committed.epoch
        self._turn.append(tp)
        if self._watch is not None:
            self._watch.add(log.handle.lock_path)

    def _drop(self, tp: TopicPartition) -> None:
        cursor = self._cursors.pop(tp, None)
        if cursor is not None:
            cursor.paused = True
            cursor.stop()
            self._turn = deque(one for one in self._turn if one != tp)

    def _positions_to_commit(self, settled: bool) -> dict[TopicPartition, tuple[int, int]]:
        return {
            tp: (cursor.settled_position if settled and cursor is self._handing else cursor.position, cursor.epoch)
            for tp, cursor in list(self._cursors.items())
        }

    def _await_handover(self, ends_s: float) -> bool:
        """Wait a moment for partitions that others have yet to let go of; False when it is no use."""
        session = self._session
        if session is None or session.is_settled or self._is_ended() or time.monotonic() >= ends_s:
            self._woken = False
            return False
        time.sleep(session.wait_s)
        return True

    # ------------------------------------------------------------ reading

    def __iter__(self) -> Iterator[Record]:
        """Records; the position moves with each one."""
        session = self._session
        for cursor, batch in self._fetches():
            handed_out = cursor.hand_out(batch)
            if session is None:
                yield from handed_out
                continue
            yield from islice(handed_out, self._max_poll_records)
            while cursor.has_left:
                session.poll()
                yield from islice(handed_out, self._max_poll_records)

    def batches(self) -> Iterator[RecordBatch]:
        """Batches of columns: the fast path. The position moves with each one."""
        for cursor, batch in self._fetches():
            cursor.position = batch.next_offset
            cursor.epoch, cursor.in_hand = batch.epoch, batch.base_offset
            yield batch
            cursor.in_hand = None

    def __next__(self) -> Record:
        """The next record, of an iteration that goes on from call to call; StopIteration at its end."""
        if self._single is None:
            self._single = iter(self)
        try:
            return next(self._single)
        except BaseException:
            self._single = None  # a generator that raised is at its end: the next call begins anew
            raise

    async def __aiter__(self) -> AsyncIterator[Record]:
        """Records, without blocking the event loop: fetching and waiting happen in a thread.

        Left by a break, an exception or a cancellation, it waits until that thread has let go, so
        that the next iteration goes on behind the last record that was handed out.
        """
        import asyncio  # 30 ms that only this needs

        loop = asyncio.get_running_loop()
        fetches = self._fetches()
        step: asyncio.Future[Any] | None = None

        async def in_thread(call: Callable[..., Any], *args: Any) -> Any:
            nonlocal step
            step = loop.run_in_executor(None, call, *args)
            return await asyncio.shield(step)  # cancelling this cancels no thread: what it does is waited for below

        try:
            while (fetched := await in_thread(next, fetches, None)) is not None:
                cursor, batch = fetched
                for number, record in enumerate(cursor.hand_out(batch), 1):
                    yield record
                    if self._session is not None and number % self._max_poll_records == 0:
                        await in_thread(self._session.poll)
        finally:
            if step is not None and not step.done():
                self.wakeup()
                await asyncio.wait([step])
                self._woken = False  # it was for that thread, and not for the next iteration
            fetches.close()

    def _fetches(self) -> Generator[tuple[Cursor, RecordBatch], None, None]:
        """Batches with the cursor they move, partition by partition in turn; ends, or waits for more."""
        self._check_open()
        return self._fetching(threading.get_ident())

    def _fetching(self, user: int) -> Generator[tuple[Cursor, RecordBatch], None, None]:
        """`_fetches` for the thread ``user``, which may leave the work to others."""
        with self._used_by(user):
            yield from self._turns()

    @contextlib.contextmanager
    def _used_by(self, user: int) -> Iterator[None]:
        """One thread at a time: two would each be handed the records of the other, or lose some."""
        if self._user not in (None, user) and self._user in sys._current_frames():
            raise ConsumerBusy(self._user or 0, user)
        self._user = user
        try:
            yield
        finally:
            if self._user == user:
                self._user = None

    def _turns(self) -> Iterator[tuple[Cursor, RecordBatch]]:
        self._check_open()
        session = self._session
        ends_s = time.monotonic() + _HANDOVER_S
        self._handing = None
        for cursor in list(self._cursors.values()):
            if self._is_there(cursor):
                cursor.end_offset, cursor.in_hand = self._end_of(cursor.log), None
        while True:
            progress = False
            if session is not None:
                session.poll()
            for _ in range(len(self._turn)):
                if not self._turn:
                    break  # all went to other members meanwhile
                tp = self._turn[0]
                self._turn.rotate(-1)
                cursor = self._cursors[tp]
                try:
                    for batch in self._fetch(cursor):
                        progress = True
                        self._handing = cursor
                        yield cursor, batch
                        self._handing = None
                        if self._closed:
                            return
                        if session is not None:
                            session.poll()
                except OffsetOutOfRange as error:
                    self._move_into_range(cursor, error)
                    progress = True
                except (UnknownTopic, StoreClosed):
                    if self._is_there(cursor):
                        raise
            if progress:
                continue
            if not (self._wait() if self._follow else self._await_handover(ends_s)):
                return

    def _is_there(self, cursor: Cursor) -> bool:
        """False when the topic is gone and only a pattern named it: it is read no more. Else raises `UnknownTopic`."""
        try:
            cursor.log.handle.check_usable()
            return True
        except UnknownTopic as error:
            topic = cursor.tp.topic
            if any(wanted == topic or (not isinstance(wanted, str) and wanted[0] == topic) for wanted in self._topics):
                raise
            logger.info("%s: read no more: %s", cursor.tp, error)
            self._drop(cursor.tp)
            return False

    def _move_into_range(self, cursor: Cursor, error: OffsetOutOfRange) -> None:
        """Go on where `auto_offset_reset` says, or raise."""
        if self._reset == "error":
            raise error
        position = cursor.position
        cursor.position = self._resolve(cursor.log, self._reset)
        cursor.end_offset = max(cursor.end_offset, cursor.position)
        self.resets.append((cursor.tp, position, cursor.position))
        logger.warning("%s: %s; going on at offset %d", cursor.tp, error, cursor.position)

    def _fetch(self, cursor: Cursor) -> Iterator[RecordBatch]:
        if cursor.paused:
            return
        if self._follow:
            cursor.end_offset = self._end_of(cursor.log)
        started_at = cursor.position
        if started_at >= cursor.end_offset:
            return
        left_bytes = self._fetch_bytes

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
                break
            left_bytes -= batch.size_bytes
            yield batch
            if cursor.position != batch.next_offset or cursor.paused:
                return  # a seek, or a pause, while the batch was out
        if left_bytes > 0 and cursor.position < cursor.end_offset:
            # Nothing more up to there: a gap that a crash or compaction left, or what is not handed
            # out, the ends of transactions and what was aborted.
            cursor.position = cursor.end_offset

    def _wait(self) -> bool:
        """Sleep until there may be more; False when the consumer was closed or woken."""
        with self._waiting:
            return self._wait_watching()

    def _wait_watching(self) -> bool:
        if self._watch is None:
            self._watch = Watch()
            self._watch.add(self._all_topics.path, folder=True)
            for cursor in self._cursors.values():
                self._watch.add(cursor.log.handle.lock_path)
        session = self._session
        if session is not None:
            folder = session.member.folder
            self._watch.add(folder.path, folder=True)
            self._watch.add(folder.members_path, folder=True, endings=True)
        while not self._is_ended():
            self._watch.drain()
            if self._is_ended():
                break  # said so just before the drain, which took the reason to wake up with it
            if session is not None:
                session.poll(ended=self._watch.take_ended())
            # Said before looking: who appends after this look wakes us.
            polled = False
            for cursor in self._cursors.values():
                polled |= not cursor.log.handle.announce_waiting(2 * _WAIT_S)
            if self._has_more():
                return True
            for cursor in list(self._cursors.values()):
                if self._is_there(cursor) and cursor.log.is_stale:  # opened read-only before anybody wrote to it
                    tp = cursor.tp
                    cursor.log = self._all_topics.open_partition(tp.topic, tp.partition, cursor.log.topic_id)
            if session is None:
                self._assign("earliest")
            self._finish_transactions()
            if self._has_more():
                return True
            wait_s = _FINISH_S if self._isolation == "read_committed" else _WAIT_S
            self._watch.wait(wait_s if session is None else min(session.wait_s, wait_s), poll=polled)
        self._woken = False
        return False

    def _finish_transactions(self) -> None:
        """Where nobody waits for a decision, a dead producer's transaction would hold this reader back for ever."""
        if self._isolation == "read_committed" and time.monotonic() >= self._finish_due_s:
            self._finish_due_s = time.monotonic() + _FINISH_S
            self._finish_dead()

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
        _check_start(to, "to")
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

    def _cursor(self, topic: str, partition: int) -> Cursor:
        tp = as_topic_partition(topic, partition)
        try:
            return self._cursors[tp]
        except KeyError:
            raise UnknownTopic(topic, f"partition {partition} is not read by this consumer") from None

    # ------------------------------------------------------------ ending

    def wakeup(self) -> None:
        """End an iteration that waits, from any thread or a signal handler; iterating again goes on."""
        self._woken = True
        if self._watch is not None:
            self._watch.interrupt()

    def close(self) -> None:
        """End; a member leaves its group. Idempotent."""
        if self._session is not None and self._session.member.is_foreign:
            self._closed = True  # a forked child: everything else is the parent's
            self._ended = True
        if not self._ended:
            self._closed = True
            self.wakeup()
            with self._waiting:  # not while another thread still sleeps on it
                try:
                    if self._session is not None:
                        self._closing = True
                        self._session.close()
                finally:
                    self._closing = False
                    if self._watch is not None:
                        self._watch.close()
                    # Else it was interrupted, and the next call goes on.
                    self._ended = self._session is None or self._session.member.has_left

    def _check_open(self) -> None:
        if self._closed and not self._closing:  # what `on_revoked` does at the end is still allowed
            raise StoreClosed("consumer")
        if self._session is not None:
            self._session.member.check_process()


_RESETS = (None, "earliest", "latest", "error")


def _flat(topics: Sequence[Any]) -> list[str | tuple[str, int]]:
    """What is to be read, lists of it taken apart. Raises `InvalidConfig`."""
    flat: list[str | tuple[str, int]] = []
    for wanted in topics:
        if isinstance(wanted, list | set | frozenset):
            flat += _flat(list(wanted))
        elif isinstance(wanted, str):
            flat.append(wanted)
        elif isinstance(wanted, tuple) and len(wanted) == 2 and isinstance(wanted[0], str):
            flat.append((wanted[0], as_partition(wanted[1])))
        else:
            raise InvalidConfig("topics", wanted, _TOPICS)
    if not flat:
        raise InvalidConfig("topics", topics, _TOPICS)
    return flat


def _check_start(start: object, name: str = "start") -> None:
    if isinstance(start, str) and start in ("earliest", "latest"):
        return
    if isinstance(start, int | date | timedelta) and not isinstance(start, bool):
        return
    wanted = "'earliest', 'latest', an offset, -N for the last N, a datetime or date, or a timedelta for so long ago"
    raise InvalidConfig(name, start, wanted)


_TOPICS = "names of topics, (topic, partition) or patterns, at least one"


class _Reader:
    """The consumer as its group session sees it."""

    def __init__(self, consumer: Consumer) -> None:
        # Weak: one that is dropped without being closed must let go of its partitions there and then.
        self._weak = weakref.ref(consumer)

    @property
    def _consumer(self) -> Consumer:
        consumer = self._weak()
        assert consumer is not None, "only a consumer that is there polls"
        return consumer

    def begin(self, tp: TopicPartition, topic_id: str, committed: CommittedOffset | None, *, is_new: bool) -> None:
        self._consumer._begin(tp, topic_id, committed, is_new)

    def stop(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._consumer._cursors[tp].paused = True
            self._consumer._cursors[tp].stop()

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._consumer._drop(tp)

    def positions_to_commit(self, *, settled: bool) -> dict[TopicPartition, tuple[int, int]]:
        return self._consumer._positions_to_commit(settled)

    def epoch_at(self, tp: TopicPartition, offset: int) -> int:
        cursor = self._consumer._cursors.get(tp)
        return cursor.epoch if cursor is not None and cursor.read_before(offset) else -1
