"""What each partition of a store has: read from the pages that all processes share, without opening one.

Of a partition that this process has open that is a look into memory. Of another one its page is read, which takes some
20 us; what needs more (sizes of sealed segments, lost ranges) is looked up once and kept until the page says that it is
another.
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

_BREATH: Final = 64
"""After so many partitions other threads have a turn, whatever the interpreter's switch interval is."""


class _Known(msgspec.Struct, gc=False):
    """What was looked up of a partition, and what it is true of."""

    topic_id: str
    files: tuple[int, int, int] = (-1, -1, -1)
    sealed: tuple[int, int] = (0, 0)
    epoch: int = -1
    lost: tuple[LostRange, ...] = ()
    clean_ms: int = 0
    """When a scrape last found everything on disk."""


class PartitionState(msgspec.Struct, frozen=True, gc=False):
    """A partition as it is now."""

    topic: str
    number: int
    summary: StateSummary
    segment_count: int
    size_bytes: int
    lost: tuple[LostRange, ...]
    """Ascending."""
    unsynced_s: float

    @property
    def lost_offsets(self) -> int:
        """How many offsets the lost ranges cover."""
        return sum(one.end_offset - one.base_offset for one in self.lost)

    @property
    def offset_count(self) -> int:
        """Offsets from the log's start to its end, without those in lost ranges."""
        return count_offsets(self.lost, self.summary.log.log_start_offset, self.summary.log.log_end_offset)

    @property
    def unshipped_count(self) -> int:
        """Offsets that are not in the object store, without those in lost ranges."""
        return count_offsets(self.lost, self.summary.shipped_offset, self.summary.log.log_end_offset)


class TopicStates(NamedTuple):
    """A topic with its partitions, in order; None for one that nobody has opened since the machine started."""

    topic: Topic
    config: TopicConfig
    partitions: list[PartitionState | None]


class _Store(Protocol):
    """What a store is asked for."""

    def topics(self, *, internal: bool = False) -> list[str]: ...

    def topic(self, name: str) -> Topic: ...

    def opened_partitions(self) -> list[Partition]: ...


class Partitions:
    """The partitions of a store. For one thread at a time."""

    def __init__(self, store: _Store, clock: Clock, fs: FileSystem | None = None) -> None:
        self._store = store
        self._clock = clock
        self._fs = fs or FileSystem()
        self._known: dict[tuple[str, int], _Known] = {}
        self.topic_count = self.partition_count = 0
        """Of the last look."""

    def look(self) -> Iterator[PartitionState]:
        """Those that something is known of, by topic."""
        for found in self.topics():
            yield from (state for state in found.partitions if state is not None)

    def topics(self) -> Iterator[TopicStates]:
        """Every topic, those of the store itself, too; half of one that is deleted in the middle."""
        opened = {(one.topic, one.number): one for one in self._store.opened_partitions() if not one.is_stale}
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
                if not self.partition_count % _BREATH:
                    time.sleep(0)
                folder = f"{topic.folder}/{number}"
                seen = _page_of(opened.get((name, number))) or read_state(self._fs, folder, boot_id)
                if seen is None:
                    continue
                known = before.get((name, number))
                if known is None or known.topic_id != topic.id:
                    known = _Known(topic.id)
                self._known[name, number] = known
                found.partitions[number] = self._state(name, number, folder, seen, known)
            yield found

    def _state(self, name: str, number: int, folder: str, seen: StateSummary, known: _Known) -> PartitionState:
        log = seen.log
        files = (log.generation, log.active_base_offset, log.log_start_offset)
        try:
            if files != known.files:
                known.sealed, known.files = sealed_size(self._fs, folder, log), files
            if log.epoch != known.epoch:
                known.lost, known.epoch = lost_ranges(self._fs, folder, log), log.epoch
        except OSError as error:  # what was known before, and the next time once more
            if is_interrupt(error):
                raise
        return PartitionState(
            name, number, seen, known.sealed[0] + 1, known.sealed[1] + log.end_position, known.lost,
            self._unsynced_s(seen, known),
        )  # fmt: skip

    def _unsynced_s(self, seen: StateSummary, known: _Known) -> float:
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
