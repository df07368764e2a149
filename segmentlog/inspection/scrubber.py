"""Scrub sealed segments: read them repeatedly, to find bytes that have changed on the disk.

    scrub -> as many bytes as the budget allows -> batch by batch -> findings

One pass checks every checksum in every sealed segment of the store; then the next pass begins. The scrubber reads the
files with `pread`, without opening partitions, mapping files or taking locks. It asks the kernel to drop the pages that
it has read. So a pass over a large store does not evict pages that other processes use. If a process has mapped a
page, the scrubber checks the page in memory, not on the disk.

If the header of a batch is damaged, only the following bytes show where the batch ends, see `segmentlog.format.scan`.
So the scrubber first reads the rest of the segment into memory, at the same speed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import HEADER_SIZE, check_payload, claimed_header, decode_header, has_valid_checksum
from segmentlog.format.file_names import LOG_SUFFIX, SWAP_SUFFIX, parse_copy_name
from segmentlog.format.scan import SegmentContext, skip_damage
from segmentlog.inspection.segment_inspection import segment_context
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.segment import list_segments, segment_stem
from segmentlog.storage.segment_stub import read_stub

logger = logging.getLogger("segmentlog")

_READ_MAX_BYTES: Final = 1 << 20
_BURST_S: Final = 0.5
# The most to read at once after a pause, as a part of a second's budget.
_PAUSE_MIN_S: Final = 0.1
_FOLDER_BYTES: Final = 4096
# How many bytes of the budget it costs to list a partition's folder.
_PASS_MIN_S: Final = 600.0
# Passes begin at least this far apart, so that a small store is not read continuously.


class ScrubTarget(NamedTuple):
    """A partition to scrub."""

    topic: str
    partition: int
    folder: str


class ScrubFinding(msgspec.Struct, frozen=True):
    """Damage in a sealed segment, from byte ``position`` on.

    No offset outside ``[base_offset, end_offset)`` is affected.
    """

    topic: str
    partition: int
    path: str
    position: int
    base_offset: int
    end_offset: int
    what: str

    def __str__(self) -> str:
        return (
            f"{self.path} at byte {self.position}, offsets [{self.base_offset}, {self.end_offset}): {self.what};"
            " 'segmentlog verify' shows the details, 'segmentlog repair' cuts it out"
        )


class ScrubReport(msgspec.Struct, frozen=True):
    """How much was read so far, and the damage found."""

    rounds: int = 0
    """The number of completed passes over all sealed segments."""
    segments: int = 0
    size_bytes: int = 0
    findings: tuple[ScrubFinding, ...] = ()


class Scrubber:
    """Reads the sealed segments of ``targets()``, at most ``bytes_per_s`` bytes a second. Thread-safe.

    Each finding is logged once, as a warning. It stays in `report` until its segment is found intact or is deleted.
    """

    def __init__(self, fs: FileSystem, targets: Callable[[], Iterable[ScrubTarget]], bytes_per_s: int) -> None:
        self._fs = fs
        self._targets = targets
        self._bytes_per_s = bytes_per_s
        self._mutex = fork_safety.lock(self, "_mutex")
        self._last_ms: int | None = None
        self._allowance = 0.0
        self._pass_began_ms: int | None = None
        self._is_in_pass = False
        self._partitions: deque[ScrubTarget] = deque()
        self._segments: deque[tuple[ScrubTarget, int, int]] = deque()
        self._current: _SegmentPass | None = None
        self._findings: dict[tuple[str, int], ScrubFinding] = {}
        self._seen_paths: set[str] = set()
        self._counts = (0, 0, 0)
        fork_safety.on_fork(self, "_reset_after_fork")

    def scrub(self, now_ms: int) -> float:
        """Read what the budget allows at ``now_ms`` (monotonic). Return the seconds until there is more to do.

        Raises OSError for an error that does not concern the segment; the next call continues with the next segment.
        """
        with self._mutex:
            self._add_budget(now_ms)
            while self._allowance >= 1:
                if self._current is None and not self._open_next_segment(now_ms):
                    return self._pause_s(now_ms)
                if self._current is not None:
                    self._read_segment(self._current)
            return max(_PAUSE_MIN_S, min(1 / self._bytes_per_s, 60.0))

    def report(self) -> ScrubReport:
        """Return the current findings, also while `scrub` runs."""
        with self._mutex:
            return ScrubReport(*self._counts, findings=tuple(self._findings.values()))

    def close(self) -> None:
        """Close the file that is being read."""
        with self._mutex:
            self._finish_segment()

    def _reset_after_fork(self) -> None:
        """Begin a new pass in a forked child, because a thread of the parent may have been inside `scrub`."""
        current, self._current = self._current, None
        if current is not None:
            current.close()
        self._partitions, self._segments = deque(), deque()
        self._pass_began_ms, self._is_in_pass = None, False
        self._seen_paths = set()

    # ------------------------------------------------------------ budget

    def _add_budget(self, now_ms: int) -> None:
        last_ms = now_ms if self._last_ms is None else self._last_ms
        self._last_ms = now_ms
        most = max(self._bytes_per_s * _BURST_S, 1.0)
        self._allowance = min(self._allowance + max(now_ms - last_ms, 0) / 1000 * self._bytes_per_s, most)

    def _pause_s(self, now_ms: int) -> float:
        assert self._pass_began_ms is not None
        return max(_PASS_MIN_S - (now_ms - self._pass_began_ms) / 1000, _PAUSE_MIN_S)

    # ------------------------------------------------------------ the order of segments

    def _open_next_segment(self, now_ms: int) -> bool:
        """Open the next segment, or list the next folder. Return False if the next pass is not due yet."""
        if self._segments:
            target, base, following = self._segments.popleft()  # an error skips the segment in this pass
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                # Skip segments that are only in the object store: the object store protects its data itself, and
                # each pass would pay for downloads again.
                if read_stub(self._fs, segment_stem(target.folder, base) + LOG_SUFFIX) is None:
                    self._current = _SegmentPass(self._fs, target, base, following)
            return True
        if not self._partitions:
            return self._begin_pass(now_ms)
        target = self._partitions.popleft()
        self._allowance -= _FOLDER_BYTES
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            bases = list_segments(self._fs, target.folder)
            self._segments.extend((target, base, following) for base, following in pairwise(bases))
        return True

    def _begin_pass(self, now_ms: int) -> bool:
        if self._is_in_pass:
            self._end_pass()
        if self._pass_began_ms is not None and now_ms - self._pass_began_ms < _PASS_MIN_S * 1000:
            return False
        self._partitions.extend(self._targets())
        self._pass_began_ms, self._is_in_pass = now_ms, True
        return bool(self._partitions)

    def _end_pass(self) -> None:
        self._is_in_pass = False
        for key in [key for key in self._findings.copy() if key[0] not in self._seen_paths]:
            with failures_ignored():  # if the check fails, keep the finding
                if not self._fs.exists(key[0]):
                    del self._findings[key]
        self._seen_paths.clear()
        rounds, segments, size_bytes = self._counts
        self._counts = (rounds + 1, segments, size_bytes)

    # ------------------------------------------------------------ reading

    def _read_segment(self, current: _SegmentPass) -> None:
        try:
            size = current.read_more(min(_READ_MAX_BYTES, int(self._allowance)))
        except OSError as error:
            if error.errno != errno.EIO:
                self._finish_segment()  # not completed: its findings do not count
                raise
            current.add_bad_sectors(error)
            size = 0
        self._allowance -= size
        rounds, segments, size_bytes = self._counts
        self._counts = (rounds, segments + current.is_done, size_bytes + size)
        if current.is_done:
            self._finish_segment()

    def _finish_segment(self) -> None:
        """Replace the earlier findings about the current segment, unless its file was replaced or deleted meanwhile."""
        current, self._current = self._current, None
        if current is None:
            return
        try:
            if not current.is_done or current.is_outdated():
                return
        finally:
            current.close()
        self._seen_paths.add(current.path)
        found = {(current.path, finding.position): finding for finding in current.findings}
        for key in [key for key in self._findings.copy() if key[0] == current.path and key not in found]:
            del self._findings[key]
        for key, finding in found.items():
            if key not in self._findings:
                logger.warning("%s/%d: damage found: %s", finding.topic, finding.partition, finding)
        self._findings.update(found)


class _SegmentPass:
    """One sealed segment, read from start to end in pieces of any size."""

    def __init__(self, fs: FileSystem, target: ScrubTarget, base: int, following: int) -> None:
        self._fs = fs
        self._target = target
        self._following = following
        self.path = segment_stem(target.folder, base) + LOG_SUFFIX
        self._fd = fs.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._stat = fs.fstat(self._fd)
        except BaseException:
            fs.close(self._fd)
            raise
        self._size = self._stat.st_size
        self._buffer = bytearray()
        self._buffer_position = 0
        self._wanted = 0
        """Length of the batch at the start of the buffer: check it only when the buffer has that many bytes."""
        self._base = self._expected = base
        self.findings: list[ScrubFinding] = []
        self.is_done = not self._size

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._fs.close(fd)

    def is_outdated(self) -> bool:
        """Return whether the file was deleted, replaced or truncated since it was opened."""
        try:
            now = self._fs.stat(self.path)
        except FileNotFoundError:
            return True
        if not os.path.samestat(now, self._stat) or now.st_size < self._size:
            return True
        return bool(self.findings) and self._is_merged()

    def _is_merged(self) -> bool:
        """Return whether a compaction replaced this file by a copy that also replaces the next segment.

        Compaction may do so after the segments were listed. While it runs, a swap file exists; afterwards, the next
        segment does not exist (see `segmentlog.log.swap`).
        """
        folder = self._target.folder
        copies = (parse_copy_name(name) for name in self._fs.listdir(folder) if name.endswith(SWAP_SUFFIX))
        if any(copy is not None and copy[0] == self._base for copy in copies):
            return True
        return not self._fs.exists(segment_stem(folder, self._following) + LOG_SUFFIX)

    def read_more(self, size: int) -> int:
        """Read ``size`` more bytes and check the complete batches. Return the number of bytes read. Raises OSError."""
        position = self._buffer_position + len(self._buffer)
        part = self._fs.pread(self._fd, min(size, self._size - position), position)
        self._fs.advise_unneeded(self._fd, position, len(part))
        self._buffer += part
        at_end = not part or position + len(part) >= self._size
        if len(self._buffer) < self._wanted and not at_end:
            return len(part)
        self._wanted = 0
        used = self._check(memoryview(bytes(self._buffer)), at_end)
        del self._buffer[:used]
        self._buffer_position += used
        if at_end:
            self._finish_check()
        return len(part)

    def add_bad_sectors(self, error: OSError) -> None:
        """Record that the disk cannot read the next bytes, and skip the rest of the segment."""
        position = self._buffer_position + len(self._buffer)
        self._add_finding(position, self._following, f"the disk cannot read these bytes ({error})")
        self.is_done = True

    def _check(self, view: memoryview, at_end: bool) -> int:
        """Check every complete batch in the buffer. Return the number of checked bytes."""
        at = 0
        while at < len(view):
            available, rest = len(view) - at, self._size - self._buffer_position - at
            claimed = claimed_header(view, at)
            if not at_end and (
                claimed is None or (has_valid_checksum(claimed) and available < claimed.size_bytes <= rest)
            ):
                self._wanted = HEADER_SIZE if claimed is None else claimed.size_bytes
                return at
            try:
                header = decode_header(view, at, self.path)
                if header.base_offset < self._expected:
                    raise CorruptBatch(self.path, at, f"an offset of {self._expected} or more", str(header.base_offset))
            except CorruptBatch as error:
                if not at_end:  # where the batch ends depends on the rest of the segment: read it first
                    self._wanted = rest
                    return at
                at = self._skip_damage(view, at, error)
                continue
            try:
                check_payload(view, at, header, self.path)
            except CorruptBatch as error:
                why = f"expected {error.expected}, found {error.found}"
                self._add_finding(self._buffer_position + at, header.next_offset, why)
            self._expected = header.next_offset
            at += header.size_bytes
        return at

    def _skip_damage(self, view: memoryview, at: int, error: CorruptBatch) -> int:
        """Record the damage at ``at``, unless only zeros follow. Return the position of the next batch."""
        if not any(view[at:]):
            return len(view)  # preallocated space that a roll has not cut off yet
        begins = self._buffer_position
        context = segment_context(self._fs, self.path, self._base)

        def known(position: int) -> Iterator[tuple[int, int]]:
            return ((position - begins, offset) for position, offset in context.known(position + begins))

        at_position = begins + at
        at, offset = skip_damage(view, at, self._expected, SegmentContext(self._following, context.batch_limit, known))
        following = self._following if offset is None else offset
        self._add_finding(at_position, following, f"expected {error.expected}, found {error.found}")
        self._expected = following
        return at

    def _finish_check(self) -> None:
        if self._expected > self._following:
            what = f"its last batch ends at {self._expected}, but the next segment begins at {self._following}"
            self._add_finding(self._size, self._following, what)
        self.is_done = True

    def _add_finding(self, position: int, end_offset: int, what: str) -> None:
        base_offset = min(self._expected, end_offset)
        self.findings.append(
            ScrubFinding(self._target.topic, self._target.partition, self.path, position, base_offset, end_offset, what)
        )
