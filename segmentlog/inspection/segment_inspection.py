"""Inspect one segment and its index: list intact batches and broken bytes. `segments_inspection` reports damage."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Protocol

import msgspec
import numpy as np

from segmentlog.format.batch import MAX_RAW_SIZE, TRANSACTIONAL
from segmentlog.format.control import Marker
from segmentlog.format.examine import DamagedRange, IntactBatch, examine_segment
from segmentlog.format.file_names import INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX, TOPIC_FILE
from segmentlog.format.index_file import OFFSET_ENTRY, TIME_ENTRY, Entries, decode_entries
from segmentlog.format.scan import SegmentContext
from segmentlog.format.stub import PROBE_BYTES
from segmentlog.inspection.finding import Tally
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem, Ranges, opened
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.segment_index import load_known_batches
from segmentlog.storage.segment_stub import is_evicted_or_replaced

_CHUNK = 1 << 20
_SECTOR = 4096


class Gap(msgspec.Struct, frozen=True):
    """Offsets ``[base_offset, end_offset)`` that no batch has, between intact batches.

    ``position`` is that of the batch after them.
    """

    position: int
    base_offset: int
    end_offset: int


class Flaw(msgspec.Struct, frozen=True):
    """A batch that can be read, but contradicts itself."""

    position: int
    size_bytes: int
    base_offset: int
    end_offset: int
    what: str


class Unreadable(msgspec.Struct, frozen=True):
    """A batch with correct checksums whose records do not decode. Its header announces ``record_count`` records."""

    position: int
    size_bytes: int
    base_offset: int
    end_offset: int
    record_count: int
    reason: str


class Tracked(msgspec.Struct, frozen=True, gc=False):
    """An intact batch with a producer id."""

    position: int
    size_bytes: int
    base_offset: int
    next_offset: int
    producer_id: int
    epoch: int
    sequence: int
    transactional: bool
    control: bool
    marker: Marker | None
    """The marker of a control batch, if it can be decoded."""


class SegmentFindings(msgspec.Struct):
    """The content of one segment."""

    base_offset: int
    path: str
    size_bytes: int
    """The size of the file. Its first ``end_position`` bytes were checked."""
    end_position: int
    end_offset: int
    """The offset after the last intact batch."""
    whole_position: int = 0
    """Where the last intact batch ends."""
    broken: list[DamagedRange] = []
    gaps: list[Gap] = []
    flaws: list[Flaw] = []
    wrong_times: list[Flaw] = []
    """Batches whose client stated a largest timestamp that differs from the records."""
    bad_sectors: list[tuple[int, int]] = []
    """(position, size) of the bytes that the disk could not read."""
    unreadable: list[Unreadable] = []
    epochs: dict[int, int] = {}
    """The epochs of its batches, each with the first base offset."""
    max_timestamp: int = 0
    tracked: list[Tracked] = []
    """The batches with producer ids; emptied after they were checked."""
    positions: array[int] = msgspec.field(default_factory=lambda: array("q"))
    base_offsets: array[int] = msgspec.field(default_factory=lambda: array("q"))
    next_offsets: array[int] = msgspec.field(default_factory=lambda: array("q"))
    timestamps_before: array[int] = msgspec.field(default_factory=lambda: array("q"))
    """For each intact batch: its position, base offset, next offset, and the largest timestamp before it."""

    @property
    def stem(self) -> str:
        return self.path.removesuffix(LOG_SUFFIX)

    @property
    def is_damaged(self) -> bool:
        return any(not broken.blank for broken in self.broken)

    def first_inside(self, base_offset: int, end_offset: int) -> int | None:
        """Return the index of the first intact batch with offsets in ``[base_offset, end_offset)``, or None."""
        at = bisect_right(self.next_offsets, base_offset)
        return at if at < len(self.base_offsets) and self.base_offsets[at] < end_offset else None

    def is_boundary(self, position: int) -> bool:
        """Return whether a batch or a range of broken bytes begins or ends at ``position``."""
        if position in (0, self.end_position) or any(broken.position == position for broken in self.broken):
            return True  # ranges are adjacent: where one ends, the next begins
        at = bisect_left(self.positions, position)
        return at < len(self.positions) and self.positions[at] == position

    def count_intact_after(self, tail_from: int) -> int:
        """Count the intact batches after the first broken bytes at or above ``tail_from``."""
        torn = [broken.position for broken in self.broken if broken.position >= tail_from and not broken.blank]
        return len(self.positions) - bisect_left(self.positions, torn[0]) if torn else 0


class InspectSegment(Protocol):
    """Function like `inspect_segment`, which may return an earlier result for the same bytes.

    Each call must return a new object, because the caller removes parts of the result, and may call again.
    """

    def __call__(
        self, fs: FileSystem, path: str, base: int, *, end_position: int | None, epoch: int, tally: Tally
    ) -> SegmentFindings: ...


def inspect_segment(
    fs: FileSystem, path: str, base: int, *, end_position: int | None, epoch: int, tally: Tally
) -> SegmentFindings:
    """Read a segment up to ``end_position`` (None: the whole file) and check every byte. Raises OSError.

    ``base`` is its base offset, ``epoch`` the largest epoch of earlier segments. The file may have another name. The
    result depends on nothing else in the log.

    The file is read, not mapped. With a map, a bad sector or a truncation by a recovery would kill the process instead
    of raising an error.
    """
    size, data, bad_sectors = read_segment(fs, path, end_position)
    end = len(data)
    found = SegmentFindings(base, path, size, end, base, bad_sectors=bad_sectors)
    tally.segments += 1
    counted = 0
    view = memoryview(data)
    for item in examine_segment(
        view, 0, end, path, expected_offset=base, epoch=epoch, context=lambda: segment_context(fs, path, base)
    ):
        if isinstance(item, IntactBatch):
            _add_intact(found, item)
            tally.batches += 1
            tally.records += item.header.record_count
        else:
            found.broken.append(item)
        if item.end_position - counted >= _CHUNK:
            tally.add_bytes(item.end_position - counted)
            counted = item.end_position
    tally.add_bytes(end - counted)
    return found


def segment_context(fs: FileSystem, path: str, base: int) -> SegmentContext:
    """Return facts about a segment's batches from its index files and its topic's file. Each file may be missing."""
    batch_limit = MAX_RAW_SIZE
    folder = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    with failures_ignored(ValueError, KeyError, TypeError):
        batch_limit = min(int(json.loads(read_file(fs, f"{folder}/{TOPIC_FILE}"))["largest_batch_bytes"]), batch_limit)
    if not path.endswith(LOG_SUFFIX):
        return SegmentContext(batch_limit=batch_limit)
    return SegmentContext(batch_limit=batch_limit, known=load_known_batches(fs, path.removesuffix(LOG_SUFFIX), base))


def _add_intact(found: SegmentFindings, item: IntactBatch) -> None:
    header = item.header
    position, base_offset = item.position, header.base_offset
    follows_damage = found.broken and found.broken[-1].end_position == position
    if base_offset > found.end_offset and not follows_damage:
        found.gaps.append(Gap(position, found.end_offset, base_offset))
    if item.flaw:
        found.flaws.append(Flaw(position, header.size_bytes, base_offset, header.next_offset, item.flaw))
    if item.wrong_time:
        found.wrong_times.append(Flaw(position, header.size_bytes, base_offset, header.next_offset, item.wrong_time))
    if item.unreadable is not None:
        found.unreadable.append(
            Unreadable(
                position, header.size_bytes, base_offset, header.next_offset, header.record_count,
                item.unreadable.reason,
            )
        )  # fmt: skip
    if header.producer_id >= 0:
        found.tracked.append(_track_batch(item))
    found.epochs.setdefault(header.partition_epoch, base_offset)
    found.positions.append(position)
    found.base_offsets.append(base_offset)
    found.next_offsets.append(header.next_offset)
    found.timestamps_before.append(found.max_timestamp)
    found.max_timestamp = max(found.max_timestamp, header.max_timestamp)
    found.end_offset, found.whole_position = header.next_offset, item.end_position


def _track_batch(item: IntactBatch) -> Tracked:
    header = item.header
    return Tracked(
        item.position,
        header.size_bytes,
        header.base_offset,
        header.next_offset,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        bool(header.attributes & TRANSACTIONAL),
        header.is_control,
        item.marker,
    )


def read_segment(
    fs: FileSystem, path: str, end_position: int | None = None
) -> tuple[int, bytearray, list[tuple[int, int]]]:
    """Return (file size, bytes up to the end position, unreadable ranges). Unreadable bytes are returned as zeros.

    A segment that is only in the object store is downloaded. Raises `ObjectStoreError`, `SegmentGone`.
    """
    while True:
        ranges = fs.ranged(path)
        if ranges is not None:
            return _read_ranges(ranges, end_position)
        with opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
            found = fs.fstat(fd)
            size, data, bad_sectors = _read_file(fs, fd, found.st_size, end_position)
        # It may have become a stub (a hole) after the check above.
        if any(data[:PROBE_BYTES]) or not data or not is_evicted_or_replaced(fs, path, found):
            return size, data, bad_sectors


def _read_file(
    fs: FileSystem, fd: int, size: int, end_position: int | None
) -> tuple[int, bytearray, list[tuple[int, int]]]:
    """Read a local file, with the result of `read_segment`."""
    data = bytearray(size if end_position is None else min(end_position, size))
    bad_sectors: list[tuple[int, int]] = []
    position = 0
    while position < len(data):
        wanted = min(_CHUNK, len(data) - position)
        try:
            part = fs.pread(fd, wanted, position)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            part = _read_by_sectors(fs, fd, position, wanted, bad_sectors)
        if not part:
            return position, data[:position], bad_sectors  # truncated meanwhile
        data[position : position + len(part)] = part
        position += len(part)
    return size, data, bad_sectors


def _read_ranges(ranges: Ranges, end_position: int | None) -> tuple[int, bytearray, list[tuple[int, int]]]:
    """Download a segment that is only in the object store, with the result of `read_segment`."""
    view = ranges.map()
    end = len(view) if end_position is None else min(end_position, len(view))
    ranges.need(0, end)
    return len(view), bytearray(view[:end]), []


def _read_by_sectors(fs: FileSystem, fd: int, position: int, size: int, bad_sectors: list[tuple[int, int]]) -> bytes:
    """Read a range that has a bad sector, sector by sector. Bytes of unreadable sectors are returned as zeros."""
    parts = []
    for start in range(position, position + size, _SECTOR):
        wanted = min(_SECTOR, position + size - start)
        try:
            part = fs.pread(fd, wanted, start)
        except OSError as error:
            if is_interrupt(error):
                raise
            part = b""
            bad_sectors.append((start, wanted))
        parts.append(part.ljust(wanted, b"\0"))
    return b"".join(parts)


# ---------------------------------------------------------------- index


class IndexFlaw(msgspec.Struct, frozen=True):
    """The first wrong entry of an index."""

    path: str
    position: int
    size_bytes: int
    what: str


def find_index_flaws(
    fs: FileSystem, found: SegmentFindings, *, next_base: int, limit: int | None, live: bool
) -> Iterator[IndexFlaw]:
    """Yield the differences between a segment's index files and a rebuilt index. Raises OSError.

    Only entries before position ``limit`` are checked. If the log is ``live``, an appender may be adding later entries;
    otherwise a power cut may have damaged them. ``limit`` is None for a sealed segment, whose last entry must be the
    closing entry.

    Missing entries are not reported: the files are written after the log, and completed when needed. Entries at an
    interval other than the current ``index.interval.bytes`` are not reported either.
    """
    offset_bytes, time_bytes = (
        _read_index(fs, found.stem + INDEX_SUFFIX),
        _read_index(fs, found.stem + TIME_INDEX_SUFFIX),
    )
    offsets, times, _ = decode_entries(offset_bytes, time_bytes)
    for suffix, data, size in ((INDEX_SUFFIX, offset_bytes, OFFSET_ENTRY.itemsize),
                               (TIME_INDEX_SUFFIX, time_bytes, TIME_ENTRY.itemsize)):  # fmt: skip
        if stray := len(data) % size:
            what = f"{stray} bytes at the end are not an entry"
            yield IndexFlaw(found.stem + suffix, len(data) - stray, stray, what)
    at = _first_wrong_entry(found, offsets, times, next_base=next_base, limit=limit)
    count = min(len(offset_bytes) // OFFSET_ENTRY.itemsize, len(time_bytes) // TIME_ENTRY.itemsize)
    if at is None and len(offsets) < count and (live or not _is_beyond(limit, offset_bytes, len(offsets))):
        at = len(offsets)
    if at is not None:
        yield _describe_flaw(found, offset_bytes, time_bytes, at, next_base)


def _read_index(fs: FileSystem, path: str) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return read_file(fs, path)
    return b""


def _is_beyond(limit: int | None, offset_bytes: bytes, at: int) -> bool:
    entry = np.frombuffer(offset_bytes, OFFSET_ENTRY, 1, at * OFFSET_ENTRY.itemsize)[0]
    return limit is not None and int(entry["position"]) >= limit


def _first_wrong_entry(
    found: SegmentFindings, offsets: Entries, times: Entries, *, next_base: int, limit: int | None
) -> int | None:
    """Return the number of the first entry that contradicts the batches; None if all agree with them."""
    positions = np.frombuffer(found.positions, np.int64)
    entry_positions = offsets["position"].astype(np.int64)
    if limit is not None:
        entry_positions = entry_positions[: int(np.searchsorted(entry_positions, limit))]
    entry_offsets = found.base_offset + offsets["relative_offset"][: len(entry_positions)].astype(np.int64)
    stamps = times["max_timestamp"][: len(entry_positions)].astype(np.int64)
    # Nearly all entries belong to a batch and are right. Compare these with the batches all at once.
    names_batch = np.isin(entry_positions, positions)
    at = np.searchsorted(positions, entry_positions[names_batch])
    known = np.frombuffer(found.timestamps_before, np.int64)[at]
    fits = (stamps[names_batch] == known) | ((stamps[names_batch] > known) & found.is_damaged)
    is_true = names_batch.copy()
    is_true[names_batch] = fits & (entry_offsets[names_batch] == np.frombuffer(found.base_offsets, np.int64)[at])
    for number in np.flatnonzero(~is_true).tolist():
        position, offset, stamp = int(entry_positions[number]), int(entry_offsets[number]), int(stamps[number])
        if names_batch[number]:
            return number
        if limit is None and position in (found.size_bytes, found.whole_position):
            true = found.end_offset <= offset <= next_base and _is_possible_timestamp(found, stamp, found.max_timestamp)
        else:
            true = any(broken.position <= position < broken.end_position for broken in found.broken)
        if not true:
            return number
    return None


def _is_possible_timestamp(found: SegmentFindings, stamp: int, known: int) -> bool:
    """Return whether ``stamp``, the timestamp of an index entry, is possible for the batches before the entry.

    ``known`` is the largest timestamp of their intact batches. In a damaged segment ``stamp`` may be larger, because
    the entry was written when all batches were intact.
    """
    return stamp == known or (stamp > known and found.is_damaged)


def _describe_flaw(
    found: SegmentFindings, offset_bytes: bytes, time_bytes: bytes, at: int, next_base: int
) -> IndexFlaw:
    """Return the flaw of entry ``at``, in the index file that contradicts the batches."""
    offset_entry = np.frombuffer(offset_bytes, OFFSET_ENTRY, 1, at * OFFSET_ENTRY.itemsize)[0]
    time_entry = np.frombuffer(time_bytes, TIME_ENTRY, 1, at * TIME_ENTRY.itemsize)[0]
    position, relative = int(offset_entry["position"]), int(offset_entry["relative_offset"])
    starts = dict(zip(found.positions, found.base_offsets, strict=True))
    offset = found.base_offset + relative
    closing = position in (found.size_bytes, found.whole_position) and found.end_offset <= offset <= next_base
    rest = "; this entry and all after it are ignored; 'segmentlog repair' rebuilds them"
    if starts.get(position) == offset or closing:
        what = f"entry {at} (offset {offset}): its timestamp {int(time_entry['max_timestamp'])}, its offset or checksum"
        path, size = found.stem + TIME_INDEX_SUFFIX, TIME_ENTRY.itemsize
        return IndexFlaw(path, at * size, size, f"{what} is wrong{rest}")
    size = OFFSET_ENTRY.itemsize
    what = f"entry {at}: no batch with offset {offset} begins at byte {position}"
    return IndexFlaw(found.stem + INDEX_SUFFIX, at * size, size, f"{what}{rest}")
