"""diskcache: a cache that never evicts, used as the queue that it can be."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence

from bench.systems.base import System, Unavailable, packed, unpack

try:
    import diskcache
    from diskcache.core import DBNAME
except ImportError as error:
    raise Unavailable("pip install diskcache") from error

_SYNCHRONOUS = {"never": 0, "second": 1, "batch": 2}
"""OFF, NORMAL, FULL, as in `bench.systems.sqlite`: its database is in WAL mode, too."""

_FIRST_KEY = 500_000_000_000_000
"""The key of the first value that is pushed; the documentation of `Cache.push` says it."""


class DiskCache(System):
    """`Cache.push`, on which `Deque` is built.

    `Deque` itself does the same when it appends and when it is iterated, but finds an index by counting from the nearer
    end. The keys that `push` gives are consecutive, so that `Cache.get` finds an offset at once.
    """

    name = "diskcache"
    about = "`Cache.push` in one `transact` a batch, eviction and culling off; `Cache.get` of the key for one offset"

    @classmethod
    def version(cls) -> str:
        return str(diskcache.__version__)

    def open(self) -> None:
        self._cache = diskcache.Cache(
            str(self.folder),
            # What `Deque` and `Index` use: nothing is ever evicted, and there is no index for it.
            eviction_policy="none",
            # Saves the query for expired items at each push (tutorial, "Settings"): none expires.
            cull_limit=0,
            sqlite_synchronous=_SYNCHRONOUS[self.sync],
            # disk_min_file_size stays at 32 KiB: smaller values are in the database, which is quicker than a file each.
        )
        self._checkpoints: sqlite3.Connection | None = None
        if self.sync == "second":
            # Beside diskcache's own checkpoints, every 1,000 pages, each of which syncs with NORMAL.
            self._checkpoints = sqlite3.connect(self.folder / DBNAME, isolation_level=None, check_same_thread=False)
            self._checkpoints.execute("PRAGMA synchronous = NORMAL")
        self._lock = threading.Lock()
        self._synced_s = time.monotonic()

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._cache.close()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        push = self._cache.push
        with self._cache.transact():
            for item in values if keys is None else packed(values, keys):
                push(item)
        self._checkpoint_if_due()

    def append_one(self, value: bytes) -> None:
        self._cache.push(value)
        self._checkpoint_if_due()

    def writer(self) -> Callable[[bytes], object]:
        # A Cache may be shared between threads (tutorial, "Cache"): it opens a connection for each, which is closed as
        # its thread ends. The lock keeps them out of SQLite's busy handler, in which they would sleep and ask again.
        def write(value: bytes) -> None:
            with self._lock:
                self.append_one(value)

        return write

    def _checkpoint_if_due(self) -> None:
        if self._checkpoints is not None and time.monotonic() - self._synced_s >= 1:
            self._synced_s = time.monotonic()
            self._checkpoints.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def scan_values(self) -> int:
        cache, count = self._cache, 0
        for key in cache:
            cache[key]
            count += 1
        return count

    def scan_records(self) -> int:
        cache, count = self._cache, 0
        for key in cache:
            record = unpack(cache[key])
            (key - _FIRST_KEY, record.timestamp, record.key, record.value)
            count += 1
        return count

    def read(self, offset: int) -> bytes:
        value = self._cache.get(_FIRST_KEY + offset)
        assert isinstance(value, bytes)
        return value

    def end(self) -> int:
        last = next(self._cache.iterkeys(reverse=True), None)
        return 0 if last is None else int(last) - _FIRST_KEY + 1

    def compact(self) -> None:
        cache = self._cache
        superseded: list[int] = []
        last: dict[bytes, int] = {}
        for key in cache:
            name = unpack(cache[key]).key
            if (before := last.get(name)) is not None:
                superseded.append(before)
            last[name] = key
        with cache.transact():
            for key in superseded:
                del cache[key]
        # Its database vacuums itself (sqlite_auto_vacuum is FULL); what is left to do is to empty the WAL.
        with sqlite3.connect(self.folder / DBNAME, isolation_level=None) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.close()
