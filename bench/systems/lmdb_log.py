"""LMDB: a B+ tree in a memory map, with the offset as its key."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Sequence

from bench.systems.base import System, Unavailable, count_all, packed, unpack

try:
    import lmdb
except ImportError as error:
    raise Unavailable("pip install lmdb") from error

_MAP_BYTES = 1 << 36
"""The file is as long when it is opened with ``writemap``; it is sparse. py-lmdb: no penalty for making it huge."""

_COMPACTION_DELETES = 50_000
"""Deleted in one transaction: with ``writemap`` one can change 131,071 pages at most (MDB_IDL_UM_MAX)."""

_key = struct.Struct(">Q")
# MDB_INTEGERKEY would need a named database, as py-lmdb does not let flags be set on the main one, and that is a second
# tree to write at every commit. Appends compare with the last key alone, so that there is little to win.
_pack_key = _key.pack


class Lmdb(System):
    """The options are those of py-lmdb's `Environment`, chosen as its documentation says, and where it does not, tried.

    With ``sync=False`` a power cut may leave a database that cannot be read at all, unless the file system writes in
    order (same document): ``never`` and ``second`` are weaker here than a lost tail. A killed process loses nothing.
    """

    name = "LMDB"
    about = "8-byte keys, `putmulti(append=True)` in one transaction a batch; `writemap` except where each is synced"

    @classmethod
    def version(cls) -> str:
        return f"{'.'.join(map(str, lmdb.version()))} (py-lmdb {lmdb.__version__})"

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._open_environment()
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            self._end = _key.unpack(cursor.key())[0] + 1 if cursor.last() else 0
        self._synced_s = time.monotonic()

    def _open_environment(self) -> None:
        synced = self.sync == "batch"
        self._environment = lmdb.open(
            str(self.folder),
            map_size=_MAP_BYTES,
            # "Faster and uses fewer mallocs" while nothing is synced. With a sync at each commit it is slower than
            # pwrite and fdatasync: it then needs two msyncs, one for the data and one for the meta page.
            writemap=not synced,
            # Not map_async, which py-lmdb prefers to this: it calls msync(MS_ASYNC), and Linux does nothing in that.
            sync=synced,
            # Without it "a system crash may undo the last committed transaction".
            metasync=synced,
            meminit=False,
            max_spare_txns=1,
        )

    def close(self) -> None:
        self._environment.close()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        items = values if keys is None else packed(values, keys)
        end = self._end + len(items)
        offsets = map(_pack_key, range(self._end, end))
        with self._environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            _consumed, added = cursor.putmulti(zip(offsets, items, strict=True), append=True)
            if added != len(items):
                raise RuntimeError(f"{added} of {len(items)} records were added")
        self._end = end
        self._sync_if_due()

    def append_one(self, value: bytes) -> None:
        with self._environment.begin(write=True) as transaction:
            transaction.put(_pack_key(self._end), value, append=True)
        self._end += 1
        self._sync_if_due()

    def writer(self) -> Callable[[bytes], object]:
        # An environment has one write transaction at a time, and commits of several threads are not joined: this lock
        # takes nothing from them. It keeps the offset right.
        def write(value: bytes) -> None:
            with self._lock:
                self.append_one(value)

        return write

    def _sync_if_due(self) -> None:
        if self.sync == "second" and time.monotonic() - self._synced_s >= 1:
            self._environment.sync(True)  # forced: else it does nothing in an environment with sync=False
            self._synced_s = time.monotonic()

    def scan_values(self) -> int:
        # Not buffers=True: as each value becomes bytes in the end, a memoryview is one more object to make.
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            return count_all(cursor.iternext(keys=False, values=True))

    def scan_records(self) -> int:
        count = 0
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            for key, item in cursor.iternext():
                record = unpack(item)
                (_key.unpack(key)[0], record.timestamp, record.key, record.value)
                count += 1
        return count

    def read(self, offset: int) -> bytes:
        with self._environment.begin() as transaction:
            value = transaction.get(_pack_key(offset))
        assert value is not None
        return value

    def end(self) -> int:
        return self._end

    def compact(self) -> None:
        superseded = self._superseded()
        for first in range(0, len(superseded), _COMPACTION_DELETES):
            with self._environment.begin(write=True) as transaction:
                for key in superseded[first : first + _COMPACTION_DELETES]:
                    transaction.delete(key)
        self._shrink()

    def _superseded(self) -> list[bytes]:
        """Return the keys (offsets) of all records that a later one has replaced."""
        superseded: list[bytes] = []
        last: dict[bytes, bytes] = {}
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            for key, item in cursor.iternext():
                name = unpack(item).key
                if (before := last.get(name)) is not None:
                    superseded.append(before)
                last[name] = key
        return superseded

    def _shrink(self) -> None:
        """Replace the data file by a copy without its free pages: the file itself never gets smaller."""
        copy = self.folder / "compacted"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        self._environment.copy(str(copy), compact=True)
        if self.sync != "never":
            _fsync(copy / "data.mdb")
        self._environment.close()
        os.replace(copy / "data.mdb", self.folder / "data.mdb")
        copy.rmdir()
        if self.sync != "never":
            _fsync(self.folder)
        self._open_environment()


def _fsync(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
