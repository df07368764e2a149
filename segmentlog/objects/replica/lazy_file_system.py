"""A file system that downloads segment data when it is read. A mirror adds files to it through `Downloader`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile

import numpy as np
import xxhash

from segmentlog.format.file_names import ABORTED_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX
from segmentlog.format.index_file import encode_entries
from segmentlog.format.manifest import Chunk, ShippedSegment, Stored
from segmentlog.objects.bucket.base import ObjectMissing
from segmentlog.objects.manifest.checksums import verify_object
from segmentlog.objects.manifest.object_ranges import ObjectRanges, file_size
from segmentlog.objects.replica.downloads import MoveIntoPlace, write_index
from segmentlog.objects.tier.block_cache import BlockCache, CachedFile, CacheLost, OpenCachedFile
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem, Stamp
from segmentlog.storage.segment import segment_stem


class LazyFileSystem(FileSystem):
    """A `FileSystem` that downloads segment data on demand.

    It is also the `Downloader` of the mirror that keeps its folder up to date.
    """

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._fds: dict[int, OpenCachedFile] = {}
        self._pending: dict[str, tuple[Callable[[], None], Sequence[str]]] = {}
        """By path of a small file: (function that downloads it, paths of all files that it writes)."""
        self._known: dict[str, str] = {}
        """Object keys of the small files, by path."""

    # ------------------------------------------------------------ for readers

    def ranged(self, path: str) -> OpenCachedFile | None:
        """Implement `FileSystem.ranged`."""
        with self._cache.mutex:
            file = self._cache.files.get(path)
            return None if file is None else file.open()

    def stamp(self, path: str) -> Stamp:
        """Implement `FileSystem.stamp`."""
        with self._cache.mutex:
            file = self._cache.files.get(path)
        if file is None:
            return super().stamp(path)
        return xxhash.xxh3_64_intdigest(repr(file.ranges).encode()), file_size(file.ranges), 0

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        """Implement `FileSystem.open`. Download a small file that is pending."""
        pending = self._pending.get(path)
        if pending is not None:
            fetch, paths = pending
            fetch()
            with self._cache.mutex:
                for one in paths:
                    if self._pending.get(one) is pending:
                        del self._pending[one]
        found = self.ranged(path)
        try:
            fd = super().open(path, flags, mode)
        except FileNotFoundError:
            if found is None:
                raise
            # A cleaner of temporary files has deleted it while a reader has it open.
            with self._cache.mutex:
                if not found.is_retired:
                    self._cache.evict(found.file)
            found = self.ranged(path)
            fd = super().open(path, flags, mode)
        if found is not None:
            self._fds[fd] = found
        return fd

    def close(self, fd: int) -> None:
        """Implement `FileSystem.close`."""
        self._fds.pop(fd, None)
        os.close(fd)

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        """Implement `FileSystem.pread`. Download the blocks first."""
        found = self._fds.get(fd)
        if found is not None:
            found.need(position, min(position + size_bytes, file_size(found.file.ranges)))
        return os.pread(fd, size_bytes, position)

    def map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
        """Implement `FileSystem.map_file`. Download the blocks first."""
        found = self._fds.get(fd)
        if found is not None:
            found.need(0, min(size_bytes, file_size(found.file.ranges)))
        return super().map_file(fd, size_bytes, writable=writable)

    # ------------------------------------------------------------ for the mirror

    def start_refresh(self) -> None:
        """Implement `Downloader.start_refresh`. Do nothing."""

    def extend(self, path: str, known_bytes: int, ranges: ObjectRanges) -> bool:
        """Implement `Downloader.extend`. The missing bytes are downloaded when they are read."""
        with self._cache.mutex:
            file = self._cache.files.get(path)
            if file is None:
                self._cache.files[path] = CachedFile(self._cache, path, ranges)
            elif file_size(ranges) < file_size(file.ranges):
                return False
            else:
                try:
                    file.extend(ranges)
                except CacheLost:
                    self._cache.evict(file, ranges)
        return True

    def prepare(self, path: str, ranges: ObjectRanges) -> MoveIntoPlace | None:
        """Implement `Downloader.prepare`. The bytes are downloaded when they are read."""
        with self._cache.mutex:
            known = self._cache.files.get(path)
            if known is not None and known.ranges == ranges:
                return None
        staged = CachedFile(self._cache, path, ranges, is_staged=True)

        def move() -> None:
            with self._cache.mutex:
                self._cache.retire(path)
                staged.move_into_place()
                self._cache.files[path] = staged

        return move

    def fetch_file(self, path: str, stored: Stored) -> None:
        """Implement `Downloader.fetch_file`. The file is downloaded when it is opened."""

        def fetch() -> None:
            with contextlib.suppress(ObjectMissing):  # the manifest has changed since; then the file does not exist
                data, _ = self._cache.bucket.get(stored.key)
                verify_object(self._cache.bucket, stored, data)
                replace_file(FileSystem(), path, data, sync_folder=False)

        self._set_pending((path,), stored.key, fetch)

    def fetch_index(self, stem: str, segment: ShippedSegment) -> None:
        """Implement `Downloader.fetch_index`. The index is downloaded when one of its files is opened."""
        index = segment.index
        if index is None:
            return

        def fetch() -> None:
            with contextlib.suppress(ObjectMissing):
                write_index(FileSystem(), self._cache.bucket, stem, index)

        self._set_pending([stem + suffix for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)],
                          index.key, fetch)  # fmt: skip

    def index_chunks(self, stem: str, chunks: Sequence[Chunk]) -> None:
        """Implement `Downloader.index_chunks`. The index has an entry for the beginning of each chunk.

        It is written when a reader opens it.
        """

        def write() -> None:
            before = list(takewhile(lambda chunk: chunk.max_timestamp >= 0, chunks[:-1]))
            if begun := chunks[1 : len(before) + 1]:
                encoded = encode_entries(
                    np.array([chunk.base_offset - chunk.segment for chunk in begun], np.uint32),
                    np.array([chunk.position for chunk in begun], np.uint32),
                    np.array(list(accumulate((chunk.max_timestamp for chunk in before), max)), np.int64),
                )
                for suffix, data in zip((INDEX_SUFFIX, TIME_INDEX_SUFFIX), encoded, strict=True):
                    replace_file(FileSystem(), stem + suffix, data, sync_folder=False)

        key = f"{chunks[-1].tail}/{chunks[-1].start}"
        self._set_pending((stem + INDEX_SUFFIX, stem + TIME_INDEX_SUFFIX), key, write)

    def _set_pending(self, paths: Sequence[str], key: str, fetch: Callable[[], None]) -> None:
        pending = (fetch, paths)
        with self._cache.mutex:
            for path in paths:
                if self._known.get(path) != key:
                    self._known[path] = key
                    self._pending[path] = pending

    def discard_derived_files(self, folder: str, bases: Iterable[int]) -> None:
        """Implement `Downloader.discard_derived_files`."""
        for base in bases:
            stem = segment_stem(folder, base)
            for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX):
                self._drop(stem + suffix)
                with contextlib.suppress(FileNotFoundError):
                    self.unlink(stem + suffix)

    def retain_segments(self, folder: str, kept: Iterable[int]) -> None:
        """Implement `Downloader.retain_segments`."""
        stems = {segment_stem(folder, base) for base in kept}
        with self._cache.mutex:
            for path in [*self._cache.files, *self._known]:
                if path.startswith(f"{folder}/") and path.rpartition(".")[0] not in stems:
                    self._cache.retire(path)
                    self._drop(path)

    def _drop(self, path: str) -> None:
        with self._cache.mutex:
            self._pending.pop(path, None)
            self._known.pop(path, None)
