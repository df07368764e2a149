"""Schedules background compaction: which partition is next, how fast it is read, and which ones are skipped."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, InvalidConfig, SegmentlogError, StoreClosed, UnknownTopic
from segmentlog.log.partition import Partition
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.topics.background_threads import BackgroundThread

logger = logging.getLogger("segmentlog")

_TICK_S = 15.0
_RETRY_MIN_S = 60.0
_RETRY_MAX_S = 3600.0


class PartitionName(NamedTuple):
    """A partition of the store, open or not."""

    topic: str
    number: int


class PartitionSource(Protocol):
    """The methods of a store that background work calls."""

    def opened_partitions(self) -> list[Partition]:
        """Return the partitions that this process has open."""

    def close_moved_partitions(self) -> None:
        """Close the partitions of topics that were deleted or renamed."""

    def all_partitions(self) -> Iterator[tuple[PartitionName, TopicConfig]]:
        """Yield all partitions, with their configuration."""

    def open_partition(self, name: str, number: int) -> Partition:
        """Open a partition. Raises `UnknownTopic` if it was deleted."""


class _Uncleanable(msgspec.Struct):
    """Why compaction skips a partition, and when it tries again."""

    why: str
    topic_id: str
    generation: int
    retry_ms: int | None
    """When to try again (monotonic). None: only after the partition's files have changed."""
    pause_s: float


class CompactionStopped(Exception):
    """The store is being closed: the current pass ends without a result."""


class Throttle:
    """Limits a rate to ``bytes_per_s`` (None: no limit). A burst may have the bytes of a fifth of a second."""

    def __init__(self, bytes_per_s: int | None, now_s: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_s is not None and (not isinstance(bytes_per_s, int) or bytes_per_s is True or bytes_per_s < 1):
            wanted = "a whole number of bytes per second, or None for no limit"
            raise InvalidConfig("cleaner.io.max.bytes.per.second", bytes_per_s, wanted)
        self._bytes_per_s = bytes_per_s
        self._now_s = now_s
        self._free_at_s = 0.0

    def wait_s(self, size_bytes: int) -> float:
        """Count bytes that were read, and return how many seconds to wait before reading more."""
        if self._bytes_per_s is None:
            return 0.0
        now_s = self._now_s()
        self._free_at_s = max(self._free_at_s, now_s - 0.2) + size_bytes / self._bytes_per_s
        return max(self._free_at_s - now_s, 0.0)


class Compactor:
    """Compacts the partitions of a store, the dirtiest first. Only one thread at a time may call `tick`."""

    def __init__(
        self, partitions: PartitionSource, clock: Clock, buffer_bytes: int, io_bytes_per_s: int | None
    ) -> None:
        if not isinstance(buffer_bytes, int) or buffer_bytes < 1:
            raise InvalidConfig("cleaner.dedupe.buffer.bytes", buffer_bytes, "a number of bytes, at least 1")
        self.buffer_bytes = buffer_bytes
        self.worker: BackgroundThread | None = None
        """The background thread that calls `tick`. It can be stopped in the middle of a pass."""
        self._partitions = partitions
        self._clock = clock
        self._throttle = Throttle(io_bytes_per_s)
        self._uncleanable: dict[PartitionName, _Uncleanable] = {}

    def tick(self, now_ms: int | None = None) -> float:
        """Compact the dirtiest partition that is due, if any; return seconds until the next call, 0 if more are due.

        A partition that cannot be compacted is skipped, and `uncleanable` returns it. If it is damaged, compaction
        tries again when its files have changed. After other errors, it tries again after a pause, which grows from a
        minute to an hour.
        """
        now_ms = self._clock.now_ms() if now_ms is None else now_ms
        due: list[tuple[float, PartitionName]] = []
        listing: OSError | None = None
        gone = set(self._uncleanable.copy())
        try:
            for name, config in self._partitions.all_partitions():
                gone.discard(name)
                if config.compacts and not self._is_skipped(name):
                    with contextlib.suppress(StoreClosed, UnknownTopic):
                        ratio = self._dirty_ratio(name, now_ms)
                        if ratio is not None:
                            due.append((ratio, name))
        except OSError as error:  # the file of a topic cannot be read
            if is_interrupt(error):
                raise
            listing = error
        else:
            for name in gone:  # their topics were deleted
                self._uncleanable.pop(name, None)
        if due:
            self._compact(max(due)[1], now_ms)
        if listing is not None:
            raise listing
        if not due:
            return _TICK_S
        return 0.0 if len(due) > 1 else _TICK_S

    def _is_skipped(self, name: PartitionName) -> bool:
        known = self._uncleanable.get(name)
        if known is None:
            return False
        if known.retry_ms is not None:
            return self._clock.monotonic_ms() < known.retry_ms
        with failures_ignored(SegmentlogError):
            partition = self._partitions.open_partition(*name)  # the topic may have been deleted and created again
            return (partition.topic_id, partition.generation) == (known.topic_id, known.generation)
        return True

    def _dirty_ratio(self, name: PartitionName, now_ms: int) -> float | None:
        """Return the dirty ratio of a partition that is due, otherwise None."""
        try:
            partition = self._partitions.open_partition(*name)
            if partition.handle.read_only:  # it belongs to another user, whose processes compact it
                return None
            return partition.dirty_ratio() if partition.compaction_due(now_ms=now_ms) else None
        except Exception as error:
            if isinstance(error, StoreClosed | UnknownTopic):
                raise
            self._skip(name, error)
            return None

    def _compact(self, name: PartitionName, now_ms: int) -> None:
        try:
            with contextlib.suppress(StoreClosed, UnknownTopic, CompactionStopped):
                self._partitions.open_partition(*name).compact(
                    now_ms=now_ms, buffer_bytes=self.buffer_bytes, pace=self._pace
                )
            self._uncleanable.pop(name, None)
        except Exception as error:
            self._skip(name, error)

    def _pace(self, size_bytes: int) -> None:
        wait_s = self._throttle.wait_s(size_bytes)
        if self.worker is None:
            time.sleep(wait_s)
            return
        while self.worker.pause(wait_s) is False and wait_s > 0:
            wait_s = self._throttle.wait_s(0)
        if self.worker.pause(0):
            raise CompactionStopped

    def _skip(self, name: PartitionName, error: Exception) -> None:
        known = self._uncleanable.get(name)
        pause_s = min(2 * known.pause_s, _RETRY_MAX_S) if known is not None else _RETRY_MIN_S
        retry_ms = None if isinstance(error, CorruptBatch) else self._clock.monotonic_ms() + int(pause_s * 1000)
        topic_id, generation = "", -1
        with failures_ignored(SegmentlogError):
            partition = self._partitions.open_partition(*name)
            topic_id, generation = partition.topic_id, partition.generation
            partition.record_uncleanable(str(error))
        if known is None or known.why != str(error):
            logger.warning(
                "%s/%d: cannot be compacted: %s; compaction skips it until its files change, or for up to an hour",
                *name,
                error,
            )
        self._uncleanable[name] = _Uncleanable(str(error), topic_id, generation, retry_ms, pause_s)

    def uncleanable(self) -> dict[PartitionName, str]:
        """Return the partitions that compaction skips for now, with the reasons."""
        return {name: skipped.why for name, skipped in self._uncleanable.copy().items()}
