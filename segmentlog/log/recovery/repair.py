"""Repairing a partition: what is damaged goes to quarantine, what is whole stays where it is.

A damaged batch is cut out of its segment; its offsets become a lost range, so that a reader
in the middle of it is told, others step over it, and no record is ever given one of them.

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
import os
from collections.abc import Callable, Iterable, Iterator

import msgspec

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import PartitionBusy
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.names import (
    ABORTED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    PRODUCERS_FILE,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    segment_name,
)
from segmentlog.format.producers import (
    AbortedTransaction,
    Malformed,
    ProducerEntry,
    decode_aborted,
    encode_aborted,
    encode_snapshot,
)
from segmentlog.inspection.findings import Tally
from segmentlog.inspection.found import Cut, PartitionFound
from segmentlog.inspection.partition import inspect_partition
from segmentlog.inspection.segment import read_segment
from segmentlog.log.aborted import read_aborted
from segmentlog.log.around import around_segment
from segmentlog.log.files import remove_segment
from segmentlog.log.handle import WRITING, Handle
from segmentlog.log.producers import ProducerStates
from segmentlog.log.recovery.recovery import recover
from segmentlog.policy.recovery import UNKNOWN_CEILING_GAP
from segmentlog.records import EpochStart, LostRange, RecoveryReport
from segmentlog.storage.file_locks import lock_within
from segmentlog.storage.fs import FileSystem, read_file, replace_file
from segmentlog.storage.index import SegmentIndex
from segmentlog.storage.locks import UNLOCK, held
from segmentlog.storage.segment import MappedSegment, list_segments, segment_stem
from segmentlog.storage.state import PRODUCERS_WORD, LogState, StatePage


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


def plan_repair(found: PartitionFound, now_ms: int) -> RepairReport:
    """What `repair_partition` would do about what was found. Changes nothing."""
    plan = RepairReport(
        found.topic, found.partition, cuts=sorted(found.cuts, key=lambda cut: (cut.segment, cut.position))
    )
    plan.lost = list(_new_ranges(found, _next_epoch(found), now_ms))
    plan.indexes = [segment_stem(found.folder, base) + INDEX_SUFFIX for base in found.bad_indexes]
    plan.caches = [one.path for one in found.bad_caches]
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
    clock: Clock | None = None,
    lock_timeout_s: float = 5.0,
) -> RepairReport:
    """Cut the damage out of a partition. Returns what was done; nothing, when there was none.

    Raises `PartitionBusy` when the append lock is not free for a moment, `PartitionFailed`
    when an fsync fails, DiskFull, OSError.
    """
    handle = Handle(fs, folder, topic, partition, load_config, clock or Clock())
    handle.open_files()
    try:
        page = StatePage.map(fs, handle.state_fd, writable=True)
        assert page is not None
        with _append_locked_now(handle, lock_timeout_s):
            return _repair_locked(handle, page)
    finally:
        handle.close_files()


def _repair_locked(handle: Handle, page: StatePage) -> RepairReport:
    found = _inspect(handle)
    report = plan_repair(found, handle.clock.now_ms())
    if not found.live or found.state.failed:
        report.quarantine += _mend_tail(handle, found, report)
        with handle.sync_locked():
            report.recovery = recover(handle, page)
        found = _inspect(handle)
    handle.adopt(page)
    # What was known of producers at the end is of the log as it was.
    for path in {f"{handle.folder}/{PRODUCERS_FILE}", *report.caches, *(one.path for one in found.bad_caches)}:
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(path)
    if _state_trouble(found):
        page.words[PRODUCERS_WORD] = 1
        page.count_abort()
    if found.cuts or found.holes or _checkpoint_trouble(found):
        with handle.sync_locked():
            report.quarantine += _mend(handle, found)
    for base in {*found.bad_indexes, *(cut.segment for cut in report.cuts)}:
        _rebuild_index(handle, base)
    return report


def _inspect(handle: Handle) -> PartitionFound:
    return inspect_partition(handle.fs, handle.folder, handle.topic, handle.partition, handle.config, Tally())


@held
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


def _mend_tail(handle: Handle, found: PartitionFound, report: RepairReport) -> list[str]:
    """Cut out what lies above the recovery point and has whole batches behind it, which a recovery would drop."""
    if not (report.lost or report.cuts or report.checkpoint):
        return []
    checkpoint = _rebuilt_checkpoint(found, report.lost)
    point = (checkpoint.recovery_segment, checkpoint.recovery_position)
    cuts = [cut for cut in report.cuts if (cut.segment, cut.position) >= point]
    with handle.sync_locked():
        # First: the recovery lets one segment follow another only where nothing is missing without a reason.
        handle.checkpoint.write(checkpoint)
    return _replace_segments(handle, cuts, keep_empty=True)


def _rebuilt_checkpoint(found: PartitionFound, lost: Iterable[LostRange]) -> Checkpoint:
    """The checkpoint with more lost ranges, and what the log tells of a slot that is gone."""
    known, log = found.checkpoint.checkpoint, found.state.log
    bases = [segment.base_offset for segment in found.segments]
    end_offset = max([segment.end_offset for segment in found.segments], default=0)
    first = bases[0] if bases else 0
    checkpoint = known or Checkpoint(
        log_start_offset=first, clean=False, epochs=(EpochStart(0, 0),), has_producers=True
    )
    ceiling = checkpoint.offset_ceiling
    if log is not None:
        ceiling = log.offset_ceiling
        checkpoint = msgspec.structs.replace(checkpoint, log_start_offset=log.log_start_offset)
    elif known is None or found.checkpoint.is_damaged:
        ceiling = max(end_offset, ceiling) + UNKNOWN_CEILING_GAP  # the slot that is gone may have had a higher one
        checkpoint = msgspec.structs.replace(checkpoint, clean=False)
    if known is None or known.recovery_segment not in bases:
        # From the next segment on: what lies before is below the recovery point.
        behind = [base for base in bases if known is not None and base > known.recovery_segment] or bases or [0]
        checkpoint = msgspec.structs.replace(
            checkpoint, recovery_offset=behind[0], recovery_segment=behind[0], recovery_position=0, clean=False
        )
    return msgspec.structs.replace(
        checkpoint,
        offset_ceiling=ceiling,
        has_producers=checkpoint.has_producers or found.has_producers,
        epochs=_epochs(found, checkpoint.epochs),
        lost_ranges=add_lost_ranges(checkpoint.lost_ranges, lost),
    )


def _epochs(found: PartitionFound, known: tuple[EpochStart, ...]) -> tuple[EpochStart, ...]:
    """The history, with what the batches say about epochs that it lacks."""
    starts = {one.epoch: one.start_offset for one in known}
    for segment in found.segments:
        for epoch, base_offset in segment.epochs.items():
            starts.setdefault(epoch, base_offset)
    history: list[EpochStart] = []
    for epoch, start_offset in sorted(starts.items()):
        if not history or start_offset >= history[-1].start_offset:
            history.append(EpochStart(epoch, start_offset))
    return tuple(history)


# ---------------------------------------------------------------- a live log


def _mend(handle: Handle, found: PartitionFound) -> list[str]:
    """Roll, announce, replace, publish. The caller holds both locks; returns the files in quarantine."""
    page = handle.page
    log = page.log.read()
    _sync_everything(handle, log)
    lost = list(_new_ranges(found, _next_epoch(found), handle.clock.now_ms()))
    if lost or found.cuts:
        log = _roll(handle, log)
        if page.words[PRODUCERS_WORD]:
            log = _keep_decisions(handle, log)
    checkpoint = msgspec.structs.replace(
        _rebuilt_checkpoint(found, lost),
        recovery_offset=log.log_end_offset,
        recovery_segment=log.active_base_offset,
        recovery_position=log.end_position,
        offset_ceiling=log.offset_ceiling,
        clean=log.offset_ceiling == log.log_end_offset,
        boot_id=handle.fs.boot_id(),
    )
    epoch = log.epoch
    if lost or found.cuts:
        epoch = _next_epoch(found)
        started = EpochStart(epoch, log.log_end_offset)
        checkpoint = msgspec.structs.replace(checkpoint, epochs=(*checkpoint.epochs, started))
    handle.checkpoint.write(checkpoint)
    kept = _replace_segments(handle, sorted(found.cuts, key=lambda cut: (cut.segment, cut.position)))
    page.log.write(msgspec.structs.replace(log, epoch=epoch, generation=log.generation + 1))
    return kept


def _sync_everything(handle: Handle, log: LogState) -> None:
    """fsync every segment that may not be, and the folder: the recovery point is about to move to the end."""
    fs, page = handle.fs, handle.page
    sync = page.sync.read()
    try:
        for base in list_segments(fs, handle.folder):
            if sync.synced_base_offset <= base <= log.active_base_offset:
                fd = fs.open(segment_stem(handle.folder, base) + LOG_SUFFIX, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fs.fdatasync(fd)
                finally:
                    fs.close(fd)
        fs.sync_folder(handle.folder)
    except OSError as error:
        handle.fail(f"an fsync failed ({error})")
    page.sync.write(
        msgspec.structs.replace(
            sync,
            durable_offset=log.log_end_offset,
            synced_bytes=log.appended_bytes,
            synced_base_offset=log.active_base_offset,
            checkpointed_bytes=log.appended_bytes,
            synced_at_ms=handle.clock.monotonic_ms(),
            sync_count=sync.sync_count + 1,
        )
    )


def _roll(handle: Handle, log: LogState) -> LogState:
    """Seal the active segment and begin one at the log end, durably. Returns the state, which is published."""
    if not log.end_position and segment_exists(handle, log.active_base_offset):
        return log
    fs, page = handle.fs, handle.page
    page.writing = WRITING  # killed in here: whoever comes next removes the new segment again
    path = segment_stem(handle.folder, log.log_end_offset) + LOG_SUFFIX
    fs.close(fs.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    if segment_exists(handle, log.active_base_offset):
        fd = fs.open(segment_stem(handle.folder, log.active_base_offset) + LOG_SUFFIX, os.O_RDWR | os.O_CLOEXEC)
        try:
            fs.ftruncate(fd, min(log.end_position, fs.fstat(fd).st_size))
            fs.fsync(fd)
        finally:
            fs.close(fd)
    fs.sync_folder(handle.folder)
    rolled = msgspec.structs.replace(
        log,
        active_base_offset=log.log_end_offset,
        end_position=0,
        first_append_ms=0,
    )
    page.log.write(rolled)
    page.sync.write(msgspec.structs.replace(page.sync.read(), synced_base_offset=log.log_end_offset))
    page.writing = 0
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
            entry = msgspec.structs.replace(entry, transaction_offset=-1)
        elif entry.transaction_offset >= 0:
            stable_offset = min(stable_offset, entry.transaction_offset)
        entries.append(entry)
    path = segment_stem(handle.folder, log.active_base_offset) + SNAPSHOT_SUFFIX
    replace_file(handle.fs, path, encode_snapshot(entries))
    return msgspec.structs.replace(log, last_stable_offset=stable_offset)


def segment_exists(handle: Handle, base: int) -> bool:
    return base in list_segments(handle.fs, handle.folder)


# ---------------------------------------------------------------- what both do


def _checkpoint_trouble(found: PartitionFound) -> str:
    if found.checkpoint.missing and (found.segments or found.state.log is not None):
        return "it was missing"
    if found.checkpoint.is_damaged:
        return "both slots were damaged" if found.checkpoint.checkpoint is None else "a slot was damaged"
    if found.is_unaware_of_producers:
        return "it did not know of the log's producers"
    return ""


def _state_trouble(found: PartitionFound) -> str:
    if not found.live:
        return ""
    if found.has_aborts and not found.state.aborts:
        return "transactions were aborted"
    return "the log has producers" if found.has_producers and not found.state.producers else ""


def _next_epoch(found: PartitionFound) -> int:
    """An epoch that nothing in the log, in the checkpoint or in the state page has had."""
    epochs = [epoch for segment in found.segments for epoch in segment.epochs]
    if found.checkpoint.checkpoint is not None:
        epochs.append(found.checkpoint.checkpoint.epoch)
    if found.state.log is not None:
        epochs.append(found.state.log.epoch)
    return max(epochs, default=0) + 1


def _new_ranges(found: PartitionFound, epoch: int, now_ms: int) -> Iterator[LostRange]:
    """The offsets of everything that is damaged or missing without a reason, ascending."""
    ranges = [(cut.base_offset, cut.end_offset, "damaged, cut out by a repair") for cut in found.cuts]
    ranges += [(hole.base_offset, hole.end_offset, f"repaired: {hole.why}") for hole in found.holes]
    for base_offset, end_offset, reason in sorted(ranges):
        if base_offset < end_offset:
            yield LostRange(base_offset, end_offset, epoch, reason, now_ms)


def add_lost_ranges(known: Iterable[LostRange], new: Iterable[LostRange]) -> tuple[LostRange, ...]:
    """All ranges, ascending; of a new one only what no other covers, so that ranges touch but never overlap."""
    ranges = sorted(known, key=_by_offset)
    for lost in sorted(new, key=_by_offset):
        base_offset = lost.base_offset
        for one in sorted(ranges, key=_by_offset):
            if base_offset < min(one.base_offset, lost.end_offset):
                end_offset = min(one.base_offset, lost.end_offset)
                ranges.append(msgspec.structs.replace(lost, base_offset=base_offset, end_offset=end_offset))
            base_offset = max(base_offset, one.end_offset)
        if base_offset < lost.end_offset:
            ranges.append(msgspec.structs.replace(lost, base_offset=base_offset))
    return tuple(sorted(ranges, key=_by_offset))


def _by_offset(lost: LostRange) -> tuple[int, int]:
    return lost.base_offset, lost.end_offset


def _replace_segments(handle: Handle, cuts: list[Cut], *, keep_empty: bool = False) -> list[str]:
    """Put a copy without the cuts in the place of each segment; the files that hold what was cut."""
    kept: list[str] = []
    for base in dict.fromkeys(cut.segment for cut in cuts):
        path = segment_stem(handle.folder, base) + LOG_SUFFIX
        _, data, _ = read_segment(handle.fs, path)
        whole: list[bytes] = []
        position = 0
        for cut in cuts:
            if cut.segment == base:
                kept.append(_quarantine(handle, cut, bytes(data[cut.position : cut.end_position])))
                whole.append(bytes(data[position : cut.position]))
                position = cut.end_position
        whole.append(bytes(data[position:]))
        if not whole[-1].strip(b"\0"):
            del whole[-1]  # zeros at the end of what was cut out: readers know of none in a sealed segment
        rest = b"".join(whole)
        aborted = _aborts_among(handle, base, len(data), [cut for cut in cuts if cut.segment == base])
        if rest.strip(b"\0") or keep_empty:
            replace_file(handle.fs, path, rest)
            _keep_aborts(handle, base, aborted)
        else:
            remove_segment(handle, base)
            handle.fs.sync_folder(handle.folder)
    return kept


def _aborts_among(handle: Handle, base: int, size_bytes: int, cuts: list[Cut]) -> list[AbortedTransaction]:
    """The aborts that only the segment's ``.txnindex`` still tells of, their markers being damaged."""
    with contextlib.suppress(FileNotFoundError, Malformed):
        size, aborted = decode_aborted(read_file(handle.fs, segment_stem(handle.folder, base) + ABORTED_SUFFIX))
        if size == size_bytes:
            return [one for one in aborted if any(cut.base_offset <= one.last_offset < cut.end_offset for cut in cuts)]
    return []


def _keep_aborts(handle: Handle, base: int, cut_out: list[AbortedTransaction]) -> None:
    """Make the ``.txnindex`` of a replaced segment fit it; what its markers told that were cut out stays in it."""
    path = segment_stem(handle.folder, base) + ABORTED_SUFFIX
    if not cut_out:
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(path)
        return
    mapped = MappedSegment(handle.fs, handle.folder, base)
    size = len(mapped.view)
    left = read_aborted(mapped, 0, size, lambda: around_segment(handle, base, None))
    aborted = sorted([*cut_out, *left], key=lambda one: one.last_offset)
    replace_file(handle.fs, path, encode_aborted(size, aborted))


def _quarantine(handle: Handle, cut: Cut, data: bytes) -> str:
    """Keep what is cut out, durably, before it goes."""
    with contextlib.suppress(FileExistsError):
        handle.fs.mkdir(handle.quarantine)
        handle.fs.sync_folder(handle.folder)
    path = f"{handle.quarantine}/{segment_name(cut.segment)}-{cut.position}-{handle.clock.now_ms()}.damaged"
    replace_file(handle.fs, path, data)
    return path


def _rebuild_index(handle: Handle, base: int) -> None:
    """Make the index files of a segment anew; never in place, where a reader may have them mapped."""
    stem = segment_stem(handle.folder, base)
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(stem + suffix)
    log = handle.page.log.read()
    with contextlib.suppress(FileNotFoundError):  # cut out as a whole
        mapped = MappedSegment(handle.fs, handle.folder, base)
        index = SegmentIndex(handle.fs, stem, base, handle.config.index_interval_bytes)
        active = base == log.active_base_offset
        end = log.end_position if active else len(mapped.view)
        index.catch_up(mapped.upto(end), end)
        if not active:
            following = [one for one in list_segments(handle.fs, handle.folder) if base < one <= log.active_base_offset]
            index.close(min(following, default=log.log_end_offset), end)
        index.flush()
