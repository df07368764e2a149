"""Open a partition: use the shared state page if it can be trusted, else recover the log."""

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
    """Make the handle usable: map the state page, after recovering the log if necessary.

    Raises OSError for files that cannot be read, `DiskFull` if recovery has no room.
    """
    if handle.read_only:
        if handle.recovery == "strict":
            _refuse_damage(handle)
        return _open_read_only(handle)
    with handle.folder_locked():
        handle.check_topic_name()  # the page is not trusted yet, so it cannot show whose folder it is
        if handle.recovery == "strict":
            _refuse_damage(handle)
        return _open(handle)


def _open(handle: Handle) -> RecoveryReport:
    handle.open_files()
    page = map_page(handle)
    if _is_sound(handle, page):
        handle.adopt(page)
        try:
            if page.writing and _try_append_lock(handle) and page.writing:
                return truncate_torn_tail(handle)
            return _live_report(page)
        finally:
            handle.fs.flock(handle.lock_fd, UNLOCK)  # harmless where it is not locked
    try:
        handle.fs.flock(handle.lock_fd, EXCLUSIVE)
        if _is_sound(handle, page):  # another process recovered it while this process waited
            handle.adopt(page)
            return _live_report(page)
        reason = distrust_reason(handle.fs, handle.folder, page, handle.state_fd)
        with handle.sync_locked():
            report = recover(handle, page)
        # Report why the page was not trusted only if records were lost.
        matters = report.lost is not None and report.verdict != "restored"
        return replace(report, why=f"{report.why}; {reason}") if reason and matters else report
    finally:
        handle.fs.flock(handle.lock_fd, UNLOCK)


def _refuse_damage(handle: Handle) -> None:
    """Raise `CorruptBatch` for the first damage, before anything is changed."""
    found = inspect_partition(handle.fs, handle.folder, handle.topic, handle.partition, handle.config, Tally())
    damage = [finding for finding in found.findings if finding.severity == "damage"]
    first = damage[0] if damage else found.torn
    if first is not None:
        expected = "a log without damage (recovery='strict')"
        raise CorruptBatch(first.path, max(first.position, 0), expected, first.what, first.base_offset)


def map_page(handle: Handle) -> StatePage:
    """Map the state page of a partition with open files, whatever it contains. Raises OSError, `DiskFull`."""
    # Map through a separate descriptor. A forked child inherits the map, which keeps the open file alive, and with it
    # every flock of that descriptor.
    try:
        # Mapping may lock the file briefly.
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


def _try_append_lock(handle: Handle) -> bool:
    try:
        handle.fs.flock(handle.lock_fd, EXCLUSIVE | NON_BLOCKING)
    except BlockingIOError:
        return False  # an append is running
    return True


def _live_report(page: StatePage) -> RecoveryReport:
    log, sync = page.log.read(), page.sync.read()
    if log.offset_ceiling == log.log_end_offset == sync.durable_offset:
        verdict, why = "clean", "it was closed cleanly"
    else:
        unsynced = log.log_end_offset - sync.durable_offset
        verdict = "live"
        why = f"the page cache is as the last process left it; {unsynced} records are not synced yet"
    return RecoveryReport(verdict, log.log_start_offset, log.log_end_offset, log.epoch, why=why)


# ---------------------------------------------------------------- after the death of an appending process


def finish_interrupted_append(handle: Handle) -> None:
    """Complete the change of a process that died while it held the append lock.

    The caller holds that lock, and not the sync lock.
    """
    writing = handle.page.writing
    if writing == REWRITING:
        with handle.sync_locked():
            recover(handle, handle.page)
    elif writing:
        truncate_torn_tail(handle)


def truncate_torn_tail(handle: Handle) -> RecoveryReport:
    """Remove the bytes of an unfinished append after the end. The caller holds the append lock.

    If it fails, the next append tries again; but a failed fsync fails the partition.
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
        with failures_ignored():  # the disk is too full for a copy, and the bytes were never acknowledged
            size, path = quarantine_tail(handle, base, start, "torn")
            truncated += size
            kept = path or kept
        if base > log.active_base_offset:
            remove_segment(handle, base)
        else:
            truncate_durably(fs, handle.folder, base, start)
    # Make the deletion of later segments durable, like `truncate_durably`: their offsets will be reused. Do so even if
    # there are none, because an earlier attempt may have deleted them.
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
    """Open without changing anything: with the live state page, or else with a private page from a scan."""
    page = find_live_page(handle)
    if page is not None:
        handle.adopt(page)
        return _live_report(page)
    handle.is_snapshot = True
    return recover(handle, StatePage.private(), write=False)


def find_live_page(handle: Handle) -> StatePage | None:
    """Return the state page of the processes that have opened the log for writing since boot; None if there is none."""
    with (
        contextlib.suppress(FileNotFoundError),
        opened(handle.fs, f"{handle.folder}/{STATE_FILE}", os.O_RDONLY | os.O_CLOEXEC) as fd,
    ):
        page = StatePage.map(handle.fs, fd, writable=False)
        if page is not None and distrust_reason(handle.fs, handle.folder, page, fd) is None:
            return page
    return None
