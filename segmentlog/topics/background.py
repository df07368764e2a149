"""What a store does by itself: flush, retain, compact, scrub. Each a public tick, and with ``threads`` a worker.

flush      fsyncs what the topics' policies want fsynced by now; lets go of files that others deleted
retention  deletes old segments, of every topic of the store, one process at a time; and groups' old positions
cleaner    compacts the dirtiest partition that is due, one after the other
transactions  ends those of processes that are gone; see `segmentlog.transactions.transactions`
scrub      reads sealed segments again, if it was asked for
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from segmentlog.clock import Clock
from segmentlog.config import CLEANER_BUFFER_BYTES, TopicConfig
from segmentlog.errors import CorruptBatch, InvalidConfig, SegmentlogError, StoreClosed, UnknownTopic
from segmentlog.format.names import OFFSETS_TOPIC
from segmentlog.inspection.scrubber import Scrubber, ScrubReport
from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.policy.retention import is_bounded
from segmentlog.quantities import UNLIMITED
from segmentlog.storage import forks
from segmentlog.topics.workers import Worker, Workers

logger = logging.getLogger("segmentlog")

_FLUSH_TICK_MAX_S = 0.25
_FLUSH_TICK_MIN_S = 0.001
_FIRST_LOOK_S = 10.0
"""A short-lived process leaves the whole store's retention to others; what it fills itself it retains at once."""
_RETENTION_TICK_MIN_S = 1.0
_RETENTION_TICK_MAX_S = 30.0
_SLICE_S = 0.05
"""A tick of retention yields after so long, however many partitions are left."""
_SLICE_PAUSE_S = 0.2
_CLEANER_TICK_S = 15.0
_RETRY_MIN_S = 60.0
_RETRY_MAX_S = 3600.0


class PartitionName(NamedTuple):
    """A partition of the store, opened or not."""

    topic: str
    number: int


class Partitions(Protocol):
    """What background work needs of the store."""

    def opened_partitions(self) -> list[Partition]:
        """Those that this process has opened."""

    def all_partitions(self) -> Iterator[tuple[PartitionName, TopicConfig]]:
        """All there are, with their configuration."""

    def open_partition(self, name: str, number: int) -> Partition:
        """Open one. Raises `UnknownTopic` when it is gone."""


class _Uncleanable(msgspec.Struct):
    """Why compaction leaves a partition alone for now."""

    why: str
    generation: int
    retry_ms: int | None
    """Monotonic; None: not before its files were changed."""
    pause_s: float


class Stopped(Exception):
    """The store is being closed: a pass ends where it is."""


class Throttle:
    """Lets ``bytes_per_s`` through, with a burst of a fifth of a second; None for no limit."""

    def __init__(self, bytes_per_s: int | None, now_s: Callable[[], float] = time.monotonic) -> None:
        if bytes_per_s is not None and (not isinstance(bytes_per_s, int) or bytes_per_s is True or bytes_per_s < 1):
            wanted = "a whole number of bytes a second, or None for as fast as it goes"
            raise InvalidConfig("cleaner.io.max.bytes.per.second", bytes_per_s, wanted)
        self._bytes_per_s = bytes_per_s
        self._now_s = now_s
        self._free_at_s = 0.0

    def wait_s(self, size_bytes: int) -> float:
        """Seconds to wait after so many bytes."""
        if self._bytes_per_s is None:
            return 0.0
        now_s = self._now_s()
        self._free_at_s = max(self._free_at_s, now_s - 0.2) + size_bytes / self._bytes_per_s
        return max(self._free_at_s - now_s, 0.0)


class Background:
    """The background work of one store. Ticks are thread-safe; each is meant for one caller at a time."""

    def __init__(
        self,
        partitions: Partitions,
        clock: Clock,
        *,
        threads: bool,
        read_only: bool,
        scrubber: Scrubber | None,
        cleaner_buffer_bytes: int = CLEANER_BUFFER_BYTES,
        cleaner_io_bytes_per_s: int | None = None,
        expire: Callable[[int], None] = lambda now_ms: None,
        finish_transactions: Callable[[], float] | None = None,
    ) -> None:
        if not isinstance(cleaner_buffer_bytes, int) or cleaner_buffer_bytes < 1:
            raise InvalidConfig("cleaner.dedupe.buffer.bytes", cleaner_buffer_bytes, "a number of bytes from 1 on")
        self._partitions = partitions
        self._clock = clock
        self._scrubber = scrubber
        self._expire = expire
        self.cleaner_buffer_bytes = cleaner_buffer_bytes
        self._throttle = Throttle(cleaner_io_bytes_per_s)
        self._rolled: set[PartitionName] = set()
        self._round: Iterator[tuple[PartitionName, TopicConfig]] | None = None
        self._round_due_ms = 0
        self._round_pause_s = _RETENTION_TICK_MAX_S
        self._uncleanable: dict[PartitionName, _Uncleanable] = {}
        self._troubles: dict[tuple[str, PartitionName], str] = {}
        """What keeps a kind of work from being done in a partition: its own affair, and told once."""
        self._workers = Workers()
        self._flusher: Worker | None = None
        self._retainer: Worker | None = None
        self._cleaner: Worker | None = None
        if threads and not read_only:
            # Those of one partition do not slow down the work for others, as a tick that raises is slowed down.
            self._flusher = self._workers.add("flush", lambda: self._flush(None)[0])
            self._retainer = self._workers.add("retention", lambda: self._retain_all(None)[0], _FIRST_LOOK_S)
            self._cleaner = self._workers.add("cleaner", self.cleaner_tick, _FIRST_LOOK_S)
            if finish_transactions is not None:
                self._workers.add("transactions", finish_transactions)
        if threads and scrubber is not None:
            self._workers.add("scrub", self.scrub_tick)
        forks.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """In a forked child: the thread is gone that may have been in the middle of a round."""
        self._rolled, self._round, self._round_due_ms = set(self._rolled), None, 0

    @property
    def has_threads(self) -> bool:
        """Whether the ticks that write are called in the background."""
        return self._flusher is not None

    def ensure_running(self) -> None:
        """Start the threads that this process is to have and has not, soon."""
        self._workers.ensure_running()

    def flush_soon(self) -> None:
        """A partition wants a look sooner than the flusher may have planned one."""
        if self._flusher is not None:
            self._flusher.ensure_running()
            self._flusher.wake()

    def rolled(self, handle: Handle) -> None:
        """A segment was sealed: its partition may hold too much now."""
        if self._retainer is not None and self._cleaner is not None:
            self._rolled.add(PartitionName(handle.topic, handle.partition))
            if is_bounded(handle.config):
                self._retainer.wake()
            if handle.config.compacts:
                self._cleaner.wake()

    # ------------------------------------------------------------ flush

    def flush_tick(self, now_ms: int | None = None) -> float:
        """fsync what the topics' policies want fsynced by now; returns the seconds until it should be asked again.

        An error in one partition does not keep it from the others, nor from being asked again; the first is raised
        at the end, and `health` tells all of them.
        """
        pause_s, first = self._flush(now_ms)
        if first is not None:
            raise first
        return pause_s

    def _flush(self, now_ms: int | None) -> tuple[float, Exception | None]:
        first: Exception | None = None
        pause_s = _FLUSH_TICK_MAX_S
        opened = self._partitions.opened_partitions()
        for partition in opened:
            policy = partition.config.fsync
            if policy.kind == "ms":
                # Four looks an interval, so that nothing stays un-fsynced for longer than one.
                pause_s = min(pause_s, max(policy.amount / 4000, _FLUSH_TICK_MIN_S))
        for partition in opened:
            name = PartitionName(partition.topic, partition.number)
            try:
                partition.let_go_of_deleted()
                if partition.sync_due(slack_ms=int(pause_s * 1000) + 1, now_ms=now_ms):
                    partition.flush()
                self._went_well("flushed", name)
            except (StoreClosed, UnknownTopic):
                self._went_well("flushed", name)
            except Exception as error:
                first = first or error
                self._went_wrong("flushed", name, error)
        return pause_s, first

    def _went_wrong(self, what: str, name: PartitionName, error: Exception) -> None:
        if self._troubles.get((what, name)) != str(error):
            self._troubles[what, name] = str(error)
            logger.warning("%s/%d: cannot be %s: %s; trying again", *name, what, error)

    def _went_well(self, what: str, name: PartitionName) -> None:
        if self._troubles:
            self._troubles.pop((what, name), None)

    # ------------------------------------------------------------ retention

    def retention_tick(self, now_ms: int | None = None) -> float:
        """Delete what retention does not keep: at once in partitions that rolled, in all others by turns.

        ``now_ms`` is the wall clock. Returns the seconds until the next call. An error in one
        partition does not keep it from the others; the first is raised at the end, and `health` tells all of them.
        """
        pause_s, first = self._retain_all(now_ms)
        if first is not None:
            raise first
        return pause_s

    def _retain_all(self, now_ms: int | None) -> tuple[float, Exception | None]:
        steady_ms = self._clock.steady_ms() if now_ms is None else now_ms
        now_ms = self._clock.now_ms() if now_ms is None else now_ms
        first: Exception | None = None
        listing: OSError | None = None
        offsets = PartitionName(OFFSETS_TOPIC, 0)
        try:
            with contextlib.suppress(StoreClosed):
                self._expire(steady_ms)
            self._went_well("cleared of old positions", offsets)
        except Exception as error:
            first = error
            self._went_wrong("cleared of old positions", offsets, error)
        while self._rolled:
            first = self._retain(self._rolled.pop(), now_ms) or first
        if self._round is None and not 0 < self._round_due_ms - now_ms <= _RETENTION_TICK_MAX_S * 1000:
            # Due, or the clock went back: then it would not be for long.
            self._round, self._round_pause_s = self._partitions.all_partitions(), _RETENTION_TICK_MAX_S
        ends_s = time.monotonic() + _SLICE_S
        while self._round is not None and time.monotonic() < ends_s:
            name = config = None
            try:
                name, config = next(self._round, (None, None))
            except OSError as error:  # of a topic whose file cannot be read; the others have had their turn
                listing = error
            if name is None or config is None:
                self._round, self._round_due_ms = None, now_ms + int(self._round_pause_s * 1000)
            elif is_bounded(config) or config.compacts:
                self._round_pause_s = min(self._round_pause_s, _look_again_s(config))
                first = self._retain(name, now_ms) or first
        if listing is not None:
            raise listing
        pause_s = _SLICE_PAUSE_S if self._round is not None else max((self._round_due_ms - now_ms) / 1000, 0.001)
        return pause_s, first

    def _retain(self, name: PartitionName, now_ms: int) -> Exception | None:
        try:
            with contextlib.suppress(StoreClosed, UnknownTopic):
                self._partitions.open_partition(*name).retain(now_ms=now_ms)
            self._went_well("retained", name)
        except Exception as error:
            self._went_wrong("retained", name, error)
            return error
        return None

    # ------------------------------------------------------------ compaction

    def cleaner_tick(self, now_ms: int | None = None) -> float:
        """Compact the dirtiest partition that is due, if any is; seconds until the next call, 0 when more are due.

        A partition that cannot be compacted is left out from then on, is told by `uncleanable`
        and tried again later: after damage when its files have changed, else after a while.
        """
        now_ms = self._clock.now_ms() if now_ms is None else now_ms
        due: list[tuple[float, PartitionName]] = []
        listing: OSError | None = None
        try:
            for name, config in self._partitions.all_partitions():
                if config.compacts and not self._is_left_out(name):
                    with contextlib.suppress(StoreClosed, UnknownTopic):
                        ratio = self._dirty_ratio(name, now_ms)
                        if ratio is not None:
                            due.append((ratio, name))
        except OSError as error:  # of a topic whose file cannot be read
            listing = error
        if due:
            self._compact(max(due)[1], now_ms)
        if listing is not None:
            raise listing
        if not due:
            return _CLEANER_TICK_S
        return 0.0 if len(due) > 1 else _CLEANER_TICK_S

    def _is_left_out(self, name: PartitionName) -> bool:
        known = self._uncleanable.get(name)
        if known is None:
            return False
        if known.retry_ms is not None:
            return self._clock.monotonic_ms() < known.retry_ms
        with contextlib.suppress(SegmentlogError, OSError):
            return self._partitions.open_partition(*name).generation == known.generation
        return True

    def _dirty_ratio(self, name: PartitionName, now_ms: int) -> float | None:
        """How dirty a partition is that is due; None for one that is not."""
        try:
            partition = self._partitions.open_partition(*name)
            return partition.dirty_ratio() if partition.compaction_due(now_ms=now_ms) else None
        except Exception as error:
            if isinstance(error, StoreClosed | UnknownTopic):
                raise
            self._leave_out(name, error)
            return None

    def _compact(self, name: PartitionName, now_ms: int) -> None:
        try:
            with contextlib.suppress(StoreClosed, UnknownTopic, Stopped):
                self._partitions.open_partition(*name).compact(
                    now_ms=now_ms, buffer_bytes=self.cleaner_buffer_bytes, pace=self._pace
                )
            self._uncleanable.pop(name, None)
        except Exception as error:
            self._leave_out(name, error)

    def _pace(self, size_bytes: int) -> None:
        wait_s = self._throttle.wait_s(size_bytes)
        if self._cleaner is None:
            time.sleep(wait_s)
            return
        while self._cleaner.pause(wait_s) is False and wait_s > 0:
            wait_s = self._throttle.wait_s(0)
        if self._cleaner.pause(0):
            raise Stopped

    def _leave_out(self, name: PartitionName, error: Exception) -> None:
        known = self._uncleanable.get(name)
        pause_s = min(2 * known.pause_s, _RETRY_MAX_S) if known is not None else _RETRY_MIN_S
        retry_ms = None if isinstance(error, CorruptBatch) else self._clock.monotonic_ms() + int(pause_s * 1000)
        generation = -1
        with contextlib.suppress(SegmentlogError, OSError):
            partition = self._partitions.open_partition(*name)
            generation = partition.generation
            partition.note_uncleanable(str(error))
        if known is None or known.why != str(error):
            logger.warning("%s/%d: cannot be compacted: %s", *name, error)
        self._uncleanable[name] = _Uncleanable(str(error), generation, retry_ms, pause_s)

    def uncleanable(self) -> dict[PartitionName, str]:
        """Partitions that compaction leaves alone for now, and why."""
        return {name: one.why for name, one in list(self._uncleanable.items())}

    # ------------------------------------------------------------ scrubbing

    def scrub_tick(self, now_ms: int | None = None) -> float:
        """Check as many bytes of sealed segments as the budget allows by now (monotonic); seconds until the next."""
        if self._scrubber is None:
            raise InvalidConfig("scrub_bytes_per_s", None, "a number of bytes a second, given when the store is opened")
        return self._scrubber.tick(self._clock.monotonic_ms() if now_ms is None else now_ms)

    def scrub_report(self) -> ScrubReport:
        """What the scrubber found so far. Empty while scrubbing is off."""
        return ScrubReport() if self._scrubber is None else self._scrubber.report()

    # ------------------------------------------------------------ all of it

    def health(self) -> dict[str, str]:
        """Work that keeps failing, and partitions that cannot be compacted."""
        problems = self._workers.errors()
        there: set[PartitionName] | None = None
        if self._troubles:
            with contextlib.suppress(OSError):
                there = {name for name, _ in self._partitions.all_partitions()}
        for (what, (topic, number)), why in list(self._troubles.items()):
            if there is not None and (topic, number) not in there and topic != OFFSETS_TOPIC:
                self._troubles.pop((what, PartitionName(topic, number)), None)  # deleted since
                continue
            problems[f"{topic}/{number}"] = f"cannot be {what}: {why}"
        for (topic, number), why in self.uncleanable().items():
            problems[f"{topic}/{number}"] = f"cannot be compacted: {why}"
        return problems

    def close(self) -> None:
        """End the threads, within a second."""
        self._workers.stop()
        if self._scrubber is not None:
            self._scrubber.close()


def _look_again_s(config: TopicConfig) -> float:
    """How long until a topic may have something to delete or to roll, at the earliest worth a look."""
    limits_ms = [config.segment_ms]
    if config.deletes:
        limits_ms += [config.retention_ms] if config.retention_ms != UNLIMITED else []
        limits_ms += [config.retention_closed_ms] if config.retention_closed_ms is not None else []
    if config.compacts:
        limits_ms.append(config.max_compaction_lag_ms)
    return min(max(min(limits_ms) / 4000, _RETENTION_TICK_MIN_S), _RETENTION_TICK_MAX_S)
