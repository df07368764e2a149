"""Sizes and times of a partition's segments, looked up on first use and cached."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from segmentlog.format.file_names import LOG_SUFFIX
from segmentlog.log.handle import Handle
from segmentlog.log.read.open_segments import OpenSegments
from segmentlog.policy.retention import Candidate
from segmentlog.records import SegmentInfo
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state_page import LogState

_NEVER_MS = 2**62


class SegmentCatalog:
    """The sealed segments of one log state, oldest first, and its active segment. Get it from `SegmentCatalogs`.

    Thread-safe: two threads that look up a segment at the same time look it up twice.
    """

    def __init__(self, handle: Handle, opened: OpenSegments, log: LogState, before: SegmentCatalog | None) -> None:
        self._handle = handle
        self._opened = opened
        self._log = log
        self.key = (log.generation, log.active_base_offset, log.log_start_offset)
        self.spans = [(base, end) for base, end in pairwise(handle.segments(log)) if end > log.log_start_offset]
        """Base and end offset of each sealed segment."""
        self._size_bytes: int | None = None
        # Sealed segments change only with the generation.
        same = before is not None and before.key[0] == log.generation
        self._files: dict[int, tuple[int, int]] = before._files if before is not None and same else {}
        self._known: dict[int, Candidate] = before._known if before is not None and same else {}

    def candidate(self, base: int, end: int) -> Candidate:
        """Return a sealed segment with its size, its largest timestamp and the time of its last write."""
        known = self._known.get(base)
        if known is None:
            size, written_ms = self._file(base)
            stamp = self._opened.max_timestamp(base, self._log)
            path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
            known = self._known[base] = Candidate(SegmentInfo(base, end, size, stamp, False, path), written_ms)
        return known

    def _file(self, base: int) -> tuple[int, int]:
        """Return (size of a segment's file, time of its last write in ms)."""
        known = self._files.get(base)
        if known is None:
            try:
                with self._handle.folder_locked():
                    found = self._handle.fs.stat(segment_stem(self._handle.folder, base) + LOG_SUFFIX)
                known = found.st_size, found.st_mtime_ns // 1_000_000
            except FileNotFoundError:  # damaged, or deleted meanwhile: it has no time of its own
                known = 0, _NEVER_MS
            self._files[base] = known
        return known

    def sealed(self) -> Iterator[SegmentInfo]:
        """Yield the sealed segments."""
        for span in self.spans:
            yield self.candidate(*span).segment

    def active(self, log: LogState) -> SegmentInfo:
        """Return the active segment of ``log``."""
        base = log.active_base_offset
        stamp = self._opened.max_timestamp(base, log) if log.end_position else -1
        path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
        return SegmentInfo(base, log.log_end_offset, log.end_position, stamp, True, path)

    def candidates(self, log: LogState, now_ms: int) -> Iterator[Candidate]:
        """Yield all segments for retention, looking up each when it is reached."""
        for span in self.spans:
            yield self.candidate(*span)
        yield Candidate(self.active(log), now_ms)

    def size_bytes(self) -> int:
        """Return the size of all sealed segments."""
        if self._size_bytes is None:
            self._size_bytes = sum(self._file(base)[0] for base, _ in self.spans)
        return self._size_bytes


class SegmentCatalogs:
    """Caches the catalog of the current log state. Thread-safe."""

    def __init__(self, handle: Handle, opened: OpenSegments) -> None:
        self._handle = handle
        self._opened = opened
        self._last: SegmentCatalog | None = None

    def get(self, log: LogState) -> SegmentCatalog:
        """Return the catalog of ``log``, the cached one if it has the same segments."""
        last = self._last
        if last is None or last.key != (log.generation, log.active_base_offset, log.log_start_offset):
            last = self._last = SegmentCatalog(self._handle, self._opened, log, last)
        return last
