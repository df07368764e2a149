"""Cached overview of all topics and partitions, for the list of topics and other pages.

Reading the states takes about 30 us a topic and opens no partition. The result is cached and read again when it is old.
With thousands of topics a page shows the cached overview, and the server reads the next one after sending the page. The
server reads the first overview when it starts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError, StoreClosed
from segmentlog.format.file_names import INTERNAL_TOPICS
from segmentlog.http.console.charts import RateSample
from segmentlog.storage import fork_safety
from segmentlog.storage.segment import list_segments
from segmentlog.topics.partition_states import PartitionState, PartitionStates, TopicStates

if TYPE_CHECKING:
    from segmentlog.clock import Clock
    from segmentlog.store import LogStore
    from segmentlog.topics.topic_registry import Topic

_FRESH_S: Final = 1.0
_EASY: Final = 9
"""Pause between two refreshes, as a multiple of the time that the last refresh took; at least a second."""
_SLOW_S: Final = 0.05
"""If reading the states takes longer, the server reads them after it has sent the response."""
_OLD_S: Final = 30.0
"""Maximum age of an overview shown on a page."""
_RATE_MIN_S: Final = 1.0
"""Minimum interval over which rates are computed."""
_RATES_MAX: Final = 120
"""Samples of records/s kept for each topic."""
_IN_USE_S: Final = 600.0
"""Seconds after the last page for which the server keeps sampling rates."""
_OPEN_S: Final = 0.2
"""Time that one refresh may spend on opening partitions not opened since the machine started."""


class TopicOverview(msgspec.Struct, frozen=True, gc=False):
    """State of one topic. Sizes, counts and offsets are sums over the partitions whose state is known."""

    name: str
    id: str
    config: TopicConfig
    partition_count: int
    unread_count: int
    """Partitions with records that no process has opened since the machine started."""
    record_count: int
    """Offsets from the log's start to its end, without lost ranges. After compaction there are fewer records."""
    size_bytes: int
    segment_count: int
    rate: float | None
    """Records per second; None before the second refresh."""
    byte_rate: float | None
    unsynced_count: int
    """Records that are written and not yet synced to disk."""
    unsynced_s: float
    """Upper limit for the time since the oldest of these records was written."""
    lost_count: int
    failed_count: int
    """Partitions that refuse appends."""
    damage_count: int
    """Findings of this process's scrubber."""

    @property
    def is_internal(self) -> bool:
        """Whether the topic belongs to the store itself."""
        return self.name in INTERNAL_TOPICS

    @property
    def severity(self) -> int:
        """Sort key: topics with more serious damage are greater."""
        return self.failed_count * 1_000_000 + self.damage_count * 1_000 + min(self.lost_count, 999)


class StoreOverview(msgspec.Struct, frozen=True):
    """State of all topics at one moment."""

    at_s: float
    """Monotonic time in seconds."""
    at_ms: int
    topics: dict[str, TopicOverview]
    partitions: dict[tuple[str, int], PartitionState]
    rate_window_s: float
    """Seconds over which rates were computed; 0 if there are none yet."""


class OverviewCache:
    """Reads and caches the overview of a store. Thread-safe. Refreshing stops early once ``is_stopped()`` is true."""

    def __init__(self, store: LogStore, clock: Clock, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._clock = clock
        self._is_stopped = is_stopped
        self._partitions = PartitionStates(store, clock, store.fs)
        self._mutex = fork_safety.lock(self, "_mutex")
        self._last: StoreOverview | None = None
        self._before: StoreOverview | None = None
        self._took_s = 0.0
        self._rates: dict[str, deque[RateSample]] = {}
        """By topic id."""
        self._used_s = -_IN_USE_S

    def current(self) -> StoreOverview:
        """Return the cached overview, refreshed if it is old. Raises `StoreClosed`."""
        self._used_s = time.monotonic()
        last = self._last
        if last is not None:
            age_s = time.monotonic() - last.at_s
            if age_s < self._fresh_s or (self._took_s > _SLOW_S and age_s < _OLD_S):
                return last
        return self.refresh()

    @property
    def _fresh_s(self) -> float:
        """Seconds for which the overview is fresh: refreshing takes at most a tenth of the time."""
        return min(max(_FRESH_S, _EASY * self._took_s), _OLD_S)

    def refresh(self) -> StoreOverview:
        """Read the states again unless the overview is fresh. Raises `StoreClosed`."""
        with self._mutex:
            began_s = time.monotonic()
            if self._last is not None and began_s - self._last.at_s < self._fresh_s:
                return self._last
            found = self._read_states()
            unread = self._find_unread(found)
            if unread and self._open_some(unread):
                found = self._read_states()
                unread = self._find_unread(found)
            if self._last is not None and began_s - self._last.at_s >= _RATE_MIN_S:
                self._before = self._last
            self._last = self._build(found, unread, began_s)
            self._add_rates(self._last)
            self._took_s = time.monotonic() - began_s
            return self._last

    def _add_rates(self, overview: StoreOverview) -> None:
        for topic in overview.topics.values():
            if topic.rate is not None:
                samples = self._rates.setdefault(topic.id, deque(maxlen=_RATES_MAX))
                samples.append(RateSample(overview.at_s, topic.rate))
        if len(self._rates) > 2 * len(overview.topics):
            existing = {topic.id for topic in overview.topics.values()}
            self._rates = {
                topic_id: samples for topic_id, samples in self._rates.copy().items() if topic_id in existing
            }

    def rates(self, topic_id: str) -> list[RateSample]:
        """Return recent samples of a topic's records/s, oldest first. Each refresh adds one."""
        with self._mutex:
            return list(self._rates.get(topic_id, ()))

    @property
    def latest(self) -> StoreOverview | None:
        """The cached overview, however old it is; None before the first refresh."""
        return self._last

    @property
    def is_in_use(self) -> bool:
        """Whether a page was shown recently, so that the server should keep sampling rates."""
        return time.monotonic() - self._used_s < _IN_USE_S

    def is_stale(self) -> bool:
        """Return whether `refresh` would read the states again."""
        return self._last is None or time.monotonic() - self._last.at_s >= self._fresh_s

    def invalidate(self) -> None:
        """Drop the cached overview after a change to the store."""
        with self._mutex:
            self._last = None

    def _read_states(self) -> list[TopicStates]:
        """Read the states of all topics. Raises `StoreClosed` once the cache is stopped."""
        found = []
        for topic in self._partitions.topics():
            if self._is_stopped():
                raise StoreClosed(self._store.path)
            found.append(topic)
        return found

    def _find_unread(self, found: list[TopicStates]) -> dict[str, list[tuple[Topic, int]]]:
        """Return partitions with records that no process has opened since the machine started, by topic."""
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
        """Open some of these partitions, for 0.2 s, and return whether any could be opened."""
        ends_s = time.monotonic() + _OPEN_S
        has_opened = False
        for topic, number in chain.from_iterable(unread.values()):
            if time.monotonic() > ends_s:
                break
            try:
                topic.partition(number)
                has_opened = True
            except (SegmentlogError, OSError):  # the partition's page shows the error
                continue
        return has_opened

    def _build(
        self, found: list[TopicStates], unread: dict[str, list[tuple[Topic, int]]], now_s: float
    ) -> StoreOverview:
        before = self._before
        rate_window_s = now_s - before.at_s if before is not None else 0.0
        damage: dict[str, int] = {}
        for finding in self._store.scrub_report().findings:
            damage[finding.topic] = damage.get(finding.topic, 0) + 1
        topics, states = {}, {}
        for one in found:
            name = one.topic.name
            for state in one.partitions:
                if state is not None:
                    states[name, state.number] = state
            topics[name] = _summarize(one, before, rate_window_s, damage.get(name, 0), len(unread.get(name, ())))
        return StoreOverview(now_s, self._clock.now_ms(), topics, states, rate_window_s)


def _summarize(
    found: TopicStates, before: StoreOverview | None, rate_window_s: float, damage_count: int, unread_count: int
) -> TopicOverview:
    known = [state for state in found.partitions if state is not None]
    name = found.topic.name
    records = stored = 0
    is_counted = before is not None and name in before.topics and before.topics[name].id == found.topic.id
    if is_counted:
        assert before is not None
        for state in known:
            earlier = before.partitions.get((name, state.number))
            log = state.summary.log
            # A crash or a truncation changes the end offset without appends, and starts a new epoch.
            if earlier is not None and earlier.summary.log.epoch == log.epoch:
                records += max(log.log_end_offset - earlier.summary.log.log_end_offset, 0)
                stored += max(log.appended_bytes - earlier.summary.log.appended_bytes, 0)
    return TopicOverview(
        name, found.topic.id, found.config, len(found.partitions), unread_count,
        sum(state.offset_count for state in known),
        sum(state.size_bytes for state in known),
        sum(state.segment_count for state in known),
        records / rate_window_s if is_counted else None,
        stored / rate_window_s if is_counted else None,
        sum(state.summary.unsynced_count for state in known),
        max((state.unsynced_s for state in known), default=0.0),
        sum(state.lost_offsets for state in known),
        sum(state.summary.has_failed for state in known),
        damage_count,
    )  # fmt: skip
