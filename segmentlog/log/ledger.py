"""The ledger of one partition: its state page and its checkpoint, and every change that the log makes to them.

Everybody reads both; nobody else writes them. (But for two words of the page: administration changes them from
outside, to tell open handles that their topic was altered or moved.) The page is what all processes see at
once, the checkpoint what is left after a power cut. Where a change touches both, it is the order that decides
what a death in between leaves:

    reserve offsets      checkpoint, page    the page never promises what is not durable
    note producers       checkpoint, page    the same
    trim                 checkpoint, page    what somebody saw gone does not come back
    move the point       checkpoint, page    the page counts what is to be written from there
    truncate             page, checkpoint    whoever comes next sees that segments are being replaced
    close cleanly        page, checkpoint    whoever appends after a death in between reserves offsets anew
    recover              checkpoint, page    a page that is believed is one whose checkpoint is there

Log fields and words are changed under the append lock, sync fields and the checkpoint under the sync lock. The
checkpoint goes by its name: whoever reads or writes it does so while the folder stays where it is (`Owner.staying`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch
from segmentlog.format.checkpoint import Checkpoint, Compacted, point_at
from segmentlog.format.file_names import CHECKPOINT_FILE
from segmentlog.policy.lost_ranges import with_lost_range
from segmentlog.records import LostRange
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.fs import DiskFailed, FileSystem
from segmentlog.storage.state_page import (
    FAILED_WORD,
    PRODUCERS_WORD,
    REWRITING,
    SHIPPED_WORD,
    WANTED_WORD,
    WRITING,
    WRITING_WORD,
    LogState,
    StatePage,
    SyncState,
)

logger = logging.getLogger("segmentlog")

_LONGEST_WAIT_MS = 60_000
"""Nobody announces more: what lies further ahead is of an earlier boot."""


class LedgerOwner(Protocol):
    """What the ledger has to know of the partition that it is of."""

    fs: FileSystem
    folder: str
    log_name: str
    clock: Clock
    config: TopicConfig

    def check_in_place(self) -> None: ...
    def folder_locked(self) -> AbstractContextManager[None]: ...
    def segments(self, log: LogState) -> list[int]: ...


class Ledger:
    """Changes state page and checkpoint. Not thread-safe: the caller holds the lock that an operation names."""

    start_append: Callable[[], None]
    """Bytes beyond the end may be torn from here on. Under the append lock, as the next two."""
    end_append: Callable[[], None]
    """Nothing is left beyond the end: it was published, or taken back durably."""
    mark_failed: Callable[[], None]
    """No process appends any more, until one opens the partition anew and recovers it."""
    unmark_failed: Callable[[], None]
    """It was no failure: the folder had been deleted."""

    def __init__(self, owner: LedgerOwner) -> None:
        self._owner = owner
        self._file = CheckpointFile(owner.fs, f"{owner.folder}/{CHECKPOINT_FILE}")
        self.adopt(StatePage.private())

    def adopt(self, page: StatePage) -> None:
        """Keep this page from now on."""
        self.page = page
        # One store each. They are C functions through and through: nothing looks for an interrupt between what the
        # caller did before, an fsync that failed, and the store that says so (`storage.interrupt_safe`).
        store = page.words.__setitem__
        self.start_append = partial(store, WRITING_WORD, WRITING)
        self.end_append = partial(store, WRITING_WORD, 0)
        self.mark_failed = partial(store, FAILED_WORD, 1)
        self.unmark_failed = partial(store, FAILED_WORD, 0)

    # ------------------------------------------------------------ the log, under the append lock

    def publish(self, log: LogState) -> None:
        """Show readers and appenders the log as it is now; ends what `begin_append` began."""
        page = self.page
        page.log.write(log)
        page.words[WRITING_WORD] = 0

    def reserve_offsets(self, log: LogState, ceiling: int) -> LogState:
        """Offsets below ``ceiling`` may be handed out once this returns. Takes the sync lock to be held, too."""
        self.update_checkpoint(offset_ceiling=ceiling, clean=False)
        log = replace(log, offset_ceiling=ceiling)
        self.page.log.write(log)
        return log

    def release_reserved_offsets(self, log: LogState) -> LogState:
        """Nobody hands out what is reserved above the end. The checkpoint says so with the next recovery point."""
        log = replace(log, offset_ceiling=log.log_end_offset)
        self.page.log.write(log)
        return log

    def record_producers(self) -> None:
        """The log has producers: every recovery and every appender looks for them from now on. Under both locks."""
        self.update_checkpoint(has_producers=True)
        self.page.words[PRODUCERS_WORD] = 1

    def mark_producers(self) -> None:
        """The page does not know of the log's producers, or of their aborts, though the checkpoint may: it is told."""
        self.page.words[PRODUCERS_WORD] = 1
        self.page.count_abort()

    def count_abort(self) -> None:
        """Readers look for aborted transactions anew."""
        self.page.count_abort()

    def count_generation(self) -> None:
        """Segment files were removed or replaced: readers look at the folder anew."""
        log = self.page.log.read()
        self.page.log.write(replace(log, generation=log.generation + 1))

    def start_epoch(self, log: LogState, epoch: int) -> None:
        """Segments were repaired: everybody looks at the log and at its folder anew."""
        self.page.log.write(replace(log, epoch=epoch, generation=log.generation + 1))

    def trim(self, log: LogState, start_offset: int, kept: int | None) -> None:
        """The log begins at ``start_offset``, and with the segment ``kept`` if some before it go. Under both locks.

        The recovery point must not stay in a segment that is gone, or a recovery would find no log; nor move to
        one whose name a power cut may take.
        """
        moved: dict[str, int] = {}
        if kept is not None and self.checkpoint().recovery_segment < kept:
            moved = point_at(kept)
            self._owner.fs.sync_folder(self._owner.folder)
        # Durable first: records must not come back after a crash once somebody saw them gone.
        self.update_checkpoint(log_start_offset=start_offset, **moved)
        generation = log.generation + (kept is not None)
        self.page.log.write(replace(log, log_start_offset=start_offset, generation=generation))

    def start_truncation(self, log: LogState, lost: LostRange, base: int) -> None:
        """``lost`` is given up from the segment ``base`` on. Under both locks.

        From here on a crash at any point ends in the same log: a recovery reads the range from the checkpoint, cuts it
        off, and resumes behind it.
        """
        current = self.checkpoint()
        is_below = base < current.recovery_segment or current.recovery_offset > lost.base_offset
        self.page.writing = REWRITING
        self.update_checkpoint(
            offset_ceiling=lost.end_offset,
            clean=False,
            lost_ranges=with_lost_range(current.lost_ranges, lost),
            **(point_at(base) if is_below else {}),
        )

    def start_replacing(self) -> None:
        """Segments are being replaced by others; `publish` ends it. For a log that nobody appends to."""
        self.page.writing = REWRITING

    # ------------------------------------------------------------ fsyncs, under the sync lock

    def record_sync(self, log: LogState, before: SyncState) -> SyncState:
        """Everything that ``log`` shows is on disk."""
        sync = SyncState(
            log.log_end_offset,
            log.appended_bytes,
            log.active_base_offset,
            before.checkpointed_bytes,
            self._owner.clock.monotonic_ms(),
            before.sync_count + 1,
        )
        self.page.sync.write(sync)
        return sync

    def record_durable_roll(self, base: int) -> None:
        """The segment ``base`` was begun, and its name and the one before it are on disk already."""
        self.page.sync.write(replace(self.page.sync.read(), synced_base_offset=base))

    def advance_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        """A recovery begins where ``log`` ends; ``sync`` says that it is on disk up to there."""
        self.update_checkpoint(
            recovery_offset=log.log_end_offset,
            recovery_segment=log.active_base_offset,
            recovery_position=log.end_position,
            **changes,
        )
        self.record_recovery_point(sync)

    def record_recovery_point(self, sync: SyncState) -> None:
        """The checkpoint says already that a recovery begins behind everything that is on disk by ``sync``."""
        self.page.sync.write(replace(sync, checkpointed_bytes=sync.synced_bytes))

    # ------------------------------------------------------------ what waits

    def announce_waiting(self, for_s: float) -> None:
        """Ask appenders to wake followers for so long. Without a lock: who is forgotten polls a moment longer."""
        now_ms = self._owner.clock.monotonic_ms()
        until_ms = now_ms + int(for_s * 1000)
        page = self.page
        if not until_ms <= page.waiting_until_ms < until_ms + _LONGEST_WAIT_MS:  # another one's longer wait stands
            page.waiting_until_ms = until_ms

    def request_offsets(self, offset: int) -> None:
        """An append needs offsets below this one. Under the append lock."""
        self.page.words[WANTED_WORD] = offset

    def record_shipped(self, offset: int) -> None:
        """Everything below ``offset`` lies in the object store. Without a lock: one process ships at a time."""
        self.page.words[SHIPPED_WORD] = offset

    def count_config_change(self) -> None:
        """Everybody who has the log open reads anew what is configured, and what is granted. Without a lock."""
        self.page.count_config_change()

    def count_move(self) -> None:
        """The folder is not this log's any more: everybody who has it open looks where it is. Without a lock."""
        self.page.count_move()

    # ------------------------------------------------------------ the checkpoint, under the sync lock

    @property
    def checkpoint_path(self) -> str:
        """Its file."""
        return self._file.path

    def read_checkpoint(self) -> tuple[Checkpoint | None, bool]:
        """(the checkpoint, whether a slot is damaged) as it is on disk: for who recovers the log."""
        return self._file.read()

    def last_checkpoint(self) -> Checkpoint:
        """The checkpoint on disk, else the last one that this process knew, else a blank one: for who reads only."""
        with self._owner.folder_locked():
            found, _ = self._file.read()
        return found or self._file.known or Checkpoint()

    def checkpoint(self) -> Checkpoint:
        """The checkpoint of a log that is live. Raises `CorruptBatch` when it is lost, and nobody here knows it.

        With both slots bad, a blank one would forget what offsets were handed out and which were lost.
        What this process read or wrote last and the state page tell it all.
        """
        current, _ = self._file.read()
        if current is not None:
            return current
        self._owner.check_in_place()  # deleted a moment ago, it is no damage
        known, log, sync = self._file.known, self.page.log.read(), self.page.sync.read()
        if known is None or known.epoch != log.epoch:  # lost ranges only ever come with an epoch
            raise CorruptBatch(self._file.path, 0, "a checkpoint in one of its two slots", "none")
        owner = self._owner
        logger.warning("%s: %s is damaged or gone: written anew from memory", owner.log_name, self._file.path)
        compacted = known.compacted
        if owner.config.compacts:  # another process may have come further
            compacted = replace(compacted, begun_offset=max(compacted.begun_offset, log.log_end_offset))
        # What lies before that segment is synced, or deleted.
        synced = max(sync.synced_base_offset, owner.segments(log)[0])
        return replace(
            known,
            log_start_offset=log.log_start_offset,
            offset_ceiling=max(known.offset_ceiling, log.offset_ceiling),
            clean=False,
            compacted=compacted,
            has_producers=known.has_producers or bool(self.page.words[PRODUCERS_WORD]),
            **(point_at(synced) if known.recovery_segment < synced else {}),
        )

    def update_checkpoint(self, **changes: Any) -> None:
        """Replace fields of it, durably. Raises `CorruptBatch` as `checkpoint` does, `DiskFull`, `DiskFailed`."""
        self._write(replace(self.checkpoint(), boot_id=self._owner.fs.boot_id(), **changes))

    def replace_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write it as a whole, whatever is there: of a log that is recovered or repaired."""
        self._write(checkpoint)

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            self._file.write(checkpoint)
        except DiskFailed:  # nobody knows what the slot holds now, and another fsync would not say
            self.mark_failed()
            raise

    def announce_compaction(self, offset: int) -> None:
        """Compaction may remove records below ``offset`` from now on."""
        current, _ = self._file.read()
        if current is None or offset > current.compacted.begun_offset:
            known = self.checkpoint().compacted
            self.update_checkpoint(compacted=replace(known, begun_offset=max(known.begun_offset, offset)))

    def record_compaction(self, cleaned_offset: int, keep_last: int, due_ms: int) -> None:
        """Compaction got so far."""
        begun_offset = max(self.checkpoint().compacted.begun_offset, cleaned_offset)
        self.update_checkpoint(compacted=Compacted(cleaned_offset, keep_last, due_ms, begun_offset))

    # ------------------------------------------------------------ a page made anew, under both locks

    def initialise_page(self, page: StatePage, log: LogState, *, has_producers: bool, fd: int) -> None:
        """Make ``page`` say ``log``, all of it durable. ``fd`` is its file; -1 for one of this process alone."""
        fs, folder = self._owner.fs, self._owner.folder
        sync = SyncState(
            durable_offset=log.log_end_offset,
            synced_bytes=0,
            synced_base_offset=log.active_base_offset,
            checkpointed_bytes=0,
            synced_at_ms=self._owner.clock.monotonic_ms(),
            sync_count=0,
        )
        page.words[PRODUCERS_WORD] = int(has_producers)
        if has_producers:
            page.count_abort()  # readers look which ones there are now
        if fd < 0:
            page.initialise(fs.boot_id(), fs.stat(folder), log, sync)
            return
        page.initialise(fs.boot_id(), fs.stat(folder), log, sync, fs.mount_id(fd))
        fs.set_inode_mark(fd)  # last: it vouches for what stands there
