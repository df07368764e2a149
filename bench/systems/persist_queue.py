"""persist-queue: a FIFO queue in a table of SQLite."""

from __future__ import annotations

import importlib.metadata
import sqlite3
import time
from collections.abc import Callable, Sequence

from bench.systems.base import Sync, System, Unavailable, packed, unpack

try:
    from persistqueue import FIFOSQLiteQueue
except ImportError as error:
    raise Unavailable("pip install persist-queue") from error

_SYNCHRONOUS = {"never": "OFF", "second": "NORMAL", "batch": "FULL"}
"""As in `bench.systems.sqlite`: the queue's database is in WAL mode, too."""


class PersistQueue(System):
    """`FIFOSQLiteQueue`: of the two kinds, the faster one in README's table of benchmarks.

    The other keeps its items in files. It makes and renames one more at each put, which took more than ten times as
    long where it was tried, and has no way to sync them.

    There is no put of several: each record is a transaction of its own. README's tip for batches, ``auto_commit=False``
    with `task_done` at their end, does nothing for a producer in 1.1.0, where `put` commits all the same.

    A scan takes nothing away: `queue` lists what is there in one query. That is a dictionary for each record, all in
    memory at once. README reads with `get`, one query a record, which took several times as long.
    """

    name = "persist-queue"
    about = "`FIFOSQLiteQueue`, one `put` and so one transaction a record; scanned with `queue`"

    @classmethod
    def version(cls) -> str:
        return importlib.metadata.version("persist-queue")

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._queue = _Queue(str(self.folder), self.sync)
        self._checkpoints: sqlite3.Connection | None = None
        if self.sync == "second":
            # Beside the queue's own checkpoints, every 1,000 pages, each of which syncs with NORMAL.
            path = self.folder / self._queue.db_file_name
            self._checkpoints = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._checkpoints.execute("PRAGMA synchronous = NORMAL")
        self._synced_s = time.monotonic()

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._queue.close()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        put = self._queue.put
        for item in values if keys is None else packed(values, keys):
            put(item)
        self._checkpoint_if_due()

    def append_one(self, value: bytes) -> None:
        self._queue.put(value)
        self._checkpoint_if_due()

    def writer(self) -> Callable[[bytes], object]:
        return self.append_one  # a put takes the queue's own lock

    def _checkpoint_if_due(self) -> None:
        if self._checkpoints is not None and time.monotonic() - self._synced_s >= 1:
            self._synced_s = time.monotonic()
            self._checkpoints.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def scan_values(self) -> int:
        count = 0
        for item in self._queue.queue():
            item["data"]
            count += 1
        return count

    def scan_records(self) -> int:
        count = 0
        for item in self._queue.queue():
            record = unpack(item["data"])
            (item["id"], record.timestamp, record.key, record.value)
            count += 1
        return count

    def read(self, offset: int) -> bytes:
        raise NotImplementedError("a get by id takes the item out of the queue")

    def end(self) -> int:
        return int(self._queue.qsize())

    def compact(self) -> None:
        raise NotImplementedError("a queue has no keys")


class _Queue(FIFOSQLiteQueue):  # type: ignore[misc, unused-ignore]
    """With another ``synchronous`` than SQLite's FULL. There is no option for it: as it comes, it has ``batch``."""

    def __init__(self, path: str, sync: Sync) -> None:
        self._sync = sync
        super().__init__(path, multithreading=True)  # README asks for it where several threads put

    def _new_db_connection(self, path: str, multithreading: bool, timeout: float) -> sqlite3.Connection:
        connection: sqlite3.Connection = super()._new_db_connection(path, multithreading, timeout)
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[self._sync]}")
        return connection
