"""All topics at a glance, as of a moment ago: what the list of topics shows, and what others need of every partition.

A look takes some 30 us a topic, without opening anything; it is kept, and made anew when it is older than a moment.
With thousands of topics nobody waits for that: who comes gets the last one, and the next one is made once he is served.
The first look is made when the door opens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError, StoreClosed
from segmentlog.format.file_names import INTERNAL_TOPICS
from segmentlog.storage import fork_safety
from segmentlog.storage.segment import list_segments
from segmentlog.topics.partition_states import PartitionState, PartitionStates, TopicStates

if TYPE_CHECKING:
    from segmentlog.clock import Clock
    from segmentlog.store import LogStore
    from segmentlog.topics.topic_registry import Topic

_FRESH_S: Final = 1.0
_EASY: Final = 9
"""So many times as long as a look took nobody looks again, and a second at least."""
_SLOW_S: Final = 0.05
"""One that takes longer is made when whoever asked has his answer."""
_OLD_S: Final = 30.0
"""But nobody is shown one that is older."""
_RATE_MIN_S: Final = 1.0
"""Rates are counted over at least so long."""
_OPEN_S: Final = 0.2
"""So long may be spent with each look on opening what nobody has opened since the machine started."""


class TopicLook(msgspec.Struct, frozen=True, gc=False):
    """One topic. Sizes, counts and offsets are sums over what is known of its partitions."""

    name: str
    id: str
    config: TopicConfig
    partition_count: int
    unknown_count: int
    """Partitions with records that nobody has opened since the machine started."""
    record_count: int
    """Offsets from the log's start to its end, without lost ranges. Compaction leaves fewer records than that."""
    size_bytes: int
    segment_count: int
    rate: float | None
    """Records a second; None before there are two looks."""
    byte_rate: float | None
    unsynced_count: int
    """Records that are written and not yet on disk."""
    unsynced_s: float
    """How long the oldest of them has been waiting, at most."""
    count_lost_offsets: int
    failed_count: int
    """Partitions that refuse appends."""
    damage_count: int
    """What the scrubber of this process found."""

    @property
    def is_internal(self) -> bool:
        """Whether it is the store's own."""
        return self.name in INTERNAL_TOPICS

    @property
    def trouble(self) -> int:
        """For sorting: the worst first."""
        return self.failed_count * 1_000_000 + self.damage_count * 1_000 + min(self.count_lost_offsets, 999)


class Look(msgspec.Struct, frozen=True):
    """The whole store at one moment."""

    at_s: float
    """Monotonic."""
    at_ms: int
    topics: dict[str, TopicLook]
    partitions: dict[tuple[str, int], PartitionState]
    over_s: float
    """What the rates were counted over; 0 where there are none."""


class Survey:
    """Looks at a store, and keeps the last look. Thread-safe. A look comes to its end early once it ``is_off``."""

    def __init__(self, store: LogStore, clock: Clock, is_off: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._clock = clock
        self._is_off = is_off
        self._partitions = PartitionStates(store, clock, store.fs)
        self._mutex = fork_safety.lock(self, "_mutex")
        self._last: Look | None = None
        self._before: Look | None = None
        self._took_s = 0.0

    def look(self) -> Look:
        """The store as it was a moment ago. Raises `StoreClosed`."""
        last = self._last
        if last is not None:
            age_s = time.monotonic() - last.at_s
            if age_s < self._fresh_s or (self._took_s > _SLOW_S and age_s < _OLD_S):
                return last
        return self.refresh()

    @property
    def _fresh_s(self) -> float:
        """A look that is younger is not made again: all of them together take a tenth of the time at most."""
        return min(max(_FRESH_S, _EASY * self._took_s), _OLD_S)

    def refresh(self) -> Look:
        """Look again, unless that was done a moment ago. Raises `StoreClosed`."""
        with self._mutex:
            began_s = time.monotonic()
            if self._last is not None and began_s - self._last.at_s < self._fresh_s:
                return self._last
            found = self._glance()
            unread = self._unread(found)
            if unread and self._open_some(unread):
                found = self._glance()
                unread = self._unread(found)
            if self._last is not None and began_s - self._last.at_s >= _RATE_MIN_S:
                self._before = self._last
            self._last = self._gather(found, unread, began_s)
            self._took_s = time.monotonic() - began_s
            return self._last

    def is_due(self) -> bool:
        """Whether `refresh` would look again."""
        return self._last is None or time.monotonic() - self._last.at_s >= self._fresh_s

    def forget(self) -> None:
        """Something was changed here: the next look is a new one."""
        with self._mutex:
            self._last = None

    def _glance(self) -> list[TopicStates]:
        """Raises `StoreClosed` once nobody wants to know any more."""
        found = []
        for topic in self._partitions.topics():
            if self._is_off():
                raise StoreClosed(self._store.path)
            found.append(topic)
        return found

    def _unread(self, found: list[TopicStates]) -> dict[str, list[tuple[Topic, int]]]:
        """Partitions with records that nobody has opened since the machine started, by topic."""
        unread: dict[str, list[tuple[Topic, int]]] = {}
        for topic, _, partitions in found:
            for number, state in enumerate(partitions):
                if state is None and self._has_segments(f"{topic.folder}/{number}"):
                    unread.setdefault(topic.name, []).append((topic, number))
        return unread

    def _has_segments(self, folder: str) -> bool:
        try:
            return bool(list_segments(self._store.fs, folder))
        except OSError:  # deleted meanwhile
            return False

    def _open_some(self, unread: dict[str, list[tuple[Topic, int]]]) -> bool:
        """Open some of them, for a moment; whether any could be."""
        ends_s = time.monotonic() + _OPEN_S
        has_opened = False
        for topic, number in chain.from_iterable(unread.values()):
            if time.monotonic() > ends_s:
                break
            try:
                topic.partition(number)
                has_opened = True
            except (SegmentlogError, OSError):  # who opens its page is told why
                continue
        return has_opened

    def _gather(self, found: list[TopicStates], unread: dict[str, list[tuple[Topic, int]]], now_s: float) -> Look:
        before = self._before
        over_s = now_s - before.at_s if before is not None else 0.0
        damage: dict[str, int] = {}
        for finding in self._store.scrub_report().findings:
            damage[finding.topic] = damage.get(finding.topic, 0) + 1
        topics, states = {}, {}
        for one in found:
            name = one.topic.name
            for state in one.partitions:
                if state is not None:
                    states[name, state.number] = state
            topics[name] = _look_at(one, before, over_s, damage.get(name, 0), len(unread.get(name, ())))
        return Look(now_s, self._clock.now_ms(), topics, states, over_s)


def _look_at(
    found: TopicStates, before: Look | None, over_s: float, damage_count: int, unknown_count: int
) -> TopicLook:
    known = [state for state in found.partitions if state is not None]
    name = found.topic.name
    records = stored = 0
    is_counted = before is not None and name in before.topics and before.topics[name].id == found.topic.id
    if is_counted:
        assert before is not None
        for state in known:
            earlier = before.partitions.get((name, state.number))
            log = state.summary.log
            # A crash leaves offsets out, and a truncation: not what was appended.
            if earlier is not None and earlier.summary.log.epoch == log.epoch:
                records += max(log.log_end_offset - earlier.summary.log.log_end_offset, 0)
                stored += max(log.appended_bytes - earlier.summary.log.appended_bytes, 0)
    return TopicLook(
        name, found.topic.id, found.config, len(found.partitions), unknown_count,
        sum(state.offset_count for state in known),
        sum(state.size_bytes for state in known),
        sum(state.segment_count for state in known),
        records / over_s if is_counted else None,
        stored / over_s if is_counted else None,
        sum(state.summary.unsynced_count for state in known),
        max((state.unsynced_s for state in known), default=0.0),
        sum(state.lost_offsets for state in known),
        sum(state.summary.has_failed for state in known),
        damage_count,
    )  # fmt: skip
