"""Read the state of a partition that this process has not opened, from the page that other processes share.

It takes no lock, opens two files briefly, and recovers nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

import msgspec

from segmentlog.format.file_names import CHECKPOINT_FILE, LOG_SUFFIX, STATE_FILE
from segmentlog.policy.lost_ranges import skip_lost_ranges
from segmentlog.records import EpochStart, LostRange
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.segment import list_segments, segment_stem
from segmentlog.storage.state_page import PAGE_SIZE, SHIPPED_WORD, LogState, StateDamaged, StatePage, SyncState

_ATTEMPTS: Final = 5


class StateSummary(msgspec.Struct, frozen=True, gc=False):
    """The content of a state page."""

    log: LogState
    sync: SyncState
    has_failed: bool
    shipped_offset: int = 0

    @property
    def unsynced_count(self) -> int:
        """The number of offsets that are not on disk yet."""
        return max(self.log.log_end_offset - self.sync.durable_offset, 0)

    @classmethod
    def from_page(cls, page: StatePage) -> StateSummary:
        """Read a page. Raises `StateDamaged`."""
        # In this order: durable and shipped offsets read first can never exceed the log end read later.
        sync = page.sync.read()
        shipped_offset = page.words[SHIPPED_WORD]
        return cls(page.log.read(), sync, bool(page.failed), shipped_offset)


def read_state(fs: FileSystem, folder: str, boot_id: str) -> StateSummary | None:
    """Return the partition's state; None if no process has opened it since the machine started, or it was deleted.

    If the disk was detached and attached again since, its page may be outdated. This function does not detect that; the
    process that opens the partition does.
    """
    try:
        found = fs.stat(folder)
        with opened(fs, f"{folder}/{STATE_FILE}", os.O_RDONLY | os.O_CLOEXEC) as fd:
            for _ in range(_ATTEMPTS):
                data = fs.pread(fd, PAGE_SIZE, 0)
                if len(data) < PAGE_SIZE:
                    return None
                page = StatePage(bytearray(data))
                try:
                    return StateSummary.from_page(page) if page.is_about(boot_id, found) else None
                except StateDamaged:  # or a process wrote to it just now
                    continue
    except OSError as error:
        if is_interrupt(error):
            raise
    return None


def sealed_size(fs: FileSystem, folder: str, log: LogState) -> tuple[int, int]:
    """Return (number of sealed segments, their bytes). Raises OSError."""
    count = size_bytes = 0
    if not log.active_base_offset:  # usual where there are many partitions: nothing to list
        return 0, 0
    for base in list_segments(fs, folder):
        if base < log.active_base_offset:
            try:
                size_bytes += fs.stat(segment_stem(folder, base) + LOG_SUFFIX).st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
            count += 1
    return count, size_bytes


def lost_ranges(fs: FileSystem, folder: str, log: LogState) -> tuple[LostRange, ...]:
    """Return the ranges of offsets lost by crashes and truncations, ascending. Raises OSError."""
    if not log.epoch:  # the first epoch ends with the first loss
        return ()
    checkpoint, _ = CheckpointFile(fs, f"{folder}/{CHECKPOINT_FILE}").read()
    return () if checkpoint is None else checkpoint.lost_ranges


def find_lost_range_end(fs: FileSystem, folder: str, offset: int) -> tuple[int, int] | None:
    """Return (end of the lost range that starts at ``offset``, the epoch there); None if no lost range starts there.

    If no process has opened the partition since the machine started, the next recovery may find more lost ranges.
    Raises OSError.
    """
    seen = read_state(fs, folder, fs.boot_id())
    if seen is not None and (not seen.log.epoch or offset >= seen.log.log_end_offset):
        return None
    checkpoint, _ = CheckpointFile(fs, f"{folder}/{CHECKPOINT_FILE}").read()
    if checkpoint is None:
        return None
    start_offset = 0 if seen is None else seen.log.log_start_offset
    if not any(max(lost.base_offset, start_offset) == offset < lost.end_offset for lost in checkpoint.lost_ranges):
        return None
    end_offset = skip_lost_ranges(checkpoint.lost_ranges, offset)
    if seen is not None and end_offset > seen.log.log_end_offset:
        return None  # an interrupted truncation; the process that opens the log for writing completes it
    return end_offset, epoch_at(checkpoint.epochs, end_offset)


def epoch_at(epochs: Iterable[EpochStart], offset: int) -> int:
    """Return the epoch of an offset, given the starts of all epochs."""
    return max(start.epoch for start in epochs if start.start_offset <= offset)


def count_lost_offsets(fs: FileSystem, folder: str, log: LogState) -> int:
    """Count the offsets in lost ranges. Raises OSError."""
    return sum(lost.end_offset - lost.base_offset for lost in lost_ranges(fs, folder, log))
