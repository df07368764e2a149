"""Repair a partition: move damaged bytes to quarantine, and leave intact batches where they are.

A damaged batch is cut out of its segment. Its offsets become a lost range: a reader in the middle of it gets an error,
other readers skip it, and its offsets are never reused. An unreadable batch (intact bytes that do not decode) stays,
unless the caller asks for its removal.

Other processes may have the partition open during a repair. They wait for the append lock and continue afterwards. The
log is then in a new epoch and a new generation, so that they list the folder again; their maps stay valid.

    tail      if no process has the log open: cut out damage that a recovery would take for the log end, and recover
    roll      begin a new segment, so that no append or recovery touches a damaged segment
    announce  write the lost ranges and the new epoch into the checkpoint
    replace   for each damaged segment: copy bytes to quarantine, write a copy without them, rename it
    publish   write the new epoch and generation into the state page
    indexes   rebuild them from the segments; delete wrong snapshots and lists of aborts

A kill between any two steps leaves the partition in a state that can be used, or repaired again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec
from msgspec.structs import replace

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import PartitionBusy
from segmentlog.format.file_names import INDEX_SUFFIX, PRODUCERS_FILE, SNAPSHOT_SUFFIX
from segmentlog.format.producer_snapshot import ProducerEntry, encode_snapshot
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_findings import Cut, PartitionFindings
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStates
from segmentlog.log.recovery.log_recovery import recover
from segmentlog.log.repair.checkpoint_rebuild import new_ranges, next_epoch, rebuilt_checkpoint
from segmentlog.log.repair.segment_repair import cut_out, rebuild_index
from segmentlog.records import EpochStart, LostRange, RecoveryReport
from segmentlog.storage.file_locks import lock_within
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import DiskFailed, FileSystem
from segmentlog.storage.interrupt_safe import UNLOCK, interrupt_safe_context
from segmentlog.storage.segment import create_segment, segment_stem, truncate_durably
from segmentlog.storage.state_page import PRODUCERS_WORD, LogState, StatePage


class RepairReport(msgspec.Struct):
    """The changes that a repair made to a partition, or would make."""

    topic: str
    partition: int
    cuts: list[Cut] = []
    """The ranges cut out of segments, in the order of the log."""
    lost: list[LostRange] = []
    """The lost offsets: offsets of the bytes that were cut out, and of missing segments."""
    quarantine: list[str] = []
    """The files with the bytes that were cut out, one for each cut."""
    indexes: list[str] = []
    """Segments whose index was rebuilt."""
    caches: list[str] = []
    """Producer snapshots and lists of aborted transactions that were wrong and were deleted."""
    state: str = ""
    """The facts about producers that the state page lacked; "" if none."""
    checkpoint: str = ""
    """Why the checkpoint was rewritten, if a slot of it was damaged."""
    recovery: RecoveryReport | None = None
    """The recovery that the next open would have done anyway."""

    @property
    def does_anything(self) -> bool:
        return bool(self.cuts or self.lost or self.indexes or self.caches or self.state or self.checkpoint)


def plan_repair(found: PartitionFindings, now_ms: int, *, drop_unreadable: bool = False) -> RepairReport:
    """Return what `repair_partition` would do. Changes no file. Call it once for each ``found``."""
    if drop_unreadable:
        found.cut_unreadable()
    plan = RepairReport(found.topic, found.partition, cuts=sorted(found.cuts, key=_by_position))
    plan.lost = list(new_ranges(found, next_epoch(found), now_ms))
    plan.indexes = [segment_stem(found.folder, base) + INDEX_SUFFIX for base in found.bad_indexes]
    plan.caches = [cache.path for cache in found.bad_caches]
    plan.state = _state_reason(found)
    plan.checkpoint = _checkpoint_reason(found)
    return plan


def repair_partition(
    fs: FileSystem,
    folder: str,
    topic: str,
    partition: int,
    load_config: Callable[[], TopicConfig],
    *,
    drop_unreadable: bool = False,
    clock: Clock | None = None,
    lock_timeout_s: float = 5.0,
) -> RepairReport:
    """Cut the damage out of a partition. Return what was done; an empty report for an intact partition.

    With ``drop_unreadable``, batches with correct checksums whose records do not decode are cut out, too.

    Raises `PartitionBusy` if the append lock is not free for ``lock_timeout_s``, `PartitionFailed` if an fsync fails,
    `DiskFull`, OSError.
    """
    handle = Handle(fs, folder, topic, partition, load_config, clock or Clock())
    handle.open_files()
    try:
        page = StatePage.map(fs, handle.state_fd, writable=True)
        assert page is not None
        with handle.folder_locked(), _append_locked_within(handle, lock_timeout_s):
            return _repair_locked(handle, page, drop_unreadable=drop_unreadable)
    finally:
        handle.close_files()


def _repair_locked(handle: Handle, page: StatePage, *, drop_unreadable: bool) -> RepairReport:
    found = _inspect(handle)
    report = plan_repair(found, handle.clock.now_ms(), drop_unreadable=drop_unreadable)
    if not found.live or found.state.failed:
        report.quarantine += _repair_tail(handle, found, report)
        with handle.sync_locked():
            report.recovery = recover(handle, page)
        found = _inspect(handle)
        if drop_unreadable:
            found.cut_unreadable()
    handle.adopt(page)
    # The producer snapshot at the end describes the log before the repair.
    for path in {f"{handle.folder}/{PRODUCERS_FILE}", *report.caches, *(cache.path for cache in found.bad_caches)}:
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(path)
    if _state_reason(found):
        handle.ledger.mark_producers()
    if found.cuts or found.holes or _checkpoint_reason(found):
        with handle.sync_locked():
            report.quarantine += _repair_live(handle, found)
    for base in {*found.bad_indexes, *(cut.segment for cut in report.cuts)}:
        rebuild_index(handle, base)
    return report


def _inspect(handle: Handle) -> PartitionFindings:
    return inspect_partition(handle.fs, handle.folder, handle.topic, handle.partition, handle.config, Tally())


@interrupt_safe_context
def _append_locked_within(handle: Handle, timeout_s: float) -> Iterator[None]:
    """Hold the append lock. Appends hold it for microseconds, so a short wait is enough to detect a stuck process."""
    with handle.append_mutex:
        try:
            if not lock_within(handle.fs, handle.lock_fd, timeout_s):
                raise PartitionBusy(handle.log_name, "repair it")
            yield
        finally:
            handle.fs.flock(handle.lock_fd, UNLOCK)


# ---------------------------------------------------------------- before a recovery


def _repair_tail(handle: Handle, found: PartitionFindings, report: RepairReport) -> list[str]:
    """Cut out damage above the recovery point, because a recovery would drop the intact batches after it."""
    if not (report.lost or report.cuts or report.checkpoint):
        return []
    checkpoint = rebuilt_checkpoint(found, report.lost)
    point = (checkpoint.recovery_segment, checkpoint.recovery_position)
    cuts = [cut for cut in report.cuts if (cut.segment, cut.position) >= point]
    with handle.sync_locked():
        # First the checkpoint: recovery accepts a gap between segments only if a lost range explains it.
        handle.ledger.replace_checkpoint(checkpoint)
    return cut_out(handle, cuts, keep_empty=True)


# ---------------------------------------------------------------- a live log


def _repair_live(handle: Handle, found: PartitionFindings) -> list[str]:
    """Repair a live log: roll, announce, replace, publish. Return the quarantine files. The caller holds both locks."""
    ledger, page = handle.ledger, handle.page
    log = page.log.read()
    lost = list(new_ranges(found, next_epoch(found), handle.clock.now_ms()))
    is_cut = bool(lost or found.cuts)
    try:
        Syncer(handle).sync_all(log, page.sync.read())
        if is_cut:
            log = _roll(handle, log)
    except DiskFailed as error:
        handle.fail(f"an fsync failed ({error})")
    if is_cut and page.words[PRODUCERS_WORD]:
        log = _snapshot_decisions(handle, log)
    epoch = next_epoch(found) if is_cut else log.epoch
    rebuilt = rebuilt_checkpoint(found, lost)
    ledger.replace_checkpoint(
        replace(
            rebuilt,
            recovery_offset=log.log_end_offset,
            recovery_segment=log.active_base_offset,
            recovery_position=log.end_position,
            offset_ceiling=log.offset_ceiling,
            clean=log.offset_ceiling == log.log_end_offset,
            boot_id=handle.fs.boot_id(),
            epochs=(*rebuilt.epochs, EpochStart(epoch, log.log_end_offset)) if is_cut else rebuilt.epochs,
        )
    )
    ledger.record_recovery_point(page.sync.read())
    kept = cut_out(handle, sorted(found.cuts, key=_by_position))
    ledger.start_epoch(log, epoch)
    return kept


def _roll(handle: Handle, log: LogState) -> LogState:
    """Seal the active segment and begin the next one at the log end, durably. Return the published state.

    Unlike an appender, it does not read the segment for its index, because the segment may be damaged.
    """
    if not log.end_position:
        return log
    fs, folder, ledger = handle.fs, handle.folder, handle.ledger
    base = log.log_end_offset
    ledger.start_append()  # if killed in between, the next process removes the new segment
    create_segment(fs, folder, base)
    truncate_durably(fs, folder, log.active_base_offset, log.end_position)
    fs.sync_folder(folder)
    rolled = replace(log, active_base_offset=base, end_position=0, first_append_ms=0)
    ledger.publish(rolled)
    ledger.record_durable_roll(base)
    return rolled


def _snapshot_decisions(handle: Handle, log: LogState) -> LogState:
    """Write a producer snapshot before markers are cut out. Return the log state with the last stable offset.

    A transaction that began below the last stable offset was decided, even if its marker is unreadable. After damaged
    markers are cut out, only the snapshot of the new segment records these decisions.
    """
    states = ProducerStates(handle)
    states.load(log, list(handle.segments(log)))
    entries: list[ProducerEntry] = []
    stable_offset = log.log_end_offset
    for entry in states.all(handle.clock.now_ms()):
        if 0 <= entry.transaction_offset < log.last_stable_offset:
            entry = replace(entry, transaction_offset=-1)
        elif entry.transaction_offset >= 0:
            stable_offset = min(stable_offset, entry.transaction_offset)
        entries.append(entry)
    path = segment_stem(handle.folder, log.active_base_offset) + SNAPSHOT_SUFFIX
    replace_file(handle.fs, path, encode_snapshot(entries))
    return replace(log, last_stable_offset=stable_offset)


# ---------------------------------------------------------------- the report


def _by_position(cut: Cut) -> tuple[int, int]:
    return cut.segment, cut.position


def _checkpoint_reason(found: PartitionFindings) -> str:
    if found.checkpoint.missing and (found.segments or found.state.log is not None):
        return "it was missing"
    if found.checkpoint.is_damaged:
        return "both slots were damaged" if found.checkpoint.checkpoint is None else "a slot was damaged"
    if found.is_unaware_of_producers:
        return "it did not know of the log's producers"
    return ""


def _state_reason(found: PartitionFindings) -> str:
    if not found.live:
        return ""
    if found.has_aborts and not found.state.aborts:
        return "transactions were aborted"
    return "the log has producers" if found.has_producers and not found.state.producers else ""
