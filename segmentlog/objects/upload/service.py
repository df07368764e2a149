"""Ship an open store in the background: a thread runs a cycle at each interval and whenever an appender waits."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from segmentlog.arguments import as_int, as_patterns
from segmentlog.defaults import HAND_OVER_SHIP_MS, HAND_OVER_WAIT_MS, SHIP_INTERVAL_MS
from segmentlog.errors import (
    InvalidConfig,
    PartitionFailed,
    SegmentlogError,
    ShippingRefused,
    StoreFenced,
    UnknownTopic,
)
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.ownership.claim import stop_shipping, unbind_store
from segmentlog.objects.tier.recall import recall_all
from segmentlog.objects.upload.hand_over_request import HAND_OVER_PAUSE_S, HandedOver, HandOverRequest
from segmentlog.objects.upload.ship_log import ShipLog
from segmentlog.objects.upload.shipper import Progress, Shipper, ShipResult
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.grant_file import read_grant
from segmentlog.storage.watch import Watch
from segmentlog.topics.background_threads import BackgroundThread
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_STANDBY_S: Final = 2.0
"""Interval at which a process that stands by checks whether another process still ships the store."""
_WATCH_S: Final = 0.5
_COUNT_S: Final = 0.05
"""Interval at which unshipped bytes are counted if their number is limited."""
_AHEAD_S: Final = 0.005
"""A cycle starts this much early, because its local work comes before the request."""
_PAUSE_MIN_S: Final = 0.0005
_CLOSING_S: Final = 1.0
"""Longest wait for each thread when shipping stops, and then for pending uploads."""
_CLOSING_PAUSE_S: Final = 0.02
_INTERVAL_MAX_MS: Final = 86_400_000


class ShippingStatus(msgspec.Struct, frozen=True):
    """Progress of the shipping of a store, from the cycles of this process.

    is_owner    whether this process ships the store
    shipped_ms  wall-clock time of the last cycle that shipped everything on the local disk; 0 before the first of these
    lag_bytes   bytes appended since the last cycle
    lag_s       seconds since ``shipped_ms``; -1 before the first such cycle
    error       why the store, or a partition, cannot be shipped; empty if nothing is wrong
    """

    url: str
    is_owner: bool
    shipped_ms: int
    lag_bytes: int
    lag_s: float
    error: str


class ShippingService:
    """Ships an open store from this process; see docs/replicate.md. Thread-safe.

    If several processes start shipping the same store, only one ships it. When that process ends, another takes over.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._run: _ShippingRun | None = None

    @property
    def url(self) -> str | None:
        """The URL that this process ships to in the background; None if it does not."""
        return None if self._run is None else self._run.shipper.bucket.url

    def start(
        self,
        url: str,
        *,
        topics: Iterable[str] = (),
        interval_ms: int = SHIP_INTERVAL_MS,
        max_bytes: int | None = None,
        bytes_per_s: int | None = None,
        threads: bool = True,
    ) -> None:
        """Ship the store from now on, every ``interval_ms`` and whenever ``max_bytes`` were appended.

        topics       names and patterns of the topics to ship; empty to keep those of the last start, at first all
        bytes_per_s  limit of the upload bandwidth
        threads      False: run no threads; the caller calls `run_cycle`

        Raise `InvalidConfig` for an invalid argument, or if shipping was already started; `ReadOnlyStore`.
        """
        if self._run is not None:
            raise InvalidConfig("ship", url, f"None, because this process already ships the store to {self.url}")
        self._run = _ShippingRun(
            self._topics, url, topic_patterns=topics, interval_ms=interval_ms, max_bytes=max_bytes,
            bytes_per_s=bytes_per_s, threads=threads,
        )  # fmt: skip
        self._topics.ship_signals.is_starting = threads
        self._run.ensure_running()

    def set_heartbeat(self, heartbeat_ms: int) -> None:
        """Publish the manifest at least every ``heartbeat_ms``, for a standby that cannot reach this store's server."""
        if self._run is not None:
            self._run.shipper.heartbeat_ms = heartbeat_ms

    def run_cycle(self, now_ms: int | None = None) -> float:
        """Run one cycle, and return the seconds until the next.

        Raise `ObjectStoreError`, `StoreFenced`, `ShippingRefused`, and `InvalidConfig` if shipping was not started.
        """
        if self._run is None:
            raise InvalidConfig("ship", None, "a URL, given when the store is opened")
        return self._run.run_cycle(now_ms)

    def ship(
        self, url: str, *, topics: Iterable[str] = (), bytes_per_s: int | None = None, progress: Progress | None = None
    ) -> ShipResult:
        """Sync what this process appended, ship all that is on disk, and return when it is uploaded.

        ``progress`` is called with (bytes uploaded, bytes in total). The total grows with appends during the call.
        Raise the errors of `run_cycle`.
        """
        if self._run is not None and self.url in (url, open_bucket(url).url):
            patterns, current = as_patterns("topics", topics), self._run.shipper.topic_patterns
            if patterns and patterns != current:
                why = f"the topics that this process already ships to it: {', '.join(current) or 'all'}"
                raise InvalidConfig("topics", topics, why)
            _sync_partitions(self._topics)
            return self._run.shipper.ship(progress)
        run = _ShippingRun(
            self._topics, url, topic_patterns=topics, bytes_per_s=bytes_per_s, threads=False, is_background=False
        )  # fmt: skip
        try:
            _sync_partitions(self._topics)
            return run.shipper.ship(progress)
        finally:
            run.close()

    def stop_permanently(self) -> str | None:
        """End shipping, remove all offset grants, and return the URL; None if the store was not shipped.

        The objects are kept. Later takeovers are refused, because this store may append more. Evicted segments are
        recalled first: after the end, garbage collection may delete their objects.

        Raise `ShippingRefused` while another process ships the store, `ObjectStoreError`, `DiskFull`, `ReadOnlyStore`.
        After an error, the store is still shipped.
        """
        topics = self._topics
        topics.check_writable("end shipping it")
        self.close()
        # The lease keeps out other shippers, which would evict recalled segments and create removed grants again.
        lease = topics.ship_signals.acquire_lease()
        if lease is None:
            holder = _lock_holder(topics.fs, topics.ship_signals.path)
            raise ShippingRefused(topics.path, f"{holder} ships this store; stop that process first, then end shipping")
        try:
            binding = read_binding(topics.fs, topics.path)
            if binding is None:
                _remove_leftovers(topics)
                return None
            recall_all(topics, is_fenced=bool(binding.fenced))
            stop_shipping(topics, open_bucket(binding.url))
        finally:
            topics.ship_signals.release_lease(lease)
        return binding.url

    def hand_over(self, *, wait_ms: int = HAND_OVER_WAIT_MS, ship_ms: int = HAND_OVER_SHIP_MS) -> HandedOver:
        """Hand the store over to a standby: stop appends in all processes, ship the rest, and wait for a new owner.

        wait_ms  limit of the wait for a new owner, and before that for the upload of the rest
        ship_ms  limit of the upload of everything else, before appends are stopped

        The process that ships the store takes the steps; this process does if no other ships it. Return once the store
        is fenced. The new owner continues at the log end offsets: no record is lost and no offset is left out.

        Raise `ShippingRefused` with the reason if the store was not handed over; this machine is still its owner then.
        Raise `StoreFenced` if it was not the owner before, `InvalidConfig`, `ReadOnlyStore`, `ObjectStoreError`.
        """
        self._topics.check_writable("hand it over")
        wait_ms = as_int("wait_ms", wait_ms, 1, _INTERVAL_MAX_MS)
        ship_ms = as_int("ship_ms", ship_ms, 1, _INTERVAL_MAX_MS)
        run = self._run
        if run is not None:
            return HandOverRequest(self._topics, run.shipper).run(wait_ms, ship_ms)
        binding = read_binding(self._topics.fs, self._topics.path)
        if binding is None:
            raise ShippingRefused(self._topics.path, "it is not shipped, so that no other machine can take it over")
        run = _ShippingRun(self._topics, binding.url, threads=False, is_background=False)
        try:
            return HandOverRequest(self._topics, run.shipper).run(wait_ms, ship_ms)
        finally:
            run.shipper.close()

    def status(self) -> ShippingStatus | None:
        """Return the progress of shipping; None if this process does not ship."""
        return None if self._run is None else self._run.status()

    def health(self) -> dict[str, str]:
        """Return what prevents shipping, as {"ship" or "ship topic/partition": reason}; empty if nothing does."""
        if self._run is None:
            return {}
        shipper = self._run.shipper
        problems = {f"ship {name}": why for name, why in (shipper.eviction_errors | shipper.stuck).items()}
        return problems if shipper.error is None else problems | {"ship": shipper.error}

    def close(self) -> None:
        """Ship what is not shipped yet, if the object store can be reached; then stop shipping from this process."""
        run, self._run = self._run, None
        if run is not None:
            run.close()

    begin = start
    """Old name of `start`, kept as an alias."""
    end = stop_permanently
    """Old name of `stop_permanently`, kept as an alias."""


def _sync_partitions(topics: Topics) -> None:
    """Sync all partitions that this process appended to. Ignore failed ones: the others must be shipped."""
    for partition in topics.opened_partitions():
        with contextlib.suppress(PartitionFailed, UnknownTopic):  # the shipper reports the failure; deleted meanwhile
            partition.flush()


def _lock_holder(fs: FileSystem, path: str) -> str:
    """Return a description of the process that has locked a file, with its id if /proc/locks contains it."""
    with contextlib.suppress(OSError, ValueError):
        found = fs.stat(path)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in read_file(fs, "/proc/locks").decode().splitlines():
            fields = line.split()  # 5: FLOCK  ADVISORY  WRITE 29996 fe:00:11149407 0 EOF
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
                return "this process itself" if int(fields[4]) == os.getpid() else f"process {fields[4]}"
    return "another process"


def _remove_leftovers(topics: Topics) -> None:
    """Remove offset grants and recall evicted segments that a store still has although it is not shipped."""
    if _has_grants(topics):
        logger.warning("%s: removing offset grants, because the store is not shipped", topics.path)
        unbind_store(topics)
    recall_all(topics, is_fenced=True)


def _has_grants(topics: Topics) -> bool:
    for name, _ in list(topics.all_partitions()):
        with contextlib.suppress(UnknownTopic):
            handle = topics.open_partition(name.topic, name.number).handle
            if read_grant(handle.fs, handle.folder) is not None:
                return True
    return False


class _ShippingRun:
    """Ships a store to one bucket, on threads of its own or in calls of `run_cycle`."""

    def __init__(
        self,
        topics: Topics,
        url: str,
        *,
        topic_patterns: Iterable[str] = (),
        interval_ms: int = SHIP_INTERVAL_MS,
        max_bytes: int | None = None,
        bytes_per_s: int | None = None,
        threads: bool = True,
        is_background: bool = True,
    ) -> None:
        topics.check_writable("ship it")
        interval_ms = as_int("ship_interval_ms", interval_ms, 1, _INTERVAL_MAX_MS)
        if max_bytes is not None:
            max_bytes = as_int("ship_bytes", max_bytes, 1)
        self._topics = topics
        self._interval_s = interval_ms / 1000
        self._max_bytes = max_bytes
        bucket = open_bucket(url, bytes_per_s)
        self.shipper = Shipper(
            topics, bucket, topic_patterns=topic_patterns, interval_ms=interval_ms,
            grants_on_request=is_background and threads,
        )  # fmt: skip
        self._log = self._new_log() if is_background else None
        self._watch: Watch | None = None
        self._worker = BackgroundThread("ship", self.run_cycle) if threads else None
        self._watcher = BackgroundThread("ship-wanted", self._wait_for_requests) if threads else None
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """Drop the parent's threads in a forked child: they keep shipping and logging in the parent."""
        self._watch = None
        self._log = self._new_log() if self._log is not None else None

    def _new_log(self) -> ShipLog:
        return ShipLog(self._topics.path, self.shipper.bucket.url)

    def ensure_running(self) -> None:
        """Start the threads of this run that are not running."""
        if self._worker is not None:
            self._topics.ship_signals.set_wake_callback(self._worker.wake)
        for worker in (self._worker, self._watcher):
            if worker is not None:
                worker.ensure_running()

    def run_cycle(self, now_ms: int | None = None) -> float:
        """Run one cycle, and return the seconds until the next. Raise as `Shipper.run_cycle` does."""
        began_s = time.monotonic()
        self._ship(now_ms)
        if not self.shipper.is_owner:
            return _STANDBY_S
        if self.shipper.is_handing_over:
            return HAND_OVER_PAUSE_S
        ahead_s = min(_AHEAD_S, self._interval_s / 20)
        return max(began_s + self._interval_s - ahead_s - time.monotonic(), _PAUSE_MIN_S)

    def _ship(self, now_ms: int | None = None) -> ShipResult:
        shipper = self.shipper
        try:
            done = shipper.run_cycle(now_ms)
        except Exception:
            if self._log is not None:
                self._log.record_failure()
            raise
        if self._log is not None:
            self._log.record_cycle(is_owner=shipper.is_owner, put=done.put, records=done.records, stuck=shipper.stuck)
        return done

    def _wait_for_requests(self) -> float:
        """Wake the thread that runs cycles when a process requests a cycle, or when ``max_bytes`` are unshipped."""
        assert self._worker is not None
        if self._watch is None:
            self._watch = Watch()
        if not self._watch.add(self._topics.ship_signals.path):
            return _COUNT_S  # the file does not exist before the first cycle
        is_due = self._watch.wait(_WATCH_S if self._max_bytes is None else _COUNT_S) or self._has_max_bytes()
        if is_due and self.shipper.is_owner:
            self._worker.wake()
        return 0.0

    def _has_max_bytes(self) -> bool:
        return self._max_bytes is not None and self.shipper.unshipped_bytes >= self._max_bytes

    def status(self) -> ShippingStatus:
        """Return the progress of shipping."""
        shipper = self.shipper
        now_ms = self._topics.clock.now_ms()
        lag_s = max(now_ms - shipper.shipped_ms, 0) / 1000 if shipper.shipped_ms else -1.0
        return ShippingStatus(
            shipper.bucket.url,
            shipper.is_owner,
            shipper.shipped_ms,
            shipper.unshipped_bytes,
            lag_s,
            shipper.error or "; ".join(f"{name}: {why}" for name, why in shipper.stuck.items()),
        )

    def close(self) -> None:
        """Ship what was appended until now, for at most `_CLOSING_S`, if the object store can be reached; then stop."""
        self._topics.ship_signals.is_starting = False
        for worker in (self._worker, self._watcher):
            if worker is not None:
                worker.ask_to_stop()
        if self._watch is not None:
            self._watch.interrupt()
        for worker in (self._worker, self._watcher):
            if worker is not None:
                worker.join(_CLOSING_S)
        if self._watch is not None:
            self._watch.close()
        missing = "a cycle failed"
        if self.shipper.is_owner:
            try:
                missing = self._ship_the_rest()
                if missing and self._log is not None:
                    logger.warning(
                        "%s: not everything is shipped to %s: %s. It is on the local disk; the next process that"
                        " ships the store uploads it", self._topics.path, self.shipper.bucket.url, missing,
                    )  # fmt: skip
            except StoreFenced:  # it was logged when the fence was written; no later process can ship the rest
                missing = "another machine owns the store"
            except (SegmentlogError, OSError) as error:
                logger.warning(
                    "%s: the last appended records are not shipped: %s. They are on the local disk; the next process"
                    " that ships the store uploads them", self._topics.path, error,
                )  # fmt: skip
        if self._log is not None:
            self._log.log_end(is_whole=not missing)
        self.shipper.close()

    def _ship_the_rest(self) -> str:
        """Ship what was appended until now, for at most `_CLOSING_S`. Describe what is missing then, or return "".

        A run that is not in the background has one cycle only. Raise as `run_cycle` does.
        """
        ends_s = time.monotonic() + (_CLOSING_S if self._log is not None else 0.0)
        ends: dict[PartitionKey, int] | None = None
        while True:
            # Again in each cycle: a cycle opens partitions to which only other processes appended.
            _sync_partitions(self._topics)
            done = self._ship()
            ends = self.shipper.log_ends() if ends is None else ends
            offsets = self.shipper.count_unshipped(ends)
            is_hopeless = bool(self.shipper.stuck) and not done.pending
            if not (done.pending or done.waiting or offsets) or is_hopeless or time.monotonic() >= ends_s:
                break
            self.shipper.wait_for_upload(ends_s - time.monotonic())
            if not done.pending:
                time.sleep(_CLOSING_PAUSE_S)
        reasons = [f"{offsets} offsets are missing in the object store"] if offsets else []
        reasons += [f"{done.pending} uploads are pending"] if done.pending else []
        return "; ".join([*reasons, *(f"{name}: {why}" for name, why in done.waiting.items())])
