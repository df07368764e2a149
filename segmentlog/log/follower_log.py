"""A log that another machine leads: append its batches unchanged, at their offsets, and truncate what it lacks.

    append            batches as they are on the leader's disk
    add_lost_range    a gap: the offsets between the end of the log and the first offset of a later term
    note_ceiling      the end of the offsets that the leader may assign, durably
    truncate          remove what the leader lacks (R10 of docs/replication-model.md)
    trim, restart_at  follow the leader's log start
    sync              make everything durable; only then may the machine confirm it
    promote           begin a term of this machine

The log has the same segments as the leader's, byte for byte, except where one of them was compacted. Any number of
processes may read it. Its checkpoint has a mark (`format.checkpoint.Replicated`). So a recovery by any process opens no
gap: the log resumes at its end, in the same epoch. The leader then sends the rest again.

An epoch or a gap is recorded in the checkpoint before the first record after it, and after all records before it are
synced. So the checkpoint never has an epoch or a gap after the end of the log, except one that begins at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import BatchHeader
from segmentlog.format.batch_codecs import Buffer
from segmentlog.format.checkpoint import Checkpoint, recovery_point_at
from segmentlog.format.scan import scan_batches
from segmentlog.log.append.active_segment import ActiveSegmentWriter
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStates
from segmentlog.log.recovery.log_recovery import recover
from segmentlog.log.recovery.open_partition import finish_interrupted_append, open_partition
from segmentlog.log.segment_removal import remove_segment
from segmentlog.log.swap import finish_swaps
from segmentlog.log.truncation import trim_locked
from segmentlog.policy.replica_fetch import LogHistory, truncate_history
from segmentlog.policy.replication import TermStart
from segmentlog.records import EpochStart, LostRange, RecoveryReport
from segmentlog.storage.fs import DiskFailed
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.storage.segment import create_segment, list_segments
from segmentlog.storage.state_page import PRODUCERS_WORD, WAITING_WORD, LogState


class FollowerLog:
    """One partition that another machine leads. Not thread-safe, except `sync`; one process at a time changes it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._writer = ActiveSegmentWriter(handle)
        self._syncer = Syncer(handle)
        self._states = ProducerStates(handle)
        self._checkpoint: Checkpoint | None = None
        """The checkpoint with the present epochs and lost ranges; None if it must be read."""
        handle.closers.append(self._writer.close_file)

    def open(self) -> RecoveryReport:
        """Open the files, recover the log if necessary, and mark it as replicated. Raise what `Partition` raises.

        With the verdict ``incomplete`` or ``no checkpoint``, the log may lack records that this machine has confirmed.
        The machine then needs a new incarnation, and must copy the log again.
        """
        handle = self._handle
        try:
            report = open_partition(handle)
            handle.is_opening = False
            with handle.translating_errors(), handle.append_locked(), handle.sync_locked():
                if handle.ledger.checkpoint().replicated is None:
                    self._syncer.sync_all(handle.page.log.read(), handle.page.sync.read())
                    handle.ledger.start_replication()
        except BaseException:
            handle.close_files()
            raise
        return report

    # ------------------------------------------------------------ state

    @property
    def log_start_offset(self) -> int:
        """Offset of the first record that still exists."""
        return self._handle.page.log.read().log_start_offset

    @property
    def log_end_offset(self) -> int:
        """Offset after the last record or lost range. The next batch must have this offset."""
        return self._handle.page.log.read().log_end_offset

    @property
    def durable_offset(self) -> int:
        """Everything below this offset is synced, so that this machine may confirm it."""
        return self._handle.page.sync.read().durable_offset

    @property
    def offset_ceiling(self) -> int:
        """The ceiling that this machine has noted on its disk."""
        return self._handle.page.log.read().offset_ceiling

    @property
    def history(self) -> LogHistory:
        """Epochs, lost ranges and the log end offset, for the decisions of `policy.replica_fetch`."""
        log_end_offset = self.log_end_offset
        if self._checkpoint is None:
            self._checkpoint = self._handle.ledger.last_checkpoint()
        known = self._checkpoint
        # An epoch becomes part of the history with its first record.
        return truncate_history(LogHistory(known.epochs, known.lost_ranges, log_end_offset), log_end_offset)

    # ------------------------------------------------------------ what the leader sends

    def append(self, data: Buffer, segment_base: int) -> int:
        """Append the leader's batches, and return the new log end offset. Nothing is synced.

        ``data`` contains whole batches of the leader's segment with base offset ``segment_base``. They must continue
        the log. Raise `CorruptBatch` for damaged batches, and for batches that do not continue the log or reach beyond
        the offset ceiling: nothing of them was appended. Raise `DiskFull`, `PartitionFailed`, `UnknownTopic`,
        `ProcessLimitError`; batches of earlier epochs in ``data`` may be appended then.
        """
        handle, view = self._handle, memoryview(data)
        source = f"{handle.folder}: batches of the leader"
        headers = [header for _, header in scan_batches(view, 0, len(view), source, payloads=True)]
        if not headers:
            return self.log_end_offset
        with handle.translating_errors("a later fetch gets the batches again"), self._changing(by_names=False) as log:
            if not log.end_position and segment_base < log.active_base_offset:
                # This machine has begun a segment that the leader has not: the first batch of it was lost.
                with handle.folder_locked():
                    self._truncate(log, log.log_end_offset)
                log = handle.page.log.read()
                self._writer.catch_up(log)
            _check_run(source, log, headers, segment_base)
            if segment_base != log.active_base_offset:
                with handle.folder_locked():
                    log = self._roll(log)
            position = 0
            for part in _parts_by_epoch(headers):
                if part[0].partition_epoch > log.epoch:
                    log = self._begin_epoch(log, EpochStart(part[0].partition_epoch, part[0].base_offset), None)
                size_bytes = sum(header.size_bytes for header in part)
                log = self._append_part(log, view[position : position + size_bytes], part)
                position += size_bytes
            return log.log_end_offset

    def add_lost_range(self, lost: LostRange) -> None:
        """Record a lost range of the leader's log, durably. The log then ends after it, in the epoch of the range.

        Raise `CorruptBatch` if the range does not begin at the log end, is of an earlier epoch, or reaches beyond the
        offset ceiling.
        """
        with self._handle.translating_errors(), self._changing() as log:
            if lost.base_offset != log.log_end_offset or not lost.base_offset < lost.end_offset <= log.offset_ceiling:
                expected = f"a lost range from {log.log_end_offset} on, below {log.offset_ceiling}"
                raise CorruptBatch(self._handle.folder, 0, expected, f"[{lost.base_offset}, {lost.end_offset})")
            if lost.epoch < log.epoch:
                raise CorruptBatch(self._handle.folder, 0, f"epoch {log.epoch} or later", f"{lost.epoch}")
            self._begin_epoch(log, EpochStart(lost.epoch, lost.end_offset), lost)

    def note_ceiling(self, ceiling: int) -> None:
        """Note durably that the leader may assign offsets below ``ceiling``. A lower ceiling changes nothing."""
        if ceiling <= self.offset_ceiling:
            return
        handle = self._handle
        with handle.translating_errors(), self._changing() as log, handle.sync_locked():
            try:
                self._writer.seen = handle.ledger.reserve_offsets(log, ceiling)
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")

    def truncate(self, offset: int) -> RecoveryReport:
        """Remove everything from ``offset`` on, which must not be below the log start. Durable when it returns.

        Removed records are copied to the quarantine of the partition. The offset ceiling stays.
        """
        with self._handle.translating_errors(), self._changing() as log:
            assert log.log_start_offset <= offset <= log.log_end_offset, "R10 never truncates below the log start"
            return self._truncate(log, offset)

    def trim(self, offset: int) -> int:
        """Delete the segments that are completely below ``offset``, the leader's log start. Return the log start."""
        with self._handle.translating_errors(), self._changing():
            self._writer.seen = None
            return trim_locked(self._handle, min(offset, self.log_end_offset))

    def restart_at(self, offset: int, history: LogHistory, ceiling: int) -> None:
        """Begin again at ``offset``, which is after the end of this log: the base offset of the leader's first segment.

        All records are deleted. Call `trim` with the leader's log start once the log has reached it.

        ``history`` is the leader's; this log gets the part of it below ``offset``.
        """
        handle = self._handle
        fs, ledger = handle.fs, handle.ledger
        history = truncate_history(history, offset)
        with handle.translating_errors(), self._changing() as log, handle.sync_locked():
            assert offset > log.log_end_offset, "only a log that ends before the leader's first segment begins again"
            self._drop_state()
            ceiling = max(ceiling, log.offset_ceiling, offset)
            ledger.start_again_at(offset, history, ceiling)
            create_segment(fs, handle.folder, offset)
            fs.sync_folder(handle.folder)
            epoch, generation = max(history.last_epoch, 0), log.generation + 1
            after = LogState(
                offset, offset, offset, offset, 0, epoch, generation, log.appended_bytes, 0, ceiling
            )  # fmt: skip
            ledger.record_sync(after, handle.page.sync.read())
            ledger.publish(after)
            for base in list_segments(fs, handle.folder):
                if base != offset:
                    remove_segment(handle, base)
            ledger.count_generation()
            handle.close_segments()

    def sync(self) -> int:
        """Make everything durable. Return the durable offset. Thread-safe. Raise `PartitionFailed`."""
        return self._syncer.sync()

    def promote(self, start: TermStart) -> None:
        """Begin a term of this machine, durably. Close this object then, and open the log as a `Partition`."""
        lost = None
        if start.log_end_offset < start.next_offset:
            now_ms = self._handle.clock.now_ms()
            lost = LostRange(start.log_end_offset, start.next_offset, start.term, "another machine led before", now_ms)
        with self._handle.translating_errors(), self._changing() as log:
            assert log.log_end_offset == start.log_end_offset, "the term begins at the end of the log"
            log = replace(log, offset_ceiling=start.offset_ceiling)
            epoch = EpochStart(start.term, start.next_offset)
            self._begin_epoch(log, epoch, lost, offset_ceiling=start.offset_ceiling, replicated=None)

    def close(self) -> None:
        """Sync everything, advance the recovery point, and close the files. Idempotent."""
        handle = self._handle
        try:
            if handle.has_files and not handle.is_moved and handle.failed is None and not handle.page.failed:
                self._syncer.checkpoint_now()
        finally:
            with handle.append_mutex, handle.sync_mutex:
                handle.close_files()

    # ------------------------------------------------------------ steps

    @interrupt_safe_context
    def _changing(self, *, by_names: bool = True) -> Iterator[LogState]:
        """Yield the log state under the append lock, after completing the change of a process that died.

        With ``by_names=False`` the caller must hold `Handle.folder_locked` whenever it uses a file by name.
        """
        handle = self._handle
        with handle.append_locked(by_names=by_names):
            handle.check_usable()
            if handle.failed is not None or handle.page.failed:
                handle.fail(handle.failed or "an fsync failed")
            if handle.page.writing:
                self._drop_state()
                with handle.folder_locked():
                    finish_interrupted_append(handle)
            if by_names:
                finish_swaps(handle)
            log = handle.page.log.read()
            if self._writer.seen is not log:
                self._writer.catch_up(log)
            yield log

    def _drop_state(self) -> None:
        """Drop what this object knows about the end of the log, because it changes."""
        self._writer.drop_state()
        self._states = ProducerStates(self._handle)
        self._checkpoint = None

    def _truncate(self, log: LogState, offset: int) -> RecoveryReport:
        """Remove everything from ``offset`` on. The segment that ends at ``offset`` is the active one afterwards."""
        handle = self._handle
        bases = handle.segments(log)
        self._drop_state()
        with handle.sync_locked():
            handle.ledger.start_replica_truncation(offset, max([bases[0], *(base for base in bases if base < offset)]))
            report = recover(handle, handle.page)
            handle.close_segments()
        return report

    def _roll(self, log: LogState, base: int | None = None) -> LogState:
        """Begin a segment at the log end, or at ``base`` after a gap, and publish it."""
        handle, writer = self._handle, self._writer
        is_tracked = self._catch_up_producers(log)
        writer.seen = None
        if not handle.page.writing:
            handle.ledger.start_append()
        after = writer.roll(log, base)
        if log.last_stable_offset == log.log_end_offset:
            after = replace(after, last_stable_offset=after.log_end_offset)
        if is_tracked:  # a recovery of the new segment alone must know the producers
            self._states.write_snapshot(after.active_base_offset, handle.clock.now_ms())
        handle.ledger.publish(after)
        writer.finish_rolls()
        handle.notify_rolled()
        if not log.end_position:  # a gap after an empty segment
            remove_segment(handle, log.active_base_offset)
            handle.ledger.count_generation()
            after = handle.page.log.read()
        self._states.mark_seen(after)
        writer.seen = after
        return after

    def _begin_epoch(self, log: LogState, start: EpochStart, lost: LostRange | None, **changes: Any) -> LogState:
        """Record an epoch of a leader, and the gap before it if ``lost`` is given, durably. Return the new state."""
        handle = self._handle
        if lost is not None and not log.end_position:  # `_roll` removes the empty segment
            changes |= recovery_point_at(lost.end_offset)
        with handle.sync_locked():
            try:
                self._syncer.sync_all(log, handle.page.sync.read())
                handle.ledger.start_epoch_of_leader(log, start, lost, **changes)
            except DiskFailed as error:
                handle.fail(f"writing the checkpoint failed ({error})")
        self._checkpoint = None
        log = replace(log, epoch=start.epoch)
        if lost is not None:
            with handle.folder_locked():
                return self._roll(log, lost.end_offset)
        handle.ledger.publish(log)
        self._writer.catch_up(log)
        self._states.mark_seen(log)
        self._writer.seen = log
        return log

    def _append_part(self, log: LogState, data: memoryview, headers: Sequence[BatchHeader]) -> LogState:
        """Write and publish batches of the current epoch."""
        handle, writer, ledger = self._handle, self._writer, self._handle.ledger
        now_ms = handle.clock.now_ms()
        words = handle.page.words
        if not words[PRODUCERS_WORD] and any(header.producer_id >= 0 for header in headers):
            with handle.sync_locked():
                ledger.record_producers()
        is_tracked = self._catch_up_producers(log)
        writer.seen = None
        if any(header.is_control for header in headers):
            ledger.count_abort()  # before publishing: a reader that sees the marker must look for aborts
        ledger.start_append()
        try:
            after = writer.write_stored(log, data, headers, now_ms)
        except DiskFailed as error:
            handle.fail(f"a write failed ({error})")
        except OSError:
            writer.handle_failed_write()
            raise
        if is_tracked:
            try:
                for header in headers:
                    self._states.record_stored(header, now_ms)
                stable_offset = self._states.stable_offset(after.log_end_offset)
                after = replace(after, last_stable_offset=stable_offset)
            except BaseException:
                self._states = ProducerStates(handle)
                raise
        ledger.publish(after)
        if words[WAITING_WORD]:
            handle.wake_followers()
        writer.observe_stored(log.end_position, headers)
        self._states.mark_seen(after)
        writer.seen = after
        return after

    def _catch_up_producers(self, log: LogState) -> bool:
        """Load the producer states up to the end of ``log``. Return False if the log has no producers."""
        if not self._handle.page.words[PRODUCERS_WORD]:
            return False
        if self._states.seen is not log:
            self._states.catch_up(log)
        return True


def _check_run(source: str, log: LogState, headers: Sequence[BatchHeader], segment_base: int) -> None:
    """Raise `CorruptBatch` unless the batches directly continue the log, in its segment or in a new segment."""
    offset, epoch = log.log_end_offset, log.epoch
    if segment_base not in (log.active_base_offset, offset):
        raise CorruptBatch(source, 0, f"segment {log.active_base_offset} or {offset}", f"segment {segment_base}")
    position = 0
    for header in headers:
        if header.base_offset != offset:
            raise CorruptBatch(source, position, f"the batch of offset {offset}", f"offset {header.base_offset}")
        if header.partition_epoch < epoch:
            raise CorruptBatch(source, position, f"an epoch of {epoch} or more", str(header.partition_epoch))
        offset, epoch = header.next_offset, header.partition_epoch
        position += header.size_bytes
    if offset > log.offset_ceiling:
        raise CorruptBatch(source, 0, f"offsets below the ceiling {log.offset_ceiling}", f"offsets up to {offset}")


def _parts_by_epoch(headers: Sequence[BatchHeader]) -> Iterator[list[BatchHeader]]:
    part: list[BatchHeader] = []
    for header in headers:
        if part and header.partition_epoch != part[0].partition_epoch:
            yield part
            part = []
        part.append(header)
    yield part
