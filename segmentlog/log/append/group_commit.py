"""Group commit: one write and one fsync for all threads that append durably at the same time.

A thread adds its records to a queue. If no thread leads, it becomes the leader. The leader takes the queue, merges
small appends into one batch, writes, syncs and wakes the threads whose records it wrote. Then the first thread that
queued meanwhile leads. On the test machine this reaches 2 to 5 times the rate of one thread. Threads that only queue
for the sync lock reached 1.2 times. Batches with a producer's numbers are not merged, because each has its own numbers,
but they are written together. A producer that may not append gets its error, and the others continue.

An interrupt may come anywhere, also in the leader, and must not leave a thread waiting (see `storage.interrupt_safe`):

- A thread leads while it holds the lock ``_leading`` by ``with``, and only then. The lock is never handed over.
- An append stays in the queue until it is done, and only the leader removes it. An append that was taken points to its
  `_CommitGroup`. Each change of a group's fate is one store into the group.
- Only the main thread runs signal handlers. While it is in `append`, or was interrupted in it, a wake-up may be lost.
  Sleeping threads then check every `POLL_INTERVAL_S`, and lead if no thread does. A leader that finds an unfinished
  group concludes that the group's leader was interrupted.
- While the main thread is not in `append`, the others sleep without a time-out: a wait with a time-out takes 2 us more,
  a twentieth of an append among 32 threads. The main thread sets `_main_is_here` before it checks whether other
  threads are in the queue. So every thread that sleeps without a time-out queued before the main thread. The main
  thread is the last to be woken and to lead, so another thread is about to lead. If the main thread does lead, it first
  wakes the others.
- An interrupted thread leaves at once and sets ``has_left``: leaders skip its append.
- A main thread that was interrupted does not lead on its next try while another thread waits. It wakes that thread and
  waits, too. Without this rule, a signal every millisecond blocked all appends. The main thread led again at once each
  time, and never finished the repair that its interrupted write had made necessary.
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
from segmentlog.log.append.batch_encoding import CheckedColumns, check_items, encode_columns_as_batches
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import is_failure
from segmentlog.storage.interrupt_safe import POLL_INTERVAL_S, is_main_thread, wake_sleeper

_MERGE_RECORDS = 16
"""Appends of at most this many records are merged. A larger append is encoded by its own thread before it queues."""
_MERGE_BYTES = 64 << 10
_GATHER_TRIES = 3


class _CommitGroup:
    """Appends that are written together, and their progress. Only the leader changes a group."""

    __slots__ = ("base_offset", "error", "is_kept", "is_placing", "is_synced", "is_void", "next_offset")

    def __init__(self) -> None:
        self.is_placing = False
        self.base_offset = self.next_offset = -1
        """Offsets of the group, once its records are appended."""
        self.is_synced = False
        self.is_kept = False
        """Whether the leader saw that no record of the group was dropped. If false, each thread checks its own records.
        """
        self.is_void = False
        """Whether nothing was appended: the next leader takes the appends into a new group."""
        self.error: BaseException | None = None

    @property
    def is_finished(self) -> bool:
        return self.is_synced or self.error is not None

    def end_with(self, error: BaseException) -> None:
        """Record that the leader ended with ``error``."""
        if is_failure(error):
            self.error = error  # an error of the log or the disk: it concerns all appends of the group
        else:
            self.end_interrupted()

    def end_interrupted(self) -> None:
        """Record that the leader was interrupted. The interrupt's exception must not reach the other threads."""
        if not self.is_placing:
            self.is_void = True
        elif self.next_offset < 0:
            self.error = SegmentlogError(
                "the thread that appended for a group of threads was interrupted: these records may or may not have"
                " been appended; read the end of the log before appending them again"
            )
        # Else all records are appended: another thread of the group syncs.


class _QueuedAppend:
    """An append in the queue. Its thread sleeps on the lock ``wake``, which is released to wake it."""

    __slots__ = (
        "_stamp",
        "ahead",
        "batches",
        "columns",
        "count",
        "error",
        "following",
        "group",
        "has_left",
        "is_main",
        "known_offset",
        "wake",
    )  # fmt: skip

    def __init__(
        self, columns: CheckedColumns | None, batches: list[EncodedBatch], stamp: ProducerStamp | None = None
    ) -> None:
        self.columns = columns
        self.batches = batches
        self._stamp = stamp
        self.known_offset = -1
        """The offset at which a producer's batches were appended before; -1 if they were not."""
        self.is_main = False
        self.group: _CommitGroup | None = None
        self.ahead = 0
        """The number of records before this append in its group."""
        self.count = 0
        self.error: BaseException | None = None
        """The error of this append alone. An error of the whole group is in `group`."""
        self.has_left = False
        self.following: _QueuedAppend | None = None
        self.wake: Any = _thread.allocate_lock()
        self.wake.acquire()

    @property
    def is_numbered(self) -> bool:
        """Whether the append has a producer id, epoch and sequence. Such an append is never merged with others."""
        return self._stamp is not None

    @property
    def stamp(self) -> ProducerStamp:
        """Producer id, epoch and first sequence of the append. Only for an append with `is_numbered`."""
        assert self._stamp is not None
        return self._stamp

    @property
    def is_free(self) -> bool:
        """Whether the append waits for a leader to add it to a group."""
        return not self.has_left and self.error is None and (self.group is None or self.group.is_void)

    @property
    def is_unfinished(self) -> bool:
        """Whether its thread still waits for a leader, to be taken into a group or for the fsync of its group."""
        return not self.has_left and self.error is None and (self.group is None or not self.group.is_finished)


class GroupCommit:
    """Appends and syncs for all waiting threads of this process.

    Thread-safe. Processes share fsyncs through `Syncer`.
    """

    def __init__(self, handle: Handle, appender: Appender, syncer: Syncer) -> None:
        self._handle = handle
        self._appender = appender
        self._syncer = syncer
        self._queue: deque[_QueuedAppend] = deque()
        self._leading = fork_safety.lock(self, "_leading")
        self._main_is_here = False
        """Whether the main thread is in `append`, or was interrupted there. Only the main thread sets it."""
        self._heir: _QueuedAppend | None = None
        """The append whose thread was woken to lead next.

        Only a hint: the thread may be interrupted before it leads.
        """
        self._last_group = 1
        # Not the buffer of the leading thread: that may hold its own batch, which is in the group.
        self._scratch = bytearray()
        handle.after_fork.append(self._reset)

    def _reset(self) -> None:
        """Discard the queue in a forked child: the child has neither the waiting threads nor the leader."""
        self._queue = deque()
        self._main_is_here = False
        self._heir = None
        self._last_group = 1
        self._scratch = bytearray()

    def append(
        self, columns: CheckedColumns, config: TopicConfig, now_ms: int, stamp: ProducerStamp | None = None
    ) -> int:
        """Append the columns. Return the offset of the first record once all records are on disk.

        ``stamp`` means the same as in `Appender.place`, and must not be transactional.
        """
        if not is_main_thread():
            return self._append(columns, config, now_ms, stamp)
        gives_way = self._main_is_here  # the last append of this thread was interrupted, so this one may be, too
        self._main_is_here = True  # and stays set if an error or an interrupt ends the append
        base_offset = self._append(columns, config, now_ms, stamp, is_main=True, gives_way=gives_way)
        self._main_is_here = False
        return base_offset

    def _append(
        self,
        columns: CheckedColumns,
        config: TopicConfig,
        now_ms: int,
        stamp: ProducerStamp | None,
        *,
        is_main: bool = False,
        gives_way: bool = False,
    ) -> int:
        leading = self._leading
        if self._last_group == 1 and not self._queue and not leading.locked():
            # Alone: no fsync to share, no thread to wake. A thread that arrives at this moment waits once for this
            # append, without sharing its fsync.
            try:
                with leading:
                    batches = encode_columns_as_batches(columns, config, now_ms, stamp=stamp)
                    base_offset, next_offset = self._appender.place(batches, now_ms, stamp)
                    self._syncer.sync_records(base_offset, next_offset)
                    return base_offset
            finally:
                self._wake_next_leader()
        mine = self._prepare(columns, config, now_ms, stamp, is_main=is_main)
        try:
            self._queue.append(mine)
            was_woken = True
            while True:
                group = mine.group  # like `_is_done`, without a call
                if mine.error is not None or (group is not None and (group.is_synced or group.error is not None)):
                    break
                # While the thread in `_heir` is about to lead, the other woken threads queue instead of leading.
                if (
                    not leading.locked()
                    and (not was_woken or self._may_lead(mine))
                    and not (gives_way and self._wake_other_leader())
                ):
                    with leading:
                        self._lead(mine)
                    self._wake_next_leader()
                else:
                    was_woken = mine.wake.acquire(True, POLL_INTERVAL_S if self._main_is_here else -1)
        except BaseException:
            mine.has_left = True
            self._wake_next_leader()  # this thread may have been woken to lead
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

    def _may_lead(self, mine: _QueuedAppend) -> bool:
        heir = self._heir
        return heir is None or heir is mine or not heir.is_unfinished

    def _wake_other_leader(self) -> bool:
        """Wake the first thread that waits to lead, except the main thread. Return False if no other thread waits."""
        other = next((queued for queued in list(self._queue) if not queued.is_main and queued.is_unfinished), None)
        if other is None:
            return False
        self._heir = other
        wake_sleeper(other.wake)
        return True

    def _is_done(self, mine: _QueuedAppend) -> bool:
        group = mine.group
        return mine.error is not None or (group is not None and group.is_finished)

    @staticmethod
    def _prepare(
        columns: CheckedColumns, config: TopicConfig, now_ms: int, stamp: ProducerStamp | None, *, is_main: bool
    ) -> _QueuedAppend:
        if stamp is None and _is_small(columns, config):
            # An interrupt ends the main thread's wait while the leader may still be writing the main thread's records.
            # So the leader must not use the main thread's lists, which belong to the caller again, or its buffer.
            mine = _QueuedAppend(columns.part(0, len(columns.values)) if is_main else columns, [])
        else:
            scratch = bytearray() if is_main else None
            mine = _QueuedAppend(None, encode_columns_as_batches(columns, config, now_ms, scratch, stamp), stamp)
        mine.is_main = is_main
        return mine

    # ------------------------------------------------------------ leading

    def _lead(self, mine: _QueuedAppend) -> None:
        """Append and sync for all threads in the queue, ``mine`` among them."""
        self._heir = None
        if self._is_done(mine):
            return
        group = mine.group
        queue = self._queue
        if mine.is_main:
            for queued in list(queue):
                wake_sleeper(queued.wake)
        # The group is unfinished although no other thread leads: its leader was interrupted.
        if group is not None and not group.is_void:
            if group.next_offset >= 0:
                self._syncer.sync(group.next_offset)
                group.is_synced = True
            else:
                group.end_interrupted()
            if group.is_finished:
                self._wake([queued for queued in list(queue) if queued.group is group], mine)
                return
            if mine not in queue:
                queue.append(mine)
        for _ in range(_GATHER_TRIES):
            # The threads of the last group are about to append again. Wait briefly for them, instead of syncing for a
            # single thread.
            if len(queue) * 2 >= self._last_group:
                break
            _yield_processor()
        taken = list(queue)
        self._last_group = len(taken)
        try:
            # The conditions of `is_free`, without a call for each.
            self._append_group(
                [
                    queued
                    for queued in taken
                    if (queued.group is None or queued.group.is_void) and queued.error is None and not queued.has_left
                ]
            )
        finally:
            while queue:
                group = queue[0].group
                is_finished = group is not None and (group.is_synced or group.error is not None)
                # Keep an append that waits for its fsync in the queue: a main thread that gives way wakes its thread.
                if not is_finished and queue[0].is_unfinished:
                    break
                queue.popleft()
            self._wake(taken, mine)

    def _append_group(self, waiting: Sequence[_QueuedAppend]) -> None:
        handle = self._handle
        config, now_ms = handle.config, handle.clock.now_ms()
        small = [append for append in waiting if append.columns is not None]
        large = [append for append in waiting if append.columns is None and not append.is_numbered]
        numbered = _first_of_each_producer(waiting)
        batches: list[EncodedBatch] = []
        if small:
            try:
                batches = encode_columns_as_batches(_merged(small, now_ms), config, now_ms, self._scratch)
            except SegmentlogError:  # one append cannot be encoded: find which one
                batches, small = self._encode_apart(small, config, now_ms)
        if not batches and not large and not numbered:
            return
        group = _CommitGroup()
        try:
            ahead = 0
            for append in small:
                assert append.columns is not None
                append.group, append.ahead, append.count = group, ahead, len(append.columns.values)
                ahead += append.count
            for append in large:
                append.group, append.ahead, append.count = group, ahead, _count_of(append.batches)
                ahead += append.count
            for append in numbered:  # `place` sets `ahead`, because it decides which of them may append
                append.group, append.count = group, _count_of(append.batches)
            batches = [*batches, *(batch for append in large for batch in append.batches)]
            group.is_placing = True
            group.base_offset, group.next_offset = self._appender.place(batches, now_ms, numbered=numbered)
            self._syncer.sync(group.next_offset)
            group.is_kept = self._syncer.is_kept(group.base_offset, group.next_offset)
            group.is_synced = True
        except BaseException as error:
            group.end_with(error)
            raise

    @staticmethod
    def _encode_apart(
        small: Sequence[_QueuedAppend], config: TopicConfig, now_ms: int
    ) -> tuple[list[EncodedBatch], list[_QueuedAppend]]:
        """Encode each append separately. Return (batches, their appends), and set `error` of the other appends."""
        batches: list[EncodedBatch] = []
        good: list[_QueuedAppend] = []
        for queued in small:
            assert queued.columns is not None
            try:
                batches += encode_columns_as_batches(queued.columns, config, now_ms, bytearray())
                good.append(queued)
            except SegmentlogError as error:
                queued.error = error
        return batches, good

    # ------------------------------------------------------------ waking

    @staticmethod
    def _wake(taken: Sequence[_QueuedAppend], mine: _QueuedAppend) -> None:
        """Wake one thread of the group, which wakes the next.

        So each thread wakes only one other thread. A single thread that woke all others would block them meanwhile.
        """
        others = [queued for queued in taken if queued is not mine and not queued.has_left]
        if len(others) > 1 and any(queued.is_main for queued in others):
            others.sort(key=lambda queued: queued.is_main)  # main thread last: it may not pass the wake-up on
        for queued, following in pairwise(others):
            queued.following = following
        if others:
            wake_sleeper(others[0].wake)

    def _wake_next_leader(self) -> None:
        """Wake the first waiting thread, so that it leads. Do nothing if a thread other than the main thread leads."""
        if self._queue and (self._main_is_here or not self._leading.locked()):
            if self._wake_other_leader():
                return
            main = next((queued for queued in list(self._queue) if queued.is_unfinished), None)
            if main is not None:
                self._heir = main
                wake_sleeper(main.wake)


def _count_of(batches: Sequence[EncodedBatch]) -> int:
    return sum(batch.last_offset_delta + 1 for batch in batches)


def _first_of_each_producer(waiting: Sequence[_QueuedAppend]) -> list[_QueuedAppend]:
    """Return the first append of each producer.

    A producer's next append can be checked only after its first is appended.
    """
    first: dict[int, _QueuedAppend] = {}
    for append in waiting:
        if append.is_numbered:
            first.setdefault(append.stamp.producer_id, append)
    return list(first.values())


def _is_small(columns: CheckedColumns, config: TopicConfig) -> bool:
    """Return whether the append is small enough to be merged with others.

    Raises `InvalidRecord` for a bad column, so that the append fails alone and not its group.
    """
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


def _merged(small: Sequence[_QueuedAppend], now_ms: int) -> CheckedColumns:
    """Return the concatenated columns of several appends. Records without a timestamp get ``now_ms``."""
    parts = [queued.columns for queued in small if queued.columns is not None]
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
    return CheckedColumns(values, keys, timestamps, None)


def _yield_processor() -> None:
    """Let other threads of this process run briefly."""
    import time

    time.sleep(0)
