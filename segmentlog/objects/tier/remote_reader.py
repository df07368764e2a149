"""Reading segments of a store in a folder whose bytes lie in an object store alone (tiered storage).

Each process brings what it reads into a folder of its own, block by block, as from a store that is opened by its URL
(`objects.tier.block_cache`); as much as a limit says stays there. What is here is known by the name of the object: no
other bytes ever have it. Nothing is opened before the first such segment is read.
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
from segmentlog.objects.manifest.object_ranges import spans_of
from segmentlog.objects.tier.block_cache import PARALLEL, Cache, CacheLost, OpenedRanges, RangedFile
from segmentlog.objects.tier.cache_folder import CacheFolder
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment_stub import read_stub

_NOT_THERE: Final = "nothing was shipped there, or it is not mounted: the segment lies there alone"


class Tiered:
    """How the process reaches such segments of one store. Thread-safe; in a forked child it begins anew.

    ``cache_bytes`` and ``cache_dir`` as for `Attached`. Raises `InvalidConfig`.
    """

    def __init__(
        self, *, cache_bytes: int = REMOTE_CACHE_BYTES, cache_dir: str | os.PathLike[str] | None = None
    ) -> None:
        self._cache_bytes = cache_bytes
        self._cache_dir = cache_dir
        self._urls: dict[str, str] = {}
        """By URLs as stubs have them those that were given: with what no file is told."""
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._is_closed = False
        self._begin_empty()
        fork_safety.on_fork(self, "_begin_empty")

    def _begin_empty(self) -> None:
        """Have brought nothing. In a forked child: the folder is the parent's, and its threads are not here."""
        self._folder: CacheFolder | None = None
        self._caches: dict[str, Cache] = {}
        """By URL."""
        self._troubles: dict[str, str] = {}

    def know(self, url: str) -> None:
        """By this URL, which may hold what is secret, its place is to be reached. Raises `InvalidConfig`."""
        place = without_secrets(url).rstrip("/")
        with self._mutex:
            if self._urls.get(place, place) == url:
                return
            self._urls[place] = url
            if place in self._caches:  # opened without what was secret; what it has brought is as good as before
                self._caches[place].bucket = open_bucket(url)

    def reach(self, fs: FileSystem, path: str) -> Remote | None:
        """As `FileSystem.ranged`. Raises also `InvalidConfig` for a URL that cannot be opened here.

        And `DiskFull`, `ObjectStoreError` for a cache that cannot be written to.
        """
        found = read_stub(fs, path)
        if found is None:
            return None
        stub, inode = found
        with self._mutex:
            cache = self._cache(stub.url)
            with self.noting_trouble(stub.url):
                try:
                    opened = self._open(cache, stub)
                except CacheLost:  # folders for temporary files are cleared of what is old
                    self._lose_folder()
                    opened = self._open(cache, stub)
            return Remote(self, fs, path, stub, inode, opened)

    def _open(self, cache: Cache, stub: Stub) -> OpenedRanges:
        with cache.mutex:
            place = f"{self._open_folder()}/{xxhash.xxh3_128_hexdigest(stub.key.encode())}"
            file = cache.files.get(place)
            if file is None:
                file = cache.files[place] = RangedFile(cache, place, spans_of(stub.stored))
            return file.open()

    def _lose_folder(self) -> None:
        """Begin a new one, with nothing in it. Who has something mapped reads on in it, and asks anew then."""
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

    def _cache(self, url: str) -> Cache:
        cache = self._caches.get(url)
        if cache is None:
            bucket = open_bucket(self._urls.get(url, url))
            cache = self._caches[url] = Cache(bucket, self._cache_bytes, PARALLEL)
        return cache

    def note_trouble(self, url: str, why: str) -> None:
        """What keeps segments from being read; empty once one was."""
        if why:
            self._troubles[url] = why
        else:
            self._troubles.pop(url, None)

    @contextlib.contextmanager
    def noting_trouble(self, url: str) -> Iterator[None]:
        """Around what fails where the object store does, or the disk that it is brought to."""
        try:
            yield
        except (ObjectStoreError, DiskFull) as error:
            self.note_trouble(url, str(error))
            raise

    def health(self) -> dict[str, str]:
        """Object stores that could not be reached the last time."""
        return {f"segments at {url}": why for url, why in self._troubles.copy().items()}

    def why_missing(self, stub: Stub) -> ObjectStoreError:
        """What to tell of an object that is not there: gone for good only where anything is there at all."""
        cache = self._caches[stub.url]
        try:
            cache.bucket.get(MANIFEST_KEY)
        except ObjectMissing:
            return ObjectStoreError(stub.url, stub.key, _NOT_THERE)
        except ObjectStoreError as error:
            return error
        return SegmentGone(stub.url, stub.key, "it is gone, and the segment lies there alone")

    @property
    def got_bytes(self) -> int:
        """What was brought so far."""
        return sum(cache.got_bytes for cache in self._caches.copy().values())

    @property
    def held_bytes(self) -> int:
        """What of it is here."""
        return sum(cache.held_bytes for cache in self._caches.copy().values())

    def close(self) -> None:
        """Bring nothing more; what was brought goes. Idempotent."""
        with self._mutex:
            self._is_closed = True
            caches, self._caches = self._caches, {}
            folder, self._folder = self._folder, None
        for cache in caches.values():
            cache.close()
        if folder is not None:
            folder.close()


class Remote:
    """One such segment that is open: `storage.fs.Ranges`."""

    def __init__(self, tiered: Tiered, fs: FileSystem, path: str, stub: Stub, inode: int, opened: OpenedRanges) -> None:
        self._tiered = tiered
        self._fs = fs
        self._path = path
        self._stub = stub
        self._opened = opened
        self.inode = inode
        """Of the hole: what tells it from a file that takes its place."""

    @property
    def is_retired(self) -> bool:
        """Whether what was brought of it has made room."""
        return self._opened.is_retired

    @property
    def source(self) -> str:
        """The object, with its URL."""
        return f"{self._stub.url}/{self._stub.key}"

    def map(self) -> memoryview:
        """See `Ranges.map`."""
        return self._opened.map()

    def need(self, start: int, end: int) -> None:
        """See `Ranges.need`.

        Raises `ObjectStoreError`, `SegmentGone`, `DiskFull` for the cache, FileNotFoundError for one that was replaced.
        """
        try:
            with self._tiered.noting_trouble(self._stub.url):
                self._opened.need(start, end)
        except (ShippingRefused, FileNotFoundError) as error:
            raise self._why() from error
        self._tiered.note_trouble(self._stub.url, "")

    def _why(self) -> SegmentlogError | OSError:
        """What to raise for an object that is missing: the segment may have been compacted or deleted since."""
        try:
            found = read_stub(self._fs, self._path)
        except FileNotFoundError as gone:
            return gone
        if found is None or found[0] != self._stub:
            return FileNotFoundError(self._path)
        why = self._tiered.why_missing(self._stub)
        self._tiered.note_trouble(self._stub.url, str(why))
        return why


@contextlib.contextmanager
def reaching(fs: FileSystem, tiered: Tiered | None = None) -> Iterator[FileSystem]:
    """Within, whoever reads files of a store by ``fs`` reaches segments that lie in an object store alone."""
    made = tiered or Tiered()
    before = fs.reach_by
    fs.reach_by = lambda path: made.reach(fs, path)
    try:
        yield fs
    finally:
        fs.reach_by = before
        if tiered is None:
            made.close()
