"""A log whose records come from elsewhere: the same bytes at the same offsets, shown once they are here.

Nobody appends to it. One process brings what is new and says so on the state page; any number of others read it, as
they read a log that somebody appends to.

    bring bytes behind the end -> checkpoint -> state page      what goes on
    bring files beside -> put them in place -> the same         what was compacted, cut, or begun in another epoch
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


class Shown(msgspec.Struct, frozen=True):
    """What readers are to see: offsets, and the size of the active segment in bytes."""

    log_start_offset: int
    end_offset: int
    stable_offset: int
    active_base: int
    end_position: int
    checkpoint: Checkpoint


class MirroredLog:
    """One partition of a mirrored store. Not thread-safe; one process at a time has it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._page: StatePage | None = None
        self._checkpoint: Checkpoint | None = None
        self._generation = 0
        self._appended_bytes = 0

    @property
    def folder(self) -> str:
        """Where its files lie."""
        return self._handle.folder

    def open(self) -> None:
        """Open its files, and go on with the page that an earlier process left, if it can be believed."""
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
        handle.close_files()  # ten thousand of them would take as many descriptors

    def show_nothing(self) -> None:
        """Have readers who come before anything was brought see an empty log: they go on with what is shown then."""
        if self._page is None:
            self.show(Shown(0, 0, 0, 0, 0, Checkpoint(clean=False)))

    @contextlib.contextmanager
    def extending(self) -> Iterator[None]:
        """Within, bytes behind the end may be such that nobody has shown yet."""
        self._handle.ledger.start_append()
        yield

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Within, files take the place of others. A reader that is surprised by one looks again for a moment."""
        self._handle.ledger.start_replacing()
        yield

    def show(self, shown: Shown, *, is_replaced: bool = False) -> None:
        """Have readers see the log so. ``is_replaced``: files are others than those that they know, or are gone."""
        handle, ledger = self._handle, self._handle.ledger
        create_segment(handle.fs, handle.folder, shown.active_base)
        if is_replaced:
            self._generation += 1
        before = self._page.log.read() if self._page is not None else None
        self._appended_bytes += max(shown.end_offset - before.log_end_offset, 0) if before is not None else 0
        log = LogState(
            log_start_offset=shown.log_start_offset,
            log_end_offset=shown.end_offset,
            last_stable_offset=shown.stable_offset,
            active_base_offset=shown.active_base,
            end_position=shown.end_position,
            epoch=shown.checkpoint.epoch,
            generation=self._generation,
            appended_bytes=self._appended_bytes,
            first_append_ms=0,
            offset_ceiling=shown.checkpoint.offset_ceiling,
        )
        if shown.checkpoint != self._checkpoint:
            if before is not None and before.epoch != log.epoch:  # until the page says the same, it is not doubted
                ledger.start_replacing()
            ledger.replace_checkpoint(shown.checkpoint)
            self._checkpoint = shown.checkpoint
        if self._page is None:
            handle.ensure_open()
            page = map_page(handle)
            ledger.initialise_page(page, log, has_producers=shown.checkpoint.has_producers, fd=handle.state_fd)
            handle.adopt(page)
            handle.close_files()
            self._page = page
        else:
            page = self._page
            if shown.checkpoint.has_producers:
                ledger.mark_producers()  # what was brought may be of one, or tell of an abort
            ledger.publish(log)
            ledger.record_sync(log, page.sync.read())
        ledger.record_shipped(shown.end_offset)

    def count_generation(self) -> None:
        """A file is another one now, with the same bytes."""
        self._generation += 1
        self._handle.ledger.count_generation()

    def remove_others(self, kept: Iterable[int]) -> None:
        """Delete the files of all segments but these: those below the log start, or that were compacted away."""
        wanted = set(kept)
        gone = [base for base in list_segments(self._handle.fs, self._handle.folder) if base not in wanted]
        for base in gone:
            remove_segment(self._handle, base)
        if gone:  # once more: who listed the folder before keeps that list for a generation
            self.count_generation()

    def tell_altered(self) -> None:
        """The topic's settings are others: who has it open reads them anew."""
        self._handle.ledger.count_config_change()

    def close(self, *, moved: bool = False) -> None:
        """``moved``: its topic is deleted or gets another name, and whoever has it open is told."""
        if moved:
            self._handle.ledger.count_move()
        self._handle.close_files()
