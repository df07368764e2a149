"""The segments of a partition that are open for reading: mapped, with an index, least recently used closed first."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator

from segmentlog.errors import CorruptBatch
from segmentlog.format.file_names import LOG_SUFFIX, REMOTE_SUFFIX
from segmentlog.format.scan import KnownBatches, SegmentContext
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
"""Mapped segments with their indexes take three maps each. Linux allows a process 65,530 maps (`vm.max_map_count`)."""
_CHECKED_IN_PROCESS = 1 << 20
"""Batches whose positions are cached, 8 bytes each: 8 MB. Up to twice that until other partitions release theirs."""


class OpenSegment:
    """A mapped segment with its index.

    A segment that was mapped while active must not be used once it is sealed. Sealing truncates the preallocated end of
    the file, and touching a mapped page that no longer exists kills the process.
    """

    __slots__ = ("checked", "index", "mapped", "sealed")

    def __init__(self, mapped: MappedSegment, index: SegmentIndex, sealed: bool, checked: VerifiedBatches) -> None:
        self.mapped = mapped
        self.index = index
        self.sealed = sealed
        self.checked = checked


def _no_batches(position: int) -> Iterator[tuple[int, int]]:
    """Return no batches: an index under construction has no entries after the damage."""
    return iter(())


_in_process: weakref.WeakSet[OpenSegments] = weakref.WeakSet()
"""The open segments of all open partitions, which share the process-wide limits."""


class OpenSegments:
    """The open segments of one partition. Thread-safe. Takes no lock that an append holds."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._mutex = fork_safety.lock(self, "_mutex", "_reset")
        self._reset()
        _in_process.add(self)

    def _reset(self) -> None:
        """Drop all segments.

        Also called in a forked child: another thread of the parent may have been changing them.
        """
        self._open: OrderedDict[int, OpenSegment] = OrderedDict()
        self._generation = -1
        self._checked_count = 0
        """The number of cached batch positions when one was added last."""

    def get(self, bases: list[int], at: int, log: LogState) -> OpenSegment:
        """Return segment ``bases[at]``, mapped, with its index complete up to its end (or to the end of ``log``)."""
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
            handle.check_usable()  # else the files may belong to a topic that has the name now
            # Both files are mapped now, so their inodes differ if the files do. Blocks downloaded into one are not in
            # the other.
            is_same = before is not None and before.mapped.inode == mapped.inode and mapped.ranges is None
            segment = OpenSegment(mapped, index, sealed, before.checked if before and is_same else VerifiedBatches())
            with self._mutex:
                if handle.page.log.read().generation == log.generation:
                    self._open[base] = segment
                # A single partition keeps 64 GB of default segments open, so jumping back needs no reopening.
                while len(self._open) > max(_KEPT_SEGMENTS, _KEPT_IN_PROCESS // len(_in_process)):
                    self._open.popitem(last=False)
        index, mapped = segment.index, segment.mapped
        if sealed:
            if not index.is_complete(len(mapped.view)):
                if mapped.ranges is not None:
                    mapped.ranges.need(index.scanned_position, len(mapped.view))
                index.catch_up(
                    mapped.view, len(mapped.view), lambda: self.segment_context(segment, bases[at + 1], _no_batches)
                )
                index.complete(len(mapped.view))
        elif index.scanned_position < log.end_position:
            with contextlib.suppress(CorruptBatch):  # the file is too short, which reading reports
                view, end = mapped.view_to(log.end_position), log.end_position
                if mapped.ranges is not None:
                    mapped.ranges.need(index.scanned_position, end)
                index.catch_up(view, end, lambda: self.segment_context(segment, log.log_end_offset, _no_batches))
        return segment

    def segment_context(
        self, segment: OpenSegment, end_offset: int, known: KnownBatches | None = None
    ) -> SegmentContext:
        """Return `Handle.segment_context` for a segment whose index is in memory."""
        base = segment.mapped.base_offset
        return self._handle.segment_context(base, end_offset, known or segment.index.batches_after)

    def known_batches(self, base: int) -> KnownBatches | None:
        """Return the batches in the index in memory, which may be ahead of the index file; None if it is not open."""
        with self._mutex:
            segment = self._open.get(base)
        return None if segment is None else segment.index.batches_after

    def unmap(self, base: int) -> None:
        """Unmap a sealed segment that a reader has passed, so that memory use stays flat.

        The map stays until the batches read from it are dropped.
        """
        with self._mutex:
            self._open.pop(base, None)

    def unmap_deleted(self) -> None:
        """Unmap everything if segments were deleted or replaced, to free disk space even without reads."""
        generation = self._handle.page.log.read().generation
        if self._generation != generation:
            with self._mutex:
                self._open.clear()
                self._generation = generation

    # ------------------------------------------------------------ verified batches

    def find_verified(self, segment: OpenSegment, epoch: int, offset: int) -> tuple[WireRun | None, int | None]:
        """Call `VerifiedBatches.find` for a segment."""
        with self._mutex:
            return segment.checked.find(epoch, offset)

    def add_verified(self, segment: OpenSegment, epoch: int, run: WireRun) -> None:
        """Cache the positions of verified batches, and drop the positions in the least recently used segments.

        A partition may always cache its own share of the limit, and more while other partitions cache less.
        """
        most = _CHECKED_IN_PROCESS // len(_in_process)
        # below half the share, the other partitions need not be counted
        if self._checked_count + run.batch_count > most // 2:
            others = sum(other._checked_count for other in members_of(_in_process) if other is not self)
            most = max(_CHECKED_IN_PROCESS - others, most)
        with self._mutex:
            segment.checked.add_run(epoch, run, most)
            count = sum(opened.checked.count for opened in self._open.values())
            for opened in self._open.values():
                if count <= most:
                    break
                if opened is not segment:
                    count -= opened.checked.count
                    opened.checked.clear()
            self._checked_count = count

    # ------------------------------------------------------------ sizes and times

    def max_timestamp(self, base: int, log: LogState) -> int:
        """Return the largest timestamp of a segment; -1 if its file is missing or empty."""
        bases = self._handle.segments(log)
        with contextlib.suppress(FileNotFoundError, ValueError):
            if (known := self.remote_size(base)) is not None:
                return known[1]
            segment = self.get(bases, bases.index(base), log)
            if base != log.active_base_offset:
                self.unmap(base)
            return segment.index.max_timestamp if len(segment.mapped.view) else -1
        return -1

    def remote_size(self, base: int) -> tuple[int, int] | None:
        """Return (size, largest timestamp) of a segment that is only in the object store, without downloading anything.

        Return None for a local segment, or one without a complete index. Raises FileNotFoundError.
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
        """Return the offset from which on the whole log is on the local disk."""
        log = self._handle.page.log.read()
        bases = self._handle.segments(log)
        for at in range(len(bases) - 2, -1, -1):
            if bases[at + 1] <= log.log_start_offset:
                break
            if is_remote(self._handle, bases[at]):
                return max(bases[at + 1], log.log_start_offset)
        return log.log_start_offset

    def describe(self) -> list[SegmentInfo]:
        """Return the segments for `Partition.segments`. A segment whose file is missing has no bytes."""
        log = self._handle.page.log.read()
        bases = self._handle.segments(log)
        infos = []
        for at, base in enumerate(bases):
            active = at + 1 == len(bases)
            path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
            size_bytes, max_timestamp, remote = 0, -1, not active and is_remote(self._handle, base)
            with contextlib.suppress(FileNotFoundError):
                known = self.remote_size(base) if remote else None
                if known is not None:
                    size_bytes, max_timestamp = known
                    infos.append(
                        SegmentInfo(
                            base, bases[at + 1], size_bytes, max_timestamp, active=False, path=path, remote=True
                        )
                    )
                    continue
                segment = self.get(bases, at, log)
                size_bytes = log.end_position if active else len(segment.mapped.view)
                max_timestamp = segment.index.max_timestamp if size_bytes else -1
                if not active:
                    self.unmap(base)
            end_offset = log.log_end_offset if active else bases[at + 1]
            infos.append(SegmentInfo(base, end_offset, size_bytes, max_timestamp, active, path, remote))
        return infos
