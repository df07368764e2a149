"""Segment files: active for appends, sealed but not yet synced, and mapped for reading."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Final

from segmentlog.errors import CorruptBatch, DiskFull
from segmentlog.format.file_names import LOG_SUFFIX, parse_segment_name, segment_name
from segmentlog.format.stub import PROBE_BYTES
from segmentlog.storage.file_operations import sync_data, try_fallocate, write_all
from segmentlog.storage.fork_safety import close_lockable, open_lockable
from segmentlog.storage.fs import LOCAL_ERRORS, NO_ROOM, Buffer, DiskFailed, FileSystem, Ranges, opened
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.segment_stub import is_evicted_or_replaced

_ALLOCATE_MIN: Final = 64 << 10
_ALLOCATE_MAX: Final = 8 << 20
_WINDOW: Final = 128 << 10
"""Size of a window in bytes. Once for each window this module decides whether to write zeros, and never writes them
further ahead.
"""
_WINDOW_SYNCS: Final = 4
"""Write zeros if the last window had at least this many fsyncs. Without zeros, these fsyncs cost more than writing the
window twice. With batches of 56 kB, zeros saved no time on the test machine.
"""
_ZEROS: Final = bytes(_WINDOW)


def segment_stem(folder: str, base_offset: int) -> str:
    """Return the path of a segment's files without their suffix."""
    return f"{folder}/{segment_name(base_offset)}"


def list_segments(fs: FileSystem, folder: str) -> list[int]:
    """Return the base offsets of the segments in a partition's folder, ascending."""
    return sorted(base for name in fs.listdir(folder) if (base := parse_segment_name(name)) is not None)


def create_segment(fs: FileSystem, folder: str, base_offset: int) -> None:
    """Create an empty segment file, if it does not exist. Its name is durable once the folder is synced."""
    path = segment_stem(folder, base_offset) + LOG_SUFFIX
    with opened(fs, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC):
        pass


def truncate_segment(fs: FileSystem, folder: str, base_offset: int, position: int) -> None:
    """Remove the preallocated space after ``position`` from a file that this process has not opened. A crash may undo
    it.
    """
    with opened(fs, segment_stem(folder, base_offset) + LOG_SUFFIX, os.O_RDWR | os.O_CLOEXEC) as fd:
        fs.ftruncate(fd, position)


def truncate_durably(fs: FileSystem, folder: str, base_offset: int, position: int) -> None:
    """Durably remove bytes from ``position`` on that were written but never published. The next append reuses their
    offsets: after a power cut the disk must not show the old bytes for the new records. Raises `DiskFailed` if the
    fsync fails: earlier appends may then be lost, too.
    """
    path = segment_stem(folder, base_offset) + LOG_SUFFIX
    with opened(fs, path, os.O_RDWR | os.O_CLOEXEC) as fd:
        _truncate_and_sync(fs, fd, position, path)


def _truncate_and_sync(fs: FileSystem, fd: int, position: int, path: str) -> None:
    if fs.fstat(fd).st_size != position:  # a truncation to the same size would change the time of the last write
        fs.ftruncate(fd, position)
    try:
        fs.fsync(fd)
    except OSError as error:
        raise DiskFailed.of(error, path) from error


class SealedSegment:
    """A segment that this process sealed, kept open with the descriptor that wrote it until it is synced.

    The kernel reports a failed writeback once for each descriptor that was open at that time. If no process has the
    file open, the kernel may drop the file's state with the error, and an fsync through a new descriptor reports
    nothing.
    """

    __slots__ = ("_fs", "base_offset", "epoch", "fd", "path")

    def __init__(self, fs: FileSystem, path: str, base_offset: int, epoch: int, fd: int) -> None:
        self._fs = fs
        self.path = path
        self.base_offset = base_offset
        self.epoch = epoch
        """The epoch of the log when it was sealed: a recovery may have replaced the file since."""
        self.fd = fd

    def sync(self) -> None:
        """Call fdatasync. Raises `DiskFailed`."""
        sync_data(self._fs, self.fd, self.path)

    def close(self) -> None:
        """Close the descriptor and ignore errors. Call `sync` first: it raises write errors. Idempotent."""
        fd, self.fd = self.fd, -1  # before: its number may be another file's right after
        if fd >= 0:
            with failures_ignored():
                close_lockable(self._fs, fd)


class ActiveSegment:
    """The segment that takes appends. Only the holder of the append lock may use it.

    It does not know where the log ends: the shared state has the positions. The file is preallocated in steps that
    double from 64 KiB to 8 MiB, and is zero there. (`fdatasync` of a preallocated file took half the time on the test
    machine.) If it is synced often, zeros are also written ahead. The first write to a block that is only reserved
    changes the file's metadata, which `fdatasync` must write, too: for 6 kB on ext4 it took 100 us instead of 45.
    PostgreSQL fills its log with zeros for the same reason (`wal_init_zero`).
    """

    __slots__ = (
        "_allocated", "_count_syncs", "_fs", "_limit", "_prepared", "_syncs", "base_offset", "fd", "is_cut", "path",
    )  # fmt: skip

    def __init__(
        self,
        fs: FileSystem,
        folder: str,
        base_offset: int,
        limit_bytes: int,
        *,
        create: bool,
        count_syncs: Callable[[], int] | None = None,
    ) -> None:
        self._fs = fs
        self._count_syncs = count_syncs
        self._syncs = -1
        self._prepared = 0
        self.base_offset = base_offset
        self.path = segment_stem(folder, base_offset) + LOG_SUFFIX
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self.is_cut = True
        """Whether the file has no bytes of a failed write after the end of the log."""
        # Open it like a locked file: the finalizer closes it if it is dropped, and a forked child closes its copy.
        self.fd: int = open_lockable(fs, self.path, flags)
        self._limit = limit_bytes
        try:
            self._allocated = fs.fstat(self.fd).st_size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, -1  # before: its number may be another file's right after
        if fd >= 0:
            close_lockable(self._fs, fd)

    def write(self, buffers: Sequence[Buffer], size_bytes: int, position: int) -> None:
        """Write at ``position``, the end of the log: all or nothing.

        An error leaves the file as it was: nothing was written, or the written bytes were removed durably. If they
        could not be removed, `is_cut` is false, and they must be removed before the next append. Raises `DiskFull`,
        `DiskFailed` if the disk fails, or another OSError that concerns this process only.
        """
        if position + size_bytes > self._prepared:
            self._prepare(position, size_bytes)
        try:
            if len(buffers) == 2 and self._fs.pwritev(self.fd, buffers, position) == size_bytes:
                return
            write_all(self._fs, self.fd, buffers, position)  # for many buffers, or again after a short write
        except OSError as error:
            self.is_cut = False
            self._remove_failed_write(position)
            if error.errno in NO_ROOM:
                raise DiskFull(self.path, size_bytes) from error
            if error.errno not in LOCAL_ERRORS:
                raise DiskFailed.of(error, self.path) from error
            raise

    def seal(self, position: int, epoch: int) -> SealedSegment:
        """Remove the space preallocated after ``position``, the end of the records. Return the segment with the open
        descriptor.

        Call this before readers see the segment as sealed: they then map the whole file.
        """
        self._fs.ftruncate(self.fd, position)
        fd, self.fd = self.fd, -1
        return SealedSegment(self._fs, self.path, self.base_offset, epoch, fd)

    def _remove_failed_write(self, position: int) -> None:
        """Remove the bytes from ``position`` on, durably, like `truncate_durably`.

        If a limit of this process or a full disk prevents that, leave `is_cut` false: the next append must then remove
        the bytes. Raises `DiskFailed`.
        """
        try:
            _truncate_and_sync(self._fs, self.fd, position, self.path)
        except OSError as error:
            if is_interrupt(error):
                raise
            failure = error
        else:
            self._allocated = self._prepared = position
            self.is_cut = True
            return
        if isinstance(failure, DiskFailed) or failure.errno not in LOCAL_ERRORS | NO_ROOM:
            raise DiskFailed.of(failure, self.path)

    def _prepare(self, position: int, size_bytes: int) -> None:
        """Preallocate space after ``position``. If the file is synced often, also write zeros there, ahead of the
        records.
        """
        if position + size_bytes > self._allocated:
            self._allocate(position, size_bytes)
        ahead = min(max(size_bytes, _WINDOW), self._allocated - position)
        if self._count_syncs is not None:
            before, self._syncs = self._syncs, self._count_syncs()
            if 0 <= before <= self._syncs - _WINDOW_SYNCS and size_bytes < ahead:
                with failures_ignored():  # the caller's own write will report the error
                    self._fs.pwritev(self.fd, [_ZEROS[:ahead]], position)
        self._prepared = position + max(ahead, size_bytes)

    def _allocate(self, position: int, size_bytes: int) -> None:
        size = self._fs.fstat(self.fd).st_size  # another process may have preallocated more
        if position + size_bytes > size:
            step = min(max(size, _ALLOCATE_MIN), _ALLOCATE_MAX)
            wanted = max(min(size + step, self._limit), position + size_bytes)
            if try_fallocate(self._fs, self.fd, size, wanted - size):
                size = wanted
        self._allocated = size


class MappedSegment:
    """A segment's file mapped for reading. The map grows with the file and never shrinks.

    It is unmapped when the object and all batches read from it are dropped. Thread-safe: two threads that map at the
    same time map it twice.

    If the file is only partly on the local disk (`FileSystem.ranged`), the constructor downloads all of it. With
    ``ranged`` it downloads nothing: the reader must request bytes with `ranges` before reading them. Raises
    `ObjectStoreError`.
    """

    __slots__ = ("_fs", "_ranged", "base_offset", "inode", "path", "ranges", "view", "written_ns")

    def __init__(self, fs: FileSystem, folder: str, base_offset: int, *, ranged: bool = False) -> None:
        self._fs = fs
        self._ranged = ranged
        self.ranges: Ranges | None = None
        self.inode = 0
        self.written_ns = 0
        self.base_offset = base_offset
        self.path = segment_stem(folder, base_offset) + LOG_SUFFIX
        self.view = memoryview(b"")
        self._map()

    def _map(self) -> None:
        while True:
            ranges = self._fs.ranged(self.path)
            if ranges is not None:
                self._map_ranges(ranges)
                return
            with opened(self._fs, self.path, os.O_RDONLY | os.O_CLOEXEC) as fd:
                found = self._fs.fstat(fd)
                if self.inode not in (0, found.st_ino):
                    return  # another file has the name now
                view = self._fs.map_file(fd, found.st_size) if found.st_size else memoryview(b"")
            # It may have become a stub (a hole) after the check above.
            if any(view[:PROBE_BYTES]) or not view or not is_evicted_or_replaced(self._fs, self.path, found):
                break
        self.inode, self.written_ns, self.view = found.st_ino, found.st_mtime_ns, view

    def _map_ranges(self, ranges: Ranges) -> None:
        if self.inode not in (0, ranges.inode):
            return
        view = ranges.map()
        if not self._ranged:
            ranges.need(0, len(view))
        self.written_ns = self._fs.stat(self.path).st_mtime_ns
        self.inode, self.ranges, self.view = ranges.inode, ranges, view

    def download(self) -> None:
        """Download the whole file if a part of it is not local. From now on also download the bytes by which the file
        grows.

        Raises `ObjectStoreError`.
        """
        self._ranged = False
        if self.ranges is not None:
            self.ranges.need(0, len(self.view))

    def view_to(self, end_position: int) -> memoryview:
        """Return the first ``end_position`` bytes. Raises `CorruptBatch` if the file has fewer."""
        if len(self.view) < end_position:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: the map stays valid
                self._map()
            if len(self.view) < end_position:
                found = f"{len(self.view)} bytes"
                raise CorruptBatch(self.path, len(self.view), f"a file of at least {end_position} bytes", found)
        return self.view[:end_position]

    @property
    def is_retired(self) -> bool:
        """Whether the block cache has replaced this file with another file."""
        return self.ranges is not None and self.ranges.is_retired
