"""Durable appends: one write and one fsync for all threads that ask at the same time.

A thread leaves its records in a queue. If nobody leads, it leads: it takes what is in the
queue, merges small appends into one batch, writes, syncs, and wakes those it did it for;
then the first of those who came meanwhile leads. Threads that merely queued for the sync
lock reached 1.2 times one thread's rate here, this 2 to 5 times. Batches of producers with numbers are not
merged, as each has its own, but written together: whoever of them may not append is told so, and the others go on.

An interrupt may come anywhere, in the leader as well, and leaves nobody waiting (`storage.interrupt_safe`):

- Leading is holding the lock ``_leading`` by ``with``, nothing else. It is never handed over while it is held.
- What is in the queue stays there until it is done, and only who leads removes it. An append that is taken points
  to its `_Group`; whatever happens to a whole group is one store into that.
- Only the main thread runs signal handlers. While it is here, or was interrupted here, a wake-up is a hint: whoever
  sleeps looks around every `LOOK_EVERY_S`, and leads if nobody does. Who leads and finds a group that is not settled
  knows that its leader was interrupted.
- As long as it is not, the others sleep until they are told: a wait with a time-out takes 2 us more, a twentieth of an
  append among 32 threads. It says that it is here before it looks whether anybody else is. So whoever sleeps without
  a time-out was in the queue before, and the main thread is the last to be woken and to lead: one of the others is
  on his way. Should it lead all the same, it wakes them first.
- Whoever is interrupted leaves at once, and says so (``left``): what he wants appended is not taken any more.
- A main thread that was interrupted here does not lead on its next try while another thread waits. It wakes that
  thread and waits too. A signal every millisecond leaves the main thread no time to finish the repair that its own
  interrupted write made necessary. It used to take the lead again at once, every time, and no thread could append.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError
from segmentlog.format.encode import EncodedBatch
from segmentlog.log.append.appender import Appender
from segmentlog.log.append.batch_encoding import RecordColumns, check_items, encode_columns_as_batches
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import is_failure
from segmentlog.storage.interrupt_safe import POLL_INTERVAL_S, is_main_thread, wake_sleeper

_MERGE_RECORDS = 16
"""Appends of up to so many records are merged; larger ones are encoded by their own thread, before they queue."""
_MERGE_BYTES = 64 << 10
_GATHER_TRIES = 3


class _Group:
    """Appends that are written together, and how far that came. Changed by who leads."""

    __slots__ = ("base_offset", "error", "is_kept", "is_placing", "is_synced", "is_void", "next_offset")

    def __init__(self) -> None:
        self.is_placing = False
        self.base_offset = self.next_offset = -1
        """Once they are appended."""
        self.is_synced = False
        self.is_kept = False
        """Nobody has dropped any of it, as far as its leader saw: else each looks for its own records."""
        self.is_void = False
        """Nothing was appended: the next who leads takes them anew."""
        self.error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        return self.is_synced or self.error is not None

    def broke_off(self, error: BaseException) -> None:
        """What becomes of it when its leader ends in ``error``."""
        if is_failure(error):
            self.error = error  # the log's, or the disk's: it is every one's
        else:
            self.orphan()

    def orphan(self) -> None:
        """Settle it, as far as that goes, when its leader was interrupted: an interrupt is not the others' affair."""
        if not self.is_placing:
            self.is_void = True
        elif self.next_offset < 0:
            self.error = SegmentlogError(
                "the thread that was appending for several was interrupted: these records may or may not be appended;"
                " read the end of the log before trying again"
            )
        # Else all of it is appended: somebody else of the group syncs.


class _Waiting:
    """One append in the queue. ``wake`` is a held lock that is released when there is news."""

    __slots__ = (
        "_stamp", "ahead", "batches", "columns", "count", "error", "following", "group", "is_main", "known_offset",
        "left", "wake",
    )  # fmt: skip

    def __init__(
        self, columns: RecordColumns | None, batches: list[EncodedBatch], stamp: ProducerStamp | None = None
    ) -> None:
        self.columns = columns
        self.batches = batches
        self._stamp = stamp
        self.known_offset = -1
        """Where a producer's batches were appended before, if they were."""
        self.is_main = False
        self.group: _Group | None = None
        self.ahead = 0
        """How many records of its group come before it."""
        self.count = 0
        self.error: BaseException | None = None
        """Its own, as opposed to the group's."""
        self.left = False
        self.following: _Waiting | None = None
        self.wake: Any = _thread.allocate_lock()
        self.wake.acquire()

    @property
    def is_numbered(self) -> bool:
        """Whether it is a producer's, under its numbers: then it is never merged with others."""
        return self._stamp is not None

    @property
    def stamp(self) -> ProducerStamp:
        """Of one that is numbered."""
        assert self._stamp is not None
        return self._stamp

    @property
    def is_free(self) -> bool:
        """Whether it is still to be taken into a group."""
        return not self.left and self.error is None and (self.group is None or self.group.is_void)

    @property
    def is_unfinished(self) -> bool:
        """Whether its thread still waits for a leader: to be taken into a group, or for the fsync of its group."""
        return not self.left and self.error is None and (self.group is None or not self.group.is_settled)


class GroupCommit:
    """Appends and syncs for whoever is waiting. Thread-safe; processes share fsyncs through `Syncer`."""

    def __init__(self, handle: Handle, appender: Appender, syncer: Syncer) -> None:
        self._handle = handle
        self._appender = appender
        self._syncer = syncer
        self._queue: deque[_Waiting] = deque()
        self._leading = fork_safety.lock(self, "_leading")
        self._main_is_here = False
        """Or was interrupted here. Only the main thread writes it."""
        self._heir: _Waiting | None = None
        """Who was woken to lead next. A hint: he may be interrupted on his way."""
        self._last_group = 1
        # Not the leading thread's own: that may hold its batch, which is in the group.
        self._scratch = bytearray()
        handle.after_fork.append(self._reset)

    def _reset(self) -> None:
        """In a forked child: nobody waits, and whoever was leading is gone with what it was encoding."""
        self._queue = deque()
        self._main_is_here = False
        self._heir = None
        self._last_group = 1
        self._scratch = bytearray()

    def append(
        self, columns: RecordColumns, config: TopicConfig, now_ms: int, stamp: ProducerStamp | None = None
    ) -> int:
        """Append the columns and return the offset of the first record once all of them are on disk.

        With the ``stamp`` of a producer, which must be of no transaction, as `Appender.place` does.
        """
        if not is_main_thread():
            return self._append(columns, config, now_ms, stamp)
        gives_way = self._main_is_here  # the last append of this thread was interrupted: this one may be, too
        self._main_is_here = True  # and stays so when an error, or an interrupt, ends it
        base_offset = self._append(columns, config, now_ms, stamp, is_main=True, gives_way=gives_way)
        self._main_is_here = False
        return base_offset

    def _append(
        self,
        columns: RecordColumns,
        config: TopicConfig,
        now_ms: int,
        stamp: ProducerStamp | None,
        *,
        is_main: bool = False,
        gives_way: bool = False,
    ) -> int:
        leading = self._leading
        if self._last_group == 1 and not self._queue and not leading.locked():
            # Alone: nothing to share, nobody to wake. Who comes at the same moment waits here, and shares nothing once.
            try:
                with leading:
                    batches = encode_columns_as_batches(columns, config, now_ms, stamp=stamp)
                    base_offset, next_offset = self._appender.place(batches, now_ms, stamp)
                    self._syncer.sync_records(base_offset, next_offset)
                    return base_offset
            finally:
                self._rouse_next()
        mine = self._waiting(columns, config, now_ms, stamp, is_main=is_main)
        try:
            self._queue.append(mine)
            is_told = True
            while True:
                group = mine.group  # as `_is_done`, without a call
                if mine.error is not None or (group is not None and (group.is_synced or group.error is not None)):
                    break
                # While an heir is on his way, those who were just woken come back and queue for him.
                if (
                    not leading.locked()
                    and (not is_told or self._may_lead(mine))
                    and not (gives_way and self._has_other_lead())
                ):
                    with leading:
                        self._lead(mine)
                    self._rouse_next()
                else:
                    is_told = mine.wake.acquire(True, POLL_INTERVAL_S if self._main_is_here else -1)
        except BaseException:
            mine.left = True
            self._rouse_next()  # it may have been this one's turn
            raise
        finally:
            if mine.following is not None:
                wake_sleeper(mine.following.wake)
        if mine.error is not None:
            raise mine.error
        assert group is not None
        if group.error is not None:
            raise group.error
        base_offset = group.base_offset + mine.ahead if mine.known_offset < 0 else mine.known_offset
        if not group.is_kept or mine.known_offset >= 0:
            self._syncer.raise_if_lost(base_offset, base_offset + mine.count)
        return base_offset

    def _may_lead(self, mine: _Waiting) -> bool:
        heir = self._heir
        return heir is None or heir is mine or not heir.is_unfinished

    def _has_other_lead(self) -> bool:
        """Wake the first thread that waits to lead, except the main thread; False when no other thread waits."""
        other = next((one for one in list(self._queue) if not one.is_main and one.is_unfinished), None)
        if other is None:
            return False
        self._heir = other
        wake_sleeper(other.wake)
        return True

    def _is_done(self, mine: _Waiting) -> bool:
        group = mine.group
        return mine.error is not None or (group is not None and group.is_settled)

    @staticmethod
    def _waiting(
        columns: RecordColumns, config: TopicConfig, now_ms: int, stamp: ProducerStamp | None, *, is_main: bool
    ) -> _Waiting:
        if stamp is None and _is_small(columns, config):
            # An interrupt ends the wait of the main thread while another thread may be writing its records: neither its
            # lists, which are the caller's again then, nor its buffer may be used for that.
            mine = _Waiting(columns.part(0, len(columns.values)) if is_main else columns, [])
        else:
            scratch = bytearray() if is_main else None
            mine = _Waiting(None, encode_columns_as_batches(columns, config, now_ms, scratch, stamp), stamp)
        mine.is_main = is_main
        return mine

    # ------------------------------------------------------------ leading

    def _lead(self, mine: _Waiting) -> None:
        """Append and sync for everyone in the queue, ``mine`` among them."""
        self._heir = None
        if self._is_done(mine):
            return
        group = mine.group
        queue = self._queue
        if mine.is_main:
            for one in list(queue):
                wake_sleeper(one.wake)
        if group is not None and not group.is_void:  # not settled, and nobody else leads: its leader was interrupted
            if group.next_offset >= 0:
                self._syncer.sync(group.next_offset)
                group.is_synced = True
            else:
                group.orphan()
            if group.is_settled:
                self._wake([one for one in list(queue) if one.group is group], mine)
                return
            if mine not in queue:
                queue.append(mine)
        for _ in range(_GATHER_TRIES):
            # Those who were just woken are about to come back: let them, rather than sync for one alone.
            if len(queue) * 2 >= self._last_group:
                break
            _yield_processor()
        taken = list(queue)
        self._last_group = len(taken)
        try:
            # `is_free`, without a call for each.
            self._append_group(
                [
                    one
                    for one in taken
                    if (one.group is None or one.group.is_void) and one.error is None and not one.left
                ]
            )
        finally:
            while queue:
                group = queue[0].group
                is_settled = group is not None and (group.is_synced or group.error is not None)
                # An append that still waits for its fsync stays: a main thread that gives way has to see it.
                if not is_settled and queue[0].is_unfinished:
                    break
                queue.popleft()
            self._wake(taken, mine)

    def _append_group(self, waiting: Sequence[_Waiting]) -> None:
        handle = self._handle
        config, now_ms = handle.config, handle.clock.now_ms()
        small = [append for append in waiting if append.columns is not None]
        large = [append for append in waiting if append.columns is None and not append.is_numbered]
        numbered = _first_of_each_producer(waiting)
        batches: list[EncodedBatch] = []
        if small:
            try:
                batches = encode_columns_as_batches(_merged(small, now_ms), config, now_ms, self._scratch)
            except SegmentlogError:  # one's records cannot be encoded: that is its own affair
                batches, small = self._encode_apart(small, config, now_ms)
        if not batches and not large and not numbered:
            return
        group = _Group()
        try:
            ahead = 0
            for append in small:
                assert append.columns is not None
                append.group, append.ahead, append.count = group, ahead, len(append.columns.values)
                ahead += append.count
            for append in large:
                append.group, append.ahead, append.count = group, ahead, _count_of(append.batches)
                ahead += append.count
            for append in numbered:  # what is ahead of them is known once it is known who of them may append
                append.group, append.count = group, _count_of(append.batches)
            batches = [*batches, *(batch for append in large for batch in append.batches)]
            group.is_placing = True
            group.base_offset, group.next_offset = self._appender.place(batches, now_ms, numbered=numbered)
            self._syncer.sync(group.next_offset)
            group.is_kept = self._syncer.is_kept(group.base_offset, group.next_offset)
            group.is_synced = True
        except BaseException as error:
            group.broke_off(error)
            raise

    @staticmethod
    def _encode_apart(
        small: Sequence[_Waiting], config: TopicConfig, now_ms: int
    ) -> tuple[list[EncodedBatch], list[_Waiting]]:
        """Batches for each of them, and those for which there are some; the others are told why not."""
        batches: list[EncodedBatch] = []
        good: list[_Waiting] = []
        for one in small:
            assert one.columns is not None
            try:
                batches += encode_columns_as_batches(one.columns, config, now_ms, bytearray())
                good.append(one)
            except SegmentlogError as error:
                one.error = error
        return batches, good

    # ------------------------------------------------------------ waking

    @staticmethod
    def _wake(taken: Sequence[_Waiting], mine: _Waiting) -> None:
        """Wake one, who wakes the next: each wakes the other core once, where one thread waking all blocks it."""
        others = [one for one in taken if one is not mine and not one.left]
        if len(others) > 1 and any(one.is_main for one in others):
            others.sort(key=lambda one: one.is_main)  # last: nobody's wake-up depends on it
        for one, following in pairwise(others):
            one.following = following
        if others:
            wake_sleeper(others[0].wake)

    def _rouse_next(self) -> None:
        """Have the first of those who wait lead, unless another thread does that is not the main one."""
        if self._queue and (self._main_is_here or not self._leading.locked()):
            if self._has_other_lead():
                return
            main = next((one for one in list(self._queue) if one.is_unfinished), None)
            if main is not None:
                self._heir = main
                wake_sleeper(main.wake)


def _count_of(batches: Sequence[EncodedBatch]) -> int:
    return sum(batch.last_offset_delta + 1 for batch in batches)


def _first_of_each_producer(waiting: Sequence[_Waiting]) -> list[_Waiting]:
    """Those with numbers, but of each producer the first alone: whether the next one follows is known after that."""
    first: dict[int, _Waiting] = {}
    for append in waiting:
        if append.is_numbered:
            first.setdefault(append.stamp.producer_id, append)
    return list(first.values())


def _is_small(columns: RecordColumns, config: TopicConfig) -> bool:
    """Whether the append is to be merged with others. Raises `InvalidRecord`: before others depend on it."""
    values, keys = columns.values, columns.keys
    if len(values) > _MERGE_RECORDS or (config.segment_records or _MERGE_RECORDS) < _MERGE_RECORDS:
        return False
    check_items(columns)
    size_bytes = sum(len(value) for value in values if value is not None)
    if keys is not None:
        size_bytes += sum(len(key) for key in keys if key is not None)
    if columns.headers is not None:
        return False
    return size_bytes <= min(_MERGE_BYTES, config.max_message_bytes // 2)


def _merged(small: Sequence[_Waiting], now_ms: int) -> RecordColumns:
    """The columns of several appends one after another; those without timestamps get the time."""
    parts = [one.columns for one in small if one.columns is not None]
    if len(parts) == 1:
        return parts[0]
    values = [value for part in parts for value in part.values]
    keys = None
    if any(part.keys is not None for part in parts):
        keys = [key for part in parts for key in (part.keys or [None] * len(part.values))]
    timestamps = None
    if any(part.timestamps is not None for part in parts):
        timestamps = np.concatenate(
            [np.full(len(part.values), now_ms) if part.timestamps is None else part.timestamps for part in parts]
        )
    return RecordColumns(values, keys, timestamps, None)


def _yield_processor() -> None:
    """Let other threads of this process run for a moment."""
    import time

    time.sleep(0)
