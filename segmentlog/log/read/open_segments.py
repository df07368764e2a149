"""The segments of a partition that are open to be read, mapped and with an index each; those used last stay open."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator

from segmentlog.errors import CorruptBatch
from segmentlog.format.file_names import LOG_SUFFIX, REMOTE_SUFFIX
from segmentlog.format.scan import Around, KnownBatches
from segmentlog.format.wire_run import WireRun
from segmentlog.log.handle import Handle
from segmentlog.log.read.verified_batches import VerifiedBatches
from segmentlog.log.segment_tiering import is_remote
from segmentlog.records import SegmentInfo
from segmentlog.storage import fork_safety
from segmentlog.storage.segment import MappedSegment, segment_stem
from segmentlog.storage.segment_index import SegmentIndex
from segmentlog.storage.state_page import LogState
from segmentlog.weak_sets import members_of

_KEPT_SEGMENTS = 64
_KEPT_IN_PROCESS = 1024
"""Mapped segments with their indexes, three maps each: Linux lets a process have 65,530 (`vm.max_map_count`)."""
_CHECKED_IN_PROCESS = 1 << 20
"""Batches of which is known where they lie, 8 bytes each: 8 MB, and twice that while others' parts are in use."""


class OpenSegment:
    """A mapped segment with its index.

    One that was mapped while active is not used any more once it is sealed: sealing gives
    the preallocated end of the file back, and touching a mapped page that is gone kills the process.
    """

    __slots__ = ("checked", "index", "mapped", "sealed")

    def __init__(self, mapped: MappedSegment, index: SegmentIndex, sealed: bool, checked: VerifiedBatches) -> None:
        self.mapped = mapped
        self.index = index
        self.sealed = sealed
        self.checked = checked


def _no_batches(position: int) -> Iterator[tuple[int, int]]:
    """For an index that is being made: it says nothing yet of what lies behind."""
    return iter(())


_in_process: weakref.WeakSet[OpenSegments] = weakref.WeakSet()
"""Those of every partition that is open: they share what a process may have mapped, and know."""


class OpenSegments:
    """Those of one partition. Thread-safe. Takes no lock that an append holds."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._mutex = fork_safety.lock(self, "_mutex", "_begin_empty")
        self._begin_empty()
        _in_process.add(self)

    def _begin_empty(self) -> None:
        """Begin without any. In a forked child: another thread of the parent may have been at them."""
        self._open: OrderedDict[int, OpenSegment] = OrderedDict()
        self._generation = -1
        self._checked_count = 0
        """Batches of which was known where they lie, when one was added to them last."""

    def get(self, bases: list[int], at: int, log: LogState) -> OpenSegment:
        """The segment ``bases[at]``, mapped, its index reaching up to its end (or to where the log ends now)."""
        base, sealed = bases[at], at + 1 < len(bases)
        with self._mutex:
            if log.generation != self._generation:
                self._open.clear()  # files may have been replaced
                self._generation = log.generation
            segment = before = self._open.get(base)
            if segment is not None and (segment.sealed != sealed or segment.mapped.is_retired):
                segment = None
            if segment is not None:
                self._open.move_to_end(base)
        handle = self._handle
        if segment is None:
            with handle.folder_locked():
                index = handle.index_of(base, writable=sealed and not handle.read_only)
                mapped = MappedSegment(handle.fs, handle.folder, base, ranged=True)
                if sealed:
                    index.log_inode = mapped.inode
                index.load(sealed=sealed, limit=len(mapped.view) if sealed else log.end_position)
            handle.check_usable()  # else these may be the files of a topic that has the name since
            # Both are mapped now: no other file has the number. What was brought into the one is not in the other.
            is_same = before is not None and before.mapped.inode == mapped.inode and mapped.ranges is None
            segment = OpenSegment(mapped, index, sealed, before.checked if before and is_same else VerifiedBatches())
            with self._mutex:
                if handle.page.log.read().generation == log.generation:
                    self._open[base] = segment
                # A reader that is alone keeps 64 GB of default segments: where it jumps to again needs no opening.
                while len(self._open) > max(_KEPT_SEGMENTS, _KEPT_IN_PROCESS // len(_in_process)):
                    self._open.popitem(last=False)
        index, mapped = segment.index, segment.mapped
        if sealed:
            if not index.is_complete(len(mapped.view)):
                if mapped.ranges is not None:
                    mapped.ranges.need(index.scanned_position, len(mapped.view))
                index.catch_up(mapped.view, len(mapped.view), lambda: self.around(segment, bases[at + 1], _no_batches))
                index.complete(len(mapped.view))
        elif index.scanned_position < log.end_position:
            with contextlib.suppress(CorruptBatch):  # shorter than it should be: reading will say so
                view, end = mapped.upto(log.end_position), log.end_position
                if mapped.ranges is not None:
                    mapped.ranges.need(index.scanned_position, end)
                index.catch_up(view, end, lambda: self.around(segment, log.log_end_offset, _no_batches))
        return segment

    def around(self, segment: OpenSegment, end_offset: int, known: KnownBatches | None = None) -> Around:
        """`Handle.around` for a segment whose index is in memory."""
        base = segment.mapped.base_offset
        return self._handle.around(base, end_offset, known or segment.index.batches_after)

    def known_batches(self, base: int) -> KnownBatches | None:
        """What the index in memory says of a segment, if it is there: more than its file, perhaps."""
        with self._mutex:
            segment = self._open.get(base)
        return None if segment is None else segment.index.batches_after

    def unmap(self, base: int) -> None:
        """A reader has passed a sealed segment: unmap it once its batches are gone, so that memory stays flat."""
        with self._mutex:
            self._open.pop(base, None)

    def unmap_deleted(self) -> None:
        """Unmap everything once segments were deleted or replaced: the disk gets its space back though nobody reads."""
        generation = self._handle.page.log.read().generation
        if self._generation != generation:
            with self._mutex:
                self._open.clear()
                self._generation = generation

    # ------------------------------------------------------------ what was checked

    def find_verified(self, segment: OpenSegment, epoch: int, offset: int) -> tuple[WireRun | None, int | None]:
        """`CheckedRuns.find` in a segment."""
        with self._mutex:
            return segment.checked.find(epoch, offset)

    def add_verified(self, segment: OpenSegment, epoch: int, run: WireRun) -> None:
        """Keep a run, and of all segments those used last.

        As many batches as others leave, or this one's part of all that there may be.
        """
        most = _CHECKED_IN_PROCESS // len(_in_process)
        if self._checked_count + run.batch_count > most // 2:  # or there is no need to ask how many others have
            others = sum(one._checked_count for one in members_of(_in_process) if one is not self)
            most = max(_CHECKED_IN_PROCESS - others, most)
        with self._mutex:
            segment.checked.keep(epoch, run, most)
            count = sum(one.checked.count for one in self._open.values())
            for one in self._open.values():
                if count <= most:
                    break
                if one is not segment:
                    count -= one.checked.count
                    one.checked.clear()
            self._checked_count = count

    # ------------------------------------------------------------ what they hold

    def max_timestamp(self, base: int, log: LogState) -> int:
        """Largest timestamp of a segment; -1 when its file is missing or holds nothing."""
        bases = self._handle.segments(log)
        with contextlib.suppress(FileNotFoundError, ValueError):
            if (known := self.remote(base)) is not None:
                return known[1]
            segment = self.get(bases, bases.index(base), log)
            if base != log.active_base_offset:
                self.unmap(base)
            return segment.index.max_timestamp if len(segment.mapped.view) else -1
        return -1

    def remote(self, base: int) -> tuple[int, int] | None:
        """(size, largest timestamp) of a segment that lies in the object store alone, as far as nothing is brought.

        None for one that is here, or has no complete index. Raises FileNotFoundError.
        """
        handle = self._handle
        stem = segment_stem(handle.folder, base)
        with handle.folder_locked():
            if not handle.fs.exists(stem + REMOTE_SUFFIX) or not is_remote(handle, base):
                return None
            size_bytes = handle.fs.stat(stem + LOG_SUFFIX).st_size
            index = handle.index_of(base, writable=False)
            index.load(sealed=True, limit=size_bytes)
        return (size_bytes, index.max_timestamp) if index.is_complete(size_bytes) else None

    def local_start(self) -> int:
        """The offset from which on all of the log lies here."""
        log = self._handle.page.log.read()
        bases = self._handle.segments(log)
        for at in range(len(bases) - 2, -1, -1):
            if bases[at + 1] <= log.log_start_offset:
                break
            if is_remote(self._handle, bases[at]):
                return max(bases[at + 1], log.log_start_offset)
        return log.log_start_offset

    def describe(self) -> list[SegmentInfo]:
        """The segments as `Partition.segments` tells them; one whose file is missing has no bytes."""
        log = self._handle.page.log.read()
        bases = self._handle.segments(log)
        infos = []
        for at, base in enumerate(bases):
            active = at + 1 == len(bases)
            path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
            size_bytes, max_timestamp, remote = 0, -1, not active and is_remote(self._handle, base)
            with contextlib.suppress(FileNotFoundError):
                known = self.remote(base) if remote else None
                if known is not None:
                    infos.append(SegmentInfo(base, bases[at + 1], *known, False, path, True))
                    continue
                segment = self.get(bases, at, log)
                size_bytes = log.end_position if active else len(segment.mapped.view)
                max_timestamp = segment.index.max_timestamp if size_bytes else -1
                if not active:
                    self.unmap(base)
            end_offset = log.log_end_offset if active else bases[at + 1]
            infos.append(SegmentInfo(base, end_offset, size_bytes, max_timestamp, active, path, remote))
        return infos
