"""RocksDB through rocksdict: a log-structured merge tree, with the offset as its key."""

from __future__ import annotations

import importlib.metadata
import struct
import threading
import time
from collections.abc import Callable, Sequence

from bench.systems.base import System, Unavailable, count_all, packed, unpack

try:
    from rocksdict import BlockBasedOptions, DBCompressionType, Options, Rdict, WriteBatch, WriteOptions
except ImportError as error:
    raise Unavailable("pip install rocksdict") from error

_COMPACTION_DELETES = 50_000
"""Deletions in one batch: each batch is in memory twice."""

_key = struct.Struct(">Q")
_pack_key = _key.pack


class RocksDB(System):
    """One `WriteBatch` a batch, written to the WAL: a killed process loses nothing that `append` has returned from.

    ``never`` is about the WAL. What RocksDB makes of it in the background it always syncs: every 64 MiB the memtable
    becomes a sorted file, and that an fdatasync. The WAL is not turned off for it, as a killed process would lose the
    memtable.
    """

    name = "RocksDB"
    about = "rocksdict in raw mode, one `WriteBatch` a batch, LZ4, blocks of 16 KiB"
    compresses = True

    @classmethod
    def version(cls) -> str:
        return f"rocksdict {importlib.metadata.version('rocksdict')}"

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._db = Rdict(str(self.folder), _options())
        write_options = WriteOptions()
        write_options.sync = self.sync == "batch"
        self._db.set_write_options(write_options)
        self._lock = threading.Lock()
        last = next(iter(self._db.keys(backwards=True)), None)
        self._end = 0 if last is None else _offset(last) + 1
        self._synced_s = time.monotonic()

    def close(self) -> None:
        self._db.close()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        items = values if keys is None else packed(values, keys)
        end = self._end + len(items)
        batch = WriteBatch(raw_mode=True)
        for key, item in zip(map(_pack_key, range(self._end, end)), items, strict=True):
            batch[key] = item  # quicker than batch.put, which has an argument more to look at
        self._db.write(batch)
        self._end = end
        self._sync_if_due()

    def append_one(self, value: bytes) -> None:
        self._db[_pack_key(self._end)] = value
        self._end += 1
        self._sync_if_due()

    def writer(self) -> Callable[[bytes], object]:
        # RocksDB joins the writes of several threads to one fsync (its wiki, "WAL Performance"), but rocksdict holds
        # the GIL while it writes, fsync and all; its pull request 100, which released it, was closed as slower. So
        # there is nothing to join, and this lock only makes the threads take turns: without it some wrote a hundred
        # records and some none.
        def write(value: bytes) -> None:
            with self._lock:
                self.append_one(value)

        return write

    def _sync_if_due(self) -> None:
        if self.sync == "second" and time.monotonic() - self._synced_s >= 1:
            self._db.flush_wal(sync=True)
            self._synced_s = time.monotonic()

    def scan_values(self) -> int:
        return count_all(self._db.values())

    def scan_records(self) -> int:
        count = 0
        for key, item in self._db.items():
            record = unpack(item)
            (_offset(key), record.timestamp, record.key, record.value)
            count += 1
        return count

    def read(self, offset: int) -> bytes:
        value = self._db[_pack_key(offset)]
        assert isinstance(value, bytes)
        return value

    def end(self) -> int:
        return self._end

    def compact(self) -> None:
        last: dict[bytes, bytes] = {}
        batch = WriteBatch(raw_mode=True)
        for key, item in self._db.items():  # from a snapshot: it does not see the deletions
            name = unpack(item).key
            if (before := last.get(name)) is not None:
                del batch[before]
            assert isinstance(key, bytes)
            last[name] = key
            if len(batch) >= _COMPACTION_DELETES:
                self._db.write(batch)
                batch = WriteBatch(raw_mode=True)
        self._db.write(batch)
        self._db.compact_range(None, None)


def _options() -> Options:
    """Return common first options: dynamic levels, several background jobs, larger blocks."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_background_jobs(6)
    options.set_bytes_per_sync(1 << 20)
    blocks = BlockBasedOptions()
    blocks.set_block_size(16 * 1024)
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options.set_block_based_table_factory(blocks)
    return options


def _offset(key: object) -> int:
    assert isinstance(key, bytes)
    (offset,) = _key.unpack(key)
    assert isinstance(offset, int)
    return offset
