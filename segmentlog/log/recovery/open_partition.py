"""Opening a partition: believe the shared state page where it can be believed, else recover the log."""

from __future__ import annotations

import contextlib
import os

from msgspec.structs import replace

from segmentlog.errors import CorruptBatch, DiskFull
from segmentlog.format.file_names import STATE_FILE
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.log.handle import Handle
from segmentlog.log.recovery.log_recovery import recover
from segmentlog.log.segment_removal import quarantine_tail, remove_segment
from segmentlog.records import RecoveryReport
from segmentlog.storage.fork_safety import opened_lockable
from segmentlog.storage.fs import NO_ROOM, DiskFailed, opened
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING, UNLOCK
from segmentlog.storage.segment import list_segments, truncate_durably
from segmentlog.storage.state_page import PAGE_SIZE, REWRITING, StatePage
from segmentlog.storage.state_page_check import distrust_reason


def open_partition(handle: Handle) -> RecoveryReport:
    """Make the handle usable: map the state page, recovering the log first if need be.

    Raises OSError for files that cannot be read, DiskFull when recovery has no room.
    """
    if handle.read_only:
        if handle.recovery == "strict":
            _refuse_damage(handle)
        return _open_read_only(handle)
    with handle.folder_locked():
        handle.check_named()  # no page tells yet whose folder it is
        if handle.recovery == "strict":
            _refuse_damage(handle)
        return _open(handle)


def _open(handle: Handle) -> RecoveryReport:
    handle.open_files()
    page = map_page(handle)
    if _is_sound(handle, page):
        handle.adopt(page)
        try:
            if page.writing and _lock_now(handle) and page.writing:
                return truncate_torn_tail(handle)
            return _live_report(page)
        finally:
            handle.fs.flock(handle.lock_fd, UNLOCK)  # harmless where it is not locked
    try:
        handle.fs.flock(handle.lock_fd, EXCLUSIVE)
        if _is_sound(handle, page):  # somebody else recovered it while this one waited
            handle.adopt(page)
            return _live_report(page)
        doubt = distrust_reason(handle.fs, handle.folder, page, handle.state_fd)
        with handle.sync_locked():
            report = recover(handle, page)
        # What the page is doubted for matters where that costs something.
        matters = report.lost is not None and report.verdict != "restored"
        return replace(report, why=f"{report.why}; {doubt}") if doubt and matters else report
    finally:
        handle.fs.flock(handle.lock_fd, UNLOCK)


def _refuse_damage(handle: Handle) -> None:
    """Raise `CorruptBatch` for the first thing that is not as it was written, before anything is changed."""
    found = inspect_partition(handle.fs, handle.folder, handle.topic, handle.partition, handle.config, Tally())
    damage = [finding for finding in found.findings if finding.severity == "damage"]
    first = damage[0] if damage else found.torn
    if first is not None:
        wanted = "a whole log (recovery='strict')"
        raise CorruptBatch(first.path, max(first.position, 0), wanted, first.what, first.base_offset)


def map_page(handle: Handle) -> StatePage:
    """The page of a partition whose files are open, whatever it says. Raises OSError, DiskFull."""
    # Through a descriptor of its own: the map keeps it open, in a forked child too, and with it any lock on it.
    try:
        # Mapping may lock it for a moment.
        with opened_lockable(handle.fs, f"{handle.folder}/{STATE_FILE}", os.O_RDWR) as fd:
            page = StatePage.map(handle.fs, fd, writable=True)
    except OSError as error:
        handle.close_files()
        if error.errno in NO_ROOM:
            raise DiskFull(f"{handle.folder}/{STATE_FILE}", PAGE_SIZE) from error
        raise
    assert page is not None
    return page


def _is_sound(handle: Handle, page: StatePage) -> bool:
    if page.failed or page.writing == REWRITING:
        return False
    return distrust_reason(handle.fs, handle.folder, page, handle.state_fd) is None


def _lock_now(handle: Handle) -> bool:
    try:
        handle.fs.flock(handle.lock_fd, EXCLUSIVE | NON_BLOCKING)
    except BlockingIOError:
        return False  # an append is in progress after all
    return True


def _live_report(page: StatePage) -> RecoveryReport:
    log, sync = page.log.read(), page.sync.read()
    if log.offset_ceiling == log.log_end_offset == sync.durable_offset:
        verdict, why = "clean", "it was closed cleanly"
    else:
        unsynced = log.log_end_offset - sync.durable_offset
        verdict, why = "live", f"the page cache is as the last process left it; {unsynced} records are not fsynced yet"
    return RecoveryReport(verdict, log.log_start_offset, log.log_end_offset, log.epoch, why=why)


# ---------------------------------------------------------------- a process died inside an append


def finish_interrupted_append(handle: Handle) -> None:
    """Finish what a process left that died under the append lock. The caller holds that lock, and not the sync lock."""
    writing = handle.page.writing
    if writing == REWRITING:
        with handle.sync_locked():
            recover(handle, handle.page)
    elif writing:
        truncate_torn_tail(handle)


def truncate_torn_tail(handle: Handle) -> RecoveryReport:
    """Cut off what an append that never finished left behind the end. The caller holds the append lock.

    Done again when something keeps it from being done; but a failed fsync fails the partition.
    """
    try:
        return _cut_torn_tail(handle)
    except DiskFailed as error:
        handle.fail(f"an fsync failed ({error})")
        raise


def _cut_torn_tail(handle: Handle) -> RecoveryReport:
    log = handle.page.log.read()
    fs = handle.fs
    bases = list_segments(fs, handle.folder)
    truncated, kept = 0, None
    for base in bases:
        if base < log.active_base_offset:
            continue
        start = log.end_position if base == log.active_base_offset else 0
        with failures_ignored():  # no room to keep them, and never acknowledged: the log goes on
            size, path = quarantine_tail(handle, base, start, "torn")
            truncated += size
            kept = path or kept
        if base > log.active_base_offset:
            remove_segment(handle, base)
        else:
            truncate_durably(fs, handle.folder, base, start)
    # Segments behind it are durably gone, like what `drop_behind` cuts off: the offsets in them go to other records
    # next. Also when there were none: who tried this before, or the append itself, may have got so far.
    fs.sync_folder(handle.folder)
    handle.ledger.end_append()
    return RecoveryReport(
        "torn write",
        log.log_start_offset,
        log.log_end_offset,
        log.epoch,
        truncated_bytes=truncated,
        quarantine_path=kept,
        why="a process died inside an append that was never acknowledged",
    )


def _open_read_only(handle: Handle) -> RecoveryReport:
    """Look, and change nothing: the live state page if there is one, else a private one made by scanning."""
    page = find_live_page(handle)
    if page is not None:
        handle.adopt(page)
        return _live_report(page)
    handle.is_snapshot = True
    return recover(handle, StatePage.private(), write=False)


def find_live_page(handle: Handle) -> StatePage | None:
    """The page that those share who have the log open for writing, or had it since the machine started."""
    with (
        contextlib.suppress(FileNotFoundError),
        opened(handle.fs, f"{handle.folder}/{STATE_FILE}", os.O_RDONLY | os.O_CLOEXEC) as fd,
    ):
        page = StatePage.map(handle.fs, fd, writable=False)
        if page is not None and distrust_reason(handle.fs, handle.folder, page, fd) is None:
            return page
    return None
