"""SQLite: a table whose primary key is the offset."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence

from bench.systems.base import System, count_all

_SYNCHRONOUS = {
    # sqlite.org/pragma.html#pragma_synchronous. In WAL mode they mean: OFF, nothing is ever fsynced. NORMAL, the WAL
    # is before a checkpoint and the database after it: a commit alone is not. FULL, the WAL is at every commit.
    "never": "OFF",
    "second": "NORMAL",
    "batch": "FULL",
}


class Sqlite(System):
    """Write-ahead logging (sqlite.org/wal.html), one transaction a batch.

    Tried and left at their defaults, as they changed less than the noise: pages of 8 and 16 KiB, a larger cache,
    ``mmap_size``, and checkpoints every 10,000 pages. ``locking_mode = EXCLUSIVE`` makes single records faster, and
    shuts every other process out, which can read all the others here; it is not used.
    """

    name = "SQLite"
    about = "WAL; `executemany` in one transaction a batch, autocommit for one record; offset as INTEGER PRIMARY KEY"

    @classmethod
    def version(cls) -> str:
        return sqlite3.sqlite_version

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # isolation_level None: transactions begin where we say so, and a statement alone commits itself.
        self._connection = sqlite3.connect(self.folder / "log.db", isolation_level=None, check_same_thread=False)
        execute = self._connection.execute
        execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {_SYNCHRONOUS[self.sync]}")
        if self.sync == "second":
            # Otherwise it checkpoints, and then fsyncs twice, every 1,000 pages: a dozen times a second under load.
            execute("PRAGMA wal_autocheckpoint = 0")
        columns = "timestamp INTEGER, key BLOB, value BLOB" if self.keyed else "value BLOB"
        execute(f"CREATE TABLE IF NOT EXISTS log (offset INTEGER PRIMARY KEY, {columns})")
        (last,) = execute("SELECT max(offset) FROM log").fetchone()
        self._end = 0 if last is None else last + 1
        self._insert = f"INSERT INTO log VALUES ({'?, ?, ?, ?' if self.keyed else '?, ?'})"
        self._lock = threading.Lock()
        self._synced_s = time.monotonic()

    def close(self) -> None:
        self._connection.close()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        connection, end = self._connection, self._end + len(values)
        offsets = range(self._end, end)
        connection.execute("BEGIN")
        try:
            if keys is None:
                connection.executemany(self._insert, zip(offsets, values, strict=True))
            else:
                times = [time.time_ns() // 1_000_000] * len(values)
                connection.executemany(self._insert, zip(offsets, times, keys, values, strict=True))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self._end = end
        self._checkpoint_if_due()

    def append_one(self, value: bytes) -> None:
        self._connection.execute(self._insert, (self._end, value))
        self._end += 1
        self._checkpoint_if_due()

    def writer(self) -> Callable[[bytes], object]:
        # One connection for all, as there is one writer at a time anyway. With one each, those that find the database
        # locked sleep and ask again (sqlite.org/c3ref/busy_timeout.html), up to a tenth of a second at a time.
        def write(value: bytes) -> None:
            with self._lock:
                self.append_one(value)

        return write

    def _checkpoint_if_due(self) -> None:
        """Once a second: fsyncs the WAL, copies it to the database and fsyncs that."""
        # An fdatasync of the WAL file would do with half of it, but the file is SQLite's, and so is the knowledge of
        # when its folder has to be synced, too.
        if self.sync == "second" and time.monotonic() - self._synced_s >= 1:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self._synced_s = time.monotonic()

    def scan_values(self) -> int:
        return count_all(self._connection.execute("SELECT value FROM log ORDER BY offset"))

    def scan_records(self) -> int:
        return count_all(self._connection.execute("SELECT offset, timestamp, key, value FROM log ORDER BY offset"))

    def read(self, offset: int) -> bytes:
        (value,) = self._connection.execute("SELECT value FROM log WHERE offset = ?", (offset,)).fetchone()
        assert isinstance(value, bytes)
        return value

    def end(self) -> int:
        return self._end

    def compact(self) -> None:
        execute = self._connection.execute
        execute("DELETE FROM log WHERE offset NOT IN (SELECT max(offset) FROM log GROUP BY key)")
        execute("VACUUM")
        # VACUUM writes the new database into the WAL: until this it takes more space than before.
        execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
