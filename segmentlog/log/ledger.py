"""The ledger of a partition: its state page and its checkpoint, and every change that the log makes to them.

Everything else only reads them, with one exception: administration writes two words of the page, to notify open handles
that their topic was altered or moved. All processes share the page. The checkpoint is what a power cut leaves. If a
change touches both, their order decides what a crash in between leaves:

    reserve offsets    checkpoint, page   the page never promises what is not durable
    record producers   checkpoint, page   the same
    trim               checkpoint, page   records that a reader saw deleted do not come back
    advance the point  checkpoint, page   the page counts the bytes written since the recovery point
    truncate           page, checkpoint   the next process sees that segments were being replaced
    close cleanly      page, checkpoint   after a crash in between, the next append reserves offsets again
    recover            checkpoint, page   a trusted page always has its checkpoint

Log fields and words are changed under the append lock, sync fields and the checkpoint under the sync lock. The
checkpoint is opened by its name, so the folder must be locked meanwhile (`LedgerOwner.folder_locked`).
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
from segmentlog.format.checkpoint import Checkpoint, Compacted, Replicated, recovery_point_at
from segmentlog.format.file_names import CHECKPOINT_FILE
from segmentlog.policy.lost_ranges import with_lost_range
from segmentlog.policy.replica_fetch import LogHistory
from segmentlog.records import EpochStart, LostRange
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
"""The longest wait that a follower announces. A later time comes from an earlier boot."""


class LedgerOwner(Protocol):
    """The parts of a `Handle` that the ledger needs."""

    fs: FileSystem
    folder: str
    log_name: str
    clock: Clock
    config: TopicConfig

    def check_in_place(self) -> None: ...
    def folder_locked(self) -> AbstractContextManager[None]: ...
    def segments(self, log: LogState) -> list[int]: ...


class Ledger:
    """Changes state page and checkpoint. Not thread-safe: the caller holds the lock that each method names."""

    start_append: Callable[[], None]
    """Record that incomplete bytes may follow the log end.

    Call under the append lock, like `end_append` and `mark_failed`.
    """
    end_append: Callable[[], None]
    """Record that no unpublished bytes follow the end: they were published, or removed durably."""
    mark_failed: Callable[[], None]
    """Refuse appends in all processes, until a process reopens the partition and recovers it."""
    unmark_failed: Callable[[], None]
    """Undo `mark_failed`: the folder had been deleted, so the disk has not failed."""

    def __init__(self, owner: LedgerOwner) -> None:
        self._owner = owner
        self._file = CheckpointFile(owner.fs, f"{owner.folder}/{CHECKPOINT_FILE}")
        self.adopt(StatePage.private())

    def adopt(self, page: StatePage) -> None:
        """Use this page from now on."""
        self.page = page
        # Each of the four is one assignment, made of C functions only. So no interrupt comes between the caller's
        # failed fsync and the assignment that records it (`storage.interrupt_safe`).
        store = page.words.__setitem__
        self.start_append = partial(store, WRITING_WORD, WRITING)
        self.end_append = partial(store, WRITING_WORD, 0)
        self.mark_failed = partial(store, FAILED_WORD, 1)
        self.unmark_failed = partial(store, FAILED_WORD, 0)

    # ------------------------------------------------------------ the log, under the append lock

    def publish(self, log: LogState) -> None:
        """Publish the log state to readers and appenders, and end what `start_append` began."""
        page = self.page
        page.log.write(log)
        page.words[WRITING_WORD] = 0

    def reserve_offsets(self, log: LogState, ceiling: int) -> LogState:
        """Reserve the offsets below ``ceiling`` durably. Return the new state. The caller also holds the sync lock."""
        self.update_checkpoint(offset_ceiling=ceiling, clean=False)
        log = replace(log, offset_ceiling=ceiling)
        self.page.log.write(log)
        return log

    def release_reserved_offsets(self, log: LogState) -> LogState:
        """Release the reserved offsets after the log end. The checkpoint records this with the next recovery point."""
        log = replace(log, offset_ceiling=log.log_end_offset)
        self.page.log.write(log)
        return log

    def record_producers(self) -> None:
        """Record that the log has producers: every recovery and every appender reads their batches.

        Under both locks.
        """
        self.update_checkpoint(has_producers=True)
        self.page.words[PRODUCERS_WORD] = 1

    def mark_producers(self) -> None:
        """Repair a page that lacks the log's producers or aborts, although the checkpoint may have them."""
        self.page.words[PRODUCERS_WORD] = 1
        self.page.count_abort()

    def count_abort(self) -> None:
        """Announce another aborted transaction: readers look for aborts again."""
        self.page.count_abort()

    def count_generation(self) -> None:
        """Announce that segment files were removed or replaced: readers list the folder again."""
        log = self.page.log.read()
        self.page.log.write(replace(log, generation=log.generation + 1))

    def start_epoch(self, log: LogState, epoch: int) -> None:
        """Announce repaired segments: all processes read the log state and the folder again."""
        self.page.log.write(replace(log, epoch=epoch, generation=log.generation + 1))

    def trim(self, log: LogState, start_offset: int, kept: int | None) -> None:
        """Move the log start to ``start_offset``.

        ``kept``: first remaining segment, if some are deleted. Under both locks.

        The recovery point must not stay in a deleted segment, or a recovery would find no log. It must not move to a
        segment whose name a power cut can undo either.
        """
        moved: dict[str, int] = {}
        if kept is not None and self.checkpoint().recovery_segment < kept:
            moved = recovery_point_at(kept)
            self._owner.fs.sync_folder(self._owner.folder)
        # Durable first: records must not come back after a crash once a reader saw them deleted.
        self.update_checkpoint(log_start_offset=start_offset, **moved)
        generation = log.generation + (kept is not None)
        self.page.log.write(replace(log, log_start_offset=start_offset, generation=generation))

    def start_truncation(self, log: LogState, lost: LostRange, base: int) -> None:
        """Record that ``lost`` is removed, from segment ``base`` on. Under both locks.

        From now on a crash at any point ends in the same log. A recovery reads the range from the checkpoint, removes
        it, and resumes after it.
        """
        current = self.checkpoint()
        is_below = base < current.recovery_segment or current.recovery_offset > lost.base_offset
        self.page.writing = REWRITING
        self.update_checkpoint(
            offset_ceiling=lost.end_offset,
            clean=False,
            lost_ranges=with_lost_range(current.lost_ranges, lost),
            **(recovery_point_at(base) if is_below else {}),
        )

    def start_replication(self) -> None:
        """Record durably that the log is replicated: a recovery opens no gap from now on. Under both locks."""
        self.update_checkpoint(replicated=Replicated(), clean=False)

    def start_replica_truncation(self, offset: int, base: int) -> None:
        """Record that a replicated log is truncated to ``offset``, which is in segment ``base``. Under both locks.

        From now on a crash at any point ends in the log before the truncation or in the log after it. A recovery reads
        the offset from the checkpoint, and removes everything after it.
        """
        current = self.checkpoint()
        is_below = base < current.recovery_segment or current.recovery_offset > offset
        self.page.writing = REWRITING
        self.update_checkpoint(
            replicated=replace(current.replicated or Replicated(), truncate_to=offset),
            **(recovery_point_at(base) if is_below else {}),
        )

    def start_epoch_of_leader(self, log: LogState, start: EpochStart, lost: LostRange | None, **changes: Any) -> None:
        """Record that a leader's epoch begins, after ``lost`` if there is a gap before it. Under both locks.

        Everything below must be synced. Until `publish`, a process that opens the log recovers it, which ends after the
        gap.
        """
        current = self.checkpoint()
        self.page.writing = REWRITING
        self.update_checkpoint(
            epochs=current.epochs if start.epoch == current.epoch else (*current.epochs, start),
            lost_ranges=current.lost_ranges if lost is None else (*current.lost_ranges, lost),
            **changes,
        )

    def start_again_at(self, offset: int, history: LogHistory, ceiling: int) -> None:
        """Record that a replicated log has nothing before ``offset``, with the leader's history of it. Under both
        locks.
        """
        self.page.writing = REWRITING
        self.update_checkpoint(
            **recovery_point_at(offset), log_start_offset=offset, offset_ceiling=ceiling,
            epochs=tuple(history.epochs), lost_ranges=tuple(history.lost_ranges),
        )  # fmt: skip

    def start_replacing(self) -> None:
        """Announce that segments are being replaced, until `publish`. For a log without appends."""
        self.page.writing = REWRITING

    # ------------------------------------------------------------ fsyncs, under the sync lock

    def record_sync(self, log: LogState, before: SyncState) -> SyncState:
        """Record that everything ``log`` shows is on disk. Return the new sync state."""
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
        """Record that segment ``base`` began, and that its name and the segment before it are already durable."""
        self.page.sync.write(replace(self.page.sync.read(), synced_base_offset=base))

    def advance_recovery_point(self, log: LogState, sync: SyncState, **changes: object) -> None:
        """Move the recovery point to the end of ``log``. ``sync`` must cover everything up to that end."""
        self.update_checkpoint(
            recovery_offset=log.log_end_offset,
            recovery_segment=log.active_base_offset,
            recovery_position=log.end_position,
            **changes,
        )
        self.record_recovery_point(sync)

    def record_recovery_point(self, sync: SyncState) -> None:
        """Record in the page that the checkpoint's recovery point covers everything that ``sync`` shows as synced."""
        self.page.sync.write(replace(sync, checkpointed_bytes=sync.synced_bytes))

    # ------------------------------------------------------------ requests and progress, without the sync lock

    def announce_waiting(self, for_s: float) -> None:
        """Ask appenders to wake followers for the next ``for_s`` seconds.

        No lock: a lost request only delays one poll.
        """
        now_ms = self._owner.clock.monotonic_ms()
        until_ms = now_ms + int(for_s * 1000)
        page = self.page
        # keep the longer wait of another follower
        if not until_ms <= page.waiting_until_ms < until_ms + _LONGEST_WAIT_MS:
            page.waiting_until_ms = until_ms

    def request_offsets(self, offset: int) -> None:
        """Record that an append needs offsets below ``offset``. Under the append lock."""
        self.page.words[WANTED_WORD] = offset

    def record_shipped(self, offset: int) -> None:
        """Record that everything below ``offset`` is in the object store. No lock: one process ships at a time."""
        self.page.words[SHIPPED_WORD] = offset

    def count_config_change(self) -> None:
        """Make all open handles reload configuration and grant. No lock needed."""
        self.page.count_config_change()

    def count_move(self) -> None:
        """Make all open handles check whether the folder is still theirs. No lock needed."""
        self.page.count_move()

    # ------------------------------------------------------------ the checkpoint, under the sync lock

    @property
    def checkpoint_path(self) -> str:
        """Path of the checkpoint file."""
        return self._file.path

    def read_checkpoint(self) -> tuple[Checkpoint | None, bool]:
        """Return (checkpoint, whether a slot is damaged) from disk, for a recovery."""
        return self._file.read()

    def last_checkpoint(self) -> Checkpoint:
        """Return the checkpoint on disk.

        Without it, return the last one that this process saw, or an empty one. For readers.
        """
        with self._owner.folder_locked():
            found, _ = self._file.read()
        return found or self._file.known or Checkpoint()

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint of a live log. Raises `CorruptBatch` if it is lost and this process has no copy of it.

        If both slots are damaged, rebuild the checkpoint from the state page and from the copy that this process read
        or wrote last. An empty checkpoint would forget the assigned offsets and the lost ranges.
        """
        current, _ = self._file.read()
        if current is not None:
            return current
        self._owner.check_in_place()  # raises if the topic was deleted just now, which is not damage
        known, log, sync = self._file.known, self.page.log.read(), self.page.sync.read()
        if known is None or known.epoch != log.epoch:  # a new lost range always has a new epoch
            raise CorruptBatch(self._file.path, 0, "a checkpoint in one of its two slots", "none")
        owner = self._owner
        logger.warning("%s: %s is damaged or missing; it is rewritten from memory", owner.log_name, self._file.path)
        compacted = known.compacted
        if owner.config.compacts:  # another process may have compacted more
            compacted = replace(compacted, begun_offset=max(compacted.begun_offset, log.log_end_offset))
        # Everything before that segment is synced or deleted.
        synced = max(sync.synced_base_offset, owner.segments(log)[0])
        return replace(
            known,
            log_start_offset=log.log_start_offset,
            offset_ceiling=max(known.offset_ceiling, log.offset_ceiling),
            clean=False,
            compacted=compacted,
            has_producers=known.has_producers or bool(self.page.words[PRODUCERS_WORD]),
            **(recovery_point_at(synced) if known.recovery_segment < synced else {}),
        )

    def update_checkpoint(self, **changes: Any) -> None:
        """Replace fields of the checkpoint, durably.

        Raises `CorruptBatch` as `checkpoint` does, `DiskFull`, `DiskFailed`.
        """
        self._write(replace(self.checkpoint(), boot_id=self._owner.fs.boot_id(), **changes))

    def replace_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Write a whole checkpoint, whatever is on disk, for a log that is being recovered or repaired."""
        self._write(checkpoint)

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            self._file.write(checkpoint)
        except DiskFailed:  # the content of the slot is unknown now, and another fsync would not show it
            self.mark_failed()
            raise

    def announce_compaction(self, offset: int) -> None:
        """Record that compaction may remove records below ``offset`` from now on."""
        current, _ = self._file.read()
        if current is None or offset > current.compacted.begun_offset:
            known = self.checkpoint().compacted
            self.update_checkpoint(compacted=replace(known, begun_offset=max(known.begun_offset, offset)))

    def record_compaction(self, cleaned_offset: int, keep_last: int, due_ms: int) -> None:
        """Record how far compaction got."""
        begun_offset = max(self.checkpoint().compacted.begun_offset, cleaned_offset)
        self.update_checkpoint(compacted=Compacted(cleaned_offset, keep_last, due_ms, begun_offset))

    # ------------------------------------------------------------ a new page, under both locks

    def initialise_page(self, page: StatePage, log: LogState, *, has_producers: bool, fd: int) -> None:
        """Initialise ``page`` for ``log``, all of which is durable. ``fd``: the page's file; -1 for a private page."""
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
            page.count_abort()  # makes readers look for aborts
        if fd < 0:
            page.initialise(fs.boot_id(), fs.stat(folder), log, sync)
            return
        page.initialise(fs.boot_id(), fs.stat(folder), log, sync, fs.mount_id(fd))
        fs.set_inode_mark(fd)  # last: the mark shows that the page is complete
