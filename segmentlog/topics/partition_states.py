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
    """Cached facts about a partition, and the versions of the files that they were read from."""

    topic_id: str
    files: tuple[int, int, int] = (-1, -1, -1)
    sealed: tuple[int, int] = (0, 0)
    epoch: int = -1
    lost: tuple[LostRange, ...] = ()
    clean_ms: int = 0
    """When a scrape last found all records on disk."""


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
    """A topic and the states of its partitions, in order of their numbers. The state is None for a partition that was
    not opened since the machine started.
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
    """Reads the states of a store's partitions, and caches what is slow to read. Not thread-safe."""

    def __init__(self, store: _Store, clock: Clock, fs: FileSystem | None = None) -> None:
        self._store = store
        self._clock = clock
        self._fs = fs or FileSystem()
        self._known: dict[tuple[str, int], _CachedState] = {}
        self.topic_count = self.partition_count = 0
        """Counts of the last scan."""

    def states(self) -> Iterator[PartitionState]:
        """Yield the partitions with a known state, by topic."""
        for found in self.topics():
            yield from (state for state in found.partitions if state is not None)

    def topics(self) -> Iterator[TopicStates]:
        """Yield every topic, including internal topics. If a topic is deleted during the call, some of its partitions
        may be missing.
        """
        opened = {(log.topic, log.number): log for log in self._store.opened_partitions() if not log.is_stale}
        boot_id = self._fs.boot_id()
        before, self._known = self._known, {}
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
                known = before.get((name, number))
                if known is None or known.topic_id != topic.id:
                    known = _CachedState(topic.id)
                self._known[name, number] = known
                found.partitions[number] = self._state(name, number, folder, seen, known)
            yield found

    def _state(self, name: str, number: int, folder: str, seen: StateSummary, known: _CachedState) -> PartitionState:
        log = seen.log
        files = (log.generation, log.active_base_offset, log.log_start_offset)
        try:
            if files != known.files:
                known.sealed, known.files = sealed_size(self._fs, folder, log), files
            if log.epoch != known.epoch:
                known.lost, known.epoch = lost_ranges(self._fs, folder, log), log.epoch
        except OSError as error:  # keep the cached facts, and try again at the next scan
            if is_interrupt(error):
                raise
        return PartitionState(
            name, number, seen, known.sealed[0] + 1, known.sealed[1] + log.end_position, known.lost,
            self._unsynced_s(seen, known),
        )  # fmt: skip

    def _unsynced_s(self, seen: StateSummary, known: _CachedState) -> float:
        now_ms = self._clock.monotonic_ms()
        if not seen.unsynced_count:
            known.clean_ms = now_ms
            return 0.0
        return max(0, now_ms - max(seen.sync.synced_at_ms, known.clean_ms)) / 1000


def _page_of(partition: Partition | None) -> StateSummary | None:
    if partition is None:
        return None
    try:
        return StateSummary.from_page(partition.handle.page)
    except (StateDamaged, ValueError):  # closed meanwhile
        return None
