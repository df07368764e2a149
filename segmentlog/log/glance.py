"""A look at a partition that this process has not opened: what the processes that have tell each other of it.

It takes no lock, opens two files for a moment, and recovers nothing.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from segmentlog.format.names import CHECKPOINT_FILE, LOG_SUFFIX, STATE_FILE
from segmentlog.records import LostRange
from segmentlog.storage.checkpoint import CheckpointFile
from segmentlog.storage.failures import is_interrupt
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.segment import list_segments, segment_stem
from segmentlog.storage.state import PAGE_SIZE, SHIPPED_WORD, LogState, StateDamaged, StatePage, SyncState

_ATTEMPTS: Final = 5


class Glance(msgspec.Struct, frozen=True, gc=False):
    """What a state page says."""

    log: LogState
    sync: SyncState
    has_failed: bool
    shipped_offset: int = 0

    @property
    def unsynced_count(self) -> int:
        """Offsets that are not on disk yet."""
        return max(self.log.log_end_offset - self.sync.durable_offset, 0)

    @classmethod
    def of(cls, page: StatePage) -> Glance:
        """Raises `StateDamaged`."""
        # In this order: what is durable was written before, and is not to show as more than there is.
        sync = page.sync.read()
        shipped_offset = page.words[SHIPPED_WORD]
        return cls(page.log.read(), sync, bool(page.failed), shipped_offset)


def glance(fs: FileSystem, folder: str, boot_id: str) -> Glance | None:
    """The partition's state; None where nobody has opened it since the machine started, or it is gone.

    What a page says of a disk that went away and came back is found out by who opens the partition, and not here.
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
                    return Glance.of(page) if page.is_about(boot_id, found) else None
                except StateDamaged:  # or somebody wrote to it in that moment
                    continue
    except OSError as error:
        if is_interrupt(error):
            raise
    return None


def sealed_size(fs: FileSystem, folder: str, log: LogState) -> tuple[int, int]:
    """(how many segments there are before the active one, their bytes). Raises OSError."""
    count = size_bytes = 0
    if not log.active_base_offset:  # most partitions that there are many of: no need to look
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
    """The offsets that crashes and truncations took, ascending. Raises OSError."""
    if not log.epoch:  # the first epoch ends with the first loss
        return ()
    checkpoint, _ = CheckpointFile(fs, f"{folder}/{CHECKPOINT_FILE}").read()
    return () if checkpoint is None else checkpoint.lost_ranges


def lost_count(fs: FileSystem, folder: str, log: LogState) -> int:
    """Count the offsets in lost ranges. Raises OSError."""
    return sum(lost.end_offset - lost.base_offset for lost in lost_ranges(fs, folder, log))
