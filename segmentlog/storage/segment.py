"""Segment files: the one that takes appends, those that were sealed and are not synced yet, any of them mapped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Final

from segmentlog.errors import CorruptBatch, DiskFull
from segmentlog.format.file_names import LOG_SUFFIX, parse_segment_name, segment_name
from segmentlog.format.stub import PROBE_BYTES
from segmentlog.storage.file_operations import sync_data, try_fallocate, write_all
from segmentlog.storage.fork_safety import hold_open, let_go
from segmentlog.storage.fs import LOCAL_ERRORS, NO_ROOM, Buffer, DiskFailed, FileSystem, Ranges, opened
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.segment_stub import is_evicted_or_replaced

_ALLOCATE_MIN: Final = 64 << 10
_ALLOCATE_MAX: Final = 8 << 20
_WINDOW: Final = 128 << 10
"""How often it is decided whether to write zeros ahead, and how many."""
_WINDOW_SYNCS: Final = 4
"""So many fsyncs in a window: they cost more than writing it twice. With batches of 56 kB here that was no gain."""
_ZEROS: Final = bytes(_WINDOW)


def segment_stem(folder: str, base_offset: int) -> str:
    """Path of a segment's files without their suffix."""
    return f"{folder}/{segment_name(base_offset)}"


def list_segments(fs: FileSystem, folder: str) -> list[int]:
    """Base offsets of the segments in a partition's folder, ascending."""
    return sorted(base for name in fs.listdir(folder) if (base := parse_segment_name(name)) is not None)


def create_segment(fs: FileSystem, folder: str, base_offset: int) -> None:
    """Make an empty one, if there is none yet. Its name is durable once the folder is synced."""
    path = segment_stem(folder, base_offset) + LOG_SUFFIX
    with opened(fs, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC):
        pass


def cut_segment(fs: FileSystem, folder: str, base_offset: int, position: int) -> None:
    """Give back what was allocated behind the end of one that nobody here has open. A crash may bring it back."""
    with opened(fs, segment_stem(folder, base_offset) + LOG_SUFFIX, os.O_RDWR | os.O_CLOEXEC) as fd:
        fs.ftruncate(fd, position)


def drop_behind(fs: FileSystem, folder: str, base_offset: int, position: int) -> None:
    """Take back what was written from ``position`` on and never published, durably.

    Its offsets go to other records next: after a power cut the disk must not come up
    with the old bytes in place of those. Raises `DiskFailed` when the fsync fails: what was appended
    before may be lost with it.
    """
    path = segment_stem(folder, base_offset) + LOG_SUFFIX
    with opened(fs, path, os.O_RDWR | os.O_CLOEXEC) as fd:
        _drop(fs, fd, position, path)


def _drop(fs: FileSystem, fd: int, position: int, path: str) -> None:
    fs.ftruncate(fd, position)
    try:
        fs.fsync(fd)
    except OSError as error:
        raise DiskFailed.of(error, path) from error


class SealedSegment:
    """A segment that was sealed here, through the descriptor that it was written with, until it is synced.

    The kernel tells of a failed writeback once for every descriptor that was open then. A file that nobody
    has open may be forgotten with its error, and an fsync that opens it again hears of nothing.
    """

    __slots__ = ("_fs", "base_offset", "epoch", "fd", "path")

    def __init__(self, fs: FileSystem, path: str, base_offset: int, epoch: int, fd: int) -> None:
        self._fs = fs
        self.path = path
        self.base_offset = base_offset
        self.epoch = epoch
        """Of the log then: a recovery may have put another file in its place."""
        self.fd = fd

    def sync(self) -> None:
        """fdatasync. Raises `DiskFailed`."""
        sync_data(self._fs, self.fd, self.path)

    def close(self) -> None:
        """Idempotent. Nobody is told of an error: whoever wants to know it syncs before."""
        fd, self.fd = self.fd, -1  # before: its number may be another file's right after
        if fd >= 0:
            with failures_ignored():
                let_go(self._fs, fd)


class ActiveSegment:
    """The segment that takes appends, held by whoever may come to append. Used under the append lock only.

    Where the log ends is not this object's to know: positions come from the shared state.
    The file is preallocated ahead in steps that double from 64 KiB to 8 MiB (an `fdatasync`
    of a preallocated file took half the time here), and zero there. Where it is synced often, zeros
    are written ahead as well: in blocks that are merely reserved the first write changes what they
    are, and an `fdatasync` has that to write, too (100 us instead of 45 for 6 kB on ext4 here).
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
        """Nothing that a failed write left stands behind the end of the log."""
        # Like a file that is locked, for what else that brings: dropped, it is closed, and so it is in a forked child.
        self.fd: int = hold_open(fs, self.path, flags)
        self._limit = limit_bytes
        try:
            self._allocated = fs.fstat(self.fd).st_size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1  # before: its number may be another file's right after
        if fd >= 0:
            let_go(self._fs, fd)

    def write(self, buffers: Sequence[Buffer], size_bytes: int, position: int) -> None:
        """Write at ``position``, the end of the log; all or nothing.

        An error leaves the file as it was: nothing was written, or it was cut off again, durably. `is_cut`
        is false where it could not be, and is to be before anything else is appended. Raises DiskFull;
        `DiskFailed` for a disk that fails; any other OSError is this process's own affair.
        """
        if position + size_bytes > self._prepared:
            self._prepare(position, size_bytes)
        try:
            if len(buffers) == 2 and self._fs.pwritev(self.fd, buffers, position) == size_bytes:
                return
            write_all(self._fs, self.fd, buffers, position)  # many buffers, or all of it again after a short write
        except OSError as error:
            self.is_cut = False
            self._take_back(position)
            if error.errno in NO_ROOM:
                raise DiskFull(self.path, size_bytes) from error
            if error.errno not in LOCAL_ERRORS:
                raise DiskFailed.of(error, self.path) from error
            raise

    def seal(self, position: int, epoch: int) -> SealedSegment:
        """Take no more: what was allocated behind ``position``, the end, is given back, and the descriptor handed over.

        Before readers see it as sealed: from then on they map all of the file.
        """
        self._fs.ftruncate(self.fd, position)
        fd, self.fd = self.fd, -1
        return SealedSegment(self._fs, self.path, self.base_offset, epoch, fd)

    def _take_back(self, position: int) -> None:
        """As `drop_behind`, unless this process cannot do it: whoever appends next can. Raises `DiskFailed`."""
        try:
            _drop(self._fs, self.fd, position, self.path)
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
        """See to what lies ahead of ``position``, up to where it is to be seen to again."""
        if position + size_bytes > self._allocated:
            self._allocate(position, size_bytes)
        ahead = min(max(size_bytes, _WINDOW), self._allocated - position)
        if self._count_syncs is not None:
            before, self._syncs = self._syncs, self._count_syncs()
            if 0 <= before <= self._syncs - _WINDOW_SYNCS and size_bytes < ahead:
                with failures_ignored():  # what is written for the caller will tell
                    self._fs.pwritev(self.fd, [_ZEROS[:ahead]], position)
        self._prepared = position + max(ahead, size_bytes)

    def _allocate(self, position: int, size_bytes: int) -> None:
        size = self._fs.fstat(self.fd).st_size  # another process may have gone ahead
        if position + size_bytes > size:
            step = min(max(size, _ALLOCATE_MIN), _ALLOCATE_MAX)
            wanted = max(min(size + step, self._limit), position + size_bytes)
            if try_fallocate(self._fs, self.fd, size, wanted - size):
                size = wanted
        self._allocated = size


class MappedSegment:
    """A segment's file mapped for reading; grows with the file, never shrinks.

    Dropping the object unmaps it once no batch that was read from it is left. Thread-safe:
    threads that map at once merely do it twice.

    Of a file of which not everything is here (`FileSystem.ranged`) all is brought first. With ``ranged`` nothing is:
    whoever looks at bytes of it asks for them before, with `ranges`. Raises `ObjectStoreError` then, too.
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
                    return  # another one has the name since
                view = self._fs.map_file(fd, found.st_size) if found.st_size else memoryview(b"")
            # It may have become a hole since it was asked for.
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

    def bring(self) -> None:
        """Have all of it here, and what it grows by. Raises `ObjectStoreError`."""
        self._ranged = False
        if self.ranges is not None:
            self.ranges.need(0, len(self.view))

    def upto(self, end_position: int) -> memoryview:
        """The first ``end_position`` bytes. Raises `CorruptBatch` when the file has fewer."""
        if len(self.view) < end_position:
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: what is mapped stays
                self._map()
            if len(self.view) < end_position:
                found = f"{len(self.view)} bytes"
                raise CorruptBatch(self.path, len(self.view), f"a file of at least {end_position} bytes", found)
        return self.view[:end_position]

    @property
    def is_retired(self) -> bool:
        """Whether another file has its place, of which there is no other sign."""
        return self.ranges is not None and self.ranges.is_retired
