"""Durable appends: one write and one fsync for all threads that ask at the same time.

A thread leaves its records in a queue. If nobody leads, it leads: it takes what is in the
queue, merges small appends into one batch, writes, syncs, and wakes those it did it for;
then the first of those who came meanwhile leads. Threads that merely queued for the sync
lock reached 1.2 times one thread's rate here, this 2 to 5 times.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from segmentlog.config import TopicConfig
from segmentlog.errors import LogTruncated, SegmentlogError
from segmentlog.format.batch import EncodedBatch
from segmentlog.partition.appender import Appender
from segmentlog.partition.encoding import Columns, check_items, encode_columns_as_batches
from segmentlog.partition.handle import Handle
from segmentlog.partition.syncer import Syncer
from segmentlog.storage import forks

_MERGE_RECORDS = 16
"""Appends of up to so many records are merged; larger ones are encoded by their own thread, before they queue."""
_MERGE_BYTES = 64 << 10
_GATHER_TRIES = 3


class _Waiting:
    """One append in the queue. ``wake`` is a held lock that is released when there is news."""

    __slots__ = ("base_offset", "batches", "columns", "error", "following", "leads", "wake")

    def __init__(self, columns: Columns | None, batches: list[EncodedBatch]) -> None:
        self.columns = columns
        self.batches = batches
        self.base_offset = -1
        self.error: BaseException | None = None
        self.leads = False
        self.following: _Waiting | None = None
        self.wake: Any = None


class GroupCommit:
    """Appends and syncs for whoever is waiting. Thread-safe; processes share fsyncs through `Syncer`."""

    def __init__(self, handle: Handle, appender: Appender, syncer: Syncer) -> None:
        self._handle = handle
        self._appender = appender
        self._syncer = syncer
        self._queue: deque[_Waiting] = deque()
        self._leading = forks.lock(self, "_leading")
        self._last_group = 1
        # Not the leading thread's own: that may hold its batch, which is in the group.
        self._scratch = bytearray()
        handle.after_fork.append(self._reset)

    def _reset(self) -> None:
        """In a forked child: nobody waits, and whoever was leading is gone with what it was encoding."""
        self._queue = deque()
        self._last_group = 1
        self._scratch = bytearray()

    def append(self, columns: Columns, config: TopicConfig, now_ms: int) -> int:
        """Append the columns and return the offset of the first record once all of them are on disk."""
        if self._leading.acquire(False):
            if not self._queue and self._last_group == 1:  # alone: nothing to share, nobody to wake
                try:
                    batches = encode_columns_as_batches(columns, config, now_ms)
                    base_offset, next_offset = self._appender.place(batches, now_ms)
                    self._syncer.sync_records(base_offset, next_offset)
                    return base_offset
                finally:
                    self._hand_over()
            mine = self._waiting(columns, config, now_ms)
            self._queue.append(mine)
            self._lead(mine)
        else:
            mine = self._waiting(columns, config, now_ms)
            mine.wake = _thread.allocate_lock()
            mine.wake.acquire()
            self._queue.append(mine)
            if self._leading.acquire(False):  # the leader left without seeing this one
                self._lead(mine)
            else:
                interrupted = self._sleep(mine)
                if mine.following is not None:
                    mine.following.wake.release()
                if mine.leads:
                    self._lead(mine)
                if interrupted is not None:
                    raise interrupted
        if mine.error is not None:
            raise mine.error
        return mine.base_offset

    @staticmethod
    def _sleep(mine: _Waiting) -> BaseException | None:
        """Wait to be woken, whatever a signal handler raises meanwhile: the next in line depends on this one."""
        interrupted = None
        while True:
            try:
                mine.wake.acquire()
                return interrupted
            except BaseException as error:
                interrupted = error

    @staticmethod
    def _waiting(columns: Columns, config: TopicConfig, now_ms: int) -> _Waiting:
        if _is_small(columns, config):
            return _Waiting(columns, [])
        batches = encode_columns_as_batches(columns, config, now_ms)
        return _Waiting(None, batches)

    def _lead(self, mine: _Waiting) -> None:
        """Append and sync for everyone in the queue, ``mine`` among them."""
        queue = self._queue
        group: list[_Waiting] = []
        try:
            for _ in range(_GATHER_TRIES):
                # Those who were just woken are about to come back: let them, rather than sync for one alone.
                if len(queue) * 2 >= self._last_group:
                    break
                _yield_processor()
            group += [queue.popleft() for _ in range(len(queue))]
            self._last_group = len(group)
            self._append_group(group)
        except BaseException as error:
            for one in group:
                one.error = one.error or (error if one is mine else _for_others(error))
            if mine not in group:  # interrupted before it was taken
                queue.remove(mine)
                raise
        finally:
            self._wake(group, mine)
            self._hand_over()

    def _append_group(self, group: Sequence[_Waiting]) -> None:
        handle = self._handle
        config, now_ms = handle.config, handle.clock.now_ms()
        small = [one for one in group if one.columns is not None]
        large = [one for one in group if one.columns is None]
        batches: list[EncodedBatch] = []
        if small:
            try:
                batches = encode_columns_as_batches(_merged(small, now_ms), config, now_ms, self._scratch)
            except SegmentlogError:  # one's records cannot be encoded: that is its own affair
                batches, small = self._encode_apart(small, config, now_ms)
        if not batches and not large:
            return
        base_offset, next_offset = self._appender.place(
            [*batches, *(batch for one in large for batch in one.batches)], now_ms
        )
        offset = base_offset
        ends: list[int] = []
        for one in small:
            assert one.columns is not None
            one.base_offset, offset = offset, offset + len(one.columns.values)
            ends.append(offset)
        for one in large:
            one.base_offset = offset
            offset += sum(batch.last_offset_delta + 1 for batch in one.batches)
            ends.append(offset)
        try:
            self._syncer.sync_records(base_offset, next_offset)
        except LogTruncated:  # of some of them, perhaps
            for one, end_offset in zip((*small, *large), ends, strict=True):
                lost = self._syncer.lost_among(one.base_offset, end_offset)
                if lost is not None:
                    one.error = LogTruncated(handle.log_name, max(one.base_offset, lost.base_offset), lost)

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

    @staticmethod
    def _wake(group: Sequence[_Waiting], mine: _Waiting) -> None:
        """Wake one, who wakes the next: each wakes the other core once, where one thread waking all blocks it."""
        others = [one for one in group if one is not mine and one.wake is not None]
        for one, following in pairwise(others):
            one.following = following
        if others:
            others[0].wake.release()

    def _hand_over(self) -> None:
        """Let the first of those who came meanwhile lead, or nobody."""
        while True:
            if self._queue:
                heir = self._queue[0]
                if heir.wake is not None:
                    heir.leads = True
                    heir.wake.release()
                    return
            self._leading.release()
            # Somebody may have queued between the look and the release, and found the lead taken.
            if not self._queue or not self._leading.acquire(False):
                return


def _for_others(error: BaseException) -> BaseException:
    """What kept the append from being made, as those are told it who waited: an interrupt is not theirs."""
    if isinstance(error, Exception):
        return error
    return SegmentlogError(
        f"the thread that was appending for several was interrupted ({type(error).__name__}): these records may or may"
        " not be appended; read the end of the log before trying again"
    )


def _is_small(columns: Columns, config: TopicConfig) -> bool:
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


def _merged(small: Sequence[_Waiting], now_ms: int) -> Columns:
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
    return Columns(values, keys, timestamps, None)


def _yield_processor() -> None:
    """Let other threads of this process run for a moment."""
    import time

    time.sleep(0)
