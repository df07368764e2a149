"""The segments of a partition with sizes and times, looked up once, when they are first asked for, and kept."""

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
    """The sealed segments of one state of the log, oldest first, and its active one. Get it from `Catalogs`.

    Thread-safe: threads that look a segment up at once merely do it twice.
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
        """A sealed segment: its size, its largest timestamp, when it was written to."""
        known = self._known.get(base)
        if known is None:
            size, written_ms = self._file(base)
            stamp = self._opened.max_timestamp(base, self._log)
            path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
            known = self._known[base] = Candidate(SegmentInfo(base, end, size, stamp, False, path), written_ms)
        return known

    def _file(self, base: int) -> tuple[int, int]:
        """(size of a segment's file, when it was written to)."""
        known = self._files.get(base)
        if known is None:
            try:
                with self._handle.folder_locked():
                    found = self._handle.fs.stat(segment_stem(self._handle.folder, base) + LOG_SUFFIX)
                known = found.st_size, found.st_mtime_ns // 1_000_000
            except FileNotFoundError:  # damage, or deleted since: nothing that has a time of its own
                known = 0, _NEVER_MS
            self._files[base] = known
        return known

    def sealed(self) -> Iterator[SegmentInfo]:
        """The sealed segments."""
        for span in self.spans:
            yield self.candidate(*span).segment

    def active(self, log: LogState) -> SegmentInfo:
        """The segment that takes appends, as ``log`` shows it."""
        base = log.active_base_offset
        stamp = self._opened.max_timestamp(base, log) if log.end_position else -1
        path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
        return SegmentInfo(base, log.log_end_offset, log.end_position, stamp, True, path)

    def candidates(self, log: LogState, now_ms: int) -> Iterator[Candidate]:
        """All segments as retention looks at them; each is looked up when its turn comes."""
        for span in self.spans:
            yield self.candidate(*span)
        yield Candidate(self.active(log), now_ms)

    def size_bytes(self) -> int:
        """Of all sealed segments."""
        if self._size_bytes is None:
            self._size_bytes = sum(self._file(base)[0] for base, _ in self.spans)
        return self._size_bytes


class SegmentCatalogs:
    """The catalog of the log as it is now. Thread-safe."""

    def __init__(self, handle: Handle, opened: OpenSegments) -> None:
        self._handle = handle
        self._opened = opened
        self._last: SegmentCatalog | None = None

    def of(self, log: LogState) -> SegmentCatalog:
        """That of ``log``; the last one, when it is of the same segments."""
        last = self._last
        if last is None or last.key != (log.generation, log.active_base_offset, log.log_start_offset):
            last = self._last = SegmentCatalog(self._handle, self._opened, log, last)
        return last
