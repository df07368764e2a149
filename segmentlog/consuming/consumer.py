"""Consuming: records of any number of partitions, from a start to the end, or following it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic

from segmentlog.arguments import as_bool, as_int, as_seconds, as_text, as_topic_partition
from segmentlog.consuming.consumer_options import ConsumerOptions as ConsumerOptions
from segmentlog.consuming.consumer_options import OffsetReset as OffsetReset
from segmentlog.consuming.consumer_options import Start as Start
from segmentlog.consuming.consumer_options import Wanted, check_start, flat
from segmentlog.consuming.cursor import Cursor
from segmentlog.consuming.cursor_set import Cursors
from segmentlog.consuming.decoding import Decoding as Decoding
from segmentlog.consuming.decoding import OnBad as OnBad
from segmentlog.consuming.wakeup import Follower
from segmentlog.errors import (
    ConsumerBusy,
    DeserializationError,
    InvalidConfig,
    OffsetOutOfRange,
    SegmentlogError,
    StoreClosed,
    UnknownTopic,
)
from segmentlog.format.record_batch import RecordBatch
from segmentlog.groups.committed_offsets import CommittedOffset, Encoded
from segmentlog.groups.group_admin import Groups
from segmentlog.groups.group_session import GroupSession
from segmentlog.groups.group_session import Rebalanced as Rebalanced
from segmentlog.records import K, Record, TopicPartition, V
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.topics.topic_registry import Topics

HANDOVER_S = 2.0
"""How long an iteration that does not follow waits for partitions that others have yet to let go of."""


class Consumer(Generic[K, V]):
    """Reads records of topics, of single partitions (``("clicks", 0)``), or of a pattern (``"events-*"``).

    start         "earliest", "latest", an offset; -5: the last five of each partition; a datetime (a naive one is
                  local time), a date (its first moment), or a timedelta: so long ago
    follow        go on waiting for records; without it iteration ends at the log ends it met. Also wait for a named
                  topic that does not exist yet; without it that raises `UnknownTopic`
    isolation     "read_committed" shows no record of an open or aborted transaction
    durable_only  shows only what no crash can take back
    shipped_only  shows only what the loss of this machine cannot take back: the object store has it (docs/replicate.md)
    fetch_bytes   how much is read of one partition before it is the next one's turn
    skip_damaged  skip damaged and unreadable batches; `skipped` has their offsets. Each batch is decoded as a whole
    auto_offset_reset  where to go on when retention has deleted what comes next: "earliest" (what is
                  left), "latest", or "error", which raises `OffsetOutOfRange`; `resets` tells

    deserializer, key_deserializer  make objects of values and keys (`segmentlog.codecs`)
    on_bad        what becomes of a record that they cannot read: "raise" raises `DeserializationError`, the position is
                  the record's; "skip" goes on, and `bad` tells; "hand_over" puts an `Undecodable` in its place

    Within a partition records come in order. Partitions, topics of a pattern and named topics that appear
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
        topics: Sequence[Wanted],
        options: ConsumerOptions,
        *,
        groups: Groups | None,
        finish_transactions: Callable[[], object],
    ) -> None:
        """``groups``: those of the store, for a member of one."""
        self._max_poll_records = options.max_poll_records
        self._follows = options.follow
        self._cursors = cursors = Cursors(all_topics, flat(topics), options)
        self._follower = Follower(
            all_topics.path, cursors, finish_transactions, is_committed=options.isolation == "read_committed"
        )
        self._closing = self._ended = False
        self._user: int | None = None
        """The thread whose iteration is under way."""
        self._single: Iterator[Record[K, V]] | None = None
        self._polled: Cursor | None = None
        """The partition of the list that `poll` returned last."""
        self.skipped = cursors.skipped
        """With ``skip_damaged``: the offsets ``[base, end)`` of a partition that were skipped, and the error."""
        self.bad: Sequence[DeserializationError] = () if options.decoding is None else options.decoding.bad
        """With ``on_bad="skip"``: why records were skipped, the last thousand of them."""
        self.resets = cursors.resets
        """Jumps that ``auto_offset_reset`` made: the partition, from which offset, to which."""
        self._session: GroupSession | None = None
        if groups is None or options.group is None:
            cursors.assign(options.start)
        else:
            all_topics.check_writable("join a group")
            self._session = _join(all_topics, options, groups, options.group, cursors, finish_transactions)

    def __enter__(self) -> Consumer[K, V]:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def assignment(self) -> list[TopicPartition]:
        """The partitions that are read."""
        partitions = list(self._cursors.by_partition.copy())
        return partitions if self._session is None else sorted(partitions)

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

        Waits up to ``wait_s`` until everything that is assigned is there. Iterating does it by itself; a loop body that
        takes long may do it, too: what it is at counts as not processed.
        """
        session = self._of_group("assignment by one")
        self._check_open()
        ends_s = time.monotonic() + wait_s
        while True:
            session.poll(settled=True)
            if session.is_settled or self._follower.is_ended() or time.monotonic() >= ends_s:
                return self.assignment()
            time.sleep(session.wait_s)

    def commit(self, positions: Mapping[Any, int] | None = None, *, metadata: str = "", sync: bool = True) -> None:
        """Say how far the group has read: by default up to and with the record that was handed out last.

        positions   offsets to go on at, by `TopicPartition` or (topic, partition)
        metadata    a text of at most 4,096 characters to keep with them
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

    # ------------------------------------------------------------ reading

    def __iter__(self) -> Iterator[Record[K, V]]:
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

    def batches(self) -> Iterator[RecordBatch[K, V]]:
        """Batches of columns: the fast path. The position moves with each one."""
        for cursor, batch in self._fetches():
            cursor.position = batch.next_offset
            cursor.epoch, cursor.in_hand = batch.epoch, batch.base_offset
            yield batch
            cursor.in_hand = None

    def poll(self, timeout_s: float = 0.0, max_records: int | None = None) -> list[Record[K, V]]:
        """Return the next records of one partition, or an empty list if none came within ``timeout_s`` seconds.

            while not is_stopping:
                rows = consumer.poll(5.0)
                ...  # rows may be empty: time to write out what was gathered

        max_records  the longest list to return; by default ``max_poll_records``

        Waits whether or not the consumer follows, and returns early after `wakeup`. With ``auto_commit`` the records of
        a list count as processed when `poll` is called again, and those of the last list only after `commit`.

        Not thread-safe. Raises `InvalidConfig`, `StoreClosed`, `ConsumerBusy`, and what reading raises, among that
        `OffsetOutOfRange`, `LogTruncated`, `UnknownTopic`, `CorruptBatch` and `DeserializationError`. Records that were
        read before the fault are returned first; the next call raises.
        """
        count = self._max_poll_records if max_records is None else as_int("max_records", max_records, 1)
        until_s = time.monotonic() + as_seconds("timeout_s", timeout_s)
        self._check_open()
        cursor, before = None, None
        try:
            with self._used_by(threading.get_ident()):
                cursor = self._polled_cursor(until_s)
                if cursor is None:
                    return []
                before = cursor.position
                records = self._gather(cursor, count)
                self._polled, self._cursors.handing, cursor.in_hand = cursor, cursor, records[0].offset
                return records
        except BaseException:  # interrupted: the caller does not get what was gathered
            if cursor is not None and before is not None:
                cursor.position = before
            raise

    def _gather(self, cursor: Cursor, count: int) -> list[Record[K, V]]:
        """Records of the batch that is handed out, and of those after it in the partition, without waiting."""
        records = cursor.take(count)
        try:
            for batch in self._cursors.fetch(cursor) if len(records) < count else ():
                cursor.hand_out(batch)
                records += cursor.take(count - len(records))
                if len(records) == count:
                    break
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            # The position is that of the fault: the next call raises it.
        return records

    def _polled_cursor(self, until_s: float) -> Cursor | None:
        """The partition whose turn it is, with records of a batch to hand out; None if no record comes in time."""
        cursors, cursor = self._cursors, self._polled
        self._polled = cursors.handing = None  # what the last call returned is processed
        if cursor is not None and cursor.has_left:
            if self._session is not None:
                self._session.poll()  # which may take the partition away, and stop the cursor
            if cursor.has_left and cursors.by_partition.get(cursor.tp) is cursor:
                return cursor
        for cursor, batch in self._turns(until_s):
            if len(batch):
                cursor.hand_out(batch)
                return cursor
        return None

    def __next__(self) -> Record[K, V]:
        """The next record, of an iteration that goes on from call to call; StopIteration at its end."""
        if self._single is None:
            self._single = iter(self)
        try:
            return next(self._single)
        except BaseException:
            self._single = None  # a generator that raised is at its end: the next call begins anew
            raise

    async def __aiter__(self) -> AsyncIterator[Record[K, V]]:
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
                self._follower.is_woken = False  # it was for that thread, and not for the next iteration
            fetches.close()

    def _fetches(self) -> Generator[tuple[Cursor, RecordBatch[Any, Any]], None, None]:
        """Batches with the cursor they move, partition by partition in turn; ends, or waits for more."""
        self._check_open()
        return self._fetching(threading.get_ident())

    def _fetching(self, user: int) -> Generator[tuple[Cursor, RecordBatch[Any, Any]], None, None]:
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

    def _turns(self, until_s: float | None = None) -> Iterator[tuple[Cursor, RecordBatch[Any, Any]]]:
        """``until_s``: until then it waits for records, whether or not the consumer follows."""
        self._check_open()
        session, cursors = self._session, self._cursors
        ends_s = time.monotonic() + HANDOVER_S
        cursors.handing = None
        cursors.meet_ends()
        while True:
            progress = False
            if session is not None:
                session.poll()
            for cursor in cursors.turns():
                try:
                    for batch in cursors.fetch(cursor):
                        progress = True
                        cursors.handing = cursor
                        yield cursor, batch
                        cursors.handing = None
                        if self._follower.is_closed:
                            return
                        if session is not None:
                            session.poll()
                except OffsetOutOfRange as error:
                    cursors.move_into_range(cursor, error)
                    progress = True
                except (UnknownTopic, StoreClosed):
                    if cursors.is_there(cursor):
                        raise
            if progress:
                continue
            if until_s is not None:
                if not self._follower.wait(session, until_s):
                    return
                cursors.meet_ends()
            elif not (self._follower.wait(session) if self._follows else self._await_handover(ends_s)):
                return

    def _await_handover(self, ends_s: float) -> bool:
        """Wait a moment for partitions that others have yet to let go of; False when it is no use."""
        session = self._session
        if session is None or session.is_settled or self._follower.is_ended() or time.monotonic() >= ends_s:
            self._follower.is_woken = False
            return False
        time.sleep(session.wait_s)
        return True

    # ------------------------------------------------------------ positions

    def position(self, topic: str, partition: int = 0) -> int:
        """Offset of the next record that this consumer gets of a partition."""
        return self._cursors.of(topic, partition).position

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset of every partition."""
        return {cursor.tp: cursor.position for cursor in self._cursors}

    def seek(self, topic: str, partition: int, to: Start) -> int:
        """Go on from another place; returns the offset. Raises `OffsetOutOfRange`, `LogTruncated`."""
        cursor = self._cursors.of(topic, partition)
        check_start(to, "to")
        cursor.position = self._cursors.resolve(cursor.log, to)
        return cursor.position

    def lag(self) -> dict[TopicPartition, int]:
        """Count the offsets from the position to the end, for every partition. Lost ranges do not count.

        Compaction and transactions leave offsets without a record, so fewer records may be waiting.
        """
        cursors = self._cursors
        return {cursor.tp: cursor.log.count_offsets(cursor.position, cursors.end_of(cursor.log)) for cursor in cursors}

    def pause(self, topic: str, partition: int = 0) -> None:
        """Read no more of a partition until `resume`."""
        cursor = self._cursors.of(topic, partition)
        cursor.paused = True
        cursor.stop()

    def resume(self, topic: str, partition: int = 0) -> None:
        """Go on reading a paused partition."""
        self._cursors.of(topic, partition).paused = False

    # ------------------------------------------------------------ ending

    def wakeup(self) -> None:
        """End an iteration or a `poll` that waits, now or the next time; from any thread, or a signal handler.

        Nothing is closed: iterating or polling again continues. An iteration that has records to return does not
        wait, so a program that has to stop sets a flag, too, and looks at it after each record or list: see
        docs/service.md.
        """
        self._follower.interrupt()

    def close(self) -> None:
        """End; a member leaves its group. Idempotent."""
        follower = self._follower
        if self._session is not None and self._session.member.is_foreign:
            follower.is_closed = True  # a forked child: everything else is the parent's
            self._ended = True
        if not self._ended:
            follower.is_closed = True
            follower.interrupt()
            with follower.lock:  # not while another thread still sleeps on what wakes it
                try:
                    if self._session is not None:
                        self._closing = True
                        self._session.close()
                finally:
                    self._closing = False
                    if follower.watch is not None:
                        follower.watch.close()
                    # Else it was interrupted, and the next call goes on.
                    self._ended = self._session is None or self._session.member.has_left

    def _check_open(self) -> None:
        if self._follower.is_closed and not self._closing:  # what `on_revoked` does at the end is still allowed
            raise StoreClosed("consumer")
        if self._session is not None:
            self._session.member.check_process()


def _join(
    all_topics: Topics, options: ConsumerOptions, groups: Groups, group: str, cursors: Cursors,
    finish_transactions: Callable[[], object],
) -> GroupSession:  # fmt: skip
    """Become a member of a group that reads with these cursors. Raises what `Cursors.subscription` does."""
    member = groups.member(
        group, cursors.subscription(group), strategy=options.assignment_strategy, client_id=options.client_id,
        max_poll_interval_ms=options.max_poll_interval_ms,
    )  # fmt: skip
    return GroupSession(
        all_topics, groups.committed_offsets, finish_transactions, group, member, cursors,
        auto_commit=options.auto_commit,
        auto_commit_interval_ms=options.auto_commit_interval_ms,
        on_assigned=options.on_assigned, on_revoked=options.on_revoked, on_lost=options.on_lost,
    )  # fmt: skip
