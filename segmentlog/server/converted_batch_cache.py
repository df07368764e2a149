"""Convert batches that the library wrote to Kafka's format for clients, and cache the results.

    in memory      the last 16 MiB: most consumers are at the end of a log and request the same batches
    on disk        batches that consumers request again after memory dropped them, because they begin at the start of a
                   log. They are in unnamed files in the store's folder, so that the kernel's page cache decides which
                   of them stay in memory
    in a response  until its client has received it, however slow it is

Batches in memory and in responses share a memory limit. Above it, the cache writes newly converted batches to disk at
once, and each response contains only its first batch, and batches that are on disk.

A batch that is read once costs no disk access. The size on disk is limited, also relative to the free space of the
disk. At the limit, the least recently used file is deleted, unless a request used it recently. This
exception helps with repeated reads of a log larger than the cache: otherwise each of them would rewrite the whole cache
and find no batch.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.server.transport import Buffer
from segmentlog.storage.anonymous_file import AnonymousFile, free_bytes
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

logger = logging.getLogger("segmentlog.server")

_KEPT_BYTES: Final = 16 << 20
_FILE_BYTES: Final = 32 << 20
_REMEMBERED: Final = 32 << 10
"""Maximum length of two lists: keys of batches that were requested once; log positions whose batch is in the cache."""
_SPARED_S: Final = 300.0
"""A file that a request used within this time is not deleted for other batches."""
_SHARE_KEPT: Final = 8
"""This class keeps at most 1/8 of the memory limit; the rest is for responses."""
_FREE_PART: Final = 4
"""The files together take at most 1/4 of the space that would be free without them."""
_WAIT_S: Final = 10.0
"""Maximum time for which a request waits while another request converts the same batch."""

_Key = tuple[str, int, int, int]
LogVersion = tuple[str, int, int, int]
"""Topic id, partition, generation and epoch. While these do not change, the batch at an offset does not change."""


class _CacheFile:
    """A cache file on disk, and the batches in it."""

    def __init__(self, scratch: AnonymousFile, now_s: float) -> None:
        self.scratch = scratch
        self.used_s = now_s
        self.views: dict[_Key, list[memoryview]] = {}


class DiskBatchCache:
    """Converted batches on disk. Thread-safe. Views into a file stay valid after it is deleted."""

    def __init__(
        self,
        folder: str,
        bound_bytes: int,
        file_bytes: int = _FILE_BYTES,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mutex = threading.Lock()
        self._writing = threading.Lock()
        """Held while a batch is written; acquired before ``_mutex``. Lookups need only ``_mutex``, so they never wait
        for the disk."""
        self._folder = folder
        self._bound_bytes = bound_bytes
        self._file_bytes = file_bytes
        self._clock_s = clock_s
        self._files: list[_CacheFile] = []
        self._by_key: dict[_Key, _CacheFile] = {}
        self._requested: OrderedDict[int, None] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Size of all files, filled or not."""
        return len(self._files) * self._file_bytes

    def find(self, key: _Key) -> list[memoryview] | None:
        """Return a batch, or None if it is not cached."""
        with self._mutex:
            file = self._by_key.get(key)
            if file is None:
                return None
            file.used_s = self._clock_s()
            return file.views[key]

    def offer(self, key: _Key, converted: list[Buffer], *, at_once: bool = False) -> None:
        """Store a converted batch if there is room. Without ``at_once``, store it only when it is offered again."""
        number = hash(key)
        with self._mutex:
            if number not in self._requested:
                self._requested[number] = None
                if len(self._requested) > _REMEMBERED:
                    self._requested.popitem(last=False)
                if not at_once:
                    return
            if key in self._by_key or not self._bound_bytes or sum(map(len, converted)) > self._file_bytes:
                return
        if not self._writing.acquire(blocking=False):
            return  # another thread is storing a batch; this one can be stored on its next request
        try:
            self._add(key, converted)
        except OSError as error:
            logger.info("converted batches are cached in memory only, not on disk: %s", error)
            self._bound_bytes = 0
        finally:
            self._writing.release()

    def _add(self, key: _Key, converted: list[Buffer]) -> None:
        file = self._files[-1] if self._files else None
        views = file.scratch.add(converted) if file is not None else None
        if views is None:
            file = self._start_file()
            views = file.scratch.add(converted) if file is not None else None
        with self._mutex:
            if file is not None and views is not None and file in self._files:
                file.views[key] = views
                self._by_key[key] = file

    def _start_file(self) -> _CacheFile | None:
        """Delete old files if necessary, and return a new file, or None for lack of space."""
        now_s = self._clock_s()
        room = (free_bytes(self._folder) + self.size_bytes) // _FREE_PART
        with self._mutex:
            while self.size_bytes + self._file_bytes > min(room, self._bound_bytes):
                oldest = min(self._files, key=lambda file: file.used_s, default=None)
                if oldest is None or oldest.used_s > now_s - _SPARED_S:
                    return None
                self._delete_file(oldest)
            if self._files:
                self._files[-1].scratch.close()  # it is full
        file = _CacheFile(AnonymousFile(FileSystem(), self._folder, self._file_bytes), now_s)
        with self._mutex:
            self._files.append(file)
        return file

    def _delete_file(self, file: _CacheFile) -> None:
        self._files.remove(file)
        file.scratch.close()
        for key in file.views:
            del self._by_key[key]

    def close(self) -> None:
        """Delete all files."""
        with self._writing, self._mutex:
            self._bound_bytes = 0
            for file in list(self._files):
                self._delete_file(file)


class ConvertedBatchCache:
    """Recently converted batches. Thread-safe. Owns ``disk``.

    ``held_max_bytes`` limits the memory of batches that are only in memory: in this cache, or in responses that
    clients have not received yet.
    """

    def __init__(
        self, kept_bytes: int = _KEPT_BYTES, disk: DiskBatchCache | None = None, held_max_bytes: int = 1 << 62
    ) -> None:
        self._mutex = threading.Lock()
        self._held_max_bytes = held_max_bytes
        self._sum_mutex = threading.Lock()
        self._held_bytes = 0
        self._changes: deque[int] = deque()
        """Size changes that are not added to ``_held_bytes`` yet. A batch may be freed in any thread, with any locks
        held. So its finalizer only appends to this queue, without a lock."""
        self._kept_bytes = min(kept_bytes, held_max_bytes // _SHARE_KEPT)
        self._bytes = 0
        self._disk = disk
        self.hit_count = self.miss_count = 0
        """Numbers of batches found in the cache, and of batches converted."""
        self._converted: OrderedDict[_Key, list[Buffer]] = OrderedDict()
        self._in_progress: dict[_Key, threading.Event] = {}
        self._registered: OrderedDict[tuple[LogVersion, int], tuple[_Key, int]] = OrderedDict()

    def lookup(self, version: LogVersion, offset: int) -> tuple[list[Buffer], int] | None:
        """Return (the batch at ``offset``, the offset after it) if it is cached and registered for this version.

        This reads nothing from the log: the batch was verified when it was converted.
        """
        with self._mutex:
            entry = self._registered.get((version, offset))
            if entry is None:
                return None
            key, next_offset = entry
            found = self._find(key)
        return None if found is None else (found, next_offset)

    def register(self, version: LogVersion, batch: RecordBatch) -> None:
        """Record that this batch, which `convert` returned, is at its offset while the log has this version."""
        header = batch.header
        if header.is_kafka or len(batch) < header.record_count:
            return
        key = (version[0], batch.partition, header.base_offset, header.header_checksum)
        with self._mutex:
            self._registered[version, header.base_offset] = key, header.next_offset
            if len(self._registered) > _REMEMBERED:
                self._registered.popitem(last=False)

    def convert(self, topic_id: str, batch: RecordBatch) -> list[Buffer]:
        """Return a batch in Kafka's format. A client's batch is unchanged; a library's becomes one batch, or several if
        it is long.
        """
        header = batch.header
        if header.is_kafka:
            return [batch.payload]
        if len(batch) < header.record_count:  # rare case: the read began inside the batch
            return to_wire_batches(batch)
        # The checksum covers the whole batch, so a compacted batch has another key.
        key = (topic_id, batch.partition, header.base_offset, header.header_checksum)
        with self._mutex:
            found = self._find(key)
            other = self._in_progress.get(key)
        if found is None and other is not None:  # another consumer is converting it
            other.wait(_WAIT_S)
            with self._mutex:
                found = self._find(key)
        if found is not None:
            return found
        return self._convert(key, batch)

    @property
    def held_bytes(self) -> int:
        """Memory of converted batches that are not on disk, in this cache and in responses."""
        with self._sum_mutex:
            while self._changes:
                self._held_bytes += self._changes.popleft()
            return self._held_bytes

    @property
    def is_used_up(self) -> bool:
        """Whether the memory limit is reached: then a response includes no more batches than it must."""
        return self.held_bytes >= self._held_max_bytes

    def _count_held(self, converted: Buffer) -> memoryview:
        """Count the bytes as held until no reference to any part of them remains. Return the same bytes."""
        owner = np.frombuffer(converted, np.uint8)
        size = len(owner)
        self._changes.append(size)
        weakref.finalize(owner, self._changes.append, -size).atexit = False
        return owner.data

    @property
    def disk_bytes(self) -> int:
        """Size of the cache on disk."""
        return 0 if self._disk is None else self._disk.size_bytes

    def close(self) -> None:
        """Delete the cache on disk."""
        if self._disk is not None:
            self._disk.close()

    def _find(self, key: _Key) -> list[Buffer] | None:
        found = self._converted.get(key)
        if found is not None:
            self._converted.move_to_end(key)
        elif self._disk is not None:
            views = self._disk.find(key)
            found = None if views is None else list(views)
        self.hit_count += found is not None
        return found

    def _convert(self, key: _Key, batch: RecordBatch) -> list[Buffer]:
        event = threading.Event()
        with self._mutex:
            self.miss_count += 1
            self._in_progress.setdefault(key, event)
        try:
            converted = to_wire_batches(batch)
            if self._disk is not None:
                self._disk.offer(key, converted, at_once=self.is_used_up)
                views = self._disk.find(key)
                if views is not None:
                    return list(views)
            converted = [self._count_held(one) for one in converted]
            with self._mutex:
                self._store(key, converted)
        finally:
            with self._mutex:
                if self._in_progress.get(key) is event:
                    del self._in_progress[key]
            event.set()
        return converted

    def _store(self, key: _Key, converted: list[Buffer]) -> None:
        if key not in self._converted:
            self._converted[key] = converted
            self._bytes += sum(map(len, converted))
            while self._bytes > self._kept_bytes:
                self._bytes -= sum(map(len, self._converted.popitem(last=False)[1]))
