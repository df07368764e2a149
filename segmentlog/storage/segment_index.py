"""The sparse index of a segment in memory, and its two files.

All processes compute the same entries, because entries depend on the batch headers alone. So any number of processes
may write them to the files.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from segmentlog.errors import UnknownTopic
from segmentlog.format.file_names import INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX
from segmentlog.format.index_file import (
    MAX_RELATIVE,
    OFFSET_ENTRY,
    TIME_ENTRY,
    Entries,
    decode_entries,
    encode_entries,
    entry_due,
)
from segmentlog.format.scan import KnownBatches, SegmentContext, scan_past_damage
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.interrupt_check import failures_ignored

_FLUSH_EVERY = 256  # entries; a kill costs the next open a scan of one megabyte at the default interval


class SegmentIndex:
    """Sparse offset and time index of one segment. Thread-safe, except `observe`.

    The entries cover the segment up to ``scanned_position``. A lookup for a later batch returns the last entry before
    ``scanned_position``, and the caller walks the batches from that entry on.
    """

    def __init__(
        self,
        fs: FileSystem,
        stem: str,
        base_offset: int,
        interval_bytes: int,
        *,
        writable: bool = True,
        folder_locked: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.writable = writable
        self._folder_locked = folder_locked
        """Context for writing files by name. Raises `UnknownTopic` if the folder belongs to another log now."""
        self.log_inode: int | None = None
        """Inode of the segment file that the entries describe. None means the file that has the segment's name now."""
        self._fs = fs
        self._stem = stem
        self.base_offset = base_offset
        self._interval = interval_bytes
        self._has_invalid_entries = False
        self._reset()
        self._lock = fork_safety.lock(self, "_lock", "_reset")

    def _reset(self) -> None:
        """Discard all entries.

        Also called in a forked child: another thread of the parent may have been adding entries.
        """
        self._set_entries(np.empty(0, OFFSET_ENTRY), np.empty(0, TIME_ENTRY))
        self.count = 0
        self._flushed = 0
        self.max_timestamp = 0
        self.scanned_position = 0
        self._last_indexed_position = 0
        self._next_offset = self.base_offset

    def _set_entries(self, offsets: Entries, times: Entries) -> None:
        """Replace the entries."""
        relative, positions = _columns(offsets)
        # Make no call between the assignments, so that an interrupt leaves all old entries or all new entries.
        self._offsets, self._times, self._relative, self._positions = offsets, times, relative, positions

    # ------------------------------------------------------------ files

    def load(self, *, limit: int = MAX_RELATIVE, sealed: bool = False) -> None:
        """Read the valid entries below position ``limit`` from the files; there may be none."""
        offset_bytes, time_bytes = self._read(INDEX_SUFFIX, sealed), self._read(TIME_INDEX_SUFFIX, sealed)
        offsets, times, whole = decode_entries(offset_bytes, time_bytes)
        kept = int(
            np.searchsorted(offsets["position"], np.uint32(min(limit, MAX_RELATIVE)), "right" if sealed else "left")
        )
        offsets, times = offsets[:kept], times[:kept]
        relative, positions = _columns(offsets)
        max_timestamp = int(times["max_timestamp"][-1]) if kept else 0
        with self._lock:
            # Make no call between the assignments, as in `_set_entries`.
            self._offsets, self._times, self._relative, self._positions = offsets, times, relative, positions
            self.count = self._flushed = kept
            self._has_invalid_entries = not whole
            if kept:
                self.scanned_position = self._last_indexed_position = positions[-1]
                self.max_timestamp = max_timestamp
                self._next_offset = self.base_offset + relative[-1]

    def _read(self, suffix: str, sealed: bool) -> memoryview:
        """Return the file's bytes.

        Map the index file of a sealed segment: ten thousand loaded indexes then use page cache instead of process
        memory.
        """
        try:
            with opened(self._fs, self._stem + suffix, os.O_RDONLY | os.O_CLOEXEC) as fd:
                size = self._fs.fstat(fd).st_size
                if not size:
                    return memoryview(b"")
                if sealed:
                    return self._fs.map_file(fd, size)
                return memoryview(self._fs.pread(fd, size, 0))
        except FileNotFoundError:
            return memoryview(b"")

    def flush(self) -> None:
        """Write the entries that the files lack. The files are a cache, so errors are ignored, even a full disk."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        count = self.count
        if count == self._flushed or not self.writable:
            return
        with failures_ignored(UnknownTopic), self._folder_locked():
            # raises if the segment was deleted: then do not create index files
            found = self._fs.stat(self._stem + LOG_SUFFIX)
            if self.log_inode not in (None, found.st_ino):
                return  # the segment was compacted meanwhile: these entries describe the old file
            if self._has_invalid_entries:
                # Create new files instead of truncating: a process that has a file mapped would be killed by touching
                # missing pages.
                for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        self._fs.unlink(self._stem + suffix)
                self._has_invalid_entries, self._flushed = False, 0
            fresh = slice(self._flushed, count)
            encoded = encode_entries(
                self._offsets["relative_offset"][fresh],
                self._offsets["position"][fresh],
                self._times["max_timestamp"][fresh],
            )
            self._write(INDEX_SUFFIX, encoded[0], self._flushed * OFFSET_ENTRY.itemsize)
            self._write(TIME_INDEX_SUFFIX, encoded[1], self._flushed * TIME_ENTRY.itemsize)
            self._flushed = count

    def _write(self, suffix: str, data: bytes, position: int) -> None:
        with opened(self._fs, self._stem + suffix, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC) as fd:
            write_all(self._fs, fd, [data], position)

    # ------------------------------------------------------------ entries

    def observe(self, position: int, base_offset: int, next_offset: int, max_timestamp: int, size_bytes: int) -> None:
        """Add the batch at ``position``, which must be the end of the batch before it.

        Takes no lock. Only for the index of an appender, which holds the append lock.
        """
        if entry_due(position, self._last_indexed_position, self._interval):
            self._add(base_offset, position)
            if self.count - self._flushed >= _FLUSH_EVERY:
                self._flush()
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
        self.scanned_position = position + size_bytes
        self._next_offset = next_offset

    def _add(self, offset: int, position: int) -> None:
        relative = offset - self.base_offset
        if relative > MAX_RELATIVE or position > MAX_RELATIVE:
            return
        count = self.count
        if count == len(self._offsets):
            grown = max(64, 2 * count)
            offsets, times = np.zeros(grown, OFFSET_ENTRY), np.zeros(grown, TIME_ENTRY)
            offsets[:count], times[:count] = self._offsets[:count], self._times[:count]
            self._set_entries(offsets, times)
        self._offsets[count] = (relative, position)
        self._times[count] = (self.max_timestamp, relative, 0)
        self.count = count + 1
        self._last_indexed_position = position

    def catch_up(
        self, view: memoryview, end_position: int, around: Callable[[], SegmentContext] = SegmentContext
    ) -> None:
        """Observe the batches up to ``end_position`` that were not observed yet, skipping damaged ones."""
        with self._lock:
            walk = scan_past_damage(view, self.scanned_position, end_position, self._next_offset, around)
            for position, header in walk:
                self.observe(position, header.base_offset, header.next_offset, header.max_timestamp, header.size_bytes)
            self.scanned_position = max(self.scanned_position, end_position)

    def close(self, next_offset: int, size_bytes: int) -> None:
        """Add the closing entry of a sealed segment, and write all entries to the files."""
        with self._lock:
            if self._last_indexed_position < size_bytes:
                self._add(next_offset, size_bytes)
            self.scanned_position = size_bytes
        self.flush()

    def complete(self, size_bytes: int) -> None:
        """Call `close` with the offset after the last observed batch. The caller must first call `catch_up` up to the
        end of the sealed segment.
        """
        self.close(self._next_offset, size_bytes)

    def is_complete(self, size_bytes: int) -> bool:
        """Return whether the closing entry for a segment of this size exists."""
        return self._last_indexed_position == size_bytes > 0

    # ------------------------------------------------------------ lookups

    def position_for_offset(self, offset: int) -> tuple[int, int]:
        """Return (position, base offset) of the last indexed batch that starts at or below ``offset``."""
        with self._lock:
            count = self.count
            if count and offset > self.base_offset:
                # bisect takes 40 ns a step. `searchsorted` needs 2 us to start, and milliseconds for a value of another
                # dtype.
                return self._entry(bisect_right(self._relative, offset - self.base_offset, 0, count) - 1)
        return 0, self.base_offset

    def position_for_timestamp(self, timestamp: int) -> tuple[int, int]:
        """Return (position, base offset) of an indexed batch before which every timestamp is below ``timestamp``."""
        with self._lock:
            stamps = self._times["max_timestamp"][: self.count]
            return self._entry(int(stamps.searchsorted(np.int64(timestamp), "left")) - 1)

    def _entry(self, index: int) -> tuple[int, int]:
        if index < 0:
            return 0, self.base_offset
        return self._positions[index], self.base_offset + self._relative[index]

    def batches_after(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield (position, base offset) of each entry after ``position``. The closing entry has the segment's size and
        end offset.
        """
        with self._lock:
            count, positions, relative = self.count, self._positions, self._relative
        for at in range(bisect_right(positions, position, 0, count), count):
            yield positions[at], self.base_offset + relative[at]

    def entries(self) -> tuple[Entries, Entries]:
        """Return copies of the entries with their checksums, for `verify` and for tests."""
        with self._lock:
            encoded = encode_entries(
                self._offsets["relative_offset"][: self.count],
                self._offsets["position"][: self.count],
                self._times["max_timestamp"][: self.count],
            )
        return np.frombuffer(encoded[0], OFFSET_ENTRY), np.frombuffer(encoded[1], TIME_ENTRY)


def _columns(offsets: Entries) -> tuple[memoryview, memoryview]:
    """Return (relative offsets, positions) of the entries, for `bisect`."""
    words = offsets.view(np.uint32).data
    return words[::2], words[1::2]


def load_known_batches(fs: FileSystem, stem: str, base_offset: int) -> KnownBatches:
    """Return a function that looks up the batches in the index files of a segment.

    It reads the files when first called.

    Missing or unreadable files are not an error: they count as empty.
    """
    index: SegmentIndex | None = None

    def batches_after(position: int) -> Iterator[tuple[int, int]]:
        nonlocal index
        if index is None:
            index = SegmentIndex(fs, stem, base_offset, 1, writable=False)
            with failures_ignored():
                index.load()
        return index.batches_after(position)

    return batches_after
