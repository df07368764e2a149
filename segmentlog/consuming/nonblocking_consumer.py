"""A consumer whose reading is split into steps that never wait: threads run the steps for an `AsyncConsumer`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from segmentlog.consuming.consumer import HANDOVER_S, Consumer
from segmentlog.consuming.cursor_set import PrefetchedBatches
from segmentlog.consuming.wakeup import Pause
from segmentlog.errors import OffsetOutOfRange, StoreClosed, UnknownTopic, UnreadableBatch
from segmentlog.records import Record, TopicPartition
from segmentlog.storage.watch import Watch


class FetchedBatches:
    """Fetched batches of one partition that the application has not received yet, with their records if requested.

    Raises `UnreadableBatch` if records are requested and the first batch is unreadable. A later unreadable batch is
    dropped with all batches after it, and the next fetch raises the error.
    """

    __slots__ = ("ahead", "records")

    def __init__(self, ahead: PrefetchedBatches, *, with_records: bool) -> None:
        self.ahead = ahead
        self.records: list[list[Record[Any, Any]]] | None = None
        if with_records:
            self.records = []
            for batch in ahead.batches:
                try:
                    self.records.append(list(batch.records()))
                except UnreadableBatch:
                    if not self.records:
                        raise
                    ahead.drop_after(len(self.records))
                    break
            self.records.reverse()


class NonblockingConsumer(Consumer[Any, Any]):
    """A consumer that never waits. One thread at a time calls `step`; only the event loop's thread returns records."""

    _handover_ends_s = 0.0

    def step(self, *, is_first: bool, with_records: bool, waits: bool = False) -> FetchedBatches | Pause | None:
        """Return the next batches, or how long to wait for records, or None at the end of the iteration.

        ``is_first``: begin an iteration. Without ``follow`` it ends at the current log ends.
        ``waits``: continue at the log ends, even without ``follow``; only `wakeup` ends the iteration.
        """
        self._check_open()
        session, cursors, follower = self._session, self._cursors, self._follower
        if is_first:
            self._handover_ends_s = time.monotonic() + HANDOVER_S
            cursors.refresh_ends()
        while True:
            if session is not None:
                session.poll()
            progress = False
            for cursor in cursors.in_turn():
                try:
                    if (ahead := cursors.prefetch(cursor)) is not None:
                        return FetchedBatches(ahead, with_records=with_records)
                except OffsetOutOfRange as error:
                    cursors.move_into_range(cursor, error)
                    progress = True
                except (UnknownTopic, StoreClosed):
                    if cursors.check_exists(cursor):
                        raise
            if progress:
                continue
            if follower.is_ended():
                follower.is_woken = False
                return None
            if self._follows or waits:
                if (pause := follower.check_once(session)) is not None:
                    return pause
                if waits:
                    cursors.refresh_ends()
            elif session is None or session.is_settled or time.monotonic() >= self._handover_ends_s:
                return None
            else:
                return Pause(session.wait_s, must_poll=False)

    @property
    def watch(self) -> Watch | None:
        """The watch whose descriptors wake a waiting consumer; None before the first wait."""
        return self._follower.watch

    @property
    def records_between_polls(self) -> int | None:
        """Number of records between two polls of the group, if the consumer has a group."""
        return None if self._session is None else self._max_poll_records

    @property
    def max_poll_records(self) -> int:
        """Maximum number of records that `AsyncConsumer.poll` returns by default."""
        return self._max_poll_records

    def poll_session(self) -> None:
        """Poll the group. All records returned so far count as processed."""
        if self._session is not None:
            self._session.poll()

    def is_settled(self) -> bool:
        """Poll the group, and return whether every assigned partition is being read."""
        session = self._of_group("group to poll")
        session.poll(is_processing=True)
        return session.is_settled

    def is_current(self, fetched: FetchedBatches) -> bool:
        """Return whether fetched batches may be returned: no seek, pause or rebalance has happened since."""
        cursor = fetched.ahead.cursor
        return (
            cursor.position == fetched.ahead.position
            and not cursor.paused
            and self._cursors.by_partition.get(cursor.tp) is cursor
        )

    def set_processing(self, fetched: FetchedBatches | None) -> None:
        """Set the partition whose record or batch the application is processing. None clears it."""
        self._cursors.processing = None if fetched is None else fetched.ahead.cursor

    def commit_current(self, offsets: Mapping[TopicPartition, int], *, metadata: str, sync: bool) -> None:
        """Commit these offsets for the partitions that still belong to this member."""
        current = self._cursors.by_partition
        self.commit({tp: offset for tp, offset in offsets.items() if tp in current}, metadata=metadata, sync=sync)

    def resolve_offset(self, topic: str, partition: int, to: Any) -> int:
        """Convert the target ``to`` of a seek to an offset."""
        return self._cursors.resolve(self._cursors.of(topic, partition).log, to)

    def set_position(self, topic: str, partition: int, offset: int) -> None:
        """Set the position of a partition."""
        self._cursors.of(topic, partition).position = offset

    def stop_returning(self) -> None:
        """Stop returning records, before `close`."""
        self._follower.is_closed = True
