"""Read evicted segments: segments of a local store whose bytes only the object store has (tiered storage).

Each process downloads the blocks that it reads into a cache folder of its own, which has a size limit (see
`objects.tier.block_cache`). Objects never change, so the object's name identifies cached data. The folder is created
when the first evicted segment is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import xxhash

from segmentlog.defaults import REMOTE_CACHE_BYTES
from segmentlog.errors import DiskFull, ObjectStoreError, SegmentGone, SegmentlogError, ShippingRefused, StoreClosed
from segmentlog.format.manifest import MANIFEST_KEY
from segmentlog.format.stub import Stub
from segmentlog.objects.bucket.base import ObjectMissing
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.object_ranges import object_ranges
from segmentlog.objects.tier.block_cache import PARALLEL, BlockCache, CachedFile, CacheLost, OpenCachedFile
from segmentlog.objects.tier.cache_folder import CacheFolder
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment_stub import read_stub

_NOT_FOUND: Final = "there is no store at this URL, or its file system is not mounted. This segment has no other copy"


class RemoteReader:
    """Opens the evicted segments of one store. Thread-safe; in a forked child it starts with an empty cache.

    ``cache_bytes`` and ``cache_dir`` are as for `RemoteStore`. Raise `InvalidConfig`.
    """

    def __init__(
        self, *, cache_bytes: int = REMOTE_CACHE_BYTES, cache_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._cache_bytes = cache_bytes
        self._cache_dir = cache_dir
        self._urls: dict[str, str] = {}
        """URLs with their secrets, by the URL without secrets. Stubs contain only the latter."""
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._is_closed = False
        self._start_empty()
        fork_safety.on_fork(self, "_start_empty")

    def _start_empty(self) -> None:
        """Start with an empty cache, also in a forked child: the cache folder and threads belong to the parent."""
        self._folder: CacheFolder | None = None
        self._caches: dict[str, BlockCache] = {}
        """By URL."""
        self._errors: dict[str, str] = {}

    def add_url(self, url: str) -> None:
        """Use the secrets in this URL for stubs that name the same URL without secrets. Raise `InvalidConfig`."""
        place = without_secrets(url).rstrip("/")
        with self._mutex:
            if self._urls.get(place, place) == url:
                return
            self._urls[place] = url
            if place in self._caches:  # opened with other secrets; the cached data stays valid
                self._caches[place].bucket = open_bucket(url)

    def open_segment(self, fs: FileSystem, path: str) -> RemoteSegment | None:
        """Open the evicted segment whose log is at ``path``; return None if its bytes are local.

        Raise the errors of `FileSystem.ranged`, `InvalidConfig` for a URL that this process cannot open, `DiskFull` and
        `ObjectStoreError` for a cache that cannot be written.
        """
        found = read_stub(fs, path)
        if found is None:
            return None
        stub, inode = found
        with self._mutex:
            cache = self._cache(stub.url)
            with self.recording_errors(stub.url):
                try:
                    opened = self._open(cache, stub)
                except CacheLost:  # a cleaner of temporary files removed the folder
                    self._drop_folder()
                    opened = self._open(cache, stub)
            return RemoteSegment(self, fs, path, stub, inode, opened)

    def _open(self, cache: BlockCache, stub: Stub) -> OpenCachedFile:
        with cache.mutex:
            place = f"{self._open_folder()}/{xxhash.xxh3_128_hexdigest(stub.key.encode())}"
            file = cache.files.get(place)
            if file is None:
                file = cache.files[place] = CachedFile(cache, place, object_ranges(stub.stored))
            return file.open()

    def _drop_folder(self) -> None:
        """Drop the cache folder, so that the next access creates a new one. Existing mappings stay valid."""
        for cache in self._caches.copy().values():
            for place in cache.files.copy():
                cache.retire(place)
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _open_folder(self) -> str:
        if self._is_closed:
            raise StoreClosed("the cache of an object store")
        if self._folder is None:
            self._folder = CacheFolder(FileSystem(), self._cache_dir)
        return self._folder.path

    def _cache(self, url: str) -> BlockCache:
        cache = self._caches.get(url)
        if cache is None:
            bucket = open_bucket(self._urls.get(url, url))
            cache = self._caches[url] = BlockCache(bucket, self._cache_bytes, PARALLEL)
        return cache

    def record_error(self, url: str, why: str) -> None:
        """Record the error that prevents reading segments from ``url``; an empty text records a success."""
        if why:
            self._errors[url] = why
        else:
            self._errors.pop(url, None)

    @contextlib.contextmanager
    def recording_errors(self, url: str) -> Iterator[None]:
        """Record errors of the object store and of the cache's disk for `health`, and raise them again."""
        try:
            yield
        except (ObjectStoreError, DiskFull) as error:
            self.record_error(url, str(error))
            raise

    def health(self) -> dict[str, str]:
        """Return the last error of each object store that could not be read."""
        return {f"segments at {url}": why for url, why in self._errors.copy().items()}

    def missing_object_error(self, stub: Stub) -> ObjectStoreError:
        """Return the error for a missing object: `SegmentGone` if the manifest at the same URL can be read.

        Otherwise the whole store is unavailable, and the object may still exist.
        """
        cache = self._caches[stub.url]
        try:
            cache.bucket.get(MANIFEST_KEY)
        except ObjectMissing:
            return ObjectStoreError(stub.url, stub.key, _NOT_FOUND)
        except ObjectStoreError as error:
            return error
        return SegmentGone(stub.url, stub.key, "the object was deleted, and it was the only copy of this segment")

    @property
    def downloaded_bytes(self) -> int:
        """Bytes downloaded so far."""
        return sum(cache.downloaded_bytes for cache in self._caches.copy().values())

    @property
    def held_bytes(self) -> int:
        """Bytes in the cache now."""
        return sum(cache.held_bytes for cache in self._caches.copy().values())

    def close(self) -> None:
        """Stop downloads and remove the cache. Idempotent."""
        with self._mutex:
            self._is_closed = True
            caches, self._caches = self._caches, {}
            folder, self._folder = self._folder, None
        for cache in caches.values():
            cache.close()
        if folder is not None:
            folder.close()


class RemoteSegment:
    """An open evicted segment. It implements `storage.fs.Ranges`."""

    def __init__(
        self, reader: RemoteReader, fs: FileSystem, path: str, stub: Stub, inode: int, opened: OpenCachedFile
    ) -> None:
        self._reader = reader
        self._fs = fs
        self._path = path
        self._stub = stub
        self._opened = opened
        self.inode = inode
        """Inode of the stub: a file that replaces the stub has another inode."""

    @property
    def is_retired(self) -> bool:
        """Whether the cache has evicted the downloaded blocks."""
        return self._opened.is_retired

    @property
    def source(self) -> str:
        """URL of the object."""
        return f"{self._stub.url}/{self._stub.key}"

    def map(self) -> memoryview:
        """Map the whole segment; see `Ranges.map`."""
        return self._opened.map()

    def need(self, start: int, end: int) -> None:
        """Download bytes ``[start, end)`` if they are missing; see `Ranges.need`.

        Raise `ObjectStoreError`, `SegmentGone`, `DiskFull` for the cache, FileNotFoundError if the segment was
        replaced.
        """
        try:
            with self._reader.recording_errors(self._stub.url):
                self._opened.need(start, end)
        except (ShippingRefused, FileNotFoundError) as error:
            raise self._missing_error() from error
        self._reader.record_error(self._stub.url, "")

    def _missing_error(self) -> SegmentlogError | OSError:
        """Return the error for a missing object: FileNotFoundError if the segment was compacted or deleted since."""
        try:
            found = read_stub(self._fs, self._path)
        except FileNotFoundError as gone:
            return gone
        if found is None or found[0] != self._stub:
            return FileNotFoundError(self._path)
        why = self._reader.missing_object_error(self._stub)
        self._reader.record_error(self._stub.url, str(why))
        return why


@contextlib.contextmanager
def remote_segments_readable(fs: FileSystem, reader: RemoteReader | None = None) -> Iterator[FileSystem]:
    """Let ``fs`` read evicted segments of a store, within the context."""
    used = reader or RemoteReader()
    before = fs.reach_by
    fs.reach_by = lambda path: used.open_segment(fs, path)
    try:
        yield fs
    finally:
        fs.reach_by = before
        if reader is None:
            used.close()
