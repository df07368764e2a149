"""Open a shipped store by its URL, in a temporary folder. Segment data is downloaded when it is read.

The folder is a store, with the topics, state pages and checkpoints of a mirror; its segments are cached files. Closing
the store removes the folder. Opening a store by its URL also removes the folders that killed processes left.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from segmentlog.arguments import as_int, as_patterns
from segmentlog.clock import Clock
from segmentlog.defaults import REMOTE_CACHE_BYTES, SHIP_INTERVAL_MS
from segmentlog.errors import ObjectStoreError
from segmentlog.format.file_names import FORMAT_VERSION, STORE_FILE
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.url import is_url, open_bucket
from segmentlog.objects.replica.lazy_file_system import LazyFileSystem
from segmentlog.objects.replica.mirror import Mirror, MirrorStatus
from segmentlog.objects.tier.block_cache import PARALLEL, BlockCache
from segmentlog.objects.tier.cache_folder import CacheFolder
from segmentlog.objects.tier.remote_reader import remote_segments_readable
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.background_threads import BackgroundThread

_REFRESH_MAX_MS: Final = 3_600_000
_CLOSING_S: Final = 10.0


class _NoSyncFileSystem(FileSystem):
    """A file system without fsync, for temporary files that need not survive a crash."""

    fdatasync: Callable[[int], Any] = staticmethod(os.fstat)
    fsync: Callable[[int], Any] = staticmethod(os.fstat)


class RemoteStore:
    """A shipped store, opened by its URL: the temporary folder, and the thread that refreshes it. Thread-safe.

    topics       names and patterns of the topics to show; empty for all
    cache_bytes  limit for downloaded segment data; a segment that is being read may exceed it
    cache_dir    parent of the temporary folder; None for the system's folder for temporary files
    refresh_ms   how often the manifest is read

    Raise `InvalidConfig`, `ShippingRefused` if no store is shipped to the URL, `ObjectStoreError`.
    """

    def __init__(
        self,
        url: str,
        *,
        topics: Iterable[str] = (),
        cache_bytes: int,
        cache_dir: str | os.PathLike[str] | None = None,
        refresh_ms: int,
        threads: bool = True,
        parallel: int = PARALLEL,
        bucket: Bucket | None = None,
        clock: Clock | None = None,
    ) -> None:
        cache_bytes = as_int("cache_bytes", cache_bytes, 1)
        self._refresh_s = as_int("refresh_ms", refresh_ms, 1, _REFRESH_MAX_MS) / 1000
        self._bucket = bucket or open_bucket(url)
        self.url = self._bucket.url
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._fs = _NoSyncFileSystem()
        self._cache = BlockCache(self._bucket, cache_bytes, parallel)
        self.fs = LazyFileSystem(self._cache)
        """The file system to read the store with."""
        self._is_of_parent = False
        self._folder = CacheFolder(self._fs, cache_dir)
        self.path = self._folder.path
        fork_safety.on_fork(self, "_mark_forked")
        self._mirror = Mirror(self._bucket, self.path, self.fs, topic_patterns=as_patterns("only_topics", topics),
                              parallel=0, fs=self._fs, clock=clock or Clock())  # fmt: skip
        self._cache.refresh = self.refresh
        self._worker = BackgroundThread("attached", self._run_cycle, self._refresh_s) if threads else None
        try:
            self._make_store()
        except BaseException:
            self.close()
            raise

    def _mark_forked(self) -> None:
        """Give up the folder in a forked child: it belongs to the parent."""
        self._is_of_parent = True

    def _make_store(self) -> None:
        self._mirror.refresh()
        manifest = self._mirror.manifest
        assert manifest is not None
        document = {"format": FORMAT_VERSION, "store_id": manifest.store_id, "created_ms": manifest.shipped_ms}
        replace_file(self._fs, f"{self.path}/{STORE_FILE}", json.dumps(document).encode() + b"\n")
        if self._worker is not None:
            self._worker.ensure_running()

    def refresh(self) -> bool:
        """Read the manifest and publish new data. Return False if there was none. Raise as `Mirror.refresh` does."""
        if self._is_of_parent:
            why = "the store was opened before this process was forked; open it again in the child"
            raise ObjectStoreError(self.url, "refresh", why, False)
        with self._mutex:
            return self._folder.is_owned and self._mirror.refresh()

    def _run_cycle(self) -> float:
        self.refresh()
        return self._refresh_s

    @property
    def status(self) -> MirrorStatus:
        """The manifest that this copy has reached, and its lag."""
        return self._mirror.status

    @property
    def downloaded_bytes(self) -> int:
        """Bytes of segments downloaded so far."""
        return self._cache.downloaded_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of segments in the cache now."""
        return self._cache.held_bytes

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        if self._worker is not None:
            self._worker.ask_to_stop()
            self._worker.join(_CLOSING_S)
        self._cache.close()
        with self._mutex:
            if self._folder.is_owned:
                self._mirror.close()
                self._folder.close()


@contextlib.contextmanager
def open_store_files(path: str, topics: Iterable[str] = ()) -> Iterator[tuple[FileSystem, str]]:
    """Yield (file system, folder) to inspect a store in a folder or at a URL, even if it cannot be opened as a store.

    Raise the errors of `RemoteStore`.
    """
    if not is_url(path):
        with remote_segments_readable(FileSystem()) as fs:
            yield fs, path
        return
    store = RemoteStore(path, topics=topics, cache_bytes=REMOTE_CACHE_BYTES, refresh_ms=SHIP_INTERVAL_MS, threads=False)
    try:
        yield store.fs, store.path
    finally:
        store.close()
