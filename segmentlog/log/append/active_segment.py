"""Write to the active segment: its file, its index, and rolls.

catch_up      open the active segment that the log has now; other processes may have appended or rolled
write         write batches after the end; nothing is published yet
roll          seal the segment and begin the next
finish_rolls  after publishing: complete the indexes of sealed segments, keep their files open until synced
undo          instead of publishing: remove everything after the old end, durably
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from segmentlog.errors import DiskFull
from segmentlog.format.batch import BatchHeader
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.file_names import LOG_SUFFIX, SEGMENT_SUFFIXES
from segmentlog.log.handle import Handle
from segmentlog.policy.roll import should_roll
from segmentlog.storage.fs import NO_ROOM, Buffer, DiskFailed
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.segment import (
    ActiveSegment,
    MappedSegment,
    SealedSegment,
    segment_stem,
    truncate_durably,
    truncate_segment,
)
from segmentlog.storage.segment_index import SegmentIndex
from segmentlog.storage.state_page import LogState

_LEFT_OPEN = 8
# Limit of the sealed segments that one append keeps open: an append of many segments must not use all descriptors.

_Run = tuple[int, list[EncodedBatch]]
Observed = tuple[SegmentIndex, int, int, int, int, int]
"""A batch that was written: its index, position, base offset, next offset, largest timestamp, size in bytes."""


class _Sealed(msgspec.Struct):
    """A segment that was sealed by an append that is not published yet."""

    segment: SealedSegment
    index: SegmentIndex
    next_offset: int
    size_bytes: int


class ActiveSegmentWriter:
    """Writes after the end of the log. Used by the thread that holds the append lock."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._segment: ActiveSegment | None = None
        self._key = (-1, -1)
        self._index: SegmentIndex | None = None
        self._mapped: MappedSegment | None = None
        self.seen: LogState | None = None
        """The log state for which file and index are open; None if the next append must check."""
        self.sealed: list[_Sealed] = []
        """Segments that the running append sealed."""

    def catch_up(self, log: LogState) -> None:
        """Open the active segment and its index at the end of the log, which other processes may have moved."""
        handle = self._handle
        while self.sealed:  # an interrupted append sealed them: they may be published, but are not synced
            left = self.sealed.pop()
            if left.segment.fd >= 0:
                handle.add_sealed(left.segment)
        if self._is_open_for(log):
            self._follow(log)
            return
        with handle.folder_locked():
            self._follow(log)

    def _is_open_for(self, log: LogState) -> bool:
        """Return whether the open file and index match ``log``, so that no file is opened by name."""
        if self._segment is None or self._segment.fd < 0 or self._index is None:
            return False
        if self._key != (log.active_base_offset, log.epoch):
            return False
        seen = 0 if self._mapped is None else len(self._mapped.view)
        return log.end_position <= max(seen, self._index.scanned_position)

    def _follow(self, log: LogState) -> None:
        handle = self._handle
        base = log.active_base_offset
        key = (base, log.epoch)
        index = self._index
        if index is None or self._key != key:
            self._close_segment()
            index = handle.index_of(base)
            index.load(limit=log.end_position)
            self._index, self._key = index, key
        if self._segment is None or self._segment.fd < 0:
            self._segment = self._open_segment(base, create=False)
        if index.scanned_position != log.end_position:
            mapped = self._mapped
            if mapped is None:
                mapped = self._mapped = MappedSegment(handle.fs, handle.folder, base)
            index.catch_up(mapped.view_to(log.end_position), log.end_position)

    # ------------------------------------------------------------ writing

    def write(self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, observed: list[Observed]) -> LogState:
        """Write batches to the active segment. Return the state after them, not yet published."""
        segment, index = self._segment, self._index
        assert segment is not None
        assert index is not None
        epoch = log.epoch
        append_time_ms = now_ms if self._handle.config.message_timestamp_type == "LogAppendTime" else None
        at, offset = log.end_position, log.log_end_offset
        buffers: list[Buffer] = []
        for batch in batches:
            buffers.append(batch.placed_at(offset, epoch, append_time_ms))
            buffers.append(batch.payload)
            following = offset + batch.last_offset_delta + 1
            observed.append((index, at, offset, following, batch.max_timestamp, batch.size_bytes))
            offset = following
            at += batch.size_bytes
        size_bytes = at - log.end_position
        segment.write(buffers, size_bytes, log.end_position)
        stable_offset = log.last_stable_offset
        return LogState(
            log.log_start_offset,
            offset,
            offset if stable_offset == log.log_end_offset else stable_offset,
            log.active_base_offset,
            at,
            epoch,
            log.generation,
            log.appended_bytes + size_bytes,
            log.first_append_ms or now_ms,
            log.offset_ceiling,
        )

    def write_stored(self, log: LogState, data: Buffer, headers: Sequence[BatchHeader], now_ms: int) -> LogState:
        """Write stored batches, unchanged, to the active segment. Return the state after them, not yet published.

        ``data`` contains the batches of ``headers``, which continue the log. The caller observes them in the index.
        """
        assert self._segment is not None
        size_bytes = len(data)
        self._segment.write([data], size_bytes, log.end_position)
        offset = headers[-1].next_offset
        return replace(
            log,
            log_end_offset=offset,
            last_stable_offset=offset if log.last_stable_offset == log.log_end_offset else log.last_stable_offset,
            end_position=log.end_position + size_bytes,
            appended_bytes=log.appended_bytes + size_bytes,
            first_append_ms=log.first_append_ms or now_ms,
        )

    def observe_stored(self, position: int, headers: Sequence[BatchHeader]) -> None:
        """Add published batches to the index. The first is at byte ``position``."""
        assert self._index is not None
        for header in headers:
            self._index.observe(
                position, header.base_offset, header.next_offset, header.max_timestamp, header.size_bytes
            )
            position += header.size_bytes

    def write_and_roll(
        self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, observed: list[Observed]
    ) -> LogState:
        """Write batches like `write`, rolling where needed.

        The batches are published together, after the last is written: readers see all of them or none.

        The caller must hold `Handle.folder_locked`, as for `roll` and `close_cleanly`.
        """
        before = log
        new_bases: list[int] = []
        try:
            for base, run in self._runs(log, batches, now_ms):
                if base != log.active_base_offset:
                    new_bases.append(base)
                    log = self._seal_and_begin(log, base)
                log = self.write(log, run, now_ms, observed)
        except BaseException as error:
            self._undo(before, new_bases, error)
            raise
        return log

    def roll(self, log: LogState, base: int | None = None) -> LogState:
        """Seal the active segment and begin the next, at ``base`` after a gap or else at the log end.

        Return the log state after the roll, not yet published.
        """
        base = log.log_end_offset if base is None else base
        try:
            return self._seal_and_begin(log, base)
        except BaseException as error:
            self._undo(log, [base], error)
            raise

    def _runs(self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int) -> list[_Run]:
        """Return (base offset of the segment, its batches) in order, split where the log rolls."""
        runs: list[_Run] = [(log.active_base_offset, [])]
        for batch in batches:
            count = batch.last_offset_delta + 1
            first_ms = log.first_append_ms or now_ms
            if should_roll(
                self._handle.config,
                log.end_position,
                log.log_end_offset - log.active_base_offset,
                now_ms - log.first_append_ms if log.first_append_ms else 0,
                batch.size_bytes,
                count,
            ):
                log = replace(log, active_base_offset=log.log_end_offset, end_position=0)
                runs.append((log.active_base_offset, []))
                first_ms = now_ms
            runs[-1][1].append(batch)
            log = replace(
                log,
                log_end_offset=log.log_end_offset + count,
                end_position=log.end_position + batch.size_bytes,
                first_append_ms=first_ms,
            )
        return runs if runs[0][1] else runs[1:]

    def _seal_and_begin(self, log: LogState, base: int) -> LogState:
        index, active = self._index, self._segment
        assert index is not None
        assert active is not None
        sealed = active.seal(log.end_position, log.epoch)
        self.sealed.append(_Sealed(sealed, index, log.log_end_offset, log.end_position))
        if len(self.sealed) > _LEFT_OPEN:
            self.sealed[-1 - _LEFT_OPEN].segment.close()
        self._segment = self._begin_segment(base)
        self._key, self._mapped = (base, log.epoch), None
        self._index = self._handle.index_of(base)
        return replace(log, log_end_offset=base, active_base_offset=base, end_position=0, first_append_ms=0)

    def _begin_segment(self, base: int) -> ActiveSegment:
        try:
            return self._open_segment(base, create=True)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(segment_stem(self._handle.folder, base) + LOG_SUFFIX, 0) from error
            raise

    def _open_segment(self, base: int, *, create: bool) -> ActiveSegment:
        handle = self._handle
        return ActiveSegment(
            handle.fs,
            handle.folder,
            base,
            handle.config.segment_bytes,
            create=create,
            count_syncs=lambda: handle.page.sync.read().sync_count,
        )

    # ------------------------------------------------------------ after publishing, or after a failed write

    def finish_rolls(self) -> list[int]:
        """Complete the indexes of the segments sealed by published rolls.

        Return the base offsets of the segments begun.
        """
        sealed, self.sealed = self.sealed, []
        for left in sealed:
            if left.segment.fd >= 0:
                self._handle.add_sealed(left.segment)
        for left in sealed:
            left.index.close(left.next_offset, left.size_bytes)
        return [left.next_offset for left in sealed]

    def handle_failed_write(self) -> None:
        """Clear the append mark if the failed `write` left no bytes; else the next append removes them."""
        if self._segment is None or self._segment.is_cut:
            self._handle.ledger.end_append()
        else:
            self.close_file()

    def _undo(self, before: LogState, new_bases: Sequence[int], cause: BaseException) -> None:
        """Durably remove the bytes that were written but not published before ``cause``: their offsets will be reused.

        If the removal fails, the state page keeps its append mark, and the next append removes the bytes. Raises
        `DiskFailed` if an fsync fails, unless ``cause`` already is a `DiskFailed`.
        """
        try:
            self._remove_unpublished(before, new_bases)
        except DiskFailed:
            if not isinstance(cause, DiskFailed):
                raise
        except OSError as error:
            if is_interrupt(error):
                raise

    def _remove_unpublished(self, before: LogState, new_bases: Sequence[int]) -> None:
        handle = self._handle
        self._close_sealed()
        self._close_segment(flush=False)
        for base in new_bases:
            for suffix in SEGMENT_SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    handle.fs.unlink(segment_stem(handle.folder, base) + suffix)
        if new_bases:
            handle.fs.sync_folder(handle.folder)
        truncate_durably(handle.fs, handle.folder, before.active_base_offset, before.end_position)
        handle.ledger.end_append()

    # ------------------------------------------------------------ closing

    def close_file(self) -> None:
        """Close the file of the active segment, and keep its index in memory for the next append."""
        segment, self._segment = self._segment, None  # first: a child forked in between must not close it again
        self.seen = self._mapped = None
        if segment is not None:
            with failures_ignored():
                segment.close()

    def close_cleanly(self, log: LogState) -> None:
        """Close file and index, and cut off the preallocated space."""
        self._close_segment()
        truncate_segment(self._handle.fs, self._handle.folder, log.active_base_offset, log.end_position)

    def drop_state(self) -> None:
        """Drop file and index without writing: the log was truncated, and its epoch may be the same as before."""
        self.close_file()
        self._index, self._key = None, (-1, -1)

    def reset_after_fork(self) -> None:
        """Discard the index and the sealed segments in a forked child: a thread of the parent may have been changing
        them.
        """
        self._index, self._key = None, (-1, -1)
        self._close_sealed()

    def _close_sealed(self) -> None:
        while self.sealed:
            self.sealed.pop().segment.close()

    def _close_segment(self, *, flush: bool = True) -> None:
        self.close_file()
        # After a truncation or a recovery the entries may describe batches that no longer exist.
        if self._index is not None and flush and self._key[1] == self._handle.page.log.read().epoch:
            self._index.flush()
        self._index, self._key = None, (-1, -1)
