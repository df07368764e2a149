"""A block cache for segments in an object store: sparse files, and the blocks that were downloaded into them.

A cached file is created with the segment's size, but without data. Before a reader accesses bytes, it calls
`CachedFile.ensure_range`, which downloads the missing blocks. The longer a reader reads sequentially, the more blocks
are prefetched. If the cache exceeds its limit, an empty file replaces the least recently used file. Readers that have
mapped the old file keep it until they unmap it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from segmentlog.errors import DiskFull, ObjectStoreError, SegmentlogError, ShippingRefused, StoreClosed
from segmentlog.format.file_names import TEMPORARY_SUFFIX
from segmentlog.objects.bucket.base import Bucket, Data, ObjectMissing
from segmentlog.objects.manifest.object_ranges import ObjectRanges, file_size
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable
from segmentlog.storage.fs import LOCAL_ERRORS, NO_ROOM, FileSystem, opened
from segmentlog.weak_sets import members_of

BLOCK_BYTES: Final = 1 << 20
_RUN_BLOCKS: Final = 4
"""Blocks per request: several small requests in parallel are faster than one large request."""
_AHEAD_BLOCKS_MAX: Final = 16
PARALLEL: Final = 4


class CacheLost(ObjectStoreError):
    """The cache folder, or a cached file in it, was deleted."""


@contextlib.contextmanager
def _translating_errors(url: str, path: str) -> Iterator[None]:
    """Translate errors of cache files, so that they name the cache folder and not the store or a segment.

    Raise `CacheLost`, `DiskFull`, `ObjectStoreError`. Leave errors of this process unchanged, such as too many open
    files.
    """
    try:
        yield
    except OSError as error:
        folder = os.path.dirname(path)
        if error.errno in NO_ROOM:
            raise DiskFull(folder) from error
        if error.errno in LOCAL_ERRORS or isinstance(error, SegmentlogError):
            raise
        if isinstance(error, FileNotFoundError):
            why = "the cache folder was deleted; reopen the store, or set 'cache_dir' to a folder that is not cleaned"
            raise CacheLost(url, folder, why) from error
        why = f"cannot write downloaded data to the cache folder: {error.strerror}; check 'cache_dir'"
        raise ObjectStoreError(url, folder, why) from error


class BlockCache:
    """The cached files of one object store, with a size limit and download threads. Thread-safe."""

    def __init__(self, bucket: Bucket, limit_bytes: int, parallel: int = PARALLEL) -> None:
        self.bucket = bucket
        self.limit_bytes = limit_bytes
        self.mutex = fork_safety.reentrant_lock(self, "mutex")
        self.files: dict[str, CachedFile] = {}
        """The files that new readers get, by path."""
        self.held_bytes = 0
        self.downloaded_bytes = 0
        """Bytes downloaded so far."""
        self.refresh: Callable[[], object] = lambda: None
        """Called when an object is missing, to read the current manifest: the bytes may be in another object now."""
        self._opened: weakref.WeakSet[OpenCachedFile] = weakref.WeakSet()
        self._is_closed = False
        self._uses = 0
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._is_of_parent = False
        fork_safety.on_fork(self, "_forget")

    def _forget(self) -> None:
        """Refuse downloads in a forked child: the download threads exist only in the parent."""
        self._is_of_parent = True

    def count_use(self) -> int:
        """Return a number that grows with every use. The file with the lowest number is the least recently used."""
        self._uses += 1
        return self._uses

    def submit(self, download: Callable[[], None]) -> Future[None]:
        """Run a download on a thread, or in the calling thread if the cache has none."""
        if self._is_closed:
            raise StoreClosed(self.bucket.url)
        if self._is_of_parent:
            why = "the store was opened before this process was forked; open it again in the child"
            raise ObjectStoreError(self.bucket.url, "get", why, False)
        if not self._parallel:
            done: Future[None] = Future()
            try:
                download()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
            return done
        with self.mutex:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._parallel, "segmentlog-ranges")
            return self._pool.submit(download)

    def record_download(self, file: CachedFile, size_bytes: int) -> None:
        """Count downloaded bytes, and evict other files while the cache exceeds its limit."""
        with self.mutex:
            self.downloaded_bytes += size_bytes
            if file.is_retired:
                return
            file.held_bytes += size_bytes
            self.held_bytes += size_bytes
            while self.held_bytes > self.limit_bytes:
                held = [one for one in self.files.values() if one.held_bytes and one is not file]
                if not held:
                    return
                try:
                    self.evict(min(held, key=lambda one: one.used))
                except (SegmentlogError, OSError):
                    return  # the next reader of that file gets the error; this download succeeded

    def evict(self, file: CachedFile, ranges: ObjectRanges | None = None) -> CachedFile:
        """Replace a cached file by an empty one, for the same or for new ``ranges``.

        The disk space of the old file is freed when the last reader has unmapped it.

        Raise the errors of `CachedFile`; then nothing has changed.
        """
        with self.mutex:
            empty = CachedFile(self, file.path, file.ranges if ranges is None else ranges)
            self.retire(file.path)
            self.files[file.path] = file.replaced_by = empty
            return empty

    def retire(self, path: str) -> None:
        """Remove a file from the cache; readers that have opened it keep it."""
        with self.mutex:
            file = self.files.pop(path, None)
            if file is not None:
                file.is_retired = True
                self.held_bytes -= file.held_bytes

    def close(self) -> None:
        """Stop downloads. Existing mappings stay valid."""
        with self.mutex:
            self._is_closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        for opened_ranges in members_of(self._opened):
            opened_ranges.close()

    def open(self, file: CachedFile) -> OpenCachedFile:
        """Open a cached file. Raise `CacheLost` if it was deleted."""
        with _translating_errors(self.bucket.url, file.path):
            fd = open_lockable(FileSystem(), file.path, os.O_RDWR)
            if FileSystem().fstat(fd).st_ino != file.inode:
                close_lockable(FileSystem(), fd)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file.path)
        found = OpenCachedFile(file, fd)
        self._opened.add(found)
        return found


class CachedFile:
    """A sparse file for one segment, with a record of the blocks that are downloaded. Thread-safe."""

    def __init__(self, cache: BlockCache, path: str, ranges: ObjectRanges, *, is_staged: bool = False) -> None:
        """Create the empty file at ``path``; with ``is_staged`` under a temporary name until `move_into_place`.

        Raise `CacheLost` if its folder was deleted, `DiskFull`, `ObjectStoreError`.
        """
        self._cache = cache
        self.url = cache.bucket.url
        self.path = path
        self.ranges = ranges
        self.is_retired = False
        self.used = cache.count_use()
        self.held_bytes = 0
        self._present = bytearray(_blocks(file_size(ranges)))
        self._downloads: dict[int, Future[None]] = {}
        """Running downloads, by block."""
        self._open: weakref.ref[OpenCachedFile] | None = None
        self._window = 0
        self._next = 0
        """Block after the last one that was requested."""
        self._ahead = 0
        """Block after the last one that is prefetched."""
        self.replaced_by: CachedFile | None = None
        """The file for the same bytes that the cache created when it evicted this file."""
        self._staged_path = path + TEMPORARY_SUFFIX
        fs = FileSystem()
        with (
            _translating_errors(self.url, path),
            opened(fs, self._staged_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC) as fd,
        ):
            fs.ftruncate(fd, file_size(ranges))
            self.inode = fs.fstat(fd).st_ino
        if not is_staged:
            self.move_into_place()

    def move_into_place(self) -> None:
        """Rename the file to its path, where readers find it."""
        with _translating_errors(self.url, self.path):
            FileSystem().replace(self._staged_path, self.path)

    def open(self) -> OpenCachedFile:
        """Open the file. Blocks can be downloaded while the result exists.

        If a cleaner of temporary files has deleted the file, create it again. Raise `CacheLost` if the folder was
        deleted, or the new file as well; `DiskFull`, `ObjectStoreError`.
        """
        with self._cache.mutex:
            found = None if self._open is None else self._open()
            if found is not None:
                return found
            try:
                file, found = self, self._cache.open(self)
            except CacheLost:
                file = self._cache.evict(self)
                found = self._cache.open(file)
            file._open = weakref.ref(found)
            return found

    def extend(self, ranges: ObjectRanges) -> None:
        """Extend the file, or change the objects of its ranges. Downloaded bytes stay valid. Raise `CacheLost`."""
        with self._cache.mutex:
            before, size_bytes = file_size(self.ranges), file_size(ranges)
            if size_bytes > before:
                with (
                    _translating_errors(self.url, self.path),
                    opened(FileSystem(), self.path, os.O_RDWR | os.O_CLOEXEC) as fd,
                ):
                    FileSystem().ftruncate(fd, size_bytes)
                self._present.extend(bytes(_blocks(size_bytes) - len(self._present)))
                if before % BLOCK_BYTES:
                    self._present[before // BLOCK_BYTES] = 0
            self.ranges = ranges

    def ensure_range(self, opened_file: OpenCachedFile, start: int, end: int) -> None:
        """Wait until bytes ``[start, end)`` are downloaded. Raise `ObjectStoreError`, `ShippingRefused`."""
        first, stop = start // BLOCK_BYTES, _blocks(end)
        if stop > self._next or first < self._next - 1:
            self._update_readahead(opened_file, first, stop)
        if self._present.find(0, first, stop) >= 0:
            self.used = self._cache.count_use()
            if not self._wait(opened_file, first, stop, is_last=False):
                self._wait(opened_file, first, stop, is_last=True)

    def _wait(self, opened_file: OpenCachedFile, first: int, stop: int, *, is_last: bool) -> bool:
        """Download blocks and wait for them. Return False if a download that another reader started has failed.

        The other reader's download may have started long ago, so the caller tries once more. With ``is_last``, raise
        the error of that download instead of returning False.
        """
        begun, joined = self._start_downloads(opened_file, first, stop)
        for future in begun:
            future.result()
        for future in joined:
            try:
                future.result()
            except ObjectStoreError:
                if is_last:
                    raise
                return False
        return True

    def _update_readahead(self, opened_file: OpenCachedFile, first: int, stop: int) -> None:
        """Prefetch blocks if the access is sequential."""
        with self._cache.mutex:
            is_sequential = self._next - 1 <= first <= self._next
            self._next = stop
            if not is_sequential:
                self._window, self._ahead = 0, stop
                return
            if stop + self._window // 2 < self._ahead:
                return
            self._window = min(max(2 * self._window, 1), _AHEAD_BLOCKS_MAX)
            start = max(self._ahead, stop)
            self._ahead = min(stop + self._window, len(self._present))
        self.used = self._cache.count_use()
        if start < self._ahead and self._cache.limit_bytes > 2 * _AHEAD_BLOCKS_MAX * BLOCK_BYTES:
            self._start_downloads(opened_file, first, stop)  # first the blocks that the reader waits for
            self._start_downloads(opened_file, start, self._ahead)

    def _start_downloads(
        self, opened_file: OpenCachedFile, first: int, stop: int
    ) -> tuple[list[Future[None]], list[Future[None]]]:
        """Start downloads of missing blocks; return (downloads started now, downloads that were running already)."""
        begun: list[Future[None]] = []
        joined: list[Future[None]] = []
        with self._cache.mutex:
            at = first
            while (at := self._present.find(0, at, stop)) >= 0:
                running = self._running_download(at)
                if running is not None:
                    joined.append(running)
                    at += 1
                    continue
                end = at + 1
                while end < min(at + _RUN_BLOCKS, stop) and not self._present[end] and not self._running_download(end):
                    end += 1
                future = self._cache.submit(lambda at=at, end=end: self._download_blocks(opened_file, at, end))  # type: ignore[misc]
                if not future.done():
                    self._downloads.update(dict.fromkeys(range(at, end), future))
                    future.add_done_callback(lambda one, at=at, end=end: self._remove_download(one, at, end))  # type: ignore[misc]
                begun.append(future)
                at = end
        return begun, joined

    def _running_download(self, block: int) -> Future[None] | None:
        """Return the running download of a block; None if there is none or it has failed."""
        running = self._downloads.get(block)
        return None if running is None or running.done() else running

    def _remove_download(self, future: Future[None], first: int, stop: int) -> None:
        with self._cache.mutex:
            for block in range(first, stop):
                if self._downloads.get(block) is future:
                    del self._downloads[block]

    def _download_blocks(self, opened_file: OpenCachedFile, first: int, stop: int) -> None:
        """Download blocks; try once more with the current manifest if an object is missing."""
        ranges = self.ranges
        start, end = first * BLOCK_BYTES, min(stop * BLOCK_BYTES, file_size(ranges))
        try:
            self._download_range(opened_file, ranges, start, end)
        except ObjectMissing as missing:
            self._cache.refresh()
            newest = self
            while newest.replaced_by is not None:  # only the newest file has the ranges of the current manifest
                newest = newest.replaced_by
            if newest.ranges == ranges:
                if newest.is_retired:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path) from None
                why = f"{missing.key} is missing, although the manifest refers to it; see 'segmentlog objects verify'"
                raise ShippingRefused(self._cache.bucket.url, why) from missing
            self._download_range(opened_file, newest.ranges, start, end)
        with self._cache.mutex:
            self._present[first:stop] = b"\1" * (stop - first)
            if end < min(stop * BLOCK_BYTES, file_size(self.ranges)):  # the file was extended meanwhile
                self._present[stop - 1] = 0
            self._cache.record_download(self, end - start)

    def _download_range(self, opened_file: OpenCachedFile, ranges: ObjectRanges, start: int, end: int) -> None:
        for part in ranges:
            low, high = max(part.position, start), min(part.end, end)
            if low < high:
                first, size_bytes = low - part.position, high - low
                data = (
                    part.data[first : first + size_bytes]
                    if part.data
                    else self._cache.bucket.get_range(part.key, part.start + first, size_bytes)
                )
                with _translating_errors(self.url, self.path):
                    opened_file.write(data, low)


class OpenCachedFile:
    """An open cached file. Missing blocks can be downloaded while it exists. It implements `storage.fs.Ranges`."""

    def __init__(self, file: CachedFile, fd: LockableFd) -> None:
        self.file = file
        self._fs = FileSystem()
        self._fd: LockableFd | None = fd
        self._mutex = fork_safety.lock(self, "_mutex")

    @property
    def inode(self) -> int:
        """Inode of the file."""
        return self.file.inode

    @property
    def is_retired(self) -> bool:
        """Whether the cache has replaced or removed the file."""
        return self.file.is_retired

    @property
    def source(self) -> str:
        """URL of the object that contains the first block."""
        return f"{self.file.url}/{self.file.ranges[0].key}" if self.file.ranges else self.file.url

    def map(self) -> memoryview:
        """Map the whole file. Only ranges that were requested with `need` are valid; other bytes are undefined."""
        size_bytes = file_size(self.file.ranges)
        with self._mutex:
            return self._fs.map_file(self._open_fd(), size_bytes) if size_bytes else memoryview(b"")

    def need(self, start: int, end: int) -> None:
        """Return when bytes ``[start, end)`` are downloaded; raise as `CachedFile.ensure_range` does."""
        if start < end:
            self.file.ensure_range(self, start, end)

    def close(self) -> None:
        """Close the file. Then no more blocks can be downloaded into it."""
        with self._mutex:
            fd, self._fd = self._fd, None
            if fd is not None:
                close_lockable(self._fs, fd)

    def write(self, data: Data, position: int) -> None:
        """Write downloaded bytes. Raise `DiskFull`, `StoreClosed`."""
        with self._mutex:  # otherwise the descriptor's number may belong to another file
            write_all(self._fs, self._open_fd(), [data], position)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StoreClosed(self.file.path)
        return self._fd


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)
