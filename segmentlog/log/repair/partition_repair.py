"""Repairing a partition: what is damaged goes to quarantine, what is whole stays where it is.

A damaged batch is cut out of its segment; its offsets become a lost range, so that a reader
in the middle of it is told, others step over it, and no record is ever given one of them.
An unreadable batch, which is what was written, stays, unless the caller asks for its removal.

A partition may be repaired while other processes have it open: they wait at the append lock
and go on afterwards. For them the log is in a new epoch and its list of segments in a new
generation, so that they look at the folder anew; what they have mapped stays as it was.

    tail      not live: cut out what the recovery would take for the end of the log, and recover
    roll      begin a new segment, so that no damaged one is appended to, or scanned by a recovery
    announce  the lost ranges and the new epoch are durable in the checkpoint
    replace   each damaged segment: bytes to quarantine, a copy without them beside it, rename
    publish   the new epoch and generation in the state page
    indexes   made anew from the segments; snapshots and lists of aborts that are not true go

Killed between any two of these, it leaves a partition that is no worse than before, and that
can be used, or repaired once more.
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
    """What a repair did to one partition, or would do."""

    topic: str
    partition: int
    cuts: list[Cut] = []
    """What was cut out of segments, in the order of the log."""
    lost: list[LostRange] = []
    """The offsets that are given up: those that were cut out, and those whose segments are missing."""
    quarantine: list[str] = []
    """The files that hold what was cut out, one for each cut."""
    indexes: list[str] = []
    """Segments whose index was made anew."""
    caches: list[str] = []
    """Snapshots of producers and lists of aborted transactions that were not true, and were removed."""
    state: str = ""
    """What the state page is told of producers that it did not know."""
    checkpoint: str = ""
    """Why the checkpoint was written anew, if a slot of it was damaged."""
    recovery: RecoveryReport | None = None
    """The recovery that the next open would have done anyway."""

    @property
    def does_anything(self) -> bool:
        return bool(self.cuts or self.lost or self.indexes or self.caches or self.state or self.checkpoint)


def plan_repair(found: PartitionFindings, now_ms: int, *, drop_unreadable: bool = False) -> RepairReport:
    """What `repair_partition` would do about what was found. Changes no file; called once for each ``found``."""
    if drop_unreadable:
        found.cut_unreadable()
    plan = RepairReport(found.topic, found.partition, cuts=sorted(found.cuts, key=_by_position))
    plan.lost = list(new_ranges(found, next_epoch(found), now_ms))
    plan.indexes = [segment_stem(found.folder, base) + INDEX_SUFFIX for base in found.bad_indexes]
    plan.caches = [cache.path for cache in found.bad_caches]
    plan.state = _state_trouble(found)
    plan.checkpoint = _checkpoint_trouble(found)
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
    """Cut the damage out of a partition. Returns what was done; nothing, when there was none.

    With ``drop_unreadable`` batches whose checksums are right and whose records do not decode are cut out, too.

    Raises `PartitionBusy` when the append lock is not free for a moment, `PartitionFailed`
    when an fsync fails, DiskFull, OSError.
    """
    handle = Handle(fs, folder, topic, partition, load_config, clock or Clock())
    handle.open_files()
    try:
        page = StatePage.map(fs, handle.state_fd, writable=True)
        assert page is not None
        with handle.folder_locked(), _append_locked_now(handle, lock_timeout_s):
            return _repair_locked(handle, page, drop_unreadable=drop_unreadable)
    finally:
        handle.close_files()


def _repair_locked(handle: Handle, page: StatePage, *, drop_unreadable: bool) -> RepairReport:
    found = _inspect(handle)
    report = plan_repair(found, handle.clock.now_ms(), drop_unreadable=drop_unreadable)
    if not found.live or found.state.failed:
        report.quarantine += _mend_tail(handle, found, report)
        with handle.sync_locked():
            report.recovery = recover(handle, page)
        found = _inspect(handle)
        if drop_unreadable:
            found.cut_unreadable()
    handle.adopt(page)
    # What was known of producers at the end is of the log as it was.
    for path in {f"{handle.folder}/{PRODUCERS_FILE}", *report.caches, *(cache.path for cache in found.bad_caches)}:
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(path)
    if _state_trouble(found):
        handle.ledger.mark_producers()
    if found.cuts or found.holes or _checkpoint_trouble(found):
        with handle.sync_locked():
            report.quarantine += _mend(handle, found)
    for base in {*found.bad_indexes, *(cut.segment for cut in report.cuts)}:
        rebuild_index(handle, base)
    return report


def _inspect(handle: Handle) -> PartitionFindings:
    return inspect_partition(handle.fs, handle.folder, handle.topic, handle.partition, handle.config, Tally())


@interrupt_safe_context
def _append_locked_now(handle: Handle, timeout_s: float) -> Iterator[None]:
    """Hold the append lock; appenders hold it for microseconds, so a short wait tells the busy from the stuck."""
    with handle.append_mutex:
        try:
            if not lock_within(handle.fs, handle.lock_fd, timeout_s):
                raise PartitionBusy(handle.log_name, "repair it")
            yield
        finally:
            handle.fs.flock(handle.lock_fd, UNLOCK)


# ---------------------------------------------------------------- before a recovery


def _mend_tail(handle: Handle, found: PartitionFindings, report: RepairReport) -> list[str]:
    """Cut out what lies above the recovery point and has whole batches behind it, which a recovery would drop."""
    if not (report.lost or report.cuts or report.checkpoint):
        return []
    checkpoint = rebuilt_checkpoint(found, report.lost)
    point = (checkpoint.recovery_segment, checkpoint.recovery_position)
    cuts = [cut for cut in report.cuts if (cut.segment, cut.position) >= point]
    with handle.sync_locked():
        # First: the recovery lets one segment follow another only where nothing is missing without a reason.
        handle.ledger.replace_checkpoint(checkpoint)
    return cut_out(handle, cuts, keep_empty=True)


# ---------------------------------------------------------------- a live log


def _mend(handle: Handle, found: PartitionFindings) -> list[str]:
    """Roll, announce, replace, publish. The caller holds both locks; returns the files in quarantine."""
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
        log = _keep_decisions(handle, log)
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
    """Seal the active segment and begin one at the log end, durably. Returns the state, which is published.

    Not as an appender does it, who reads the segment for its index: it may be the one that is damaged.
    """
    if not log.end_position:
        return log
    fs, folder, ledger = handle.fs, handle.folder, handle.ledger
    base = log.log_end_offset
    ledger.start_append()  # killed in here: whoever comes next removes the new segment again
    create_segment(fs, folder, base)
    truncate_durably(fs, folder, log.active_base_offset, log.end_position)
    fs.sync_folder(folder)
    rolled = replace(log, active_base_offset=base, end_position=0, first_append_ms=0)
    ledger.publish(rolled)
    ledger.record_durable_roll(base)
    return rolled


def _keep_decisions(handle: Handle, log: LogState) -> LogState:
    """Write down what is known of producers before markers are cut out; the state with the last stable offset.

    A transaction that began below the last stable offset was decided, whether or not its marker
    can be read: the snapshot of the new segment says so when the log does not any more.
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


# ---------------------------------------------------------------- what is told


def _by_position(cut: Cut) -> tuple[int, int]:
    return cut.segment, cut.position


def _checkpoint_trouble(found: PartitionFindings) -> str:
    if found.checkpoint.missing and (found.segments or found.state.log is not None):
        return "it was missing"
    if found.checkpoint.is_damaged:
        return "both slots were damaged" if found.checkpoint.checkpoint is None else "a slot was damaged"
    if found.is_unaware_of_producers:
        return "it did not know of the log's producers"
    return ""


def _state_trouble(found: PartitionFindings) -> str:
    if not found.live:
        return ""
    if found.has_aborts and not found.state.aborts:
        return "transactions were aborted"
    return "the log has producers" if found.has_producers and not found.state.producers else ""
