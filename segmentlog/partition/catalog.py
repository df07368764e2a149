"""The sealed segments of a partition with their sizes, looked up once and kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from segmentlog.format.names import LOG_SUFFIX
from segmentlog.partition.handle import Handle
from segmentlog.partition.reader import Reader
from segmentlog.policy.retention import Candidate
from segmentlog.records import SegmentInfo
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state import LogState


class Sealed(msgspec.Struct, frozen=True, gc=False):
    """What a look at the folder tells of a sealed segment."""

    base_offset: int
    end_offset: int
    size_bytes: int
    written_ms: int


class Catalog:
    """Sealed segments, oldest first. For one thread at a time: whoever holds the lease."""

    def __init__(self, handle: Handle, reader: Reader) -> None:
        self._handle = handle
        self._reader = reader
        self._key = (-1, -1)
        self._sealed: list[Sealed] = []
        self._stamps: dict[int, int] = {}
        self.size_bytes = 0
        """Of all sealed segments."""

    def sealed(self, log: LogState) -> list[Sealed]:
        """Those of the log as ``log`` shows it. Not to be changed."""
        key = (log.generation, log.active_base_offset)
        if key != self._key:
            known = {one.base_offset: one for one in self._sealed} if key[0] == self._key[0] else {}
            bases = self._handle.segments(log)
            if not known:
                self._stamps.clear()
            self._sealed = [
                one
                for base, end in pairwise(bases)
                if (one := known.get(base) or self._look(base, end)) and one.end_offset > log.log_start_offset
            ]
            self.size_bytes = sum(one.size_bytes for one in self._sealed)
            self._key = key
        return self._sealed

    def _look(self, base: int, end: int) -> Sealed | None:
        with contextlib.suppress(FileNotFoundError):
            found = self._handle.fs.stat(segment_stem(self._handle.folder, base) + LOG_SUFFIX)
            return Sealed(base, end, found.st_size, found.st_mtime_ns // 1_000_000)
        return None

    def describe(self, one: Sealed, log: LogState) -> SegmentInfo:
        """With its largest timestamp, which its index knows."""
        stamp = self._stamps.get(one.base_offset)
        if stamp is None:
            stamp = self._stamps[one.base_offset] = self._reader.max_timestamp(one.base_offset, log)
        path = segment_stem(self._handle.folder, one.base_offset) + LOG_SUFFIX
        return SegmentInfo(one.base_offset, one.end_offset, one.size_bytes, stamp, False, path)

    def active(self, log: LogState) -> SegmentInfo:
        """The segment that takes appends."""
        base = log.active_base_offset
        stamp = self._reader.max_timestamp(base, log) if log.end_position else -1
        path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
        return SegmentInfo(base, log.log_end_offset, log.end_position, stamp, True, path)

    def candidates(self, log: LogState, now_ms: int) -> Iterator[Candidate]:
        """All segments as retention looks at them, oldest first; made one by one, as they are asked for."""
        for one in self.sealed(log):
            yield Candidate(self.describe(one, log), one.written_ms)
        yield Candidate(self.active(log), now_ms)
