"""A store read straight from an object store: a folder for a while, of which what is read comes when it is read.

The folder is a store like any other, with the topics, state pages and checkpoints that a mirror makes; its segments are
files of ranges. It goes when the store is closed, and what killed processes left of theirs goes with the next one.
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
from segmentlog.objects.replica.lazy_file_system import RangedFiles
from segmentlog.objects.replica.mirror import Mirror, MirrorStatus
from segmentlog.objects.tier.block_cache import PARALLEL, Cache
from segmentlog.objects.tier.cache_folder import CacheFolder
from segmentlog.objects.tier.remote_reader import reaching
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.background_threads import BackgroundThread

_REFRESH_MAX_MS: Final = 3_600_000
_CLOSING_S: Final = 10.0


class _Fleeting(FileSystem):
    """What no crash needs to leave there: nothing waits for a disk."""

    fdatasync: Callable[[int], Any] = staticmethod(os.fstat)
    fsync: Callable[[int], Any] = staticmethod(os.fstat)


class Attached:
    """The folder, and what keeps it up. Thread-safe.

    ``topics``: names and patterns of those that are shown, none for all;
    ``cache_bytes``: how much of the segments may be here, as far as no single one that is being read takes more;
    ``cache_dir``: where, None for the system's place for such; ``refresh_ms``: how often it is looked for what is new.
    Raises `InvalidConfig`, `ShippingRefused` (nothing was shipped there), `ObjectStoreError`.
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
        self._fs = _Fleeting()
        self._cache = Cache(self._bucket, cache_bytes, parallel)
        self.fs = RangedFiles(self._cache)
        """What the store is to be read with."""
        self._is_of_parent = False
        self._folder = CacheFolder(self._fs, cache_dir)
        self.path = self._folder.path
        fork_safety.on_fork(self, "_forget")
        self._mirror = Mirror(self._bucket, self.path, self.fs, wanted=as_patterns("only_topics", topics), parallel=0,
                              fs=self._fs, clock=clock or Clock())  # fmt: skip
        self._cache.refresh = self.turn
        self._worker = BackgroundThread("attached", self._tick, self._refresh_s) if threads else None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _forget(self) -> None:
        """In a forked child: the folder is the parent's."""
        self._is_of_parent = True

    def _begin(self) -> None:
        self._mirror.turn()
        manifest = self._mirror.manifest
        assert manifest is not None
        document = {"format": FORMAT_VERSION, "store_id": manifest.store_id, "created_ms": manifest.shipped_ms}
        replace_file(self._fs, f"{self.path}/{STORE_FILE}", json.dumps(document).encode() + b"\n")
        if self._worker is not None:
            self._worker.ensure_running()

    def turn(self) -> bool:
        """Show what lies there now; False when there was nothing new. Raises as `Mirror.turn`."""
        if self._is_of_parent:
            why = "it was opened before this process was forked; open it anew in the child"
            raise ObjectStoreError(self.url, "refresh", why, False)
        with self._mutex:
            return self._folder.is_here and self._mirror.turn()

    def _tick(self) -> float:
        self.turn()
        return self._refresh_s

    @property
    def status(self) -> MirrorStatus:
        """How far it is."""
        return self._mirror.status

    @property
    def got_bytes(self) -> int:
        """Of segments, what was brought so far."""
        return self._cache.got_bytes

    @property
    def held_bytes(self) -> int:
        """Of segments, what is here."""
        return self._cache.held_bytes

    def close(self) -> None:
        """The folder goes. Idempotent."""
        if self._worker is not None:
            self._worker.ask_to_stop()
            self._worker.join(_CLOSING_S)
        self._cache.close()
        with self._mutex:
            if self._folder.is_here:
                self._mirror.close()
                self._folder.close()


@contextlib.contextmanager
def reach_files(path: str, topics: Iterable[str] = ()) -> Iterator[tuple[FileSystem, str]]:
    """By what, and where, the files of a store are reached, in a folder or at a URL; whether or not it can be opened.

    For who inspects them. Raises as `Attached`.
    """
    if not is_url(path):
        with reaching(FileSystem()) as fs:
            yield fs, path
        return
    attached = Attached(path, topics=topics, cache_bytes=REMOTE_CACHE_BYTES, refresh_ms=SHIP_INTERVAL_MS, threads=False)
    try:
        yield attached.fs, attached.path
    finally:
        attached.close()
