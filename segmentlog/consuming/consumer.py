"""Consumers read records of any number of partitions, from a start position to the end or continuously."""

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
from segmentlog.consuming.consumer_options import Source, check_start, flatten_sources
from segmentlog.consuming.consumer_options import Start as Start
from segmentlog.consuming.cursor import Cursor
from segmentlog.consuming.cursor_set import CursorSet
from segmentlog.consuming.decoding import Decoding as Decoding
from segmentlog.consuming.decoding import OnBad as OnBad
from segmentlog.consuming.decoding import OnError as OnError
from segmentlog.consuming.wakeup import RecordWaiter
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
"""Seconds that an iteration without ``follow`` waits until other members release its assigned partitions."""


class Consumer(Generic[K, V]):
    """Reads records of topics, of single partitions (``("clicks", 0)``), or of a pattern (``"events-*"``).

    start         "earliest", "latest", or an offset; -5: the last five records of each partition; a datetime (a naive
                  one is local time), a date (its first moment), or a timedelta before now
    follow        wait for new records; without it, iteration ends at the current log ends. Also wait for a named topic
                  that does not exist yet; without it, such a topic raises `UnknownTopic`
    isolation     "read_committed" returns no records of open or aborted transactions
    durable_only  return only records that no crash can lose
    shipped_only  return only records that are stored in an object store, and so survive the loss of this machine
                  (docs/replicate.md)
    fetch_bytes   bytes to read from one partition before reading from the next
    skip_damaged  skip damaged and unreadable batches; `skipped` has their offsets. Each batch is decoded as a whole
    auto_offset_reset  where to continue if retention has deleted the next record: "earliest", "latest", or "error",
                  which raises `OffsetOutOfRange`; `resets` lists the jumps
    deserializer, key_deserializer  convert values and keys to objects (`segmentlog.codecs`)
    on_error      for a record that they cannot read: "raise" raises `DeserializationError` and leaves the position at
                  the record; "skip" continues, and `bad` has the errors; "yield" returns an `Undecodable` in its place.
                  (``on_bad`` is the former name, with "hand_over" for "yield".)

    Records of one partition are returned in order. With ``follow``, new partitions, new topics that match a pattern and
    new named topics are read from their beginning. Not thread-safe: use a consumer from one thread. Only `close` and
    `wakeup` may be called from other threads.

    With ``group`` the consumer shares the topics with the other members of the group, in any process: each partition is
    read by one member at a time, from its committed offset on.

    start, auto_offset_reset  where to start in a partition without a committed offset: at ``auto_offset_reset`` if
                  it is given ("error" raises), otherwise at ``start``
    auto_commit   commit processed records at polls every ``auto_commit_interval_ms``, when partitions are revoked, and
                  at `close`; does not commit the record that the loop body is processing
    assignment_strategy   "sticky", "range" or "roundrobin"; all members must use the same
    max_poll_interval_ms  a member that requests no record for this long is evicted, and others get its partitions
    max_poll_records      number of records between two polls of the group
    on_assigned, on_revoked, on_lost  called with a list of partitions, by the thread that consumes: when the member
                  starts to read them; before it releases them (it may still commit); when it was evicted and has lost
                  them (if ``on_lost`` is missing, `on_revoked` is called)

    The consumer joins the group when it is created, and reads after its first poll: iteration, `poll` or `poll_group`.
    Without ``follow``, an iteration ends when the assigned partitions are read to their ends; it waits two seconds for
    partitions that another member has yet to release. A consumer that is garbage-collected without `close` leaves the
    group without committing.
    """

    def __init__(
        self,
        all_topics: Topics,
        topics: Sequence[Source],
        options: ConsumerOptions,
        *,
        groups: Groups | None,
        finish_transactions: Callable[[], object],
    ) -> None:
        """Create a consumer of ``topics``; ``groups`` is needed for a group member only."""
        self._max_poll_records = options.max_poll_records
        self._follows = options.follow
        self._cursors = cursors = CursorSet(all_topics, flatten_sources(topics), options)
        self._follower = RecordWaiter(
            all_topics.path, cursors, finish_transactions, is_committed=options.isolation == "read_committed"
        )
        self._closing = self._ended = False
        self._user: int | None = None
        """Ident of the thread that is iterating."""
        self._single: Iterator[Record[K, V]] | None = None
        self._polled: Cursor | None = None
        """Cursor of the records that the last `poll` returned."""
        self.skipped = cursors.skipped
        """With ``skip_damaged``: skipped offsets ``[base, end)`` of a partition, with the error."""
        self.bad: Sequence[DeserializationError] = () if options.decoding is None else options.decoding.bad
        """With ``on_error="skip"``: errors of the last 1,000 skipped records."""
        self.resets = cursors.resets
        """Jumps of ``auto_offset_reset``: partition, offset before, offset after."""
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
        """Return the partitions that this consumer reads."""
        partitions = list(self._cursors.by_partition.copy())
        return partitions if self._session is None else sorted(partitions)

    # ------------------------------------------------------------ as a member of a group

    @property
    def member_id(self) -> str:
        """Id of this member in the group; an evicted member gets a new one."""
        return self._of_group("member id").member.id

    @property
    def generation(self) -> int:
        """Generation of the group's assignment that this member has; it grows with each assignment."""
        return self._of_group("generation").member.generation

    def poll_group(self, wait_s: float = 0.0) -> list[TopicPartition]:
        """Poll the group without reading; return the assigned partitions.

        Waits up to ``wait_s`` seconds until the former members have released every assigned partition. An iteration
        polls the group, too. A slow loop body may call this to remain a member. With ``auto_commit``, this call does
        not commit the record that the body is processing.
        """
        session = self._of_group("group to poll")
        self._check_open()
        ends_s = time.monotonic() + wait_s
        while True:
            session.poll(is_processing=True)
            if session.is_settled or self._follower.is_ended() or time.monotonic() >= ends_s:
                return self.assignment()
            time.sleep(session.wait_s)

    def commit(self, positions: Mapping[Any, int] | None = None, *, metadata: str = "", sync: bool = True) -> None:
        """Commit offsets of the group; by default up to and including the last returned record.

        positions   offsets to resume at, by `TopicPartition` or (topic, partition)
        metadata    a text of at most 4,096 characters, stored with the offsets
        sync        return once the offsets are on disk; False: once they are written, so that a power cut may lose
                    commits of the last second

        All offsets are committed, or none. Raises `ConsumerFenced` if a partition belongs to another member now,
        `UnknownTopic`, or `InvalidConfig` for an invalid offset. Not thread-safe.
        """
        session = self._of_group("offsets to commit")
        self._check_open()
        session.commit(positions, metadata=as_text("metadata", metadata), sync=as_bool("sync", sync))

    def commit_async(self, positions: Mapping[Any, int] | None = None, *, metadata: str = "") -> None:
        """Commit without waiting. Cheap enough for every record: only the last commit of each 10 ms is written.

        If the process dies, commits that were not written yet are lost, and their records are read again. The commit is
        written at the latest when the consumer requests records of another batch, commits in another way, or is closed.
        Raises the errors of `commit`, in this call or in the call that writes. Not thread-safe.
        """
        session = self._of_group("offsets to commit")
        self._check_open()
        session.commit_soon(positions, metadata=as_text("metadata", metadata))

    def committing(
        self, positions: Mapping[Any, int] | None = None, *, metadata: str = ""
    ) -> contextlib.AbstractContextManager[Encoded]:
        """Yield keys and values to append to ``__consumer_offsets`` as part of a transaction.

        Raises `ConsumerFenced` as `commit` does. Within the context, no other member can get the partitions.
        """
        self._check_open()
        return self._of_group("offsets to commit").committing(positions, metadata=metadata)

    def committed(self, topic: str, partition: int = 0) -> CommittedOffset | None:
        """Return the group's committed offset of a partition, whichever member reads it; None if there is none."""
        return self._of_group("committed offsets").committed(as_topic_partition(topic, partition))

    def _of_group(self, what: str) -> GroupSession:
        if self._session is None:
            expected = f"give `store.consumer` the name of a group: a consumer without a group has no {what}"
            raise InvalidConfig("group", None, expected)
        return self._session

    # ------------------------------------------------------------ reading

    def __iter__(self) -> Iterator[Record[K, V]]:
        """Iterate over records; the position follows each record."""
        session = self._session
        for cursor, batch in self._fetches():
            records = cursor.iterate(batch)
            if session is None:
                yield from records
                continue
            yield from islice(records, self._max_poll_records)
            while cursor.has_remaining:
                session.poll()
                yield from islice(records, self._max_poll_records)

    def batches(self) -> Iterator[RecordBatch[K, V]]:
        """Iterate over batches of columns, which is the fastest way to read. The position follows each batch."""
        for cursor, batch in self._fetches():
            cursor.position = batch.next_offset
            cursor.epoch, cursor.processing_offset = batch.epoch, batch.base_offset
            yield batch
            cursor.processing_offset = None

    def poll(self, timeout_s: float = 0.0, max_records: int | None = None) -> list[Record[K, V]]:
        """Return the next records of one partition, or an empty list if none arrived within ``timeout_s`` seconds.

            while not is_stopping:
                rows = consumer.poll(5.0)
                ...  # rows may be empty: time to write what was collected

        The list has at most ``max_records`` records (default: ``max_poll_records``). Waits whether or not the
        consumer follows, and returns early after `wakeup`. With ``auto_commit``, the records of a list count as
        processed when `poll` is called again; those of the last list must be committed with `commit`.

        Not thread-safe. Raises `InvalidConfig`, `StoreClosed`, `ConsumerBusy`, and errors of reading, such as
        `OffsetOutOfRange`, `LogTruncated`, `UnknownTopic`, `CorruptBatch` and `DeserializationError`. Records before an
        error are returned first; the next call raises.
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
                self._polled, self._cursors.processing, cursor.processing_offset = cursor, cursor, records[0].offset
                return records
        except BaseException:  # interrupted: the caller does not get the records
            if cursor is not None and before is not None:
                cursor.position = before
            raise

    def _gather(self, cursor: Cursor, count: int) -> list[Record[K, V]]:
        """Return up to ``count`` records of the cursor's current batch and the batches after it, without waiting."""
        records = cursor.take(count)
        try:
            for batch in self._cursors.fetch(cursor) if len(records) < count else ():
                cursor.iterate(batch)
                records += cursor.take(count - len(records))
                if len(records) == count:
                    break
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            # The position is before the error: the next call raises it.
        return records

    def _polled_cursor(self, until_s: float) -> Cursor | None:
        """Return the cursor whose records `poll` returns next, or None if ``until_s`` passes first."""
        cursors, cursor = self._cursors, self._polled
        self._polled = cursors.processing = None  # the records of the last call are processed
        if cursor is not None and cursor.has_remaining:
            if self._session is not None:
                self._session.poll()  # may revoke the partition, which stops the cursor
            if cursor.has_remaining and cursors.by_partition.get(cursor.tp) is cursor:
                return cursor
        for cursor, batch in self._turns(until_s):
            if len(batch):
                cursor.iterate(batch)
                return cursor
        return None

    def __next__(self) -> Record[K, V]:
        """Return the next record. All calls share one iteration. Raises StopIteration at its end."""
        if self._single is None:
            self._single = iter(self)
        try:
            return next(self._single)
        except BaseException:
            self._single = None  # a generator that raised has ended; the next call starts a new iteration
            raise

    async def __aiter__(self) -> AsyncIterator[Record[K, V]]:
        """Iterate over records without blocking the event loop: a thread fetches and waits.

        When the iteration is left by a break, an exception or a cancellation, it waits until that thread has finished,
        so that the next iteration continues after the last returned record.
        """
        import asyncio  # takes 30 ms, and only this needs it

        loop = asyncio.get_running_loop()
        fetches = self._fetches()
        step: asyncio.Future[Any] | None = None

        async def in_thread(call: Callable[..., Any], *args: Any) -> Any:
            nonlocal step
            step = loop.run_in_executor(None, call, *args)
            return await asyncio.shield(step)  # a cancellation does not stop the thread; `finally` waits for it

        try:
            while (fetched := await in_thread(next, fetches, None)) is not None:
                cursor, batch = fetched
                for number, record in enumerate(cursor.iterate(batch), 1):
                    yield record
                    if self._session is not None and number % self._max_poll_records == 0:
                        await in_thread(self._session.poll)
        finally:
            if step is not None and not step.done():
                self.wakeup()
                await asyncio.wait([step])
                self._follower.is_woken = False  # `wakeup` was meant for that thread, not for the next wait
            fetches.close()

    def _fetches(self) -> Generator[tuple[Cursor, RecordBatch[Any, Any]], None, None]:
        """Yield batches with their cursors, from each partition in turn. At the log ends, end or wait for records."""
        self._check_open()
        return self._fetches_of(threading.get_ident())

    def _fetches_of(self, user: int) -> Generator[tuple[Cursor, RecordBatch[Any, Any]], None, None]:
        """Yield the batches of `_fetches`. They belong to thread ``user``, even if other threads run the generator."""
        with self._used_by(user):
            yield from self._turns()

    @contextlib.contextmanager
    def _used_by(self, user: int) -> Iterator[None]:
        """Reserve the consumer for one thread, so that no other thread gets its records. Raises `ConsumerBusy`."""
        if self._user not in (None, user) and self._user in sys._current_frames():
            raise ConsumerBusy(self._user or 0, user)
        self._user = user
        try:
            yield
        finally:
            if self._user == user:
                self._user = None

    def _turns(self, until_s: float | None = None) -> Iterator[tuple[Cursor, RecordBatch[Any, Any]]]:
        """Yield batches from each partition in turn. With ``until_s``, wait until then, even without ``follow``."""
        self._check_open()
        session, cursors = self._session, self._cursors
        ends_s = time.monotonic() + HANDOVER_S
        cursors.processing = None
        cursors.refresh_ends()
        while True:
            progress = False
            if session is not None:
                session.poll()
            for cursor in cursors.in_turn():
                try:
                    for batch in cursors.fetch(cursor):
                        progress = True
                        cursors.processing = cursor
                        yield cursor, batch
                        cursors.processing = None
                        if self._follower.is_closed:
                            return
                        if session is not None:
                            session.poll()
                except OffsetOutOfRange as error:
                    cursors.move_into_range(cursor, error)
                    progress = True
                except (UnknownTopic, StoreClosed):
                    if cursors.check_exists(cursor):
                        raise
            if progress:
                continue
            if until_s is not None:
                if not self._follower.wait(session, until_s):
                    return
                cursors.refresh_ends()
            elif not (self._follower.wait(session) if self._follows else self._await_handover(ends_s)):
                return

    def _await_handover(self, ends_s: float) -> bool:
        """Sleep briefly if another member still has to release an assigned partition. Return False if none does."""
        session = self._session
        if session is None or session.is_settled or self._follower.is_ended() or time.monotonic() >= ends_s:
            self._follower.is_woken = False
            return False
        time.sleep(session.wait_s)
        return True

    # ------------------------------------------------------------ positions

    def position(self, topic: str, partition: int = 0) -> int:
        """Return the offset of the next record of a partition."""
        return self._cursors.of(topic, partition).position

    def positions(self) -> dict[TopicPartition, int]:
        """Return the offset of the next record of every partition."""
        return {cursor.tp: cursor.position for cursor in self._cursors}

    def seek(self, topic: str, partition: int, to: Start) -> int:
        """Set the position of a partition; return the offset. Raises `OffsetOutOfRange`, `LogTruncated`."""
        cursor = self._cursors.of(topic, partition)
        check_start(to, "to")
        cursor.position = self._cursors.resolve(cursor.log, to)
        return cursor.position

    def lag(self) -> dict[TopicPartition, int]:
        """Return the number of offsets from the position to the end, for every partition, without lost ranges.

        Compaction and transactions leave offsets without records, so there may be fewer records to read.
        """
        cursors = self._cursors
        return {cursor.tp: cursor.log.count_offsets(cursor.position, cursors.end_of(cursor.log)) for cursor in cursors}

    def pause(self, topic: str, partition: int = 0) -> None:
        """Stop reading a partition until `resume`."""
        cursor = self._cursors.of(topic, partition)
        cursor.paused = True
        cursor.stop()

    def resume(self, topic: str, partition: int = 0) -> None:
        """Resume reading a paused partition."""
        self._cursors.of(topic, partition).paused = False

    # ------------------------------------------------------------ ending

    def wakeup(self) -> None:
        """End the wait of an iteration or a `poll`, now or the next time. Any thread or signal handler may call it.

        Nothing is closed: iterating or polling again continues. An iteration that has records to return does not wait,
        so a program that must stop also sets a flag and checks it after each record or list: see
        docs/service.md.
        """
        self._follower.interrupt()

    def close(self) -> None:
        """Close the consumer; a member leaves its group. Idempotent; any thread may call it."""
        follower = self._follower
        if self._session is not None and self._session.member.is_foreign:
            follower.is_closed = True  # a forked child: all resources belong to the parent
            self._ended = True
        if not self._ended:
            follower.is_closed = True
            follower.interrupt()
            with follower.lock:  # wait until no thread sleeps on the descriptors
                try:
                    if self._session is not None:
                        self._closing = True
                        self._session.close()
                finally:
                    self._closing = False
                    if follower.watch is not None:
                        follower.watch.close()
                    # If it was interrupted, the next call continues.
                    self._ended = self._session is None or self._session.member.has_left

    def _check_open(self) -> None:
        if self._follower.is_closed and not self._closing:  # `on_revoked` may still use the consumer while it closes
            raise StoreClosed("consumer")
        if self._session is not None:
            self._session.member.check_process()


def _join(
    all_topics: Topics, options: ConsumerOptions, groups: Groups, group: str, cursors: CursorSet,
    finish_transactions: Callable[[], object],
) -> GroupSession:  # fmt: skip
    """Join a group, and return the session. Raises the errors of `CursorSet.subscription`."""
    member = groups.member(
        group, cursors.subscription(group), strategy=options.assignment_strategy, client_id=options.client_id,
        max_poll_interval_ms=options.max_poll_interval_ms,
    )  # fmt: skip
    return GroupSession(
        all_topics,
        groups.committed_offsets,
        finish_transactions,
        group,
        member,
        cursors,
        auto_commit=options.auto_commit,
        auto_commit_interval_ms=options.auto_commit_interval_ms,
        on_assigned=options.on_assigned,
        on_revoked=options.on_revoked,
        on_lost=options.on_lost,
    )
