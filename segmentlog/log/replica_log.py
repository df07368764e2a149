"""A local copy of a partition that another machine appends to: the same bytes at the same offsets.

One process downloads new data and then publishes it on the state page. Any number of processes read the copy, as they
read a log that another process appends to.

    download bytes after the end -> checkpoint -> state page        the log was extended
    download files beside the old ones -> rename them -> the same   the log was compacted or truncated; a new epoch
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import msgspec

from segmentlog.format.checkpoint import Checkpoint
from segmentlog.log.handle import Handle
from segmentlog.log.recovery.open_partition import map_page
from segmentlog.log.segment_removal import remove_segment
from segmentlog.storage.segment import create_segment, list_segments
from segmentlog.storage.state_page import LogState, StateDamaged, StatePage
from segmentlog.storage.state_page_check import distrust_reason


class PublishedState(msgspec.Struct, frozen=True):
    """The state that readers see: offsets, the checkpoint, and the size of the active segment in bytes."""

    log_start_offset: int
    end_offset: int
    stable_offset: int
    active_base: int
    end_position: int
    checkpoint: Checkpoint


class ReplicaLog:
    """One partition of a replica. Not thread-safe; one process at a time opens it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._page: StatePage | None = None
        self._checkpoint: Checkpoint | None = None
        self._generation = 0
        self._appended_bytes = 0

    @property
    def folder(self) -> str:
        """The partition's folder."""
        return self._handle.folder

    def open(self) -> None:
        """Open the files, and continue from the state page of an earlier process if it can be trusted."""
        handle = self._handle
        handle.open_files()
        handle.is_opening = False
        page = map_page(handle)
        with contextlib.suppress(StateDamaged):
            log = page.log.read()
            self._generation, self._appended_bytes = log.generation, log.appended_bytes
        if distrust_reason(handle.fs, handle.folder, page, handle.state_fd) is None:
            handle.adopt(page)
            self._page = page
        handle.close_files()  # otherwise a replica with ten thousand partitions would need as many descriptors

    def publish_empty(self) -> None:
        """Publish an empty log, if no state was published, for readers that come before the first download."""
        if self._page is None:
            self.publish(PublishedState(0, 0, 0, 0, 0, Checkpoint(clean=False)))

    @contextlib.contextmanager
    def extending(self) -> Iterator[None]:
        """Mark the log so that bytes after its end may be unpublished, while they are downloaded."""
        self._handle.ledger.start_append()
        yield

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Mark the log so that readers which find an unexpected file read the state again, while files are replaced."""
        self._handle.ledger.start_replacing()
        yield

    def publish(self, state: PublishedState, *, is_replaced: bool = False) -> None:
        """Let readers see ``state``. With ``is_replaced`` they drop their mappings: files were replaced or deleted."""
        handle, ledger = self._handle, self._handle.ledger
        create_segment(handle.fs, handle.folder, state.active_base)
        if is_replaced:
            self._generation += 1
        before = self._page.log.read() if self._page is not None else None
        self._appended_bytes += max(state.end_offset - before.log_end_offset, 0) if before is not None else 0
        log = LogState(
            log_start_offset=state.log_start_offset,
            log_end_offset=state.end_offset,
            last_stable_offset=state.stable_offset,
            active_base_offset=state.active_base,
            end_position=state.end_position,
            epoch=state.checkpoint.epoch,
            generation=self._generation,
            appended_bytes=self._appended_bytes,
            first_append_ms=0,
            offset_ceiling=state.checkpoint.offset_ceiling,
        )
        if state.checkpoint != self._checkpoint:
            # Page and checkpoint differ until the page is written. Until then the mark keeps other processes from
            # distrusting the page.
            if before is not None and before.epoch != log.epoch:
                ledger.start_replacing()
            ledger.replace_checkpoint(state.checkpoint)
            self._checkpoint = state.checkpoint
        if self._page is None:
            handle.ensure_open()
            page = map_page(handle)
            ledger.initialise_page(page, log, has_producers=state.checkpoint.has_producers, fd=handle.state_fd)
            handle.adopt(page)
            handle.close_files()
            self._page = page
        else:
            page = self._page
            if state.checkpoint.has_producers:
                ledger.mark_producers()  # the new data may contain a producer's batches, or an abort marker
            ledger.publish(log)
            ledger.record_sync(log, page.sync.read())
        ledger.record_shipped(state.end_offset)

    def count_generation(self) -> None:
        """Tell readers that a file was replaced by one with the same bytes."""
        self._generation += 1
        self._handle.ledger.count_generation()

    def remove_other_segments(self, kept: Iterable[int]) -> None:
        """Delete the files of all segments except those with base offsets ``kept``."""
        remaining = set(kept)
        removed = [base for base in list_segments(self._handle.fs, self._handle.folder) if base not in remaining]
        for base in removed:
            remove_segment(self._handle, base)
        if removed:  # again: a reader that listed the folder before the deletion keeps its list for a generation
            self.count_generation()

    def notify_config_change(self) -> None:
        """Tell readers to read the topic's configuration again."""
        self._handle.ledger.count_config_change()

    def close(self, *, moved: bool = False) -> None:
        """Close the files. With ``moved``, tell readers that the topic was deleted or renamed."""
        if moved:
            self._handle.ledger.count_move()
        self._handle.close_files()
