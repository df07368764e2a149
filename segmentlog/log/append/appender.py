"""Appending: batches that are ready get their offsets, are written and published, under one lock.

The lock is held for the assignment of offsets and one `pwritev`, nothing else: encoding is
done before, fsync after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from segmentlog.config import OFFSET_CEILING_STEP
from segmentlog.errors import DiskFull, ProducerFenced
from segmentlog.format.batch import EncodedBatch
from segmentlog.format.control import encode_marker
from segmentlog.format.names import LOG_SUFFIX, SEGMENT_SUFFIXES
from segmentlog.log.handle import WRITING, Handle
from segmentlog.log.producers import ProducerStamp, ProducerStates
from segmentlog.log.recovery.opening import settle
from segmentlog.policy.roll import should_roll
from segmentlog.storage.fs import NO_ROOM, Buffer, DiskFailed
from segmentlog.storage.index import SegmentIndex
from segmentlog.storage.locks import EXCLUSIVE, UNLOCK, held
from segmentlog.storage.segment import ActiveSegment, MappedSegment, segment_stem
from segmentlog.storage.state import (
    CONFIG_WORD,
    FAILED_WORD,
    MOVED_WORD,
    PRODUCERS_WORD,
    WAITING_WORD,
    WRITING_WORD,
    LogState,
)

_OFFSET_MAX = 2**63 - 2
_EPOCH_MAX = 2**32 - 2
# What a batch's header holds; only a forged or damaged log gets there.

_LEFT_OPEN = 8
# Of the segments that one append seals; an append of very many does not take all descriptors.

_Run = tuple[int, list[EncodedBatch]]
_Observed = tuple[SegmentIndex, int, int, int, int, int]
"""A batch that was written: its index, position, base offset, next offset, largest timestamp, size in bytes."""


class Appender:
    """Places finished batches at the end of the log. Thread-safe; any number of processes have one."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._active: ActiveSegment | None = None
        self._key = (-1, -1)
        self._index: SegmentIndex | None = None
        self._mapped: MappedSegment | None = None
        self._seen: LogState | None = None
        self._sealing: list[tuple[SegmentIndex, int, int]] = []
        self._begun: list[int] = []
        self._left: list[ActiveSegment] = []
        """Those that the rolls of one append sealed, still open."""
        self._states = ProducerStates(handle)
        self.appended = False
        """Whether this process appended since it opened the partition: it then owes a clean close."""
        handle.closers.append(self._let_go)
        handle.after_fork.append(self._forget)

    def place(
        self, batches: Sequence[EncodedBatch], now_ms: int, stamp: ProducerStamp | None = None
    ) -> tuple[int, int]:
        """Append the batches, all or none: (offset of the first record, offset after the last).

        Their offsets are consecutive, across batches and segments. With a ``stamp``, the one
        that they were encoded with, batches that were appended before are not appended again:
        the offsets are those that they have. Raises `DiskFull`, `PartitionFailed`,
        `UnknownTopic`, `ProducerFenced`, `OutOfOrderSequence`, and `LocalError` for what is this process's own
        affair: the log is as before then, here and for everybody else.
        """
        handle = self._handle
        with handle.append_mutex:
            if handle.lock_fd < 0:
                handle.ensure_open()
            handle.used = True
            flock, fd = handle.fs.flock, handle.lock_fd
            try:
                flock(fd, EXCLUSIVE)  # inside: an interrupt may come before it has returned
                log = self._look()
                if stamp is None and not handle.page.words[PRODUCERS_WORD]:
                    return self._place_locked(log, batches, now_ms)
                return self._place_tracked(log, batches, now_ms, stamp)
            except FileNotFoundError:
                handle.check_in_place()  # renamed or deleted a moment ago
                raise
            except OSError as error:
                handle.raise_local(error, "nothing was appended")
                raise
            finally:
                flock(fd, UNLOCK)

    def end_transaction(self, producer_id: int, epoch: int, *, committed: bool, now_ms: int) -> int | None:
        """Write the marker that decides the producer's open transaction; its offset, or None when none is open.

        Raises `ProducerFenced` when a newer epoch of the producer has one open.
        """
        handle = self._handle
        with handle.telling(), handle.append_locked():
            log = self._look()
            states = self._states
            states.catch_up(log)
            first_offset = states.open_transaction(producer_id)
            if first_offset < 0:
                return None
            known = states.find(producer_id, now_ms)
            if known is not None and known.epoch > epoch:
                raise ProducerFenced(str(producer_id), epoch, known.epoch)
            marker = encode_marker(producer_id, epoch, committed=committed, first_offset=first_offset, now_ms=now_ms)
            if not committed:
                handle.page.count_abort()  # before it is published: who reads behind it must know
            stable_offset = states.stable_offset(-1, without=producer_id)
            offset, _ = self._place_locked(log, [marker], now_ms, stable_offset)
            self._take_note(log, [marker], lambda at, _: states.ended(producer_id, epoch, at, now_ms), now_ms)
            return offset

    @held
    def producers(self) -> Iterator[ProducerStates]:
        """What is known of producers up to the end of the log, under the append lock."""
        with self._handle.append_locked():
            self._states.catch_up(self._look())
            yield self._states

    def _look(self) -> LogState:
        """The state of the log, once nothing keeps it from being appended to. Under the append lock."""
        handle = self._handle
        page = handle.page
        words = page.words
        if (
            handle.failed is not None
            or words[FAILED_WORD]
            or words[CONFIG_WORD] != handle.config_version
            or words[MOVED_WORD] != handle.moved
        ):
            handle.check_appendable()
        if words[WRITING_WORD]:
            settle(handle)
        log = page.log.read()
        if self._seen is not log:
            self._catch_up(log)
        return log

    def _place_tracked(
        self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, stamp: ProducerStamp | None
    ) -> tuple[int, int]:
        """`_place_locked` in a log that has producers."""
        states = self._states
        if states.seen is not log:
            states.catch_up(log)
        if stamp is None:
            placed = self._place_locked(log, batches, now_ms)
            self._take_note(log, batches, None, now_ms)
            return placed
        count = batches[0].last_offset_delta + 1
        if len(batches) > 1:
            count = sum(batch.last_offset_delta + 1 for batch in batches)
        known_offset = states.admit(stamp, count, now_ms)
        if known_offset is not None:
            return known_offset, known_offset + count
        if not self._handle.page.words[PRODUCERS_WORD]:
            self._note_producers()
        # In a transaction: it ends before this transaction's first batch, or an earlier one's.
        stable_offset = log.last_stable_offset if stamp.transactional else None
        placed = self._place_locked(log, batches, now_ms, stable_offset)
        if len(batches) == 1 and not self._begun and self._seen is not None:
            states.applied(stamp, placed[0], count, now_ms)
            states.reached(self._seen)
        else:
            first = placed[0]
            self._take_note(
                log, batches, lambda at, some: states.applied(stamp.after(at - first), at, some, now_ms), now_ms
            )
        return placed

    def _note_producers(self) -> None:
        """Write down that the log has producers, durably: from then on every recovery looks for them."""
        handle = self._handle
        with handle.sync_locked():
            try:
                handle.update_checkpoint(has_producers=True)
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")
        handle.page.words[PRODUCERS_WORD] = 1

    def _take_note(
        self,
        log: LogState,
        batches: Sequence[EncodedBatch],
        note: Callable[[int, int], None] | None,
        now_ms: int,
    ) -> None:
        """Tell ``note`` the offset and length of each batch that was published behind ``log``.

        And leave a snapshot of the states where a segment was begun.
        """
        begun, self._begun = self._begun, []
        offset = log.log_end_offset
        for batch in batches:
            while begun and begun[0] <= offset:
                self._states.write_snapshot(begun.pop(0), now_ms)
            count = batch.last_offset_delta + 1
            if note is not None:
                note(offset, count)
            offset += count
        for base in begun:
            self._states.write_snapshot(base, now_ms)
        self._states.reached(self._handle.page.log.read())

    def _place_locked(
        self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, stable_offset: int | None = None
    ) -> tuple[int, int]:
        """Write and publish; ``stable_offset`` is the last stable one after that, -1 the new end."""
        handle = self._handle
        page = handle.page
        words = page.words
        size_bytes = record_count = 0
        for batch in batches:
            size_bytes += batch.size_bytes
            record_count += batch.last_offset_delta + 1
        next_offset = log.log_end_offset + record_count
        if next_offset >= log.offset_ceiling:  # so that a position at the log end lies below the ceiling, too
            log = self._raise_ceiling(log, next_offset)
        rolls = self._must_roll(log, size_bytes, record_count, now_ms)
        if rolls:
            handle.check_in_place()
        self._seen = None  # whatever ends this early: the next one looks for itself what is open here
        words[WRITING_WORD] = WRITING
        observed: list[_Observed] = []
        is_one_run = not rolls and (log.end_position or len(batches) == 1)
        try:
            if is_one_run:
                after = self._write_run(log, batches, now_ms, observed)
            else:
                after = self._write_runs(log, batches, now_ms, observed)
        except DiskFailed as error:
            handle.fail(f"a write failed ({error})")
        except OSError:
            if is_one_run:
                self._leave_as_it_was()
            raise
        if stable_offset is not None:
            after = replace(after, last_stable_offset=next_offset if stable_offset < 0 else stable_offset)
        page.log.write(after)
        words[WRITING_WORD] = 0
        if words[WAITING_WORD]:
            handle.wake_followers()
        # Only now: an index must not know of batches that were never published.
        for index, position, first, following, max_timestamp, size_bytes in observed:
            index.observe(position, first, following, max_timestamp, size_bytes)
        if self._sealing:
            self._close_indexes()
        self._seen = after
        self.appended = True
        return log.log_end_offset, next_offset

    def roll(self) -> bool:
        """Seal the active segment and begin the next, though nothing is appended; False when it is empty."""
        handle = self._handle
        with handle.append_locked():
            handle.check_appendable()
            settle(handle)
            log = handle.page.log.read()
            if not log.end_position:
                return False
            if self._seen is not log:
                self._catch_up(log)
            tracked = bool(handle.page.words[PRODUCERS_WORD])
            if tracked:
                self._states.catch_up(log)
            self._seen = None
            handle.page.writing = WRITING
            after = replace(log, active_base_offset=log.log_end_offset, end_position=0, first_append_ms=0)
            try:
                try:
                    self._seal_and_begin(log, after.active_base_offset)
                    self._cut_sealed(log.active_base_offset, log.end_position)
                except BaseException as error:
                    self._undo(log, [after.active_base_offset], error)
                    raise
            except DiskFailed as error:
                handle.fail(f"an fsync failed ({error})")
            handle.page.log.write(after)
            handle.page.writing = 0
            self._close_indexes()
            self._seen = after
            self.appended = True
            if tracked:
                self._take_note(log, [], None, handle.clock.now_ms())
            return True

    def _seal_and_begin(self, log: LogState, base: int) -> None:
        assert self._index is not None
        assert self._active is not None
        self._sealing.append((self._index, log.log_end_offset, log.end_position))
        # Not closed yet, see `Handle.keep_sealed`.
        if len(self._left) == _LEFT_OPEN:
            self._left.pop(0).close()
        self._left.append(self._active)
        self._active = None
        self._begin_segment(base, log.epoch)

    def _catch_up(self, log: LogState) -> None:
        """Bring the active segment and its index to where the log is now, whoever appended meanwhile."""
        handle = self._handle
        if self._sealing or self._begun:  # of an append that was interrupted
            self._sealing, self._begun = [], []
        base = log.active_base_offset
        key = (base, log.epoch)
        index = self._index
        if index is None or self._key != key:
            self._close_active()
            stem = segment_stem(handle.folder, base)
            index = SegmentIndex(handle.fs, stem, base, handle.config.index_interval_bytes)
            index.load(limit=log.end_position)
            self._index, self._key = index, key
        if self._active is None or self._active.fd < 0:
            self._active = self._open_segment(base, create=False)
        if index.scanned_position != log.end_position:
            mapped = self._mapped
            if mapped is None:
                mapped = self._mapped = MappedSegment(handle.fs, handle.folder, base)
            index.catch_up(mapped.upto(log.end_position), log.end_position)

    def _raise_ceiling(self, log: LogState, next_offset: int) -> LogState:
        """Reserve offsets durably before any of them is handed out: one fsync for a million records."""
        handle = self._handle
        ceiling = next_offset + OFFSET_CEILING_STEP
        if ceiling > _OFFSET_MAX or log.epoch > _EPOCH_MAX:
            handle.fail(
                f"it has used up its numbers (offset {log.log_end_offset}, epoch {log.epoch}): make a new topic"
            )
        with handle.sync_locked():
            try:
                handle.update_checkpoint(offset_ceiling=ceiling, clean=False)
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")
        log = replace(log, offset_ceiling=ceiling)
        handle.page.log.write(log)
        return log

    def _must_roll(self, log: LogState, size_bytes: int, record_count: int, now_ms: int) -> bool:
        """Whether so much more does not go to the segment in which ``log`` ends."""
        return should_roll(
            self._handle.config,
            log.end_position,
            log.log_end_offset - log.active_base_offset,
            now_ms - log.first_append_ms if log.first_append_ms else 0,
            size_bytes,
            record_count,
        )

    def _plan(self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int) -> list[_Run]:
        """(base offset of the segment, its batches) in order: where the log rolls, and where not."""
        runs: list[_Run] = [(log.active_base_offset, [])]
        for batch in batches:
            count = batch.last_offset_delta + 1
            first_ms = log.first_append_ms or now_ms
            if self._must_roll(log, batch.size_bytes, count, now_ms):
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

    def _write_run(
        self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, observed: list[_Observed]
    ) -> LogState:
        """Write batches to the active segment; the state as it is after them, not yet published."""
        handle = self._handle
        active, index = self._active, self._index
        assert active is not None
        assert index is not None
        epoch = log.epoch
        append_time_ms = now_ms if handle.config.message_timestamp_type == "LogAppendTime" else None
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
        active.write(buffers, size_bytes, log.end_position)
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

    def _write_runs(
        self, log: LogState, batches: Sequence[EncodedBatch], now_ms: int, observed: list[_Observed]
    ) -> LogState:
        """Write batches over one or more rolls. Readers see all of it at once: nothing is published in between."""
        before = log
        made: list[int] = []
        try:
            for base, run in self._plan(log, batches, now_ms):
                if base != log.active_base_offset:
                    made.append(base)
                    self._seal_and_begin(log, base)
                    log = replace(
                        log,
                        active_base_offset=base,
                        end_position=0,
                        first_append_ms=0,
                    )
                log = self._write_run(log, run, now_ms, observed)
            for index, _, size_bytes in self._sealing:
                # Before readers see it as sealed: from then on they map all of the file.
                self._cut_sealed(index.base_offset, size_bytes)
        except BaseException as error:
            self._undo(before, made, error)
            raise
        return log

    def _close_indexes(self) -> None:
        """Complete the indexes of the segments that the rolls left behind."""
        sealing, self._sealing = self._sealing, []
        self._begun = [next_offset for _, next_offset, _ in sealing]
        left, self._left = self._left, []
        for segment in left:
            self._handle.keep_sealed(segment, self._key[1])
        for index, next_offset, size_bytes in sealing:
            index.close(next_offset, size_bytes)
        self._handle.rolled()

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

    def _begin_segment(self, base: int, epoch: int) -> None:
        handle = self._handle
        try:
            segment = self._open_segment(base, create=True)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(segment_stem(handle.folder, base) + LOG_SUFFIX, 0) from error
            raise
        self._close_active(flush=False)
        self._active = segment
        self._key = (base, epoch)
        stem = segment_stem(handle.folder, base)
        self._index = SegmentIndex(handle.fs, stem, base, handle.config.index_interval_bytes)

    def _leave_as_it_was(self) -> None:
        """A write failed. What it left is cut off; if it could not be, the next append does it, whosever it is."""
        if self._active is None or self._active.is_cut:
            self._handle.page.writing = 0
        else:
            self._let_go()

    def _undo(self, before: LogState, made: Sequence[int], error: BaseException) -> None:
        """Take back what was written but not published when ``error`` came, durably: its offsets go to other records.

        What cannot be taken back now stays marked, as after a process's death, and the next append does it. Raises
        `DiskFailed` for a failed fsync, unless that is what came.
        """
        try:
            self._take_back(before, made)
        except DiskFailed:
            if not isinstance(error, DiskFailed):
                raise
        except OSError:
            pass

    def _take_back(self, before: LogState, made: Sequence[int]) -> None:
        handle = self._handle
        self._sealing.clear()
        self._close_left()
        self._close_active(flush=False)
        for base in made:
            for suffix in SEGMENT_SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    handle.fs.unlink(segment_stem(handle.folder, base) + suffix)
        if made:
            handle.fs.sync_folder(handle.folder)
        segment = ActiveSegment(handle.fs, handle.folder, before.active_base_offset, 0, create=False)
        try:
            segment.drop(before.end_position)
        finally:
            segment.close()
        handle.page.writing = 0

    def _cut_sealed(self, base: int, size_bytes: int) -> None:
        for segment in self._left:
            if segment.base_offset == base:
                segment.cut(size_bytes)
                return
        self._cut_file(base, size_bytes)

    def _close_left(self) -> None:
        while self._left:
            with contextlib.suppress(OSError):
                self._left.pop().close()

    def _cut_file(self, base: int, size_bytes: int) -> None:
        """Give back what was preallocated behind the end of a segment."""
        handle = self._handle
        segment = ActiveSegment(handle.fs, handle.folder, base, 0, create=False)
        try:
            segment.cut(size_bytes)
        finally:
            segment.close()

    def _let_go(self) -> None:
        """Close the file; what is known of the segment stays for the next append, however idle the partition is."""
        active, self._active = self._active, None  # first: a child forked in between must not close it again
        self._seen = self._mapped = None
        if active is not None:
            with contextlib.suppress(OSError):
                active.close()

    def _forget(self) -> None:
        """In a forked child: another thread of the parent may have been at the index, or in the middle of a roll."""
        self._index, self._key = None, (-1, -1)
        self._sealing, self._begun = [], []
        self._close_left()
        self._states = ProducerStates(self._handle)
        self.appended = False  # the clean close of what the parent appended is the parent's

    def _close_active(self, *, flush: bool = True) -> None:
        self._let_go()
        # After a truncation or a recovery its entries may be of batches that are gone.
        if self._index is not None and flush and self._key[1] == self._handle.page.log.read().epoch:
            self._index.flush()
        self._index, self._key = None, (-1, -1)

    def leave_cleanly(self, log: LogState) -> None:
        """Give back the space ahead of the end, and leave what is known, at a clean close. Under the append lock."""
        self._close_active()
        self._cut_file(log.active_base_offset, log.end_position)
        if self._handle.page.words[PRODUCERS_WORD]:
            self._states.leave(log, self._handle.clock.now_ms())
