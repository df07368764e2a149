"""Background work of a store. Each kind of work is a public tick, which a thread calls if ``threads`` is set.

flush         syncs partitions as the fsync policies of their topics require; unmaps deleted segments
retention     deletes old segments of all topics, one process at a time, and offsets of expired groups
cleaner       compacts the partitions that are due, the dirtiest first
transactions  ends transactions of dead processes; see `segmentlog.transactions.transaction_coordinator`
scrub         reads sealed segments again, if that is enabled
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from segmentlog.clock import Clock
from segmentlog.config import CLEANER_BUFFER_BYTES, TopicConfig
from segmentlog.errors import InvalidConfig, StoreClosed, UnknownTopic
from segmentlog.format.file_names import OFFSETS_TOPIC
from segmentlog.inspection.scrubber import Scrubber, ScrubReport
from segmentlog.log.handle import Handle
from segmentlog.policy.retention import is_bounded
from segmentlog.quantities import UNLIMITED
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.topics.background_threads import BackgroundThread, BackgroundThreads
from segmentlog.topics.compaction_scheduler import Compactor, PartitionName, PartitionSource

logger = logging.getLogger("segmentlog")

_FLUSH_TICK_MAX_S = 0.25
_FLUSH_TICK_MIN_S = 0.001
_FIRST_PAUSE_S = 10.0
"""Pause before the first scan. A short-lived process leaves retention to other processes, except for segments that it
has sealed.
"""
_RETENTION_TICK_MIN_S = 1.0
_RETENTION_TICK_MAX_S = 30.0
_SLICE_S = 0.05
"""A tick of retention ends after this time. The next tick continues with the remaining partitions."""
_SLICE_PAUSE_S = 0.2


class BackgroundWork:
    """The background work of one store. Any thread may call a tick, even while the store's threads call it."""

    def __init__(
        self,
        partitions: PartitionSource,
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
        self._partitions = partitions
        self._clock = clock
        self._scrubber = scrubber
        self._expire = expire
        self._compactor = Compactor(partitions, clock, cleaner_buffer_bytes, cleaner_io_bytes_per_s)
        self._newly_sealed: set[PartitionName] = set()
        self._scan_mutex = fork_safety.lock(self, "_scan_mutex")
        self._scan: Iterator[tuple[PartitionName, TopicConfig]] | None = None
        self._scan_due_ms = 0
        self._scan_pause_s = _RETENTION_TICK_MAX_S
        self._errors: dict[tuple[str, PartitionName], str] = {}
        """Errors by kind of work and partition. An error is logged once and does not stop the work for other
        partitions."""
        self._threads = BackgroundThreads()
        self._flusher: BackgroundThread | None = None
        self._retainer: BackgroundThread | None = None
        self._cleaner: BackgroundThread | None = None
        if threads and not read_only:
            # These ticks do not raise the error of one partition: a tick that raises is called less and less often, and
            # all other partitions would have to wait.
            self._flusher = self._threads.add("flush", lambda: self._flush(None)[0])
            self._retainer = self._threads.add("retention", lambda: self._continue_scan(None)[0], _FIRST_PAUSE_S)
            self._cleaner = self._threads.add("cleaner", self.cleaner_tick, _FIRST_PAUSE_S)
            self._compactor.worker = self._cleaner
            if finish_transactions is not None:
                self._threads.add("transactions", finish_transactions)
        if threads and scrubber is not None:
            self._threads.add("scrub", self.scrub_tick)
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        """Start a new scan in a forked child: the thread that runs the current scan exists only in the parent."""
        self._newly_sealed, self._scan, self._scan_due_ms = self._newly_sealed.copy(), None, 0

    @property
    def has_threads(self) -> bool:
        """Return whether threads call the ticks that write."""
        return self._flusher is not None

    def ensure_running(self) -> None:
        """Start the threads that do not run in this process, within a moment."""
        self._threads.ensure_running()

    def flush_soon(self) -> None:
        """Wake the flusher: a partition needs a flush earlier than the flusher has planned."""
        if self._flusher is not None:
            self._flusher.ensure_running()
            self._flusher.wake()

    def on_segment_sealed(self, handle: Handle) -> None:
        """Schedule retention and compaction for a partition in which a segment was sealed."""
        if self._retainer is not None and self._cleaner is not None:
            self._newly_sealed.add(PartitionName(handle.topic, handle.partition))
            if is_bounded(handle.config):
                self._retainer.wake()
            if handle.config.compacts:
                self._cleaner.wake()

    # ------------------------------------------------------------ flush

    def flush_tick(self, now_ms: int | None = None) -> float:
        """Sync the partitions whose fsync policy requires it now; return the seconds until the next call.

        An error in a partition does not stop the call: it raises the first error at the end, and `health` reports all
        errors.
        """
        pause_s, first = self._flush(now_ms)
        if first is not None:
            raise first
        return pause_s

    def _flush(self, now_ms: int | None) -> tuple[float, Exception | None]:
        first: Exception | None = None
        pause_s = _FLUSH_TICK_MAX_S
        self._partitions.close_moved_partitions()
        opened = self._partitions.opened_partitions()
        for partition in opened:
            policy = partition.config.fsync
            if policy.kind == "ms":
                # Four checks for each interval, so that no record stays unsynced for longer than one interval.
                pause_s = min(pause_s, max(policy.amount / 4000, _FLUSH_TICK_MIN_S))
        for partition in opened:
            name = PartitionName(partition.topic, partition.number)
            try:
                partition.unmap_deleted_segments()
                if partition.sync_due(slack_ms=int(pause_s * 1000) + 1, now_ms=now_ms):
                    partition.flush()
                self._clear_error("flushed", name)
            except (StoreClosed, UnknownTopic):
                self._clear_error("flushed", name)
            except Exception as error:
                first = first or error
                self._record_error("flushed", name, error)
        return pause_s, first

    def _record_error(self, what: str, name: PartitionName, error: Exception) -> None:
        if self._errors.get((what, name)) != str(error):
            self._errors[what, name] = str(error)
            logger.warning("%s/%d: cannot be %s: %s; trying again", *name, what, error)

    def _clear_error(self, what: str, name: PartitionName) -> None:
        if self._errors:
            self._errors.pop((what, name), None)

    # ------------------------------------------------------------ retention

    def retention_tick(self, now_ms: int | None = None) -> float:
        """Apply retention to partitions with a newly sealed segment, and continue the scan of all partitions.

        The scan stops at a time limit; the next call continues it.
        ``now_ms`` is the wall clock. Returns the seconds until the next call. An error in a partition does not stop the
        call: it raises the first error at the end, and `health` reports all errors.
        """
        pause_s, first = self._continue_scan(now_ms)
        if first is not None:
            raise first
        return pause_s

    def _continue_scan(self, now_ms: int | None) -> tuple[float, Exception | None]:
        """Continue the scan of all partitions. All callers share one scan."""
        with self._scan_mutex:
            return self._retain_all(now_ms)

    def _retain_all(self, now_ms: int | None) -> tuple[float, Exception | None]:
        steady_ms = self._clock.steady_ms() if now_ms is None else now_ms
        now_ms = self._clock.now_ms() if now_ms is None else now_ms
        first: Exception | None = None
        listing: OSError | None = None
        offsets = PartitionName(OFFSETS_TOPIC, 0)
        try:
            with contextlib.suppress(StoreClosed):
                self._expire(steady_ms)
            self._clear_error("cleared of expired offsets", offsets)
        except Exception as error:
            first = error
            self._record_error("cleared of expired offsets", offsets, error)
        while self._newly_sealed:
            first = self._retain(self._newly_sealed.pop(), now_ms) or first
        if self._scan is None and not 0 < self._scan_due_ms - now_ms <= _RETENTION_TICK_MAX_S * 1000:
            # The scan is due. Or the clock was set back, and without this check the scan would be due much later.
            self._scan, self._scan_pause_s = self._partitions.all_partitions(), _RETENTION_TICK_MAX_S
        # If a partition is open, handle it even if its topic has no retention: a trim may have left files to delete.
        # Do not open a partition for that.
        opened = {PartitionName(log.topic, log.number) for log in self._partitions.opened_partitions()}
        ends_s = time.monotonic() + _SLICE_S
        while self._scan is not None:
            name = config = None
            try:
                name, config = next(self._scan, (None, None))
            except OSError as error:  # the file of a topic cannot be read; the other topics were handled
                if is_interrupt(error):
                    raise
                listing = error
            if name is None or config is None:
                self._scan, self._scan_due_ms = None, now_ms + int(self._scan_pause_s * 1000)
            elif is_bounded(config) or config.compacts or name in opened:
                self._scan_pause_s = min(self._scan_pause_s, _min_pause_s(config))
                first = self._retain(name, now_ms) or first
            if time.monotonic() >= ends_s:
                break
        if listing is not None:
            raise listing
        pause_s = _SLICE_PAUSE_S if self._scan is not None else max((self._scan_due_ms - now_ms) / 1000, 0.001)
        return pause_s, first

    def _retain(self, name: PartitionName, now_ms: int) -> Exception | None:
        try:
            with contextlib.suppress(StoreClosed, UnknownTopic):
                partition = self._partitions.open_partition(*name)
                if not partition.handle.read_only:  # else it belongs to another user, whose processes apply retention
                    partition.apply_retention(now_ms=now_ms)
            self._clear_error("cleared of old segments", name)
        except Exception as error:
            self._record_error("cleared of old segments", name, error)
            return error
        return None

    # ------------------------------------------------------------ compaction

    def cleaner_tick(self, now_ms: int | None = None) -> float:
        """Compact the dirtiest partition that is due, if any; return seconds until the next call, 0 if more are due.

        See `Compactor.tick`: a partition that cannot be compacted is skipped for a while, and `health` reports why.
        """
        return self._compactor.tick(now_ms)

    # ------------------------------------------------------------ scrubbing

    def scrub_tick(self, now_ms: int | None = None) -> float:
        """Check as many bytes of sealed segments as the rate limit allows. Return the seconds until the next call."""
        if self._scrubber is None:
            raise InvalidConfig("scrub_bytes_per_s", None, "open the store with a number of bytes per second")
        return self._scrubber.scrub(self._clock.monotonic_ms() if now_ms is None else now_ms)

    def scrub_report(self) -> ScrubReport:
        """Return what the scrubber has found so far. Empty while scrubbing is off."""
        return ScrubReport() if self._scrubber is None else self._scrubber.report()

    # ------------------------------------------------------------ health, closing

    def health(self) -> dict[str, str]:
        """Return the errors of work that keeps failing, and why partitions cannot be compacted, by name."""
        problems = self._threads.errors()
        existing: set[PartitionName] | None = None
        if self._errors:
            with failures_ignored():
                existing = {name for name, _ in self._partitions.all_partitions()}
        for (what, (topic, number)), why in self._errors.copy().items():
            if existing is not None and (topic, number) not in existing and topic != OFFSETS_TOPIC:
                self._errors.pop((what, PartitionName(topic, number)), None)  # the partition was deleted meanwhile
                continue
            problems[f"{topic}/{number}"] = f"cannot be {what}: {why}"
        for (topic, number), why in self._compactor.uncleanable().items():
            problems[f"{topic}/{number}"] = f"cannot be compacted: {why}"
        return problems

    def close(self) -> None:
        """Stop the threads, within a second."""
        self._threads.stop()
        if self._scrubber is not None:
            self._scrubber.close()


def _min_pause_s(config: TopicConfig) -> float:
    """Return the pause between two scans that a topic needs: a quarter of its shortest time limit, within bounds."""
    limits_ms = [config.segment_ms]
    if config.deletes:
        limits_ms += [config.retention_ms] if config.retention_ms != UNLIMITED else []
        limits_ms += [config.retention_closed_ms] if config.retention_closed_ms is not None else []
    if config.compacts:
        limits_ms.append(config.max_compaction_lag_ms)
    return min(max(min(limits_ms) / 4000, _RETENTION_TICK_MIN_S), _RETENTION_TICK_MAX_S)
