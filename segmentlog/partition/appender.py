"""Appending: batches that are ready get their offsets, are written and published, under one lock.

The lock is held for the assignment of offsets and one `pwritev`, nothing else: encoding is
done before, fsync after.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Sequence
from typing import Any

import msgspec

from segmentlog.config import OFFSET_CEILING_STEP
from segmentlog.errors import DiskFull
from segmentlog.format.batch import EncodedBatch
from segmentlog.format.names import INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX
from segmentlog.partition.handle import WRITING, Handle
from segmentlog.partition.loader import cut_torn_tail
from segmentlog.policy.roll import should_roll
from segmentlog.storage.fs import NO_ROOM
from segmentlog.storage.index import SegmentIndex
from segmentlog.storage.segment import ActiveSegment, MappedSegment, segment_stem
from segmentlog.storage.state import LogState

_Observed = tuple[SegmentIndex, int, int, int, int, int]
"""A batch that was written: its index, position, base offset, next offset, largest timestamp, size in bytes."""


class Appender:
    """Places finished batches at the end of the log. Thread-safe; any number of processes have one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._active: ActiveSegment | None = None
        self._active_key = (-1, -1)
        self._index: SegmentIndex | None = None
        self._mapped: MappedSegment | None = None
        self._seen: LogState | None = None
        self._sealing: list[tuple[SegmentIndex, int, int]] = []
        self.appended = False
        """Whether this process appended since it opened the partition: it then owes a clean close."""
        handle.closers.append(self._close_active)

    def place(self, batches: Sequence[EncodedBatch]) -> tuple[int, LogState]:
        """Append the batches, all or none: (offset of the first record, the state just published).

        Their offsets are consecutive, across batches and segments. Raises `DiskFull`,
        `PartitionFailed`, `UnknownTopic`.
        """
        handle = self._handle
        with handle.append_mutex:
            handle.ensure_open()
            flock, fd = handle.fs.flock, handle.lock_fd
            flock(fd, fcntl.LOCK_EX)
            try:
                return self._place_locked(batches)
            finally:
                flock(fd, fcntl.LOCK_UN)

    def _place_locked(self, batches: Sequence[EncodedBatch]) -> tuple[int, LogState]:
        handle = self._handle
        page = handle.page
        handle.check_appendable()
        if page.writing:
            cut_torn_tail(handle, page)
        log = page.log.read()
        active = self._catch_up(log)
        base_offset = log.log_end_offset
        record_count = 0
        for batch in batches:
            record_count += batch.last_offset_delta + 1
        if base_offset + record_count > page.sync.read().offset_ceiling:
            self._raise_ceiling(base_offset + record_count)
        runs = self._plan(log, batches)
        page.writing = WRITING
        observed: list[_Observed] = []
        if len(runs) == 1 and runs[0][0] == log.active_base_offset:
            after = self._write_run(active, log, runs[0][1], observed)
        else:
            after = self._write_runs(active, log, runs, observed)
        page.log.write(after)
        page.writing = 0
        if page.waiting_until_ms:
            handle.wake_followers()
        # Only now: an index must not know of batches that were never published.
        for index, position, first, following, max_timestamp, size_bytes in observed:
            index.observe(position, first, following, max_timestamp, size_bytes)
        if self._sealing:
            self._seal()
        self._seen = after
        self.appended = True
        return base_offset, after

    def _catch_up(self, log: LogState) -> ActiveSegment:
        """The active segment and its index as they are now, whoever appended meanwhile."""
        key = (log.active_base_offset, log.epoch)
        active, index = self._active, self._index
        if active is None or index is None or self._active_key != key:
            self._close_active()
            handle = self._handle
            base = log.active_base_offset
            active = ActiveSegment(handle.fs, handle.folder, base, handle.config.segment_bytes, create=False)
            index = SegmentIndex(
                handle.fs, segment_stem(handle.folder, base), base, handle.config.index_interval_bytes
            )
            index.load(limit=log.end_position)
            self._active, self._index, self._active_key, self._seen = active, index, key, None
        if self._seen is not log and index.scanned_position != log.end_position:
            mapped = self._mapped
            if mapped is None:
                mapped = self._mapped = MappedSegment(self._handle.fs, self._handle.folder, log.active_base_offset)
            index.catch_up(mapped.upto(log.end_position), log.end_position, mapped.path)
        return active

    def _require_index(self) -> SegmentIndex:
        assert self._index is not None, "the index is opened with the active segment"
        return self._index

    def _raise_ceiling(self, next_offset: int) -> None:
        """Reserve offsets durably before any of them is handed out: one fsync for a million records."""
        handle = self._handle
        ceiling = next_offset + OFFSET_CEILING_STEP
        with handle.sync_locked():
            try:
                handle.update_checkpoint(offset_ceiling=ceiling, clean=False)
            except DiskFull:
                raise
            except OSError as error:
                handle.fail(f"writing the checkpoint failed ({error})")
            handle.page.sync.write(msgspec.structs.replace(handle.page.sync.read(), offset_ceiling=ceiling))

    def _plan(self, log: LogState, batches: Sequence[EncodedBatch]) -> list[tuple[int, list[EncodedBatch]]]:
        """(base offset of the segment, its batches) in order: where the log rolls, and where not."""
        config = self._handle.config
        base, position, offset = log.active_base_offset, log.end_position, log.log_end_offset
        now_ms = self._handle.clock.now_ms()
        age_ms = now_ms - log.first_append_ms if log.first_append_ms else 0
        runs: list[tuple[int, list[EncodedBatch]]] = [(base, [])]
        for batch in batches:
            count = batch.last_offset_delta + 1
            if should_roll(
                config,
                size_bytes=position,
                record_count=offset - base,
                next_relative_offset=offset - base,
                age_ms=age_ms,
                batch_bytes=batch.size_bytes,
                batch_records=count,
            ):
                base, position, age_ms = offset, 0, 0
                runs.append((base, []))
            runs[-1][1].append(batch)
            position += batch.size_bytes
            offset += count
        return runs if runs[0][1] else runs[1:]

    def _write_run(
        self, active: ActiveSegment, log: LogState, batches: Sequence[EncodedBatch], observed: list[_Observed]
    ) -> LogState:
        """Write batches that go to one segment; the state as it is after them, not yet published."""
        handle = self._handle
        config, epoch = handle.config, log.epoch
        now_ms = handle.clock.now_ms()
        append_time_ms = now_ms if config.message_timestamp_type == "LogAppendTime" else None
        position, offset = log.end_position, log.log_end_offset
        buffers: list[Any] = []
        size_bytes = 0
        for batch in batches:
            buffers.append(batch.placed_at(offset, epoch, append_time_ms))
            buffers.append(batch.payload)
            size_bytes += batch.size_bytes
            offset += batch.last_offset_delta + 1
        try:
            active.write(buffers, size_bytes, position)
        except DiskFull:
            handle.page.writing = 0
            raise
        except OSError as error:
            handle.fail(f"a write failed ({error})")
        index = self._require_index()
        at, next_offset = position, log.log_end_offset
        for batch in batches:
            base_offset, next_offset = next_offset, next_offset + batch.last_offset_delta + 1
            observed.append((index, at, base_offset, next_offset, batch.max_timestamp, batch.size_bytes))
            at += batch.size_bytes
        return LogState(
            log.log_start_offset,
            offset,
            offset,
            active.base_offset,
            at,
            epoch,
            log.generation,
            log.appended_bytes + size_bytes,
            log.first_append_ms or now_ms,
        )

    def _write_runs(
        self,
        active: ActiveSegment,
        log: LogState,
        runs: Sequence[tuple[int, list[EncodedBatch]]],
        observed: list[_Observed],
    ) -> LogState:
        """Write batches over one or more rolls. Readers see all of it at once: nothing is published in between."""
        before = log
        made: list[int] = []
        try:
            for base, batches in runs:
                if base != log.active_base_offset:
                    self._sealing.append((self._require_index(), log.log_end_offset, log.end_position))
                    made.append(base)
                    active = self._begin_segment(base)
                    log = msgspec.structs.replace(
                        log,
                        active_base_offset=base,
                        end_position=0,
                        generation=log.generation + 1,
                        first_append_ms=0,
                    )
                log = self._write_run(active, log, batches, observed)
            for index, _, size_bytes in self._sealing:
                # Before readers see it as sealed: from then on they map all of the file.
                self._cut_file(index.base_offset, size_bytes)
        except BaseException:
            self._undo(before, made)
            raise
        return log

    def _seal(self) -> None:
        """Complete the indexes of the segments that the rolls left behind."""
        sealing, self._sealing = self._sealing, []
        for index, next_offset, size_bytes in sealing:
            index.close(next_offset, size_bytes)

    def _begin_segment(self, base: int) -> ActiveSegment:
        handle = self._handle
        try:
            segment = ActiveSegment(handle.fs, handle.folder, base, handle.config.segment_bytes, create=True)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(segment_stem(handle.folder, base) + LOG_SUFFIX, 0) from error
            raise
        self._close_active(flush=False)
        self._active = segment
        self._active_key = (base, handle.page.log.read().epoch)
        stem = segment_stem(handle.folder, base)
        self._index = SegmentIndex(handle.fs, stem, base, handle.config.index_interval_bytes)
        return segment

    def _undo(self, before: LogState, made: Sequence[int]) -> None:
        """Take back what was written but not published."""
        handle = self._handle
        self._sealing.clear()
        self._close_active(flush=False)
        for base in made:
            for suffix in (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    handle.fs.unlink(segment_stem(handle.folder, base) + suffix)
        self._cut_file(before.active_base_offset, before.end_position)
        handle.page.writing = 0

    def _cut_file(self, base: int, size_bytes: int) -> None:
        """Give back what was preallocated behind the end of a segment."""
        handle = self._handle
        segment = ActiveSegment(handle.fs, handle.folder, base, 0, create=False)
        try:
            segment.cut(size_bytes)
        finally:
            segment.close()

    def _close_active(self, *, flush: bool = True) -> None:
        if self._active is not None:
            with contextlib.suppress(OSError):
                self._active.close()
        if self._index is not None and flush:
            self._index.flush()
        self._active, self._index, self._mapped, self._seen = None, None, None, None
        self._active_key = (-1, -1)

    def trim_preallocated(self, log: LogState) -> None:
        """Give back the space ahead of the end, at a clean close. The caller holds the append lock."""
        self._close_active()
        self._cut_file(log.active_base_offset, log.end_position)
