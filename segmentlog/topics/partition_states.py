"""States of all partitions of a store, read from shared state pages, without opening partitions.

The state of a partition that this process has open is read from memory. For every other partition, its state page is
read, which takes some 20 us. Sizes of sealed segments and lost ranges need more work, and are cached until the page
shows a change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

import msgspec

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.log.state_peek import StateSummary, lost_ranges, read_state, sealed_size
from segmentlog.policy.lost_ranges import count_offsets
from segmentlog.records import LostRange
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.state_page import StateDamaged
from segmentlog.topics.topic_registry import Topic

_YIELD_EVERY: Final = 64
"""After this many partitions the scan yields to other threads, whatever the interpreter's switch interval is."""


class _CachedState(msgspec.Struct, gc=False):
    """The parts of a partition's state that are slow to read, and the versions of the files that have them."""

    topic_id: str
    files: tuple[int, int, int] = (-1, -1, -1)
    sealed: tuple[int, int] = (0, 0)
    epoch: int = -1
    lost: tuple[LostRange, ...] = ()
    clean_ms: int = 0
    """Time of the last scan that found all records on disk (monotonic)."""


class PartitionState(msgspec.Struct, frozen=True, gc=False):
    """The current state of a partition."""

    topic: str
    number: int
    summary: StateSummary
    segment_count: int
    size_bytes: int
    lost: tuple[LostRange, ...]
    """In ascending order."""
    unsynced_s: float

    @property
    def lost_offsets(self) -> int:
        """Return how many offsets the lost ranges cover."""
        return sum(lost.end_offset - lost.base_offset for lost in self.lost)

    @property
    def offset_count(self) -> int:
        """Return the number of offsets from log start to log end. Offsets in lost ranges do not count."""
        return count_offsets(self.lost, self.summary.log.log_start_offset, self.summary.log.log_end_offset)

    @property
    def unshipped_count(self) -> int:
        """Return the number of offsets whose records are not in the object store yet. Offsets in lost ranges do not
        count.
        """
        return count_offsets(self.lost, self.summary.shipped_offset, self.summary.log.log_end_offset)


class TopicStates(NamedTuple):
    """A topic and the states of its partitions, in the order of their numbers.

    Until a process opens a partition after the start of the machine, its state is None.
    """

    topic: Topic
    config: TopicConfig
    partitions: list[PartitionState | None]


class _Store(Protocol):
    """The methods of a store that `PartitionStates` calls."""

    def topics(self, *, internal: bool = False) -> list[str]: ...

    def topic(self, name: str) -> Topic: ...

    def opened_partitions(self) -> list[Partition]: ...


class PartitionStates:
    """Reads the states of a store's partitions, and caches slow parts of them. Not thread-safe."""

    def __init__(self, store: _Store, clock: Clock, fs: FileSystem | None = None) -> None:
        self._store = store
        self._clock = clock
        self._fs = fs or FileSystem()
        self._cached: dict[tuple[str, int], _CachedState] = {}
        self.topic_count = self.partition_count = 0
        """Numbers of topics and partitions in the last scan."""

    def states(self) -> Iterator[PartitionState]:
        """Yield the state of each partition that has one, topic by topic."""
        for found in self.topics():
            yield from (state for state in found.partitions if state is not None)

    def topics(self) -> Iterator[TopicStates]:
        """Yield every topic, including internal topics. If a topic is deleted during the call, some of its partitions
        may be missing.
        """
        opened = {(log.topic, log.number): log for log in self._store.opened_partitions() if not log.is_stale}
        boot_id = self._fs.boot_id()
        before, self._cached = self._cached, {}
        self.topic_count = self.partition_count = 0
        for name in self._store.topics(internal=True):
            try:
                topic = self._store.topic(name)
                found = TopicStates(topic, topic.config, [None] * topic.partition_count)
            except (SegmentlogError, OSError) as error:  # deleted meanwhile
                if is_interrupt(error):
                    raise
                continue
            self.topic_count += 1
            for number in range(len(found.partitions)):
                self.partition_count += 1
                if not self.partition_count % _YIELD_EVERY:
                    time.sleep(0)
                folder = f"{topic.folder}/{number}"
                seen = _page_of(opened.get((name, number))) or read_state(self._fs, folder, boot_id)
                if seen is None:
                    continue
                cached = before.get((name, number))
                if cached is None or cached.topic_id != topic.id:
                    cached = _CachedState(topic.id)
                self._cached[name, number] = cached
                found.partitions[number] = self._state(name, number, folder, seen, cached)
            yield found

    def _state(self, name: str, number: int, folder: str, seen: StateSummary, cached: _CachedState) -> PartitionState:
        log = seen.log
        files = (log.generation, log.active_base_offset, log.log_start_offset)
        try:
            if files != cached.files:
                cached.sealed, cached.files = sealed_size(self._fs, folder, log), files
            if log.epoch != cached.epoch:
                cached.lost, cached.epoch = lost_ranges(self._fs, folder, log), log.epoch
        except OSError as error:  # keep the cached facts, and try again at the next scan
            if is_interrupt(error):
                raise
        return PartitionState(
            name, number, seen, cached.sealed[0] + 1, cached.sealed[1] + log.end_position, cached.lost,
            self._unsynced_s(seen, cached),
        )  # fmt: skip

    def _unsynced_s(self, seen: StateSummary, cached: _CachedState) -> float:
        now_ms = self._clock.monotonic_ms()
        if not seen.unsynced_count:
            cached.clean_ms = now_ms
            return 0.0
        return max(0, now_ms - max(seen.sync.synced_at_ms, cached.clean_ms)) / 1000


def _page_of(partition: Partition | None) -> StateSummary | None:
    if partition is None:
        return None
    try:
        return StateSummary.from_page(partition.handle.page)
    except (StateDamaged, ValueError):  # closed meanwhile
        return None
