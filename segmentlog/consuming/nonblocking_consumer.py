"""A consumer whose reading is cut into steps, none of which waits: what an asynchronous one has threads do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from segmentlog.consuming.consumer import HANDOVER_S, Consumer
from segmentlog.consuming.cursor_set import Ahead
from segmentlog.consuming.wakeup import Pause
from segmentlog.errors import OffsetOutOfRange, StoreClosed, UnknownTopic, UnreadableBatch
from segmentlog.records import Record, TopicPartition
from segmentlog.storage.watch import Watch


class Fetched:
    """Batches of one partition, with their records where these are wanted, on their way to be handed out.

    Raises `UnreadableBatch` if records are wanted and the first batch is unreadable. Another one ends what is handed
    out: the next fetch raises.
    """

    __slots__ = ("ahead", "records")

    def __init__(self, ahead: Ahead, *, with_records: bool) -> None:
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
                    ahead.cut(len(self.records))
                    break
            self.records.reverse()


class SteppedConsumer(Consumer[Any, Any]):
    """For one thread at a time, whichever it is; handing out is for the thread of an event loop."""

    _handover_ends_s = 0.0

    def step(self, *, is_first: bool, with_records: bool, waits: bool = False) -> Fetched | Pause | None:
        """What comes next; or for how long there is nothing to come; None when the iteration is at its end.

        ``is_first`` of an iteration: it ends where the logs end now, unless it follows.
        ``waits``: it does not end, but for `wakeup`, also where the consumer does not follow.
        """
        self._check_open()
        session, cursors, follower = self._session, self._cursors, self._follower
        if is_first:
            self._handover_ends_s = time.monotonic() + HANDOVER_S
            cursors.meet_ends()
        while True:
            if session is not None:
                session.poll()
            progress = False
            for cursor in cursors.turns():
                try:
                    if (ahead := cursors.fetch_ahead(cursor)) is not None:
                        return Fetched(ahead, with_records=with_records)
                except OffsetOutOfRange as error:
                    cursors.move_into_range(cursor, error)
                    progress = True
                except (UnknownTopic, StoreClosed):
                    if cursors.is_there(cursor):
                        raise
            if progress:
                continue
            if follower.is_ended():
                follower.is_woken = False
                return None
            if self._follows or waits:
                if (pause := follower.look(session)) is not None:
                    return pause
                if waits:
                    cursors.meet_ends()
            elif session is None or session.is_settled or time.monotonic() >= self._handover_ends_s:
                return None
            else:
                return Pause(session.wait_s, must_poll=False)

    @property
    def watch(self) -> Watch | None:
        """What wakes a follower."""
        return self._follower.watch

    @property
    def records_between_polls(self) -> int | None:
        """A member polls its group after so many; None without a group."""
        return None if self._session is None else self._max_poll_records

    @property
    def max_poll_records(self) -> int:
        """How many records a list of `AsyncConsumer.poll` has at most, unless its caller says otherwise."""
        return self._max_poll_records

    def take_part(self) -> None:
        """Take part in the group; all that was handed out is processed."""
        if self._session is not None:
            self._session.poll()

    def is_settled(self) -> bool:
        """Take part in the group, and say whether everything that is assigned is read."""
        session = self._of_group("assignment by one")
        session.poll(settled=True)
        return session.is_settled

    def is_wanted(self, fetched: Fetched) -> bool:
        """Whether what was fetched is still to be handed out: no seek, no pause, no rebalance came in between."""
        cursor = fetched.ahead.cursor
        return (
            cursor.position == fetched.ahead.position
            and not cursor.paused
            and self._cursors.by_partition.get(cursor.tp) is cursor
        )

    def note_handing(self, fetched: Fetched | None) -> None:
        """Whose record or batch the application is working on."""
        self._cursors.handing = None if fetched is None else fetched.ahead.cursor

    def commit_handed_out(self, handed_out: Mapping[TopicPartition, int], *, metadata: str, sync: bool) -> None:
        """Commit these positions, of those partitions that are still this member's to read."""
        there = self._cursors.by_partition
        self.commit({tp: offset for tp, offset in handed_out.items() if tp in there}, metadata=metadata, sync=sync)

    def resolve(self, topic: str, partition: int, to: Any) -> int:
        """The offset that is meant, for a seek."""
        return self._cursors.resolve(self._cursors.of(topic, partition).log, to)

    def move(self, topic: str, partition: int, offset: int) -> None:
        """Go on there."""
        self._cursors.of(topic, partition).position = offset

    def end_soon(self) -> None:
        """Hand out nothing more; `close` is to follow."""
        self._follower.is_closed = True
