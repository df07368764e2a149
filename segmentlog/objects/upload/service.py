"""Shipping as a store does it by itself: a thread that ticks, once an interval or when somebody waits."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from typing import Final

import msgspec

from segmentlog.arguments import as_int, as_patterns
from segmentlog.defaults import SHIP_INTERVAL_MS
from segmentlog.errors import InvalidConfig, PartitionFailed, SegmentlogError, ShippingRefused, UnknownTopic
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.ownership.claim import end, unbind
from segmentlog.objects.tier.recall import bring_all_back
from segmentlog.objects.upload.ship_log import ShipLog
from segmentlog.objects.upload.shipper import Progress, ShippedNow, Shipper
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.grant_file import read_grant
from segmentlog.storage.watch import Watch
from segmentlog.topics.background_threads import Worker
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_STANDBY_S: Final = 2.0
"""Another process ships: it is looked so often whether it still does."""
_WATCH_S: Final = 0.5
_COUNT_S: Final = 0.05
"""So often it is counted what waits, where a number of bytes is not to be exceeded."""
_AHEAD_S: Final = 0.005
"""A turn begins so much early, for what it takes beside its requests: nothing waits longer than for these."""
_PAUSE_MIN_S: Final = 0.0005
_CLOSING_S: Final = 1.0
"""Closing waits at most so long for each thread, and then for uploads that are pending."""
_CLOSING_PAUSE_S: Final = 0.02
_INTERVAL_MAX_MS: Final = 86_400_000


class ShippingStatus(msgspec.Struct, frozen=True):
    """How far a store is shipped, as the process knows that ships it.

    ``lag_bytes`` were appended since the last turn, ``lag_s`` ago everything was shipped that was on disk then.
    ``error``: what keeps it, or some partition, from being shipped; empty when nothing does.
    """

    url: str
    is_owner: bool
    shipped_ms: int
    lag_bytes: int
    lag_s: float
    error: str


class Shipping:
    """How a store is shipped from this process. Thread-safe; see docs/replicate.md.

    Of several processes that are to ship a store one does; another takes its place when it is gone.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._run: _Run | None = None

    @property
    def url(self) -> str | None:
        """Where this process ships it to by itself; None when it does not."""
        return None if self._run is None else self._run.shipper.bucket.url

    def begin(
        self,
        url: str,
        *,
        topics: Iterable[str] = (),
        interval_ms: int = SHIP_INTERVAL_MS,
        max_bytes: int | None = None,
        bytes_per_s: int | None = None,
        threads: bool = True,
    ) -> None:
        """Ship it from now on, every ``interval_ms`` and as soon as ``max_bytes`` are new; without threads by `tick`.

        ``topics`` are names and patterns, none for those of the last time, at first all; ``bytes_per_s``
        limits what is put. Raises `InvalidConfig`, `ReadOnlyStore`.
        """
        if self._run is not None:
            raise InvalidConfig("ship", url, f"nothing more: it is shipped to {self.url} already")
        self._run = _Run(
            self._topics, url, wanted=topics, interval_ms=interval_ms, max_bytes=max_bytes, bytes_per_s=bytes_per_s,
            threads=threads,
        )  # fmt: skip
        self._topics.ship_signals.is_starting = threads
        self._run.ensure_running()

    def tick(self, now_ms: int | None = None) -> float:
        """One turn; seconds until the next. Raises `ObjectStoreError`, `StoreFenced`, `ShippingRefused`.

        And `InvalidConfig` where nobody began to ship it.
        """
        if self._run is None:
            raise InvalidConfig("ship", None, "a URL, given when the store is opened")
        return self._run.tick(now_ms)

    def ship(
        self, url: str, *, topics: Iterable[str] = (), bytes_per_s: int | None = None, progress: Progress | None = None
    ) -> ShippedNow:
        """Ship all that was appended here, or is on disk; returns once it lies there. Raises as `tick`.

        ``progress`` is told (bytes that were put, bytes in all), which grow with what is appended meanwhile.
        """
        if self._run is not None and self.url in (url, open_bucket(url).url):
            wanted, known = as_patterns("topics", topics), self._run.shipper.wanted
            if wanted and wanted != known:
                why = f"those that this process ships there anyway: {', '.join(known) or 'all'}"
                raise InvalidConfig("topics", topics, why)
            _flush(self._topics)
            return self._run.shipper.ship(progress)
        run = _Run(self._topics, url, wanted=topics, bytes_per_s=bytes_per_s, threads=False, goes_on=False)
        try:
            _flush(self._topics)
            return run.shipper.ship(progress)
        finally:
            run.close()

    def end(self) -> str | None:
        """Ship no more, for good: nothing here asks the object store for offsets then. Where it was shipped to.

        What lies there stays; whoever takes it over is told that this store went on. What lies there alone is brought
        back first: nobody there knows any more that somebody needs it. None when it was not shipped. Raises
        `ObjectStoreError`, `DiskFull`, `ReadOnlyStore`, `ShippingRefused` while somebody else ships it; it is shipped
        still then.
        """
        topics = self._topics
        topics.check_writable("end shipping it")
        self.close()
        # Beside somebody who ships what came back would leave again, and grants that are released be made anew.
        lease = topics.ship_signals.become_shipper()
        if lease is None:
            who = _who_holds(topics.fs, topics.ship_signals.path)
            raise ShippingRefused(topics.path, f"{who} ships this store; stop that first, then end shipping")
        try:
            binding = read_binding(topics.fs, topics.path)
            if binding is None:
                _clean_up(topics)
                return None
            bring_all_back(topics, is_fenced=bool(binding.fenced))
            end(topics, open_bucket(binding.url))
        finally:
            topics.ship_signals.resign(lease)
        return binding.url

    def status(self) -> ShippingStatus | None:
        """How far it is, as this process knows; None when it does not ship."""
        return None if self._run is None else self._run.status()

    def health(self) -> dict[str, str]:
        """What keeps it from shipping; empty when nothing does."""
        if self._run is None:
            return {}
        shipper = self._run.shipper
        problems = {f"ship {name}": why for name, why in (shipper.troubles | shipper.stuck).items()}
        return problems if shipper.error is None else problems | {"ship": shipper.error}

    def close(self) -> None:
        """Ship once more what there is, if the object store can be reached, and no more then."""
        run, self._run = self._run, None
        if run is not None:
            run.close()


def _flush(topics: Topics) -> None:
    """Have all that was appended here on disk; but of those that failed, which keep no other from being shipped."""
    for partition in topics.opened_partitions():
        with contextlib.suppress(PartitionFailed, UnknownTopic):  # the shipper says so; deleted meanwhile
            partition.flush()


def _who_holds(fs: FileSystem, path: str) -> str:
    """Who has a file locked, as far as the system says it."""
    with contextlib.suppress(OSError, ValueError):
        found = fs.stat(path)
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in read_file(fs, "/proc/locks").decode().splitlines():
            words = line.split()  # 5: FLOCK  ADVISORY  WRITE 29996 fe:00:11149407 0 EOF
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == device and int(words[4]) > 0:
                return "this process itself" if int(words[4]) == os.getpid() else f"process {words[4]}"
    return "another process"


def _clean_up(topics: Topics) -> None:
    """Nothing asks for grants in a store that is bound to nothing, or lies elsewhere alone: whoever left it so."""
    if _has_grants(topics):
        logger.warning("%s: it was not shipped, and its logs asked for grants; they need none any more", topics.path)
        unbind(topics)
    bring_all_back(topics, is_fenced=True)


def _has_grants(topics: Topics) -> bool:
    for name, _ in list(topics.all_partitions()):
        with contextlib.suppress(UnknownTopic):
            handle = topics.open_partition(name.topic, name.number).handle
            if read_grant(handle.fs, handle.folder) is not None:
                return True
    return False


class _Run:
    """Shipping to one place, with threads or without."""

    def __init__(
        self,
        topics: Topics,
        url: str,
        *,
        wanted: Iterable[str] = (),
        interval_ms: int = SHIP_INTERVAL_MS,
        max_bytes: int | None = None,
        bytes_per_s: int | None = None,
        threads: bool = True,
        goes_on: bool = True,
    ) -> None:
        topics.check_writable("ship it")
        interval_ms = as_int("ship_interval_ms", interval_ms, 1, _INTERVAL_MAX_MS)
        if max_bytes is not None:
            max_bytes = as_int("ship_bytes", max_bytes, 1)
        self._topics = topics
        self._interval_s = interval_ms / 1000
        self._max_bytes = max_bytes
        self.shipper = Shipper(topics, open_bucket(url, bytes_per_s), wanted=wanted, interval_ms=interval_ms)
        self._log = self._new_log() if goes_on else None
        self._ticked_s = 0.0
        self._watch: Watch | None = None
        self._worker = Worker("ship", self.tick) if threads else None
        self._watcher = Worker("ship-wanted", self._watch_tick) if threads else None
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """In a forked child: the parent ships, and logs it."""
        self._watch = None
        self._log = self._new_log() if self._log is not None else None

    def _new_log(self) -> ShipLog:
        return ShipLog(self._topics.path, self.shipper.bucket.url)

    def ensure_running(self) -> None:
        """Start the threads that this process is to have and has not."""
        if self._worker is not None:
            self._topics.ship_signals.wake_by(self._worker.wake)
        for worker in (self._worker, self._watcher):
            if worker is not None:
                worker.ensure_running()

    def tick(self, now_ms: int | None = None) -> float:
        """One turn; seconds until the next. Raises what `Shipper.tick` does."""
        began_s = self._ticked_s = time.monotonic()
        self._ship(now_ms)
        if not self.shipper.is_owner:
            return _STANDBY_S
        ahead_s = min(_AHEAD_S, self._interval_s / 20)
        return max(began_s + self._interval_s - ahead_s - time.monotonic(), _PAUSE_MIN_S)

    def _ship(self, now_ms: int | None = None) -> ShippedNow:
        shipper = self.shipper
        try:
            done = shipper.tick(now_ms)
        except Exception:
            if self._log is not None:
                self._log.note_failure()
            raise
        if self._log is not None:
            self._log.note_cycle(is_owner=shipper.is_owner, put=done.put, records=done.records, stuck=shipper.stuck)
        return done

    def _watch_tick(self) -> float:
        """Wake the one that ticks when somebody waits for it, or when there is much."""
        assert self._worker is not None
        if self._watch is None:
            self._watch = Watch()
        if not self._watch.add(self._topics.ship_signals.path):
            return _COUNT_S  # nobody has ever shipped it; in a moment this process does
        is_wanted = self._watch.wait(_WATCH_S if self._max_bytes is None else _COUNT_S) or self._is_much()
        if is_wanted and self.shipper.is_owner:
            self._worker.wake()
        return 0.0

    def _is_much(self) -> bool:
        return self._max_bytes is not None and self.shipper.unshipped_bytes >= self._max_bytes

    def status(self) -> ShippingStatus:
        """How far it is."""
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
        """Ship what is appended by now, as far as `_CLOSING_S` and the object store allow it, and no more then."""
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
            except (SegmentlogError, OSError) as error:
                logger.warning("%s: what was appended last is not shipped: %s", self._topics.path, error)
        if self._log is not None:
            self._log.end(is_whole=not missing)
        self.shipper.close()

    def _ship_the_rest(self) -> str:
        """Ship what is appended by now, in `_CLOSING_S` at most; return what is missing, or an empty string.

        A run that ships once only has one cycle. Raises what `tick` does.
        """
        ends_s = time.monotonic() + (_CLOSING_S if self._log is not None else 0.0)
        ends: dict[Where, int] | None = None
        while True:
            _flush(self._topics)  # in each round: a cycle opens partitions to which only other processes appended
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
