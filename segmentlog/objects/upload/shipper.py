"""Shipping a store: in each interval what is new goes into one object, and one conditional put says so.

Few bytes that are new are part of what that one puts.

look      which partitions have something new on disk (`looking`); segments to upload whole, pieces for the tail, and
          what is held back (`planning`)
upload    segments by threads of their own, over as many intervals as it takes (`segments`); the tail at once (`tails`)
put       the manifest, in the place of the one that was read or put last (`composing`, `root`)
tell      readers and waiters what is shipped, appenders how far they may go; delete what was condemned long ago
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from segmentlog.arguments import as_patterns
from segmentlog.defaults import SHIP_INTERVAL_MS
from segmentlog.errors import SegmentlogError, ShippingRefused
from segmentlog.format.manifest import Manifest, Owner, ShippedPartition
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket, ObjectChanged
from segmentlog.objects.local.partition_snapshot import is_wanted
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.upload_state import KnownPartitions
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.objects.ownership.binding import Binding, write_binding
from segmentlog.objects.ownership.claim import claim
from segmentlog.objects.tier.eviction import Evicting
from segmentlog.objects.upload.excluded_topics import release_unwanted
from segmentlog.objects.upload.manifest_builder import compose_topics, records_of, said, tails_of
from segmentlog.objects.upload.manifest_publisher import Learnt, Root
from segmentlog.objects.upload.plan import Interval, Planning
from segmentlog.objects.upload.segment_uploader import SegmentUploads
from segmentlog.objects.upload.store_files import StoreFiles
from segmentlog.objects.upload.store_scan import partitions_of
from segmentlog.objects.upload.tail_uploader import Tails
from segmentlog.storage import fork_safety
from segmentlog.storage.fork_safety import LockableFd
from segmentlog.topics.topic_registry import Topics

GRACE_MS: Final = 5 * 60_000
"""Objects that the manifest refers to no more are deleted after so long: who reads an older one is not hurried."""

_UPLOAD_WAIT_S: Final = 1.0
_PATIENCE_S: Final = 3.0
"""A partition of which nothing could be shipped for so long, though others were, will not be by itself."""
_PAUSE_S: Final = 0.02
_LOOK_MS: Final = 30_000
"""Who has nothing to ship looks so often whether somebody has taken over."""


Progress = Callable[[int, int], None]
"""Told (bytes that were put, bytes in all)."""


class ShippedNow(msgspec.Struct, frozen=True):
    """What a tick did. ``pending``: segments that are being uploaded, or wait for it.

    ``waiting``: by partition, why nothing more of it could be shipped.
    """

    put: bool
    records: int
    size_bytes: int
    pending: int = 0
    waiting: dict[str, str] = {}


class Shipper:
    """Ships one store to one place. Thread-safe; one thread of one process at a time is at it.

    Others that are asked to ship the same store wait in `tick` for their turn: it does nothing and says so.
    """

    def __init__(
        self,
        topics: Topics,
        bucket: Bucket,
        *,
        wanted: Iterable[str] = (),
        interval_ms: int = SHIP_INTERVAL_MS,
        grace_ms: int = GRACE_MS,
        parallel: int = upload_pool.PARALLEL,
    ) -> None:
        self._topics = topics
        self._fs = topics.fs
        self._clock = topics.clock
        self._wanted = as_patterns("topics", wanted)
        self._interval_ms = interval_ms
        self._grace_ms = grace_ms
        self.bucket = bucket
        self._parallel = parallel
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._forget()
        fork_safety.on_fork(self, "_forget")

    def _forget(self) -> None:
        """As at the beginning; in a forked child, where the parent ships."""
        topics, bucket, parallel = self._topics, self.bucket, self._parallel
        self._lease: LockableFd | None = None
        self._binding: Binding | None = None
        self._owner: Owner | None = None
        self._root = Root(topics, bucket)
        orphans = self._orphans = Orphans()
        self._known = KnownPartitions(topics, orphans)
        self._planning = Planning(topics, bucket.url, self._known)
        self._segments = SegmentUploads(topics.fs, topics.path, bucket, parallel, self._known, orphans)
        self._tails = Tails(bucket, parallel, orphans)
        self._files = StoreFiles(topics.fs, topics.path, bucket, orphans)
        self._evicting = Evicting(bucket)
        self._there: frozenset[str] | None = None
        """Ids of the topics that the manifest had when all others were released; None when that is to be done."""
        self._looked_ms = 0
        """When the manifest was last put, or looked at."""
        self._is_whole = True
        """Whether the last tick came to its end; else, were it only interrupted, what it saw may not be shipped."""
        self.error: str | None = None
        """Why the last tick failed; None when it did not."""
        self.shipped_ms = 0
        """Wall clock when all was there the last time that was on disk then."""
        self._waiting: dict[str, tuple[str, float]] = {}
        """By partition, why nothing more of it could be shipped, and since when."""

    # ------------------------------------------------------------ the tick

    def tick(self, now_ms: int | None = None) -> ShippedNow:
        """Ship what is on disk by now, but for segments whose upload goes on.

        Raises `ObjectStoreError` (what was not shipped is the next time), `StoreFenced`, `ShippingRefused`.
        """
        with self._mutex:
            now_ms = self._clock.now_ms() if now_ms is None else now_ms
            if not self._is_whole:
                self._known.forget_what_was_seen()
            self._is_whole = False
            try:
                if not self._become_owner(now_ms):
                    return ShippedNow(put=False, records=0, size_bytes=0)
                try:
                    result = self._tick(now_ms)
                except ObjectChanged:  # somebody swept the place meanwhile; what lies there is known by now
                    result = self._tick(now_ms)
            except (SegmentlogError, OSError) as error:
                self.error = self._topics.ship_signals.trouble = str(error)
                raise
            self._is_whole = True
            self.error = None
            if not result.pending and not result.waiting:
                self.shipped_ms = now_ms
            self._topics.ship_signals.trouble = ""
        self._topics.ship_signals.tell()
        return result

    def _tick(self, now_ms: int) -> ShippedNow:
        assert self._binding is not None
        if self._root.is_uncertain:
            self._learn_outcome()
        self._segments.collect(self._root.manifest)
        before = self._root.manifest
        interval = self._planning.look(self._binding.topics, before, now_ms)
        pending = self._segments.begin(interval.rounds)
        size_bytes = self._tails.put(interval.rounds, before)
        self._files.put(before)
        manifest = self._compose(interval, now_ms)
        if before is None or said(manifest) != said(before):
            self._put(manifest)
            self._looked_ms = now_ms
        elif not 0 <= now_ms - self._looked_ms < _LOOK_MS:  # or the clock was set back
            self._learn_outcome()
            self._looked_ms = now_ms
        self._release_unwanted()
        shipped = partitions_of(self._root.manifest)
        self._planning.record_shipped(interval, shipped)
        self._tell(interval, shipped)
        pending += any(round_.to_do.is_behind for round_ in interval.rounds.values())
        leaving = {file.topic_id for name, file in interval.topics if not is_wanted(name, self._binding.topics)}
        self._evicting.turn(self._known.parts, shipped, leaving, now_ms)
        records = records_of(manifest) - records_of(before)
        waiting = self._note_waiting(interval, shipped)
        self._topics.ship_signals.tell()  # nobody waits for what is deleted
        self._root.delete_condemned(now_ms, self._grace_ms)
        return ShippedNow(manifest is self._root.manifest, records, size_bytes, pending, waiting)

    def _compose(self, interval: Interval, now_ms: int) -> Manifest:
        """What the manifest is to say, now that all it is to refer to lies there."""
        assert self._owner is not None
        before = self._root.manifest
        topics = compose_topics(interval, self._known.parts)
        manifest = Manifest(
            store_id=self._topics.store_id,
            owner=self._owner,
            sequence=before.sequence + 1 if before else 0,
            nonce=upload_pool.nonce(),
            shipped_ms=now_ms,
            interval_ms=self._interval_ms,
            topics=topics,
            tails=self._tails.live(tails_of(topics), before),
            files=self._files.there,
            next_tail=self._tails.next_number(before),
        )
        kept = self._known.kept() | self._tails.kept(self._known.staged_tails())
        return self._root.condemn(manifest, self._orphans.keys, kept, now_ms)

    def _tell(self, interval: Interval, shipped: Mapping[Where, ShippedPartition]) -> None:
        """Let those know here who wait for it, or need more offsets, what the manifest says of partitions.

        Raises the first error, once all others know.
        """
        first: SegmentlogError | OSError | None = None
        for where, there in shipped.items():
            part, round_ = self._known.parts.get(where), interval.rounds.get(where)
            if part is None or (round_ is None and there.ceiling <= part.ceiling):
                continue
            if round_ is not None and round_.to_do.upload:
                part.look_again()
            if round_ is not None and not round_.is_held:
                part.standing.keep_snapshots(there)
            try:
                part.tell(there)
            except (SegmentlogError, OSError) as error:
                first = first or error
        if first is not None:
            raise first

    def _release_unwanted(self) -> None:
        """Whatever is shipped no more goes on alone, once the manifest says so."""
        assert self._binding is not None
        there = frozenset(topic.id for topic in self._root.manifest.topics) if self._root.manifest else frozenset()
        if there != self._there:
            is_done = release_unwanted(self._topics, self._binding.topics, there)
            self._there = there if is_done else None

    def _note_waiting(self, interval: Interval, shipped: Mapping[Where, ShippedPartition]) -> dict[str, str]:
        """What waits, by the names of partitions; and how long nothing has become of it."""
        names = {file.topic_id: name for name, file in interval.topics}
        now_s, waiting = time.monotonic(), {}
        for where, why in interval.waiting.items():
            end_offset = shipped[where].end_offset if where in shipped else 0
            waiting[f"{names[where[0]]}/{where[1]}"] = f"shipped up to offset {end_offset}: {why}"
        before = self._waiting
        self._waiting = {name: before[name] if name in before and before[name][0] == why else (why, now_s)
                         for name, why in waiting.items()}  # fmt: skip
        return waiting

    @property
    def stuck(self) -> dict[str, str]:
        """Partitions that have been waiting for long, and why."""
        long_ago_s = time.monotonic() - _PATIENCE_S
        return {name: why for name, (why, since_s) in self._waiting.copy().items() if since_s <= long_ago_s}

    # ------------------------------------------------------------ being the owner

    def _become_owner(self, now_ms: int) -> bool:
        if self._owner is not None:
            return True
        if self._lease is None:
            try:
                self._lease = self._topics.ship_signals.become_shipper()
            finally:
                self._topics.ship_signals.is_starting = False
        if self._lease is None:
            return False
        self._binding, self._owner, found, unopened = claim(self._topics, self.bucket, self._wanted, now_ms)
        self._segments.load()
        if found is not None:
            self._root.begin(*found, unopened)
            self._known.not_compared = set(unopened)
            self._segments.settle(self._root.settled())
        return True

    def _put(self, manifest: Manifest) -> None:
        """Put it in the place of the last one. Raises `ObjectStoreError`: the next tick learns what became of it."""
        try:
            self._root.put(manifest)
        except ObjectChanged:
            self._learn_outcome()
            if self._root.manifest is not manifest:
                raise
        else:
            self._settle()

    def _learn_outcome(self) -> None:
        """Find out what lies there, after a put of which nobody knows whether it took effect.

        One of our own did, or an earlier process's; or the one before it still lies there; or somebody only condemned
        objects meanwhile. Raises as `Root.learn` does.
        """
        assert self._binding is not None
        assert self._owner is not None
        learnt = self._root.learn(self._binding, self._owner)
        if learnt is not Learnt.NOTHING:
            self._files.forget()
        match learnt:
            case Learnt.PUT:
                self._settle()
                self._known.forget_staged()
                self._known.forget_what_was_seen()
            case Learnt.SWEPT:
                self._settle()
                self._known.forget_keys(self._root.condemned())
                self._known.forget_what_was_seen()
            case Learnt.EARLIER:
                self._known.not_compared |= self._root.unopened
                self._known.forget_topics(set())  # nothing is staged then: it has other tails of these numbers
                self._settle()

    def _settle(self) -> None:
        """Another manifest lies there: what was put is referred to, or condemned, or goes on to be of use."""
        assert self._binding is not None
        settled = self._root.settled()
        self._segments.settle(settled)
        self._tails.settle(self._known.staged_tails())
        self._orphans.settle(settled)
        if not self._binding.begun:
            self._binding = replace(self._binding, begun=True)
            write_binding(self._fs, self._topics.path, self._binding)

    # ------------------------------------------------------------ for whoever asks

    def ship(self, progress: Progress | None = None) -> ShippedNow:
        """Ship all that is on disk now, until it lies there. Raises as `tick` does.

        And `ShippingRefused` for partitions of which nothing more can be shipped; all else lies there then.
        """
        put_before = self._put_bytes
        first = self.tick()
        records, size_bytes, put = first.records, first.size_bytes, first.put
        while True:
            with self._mutex:
                if self._owner is None:
                    raise ShippingRefused(self.bucket.url, f"another process is shipping {self._topics.path} there")
            self.wait_for_upload(_UPLOAD_WAIT_S)
            now = self.tick()
            records, size_bytes, put = records + now.records, size_bytes + now.size_bytes, put or now.put
            if progress is not None:
                done = self._put_bytes - put_before
                progress(done, done + self._segments.left_bytes)
            if not now.pending and not now.waiting and not self._evicting.is_behind:
                return ShippedNow(put, records, size_bytes)
            if not now.pending and (stuck := self.stuck):
                what = "; ".join(f"{name}: {why}" for name, why in stuck.items())
                raise ShippingRefused(self.bucket.url, f"not all of the store can be shipped: {what}")
            if now.waiting:
                time.sleep(_PAUSE_S)

    def wait_for_upload(self, wait_s: float) -> None:
        """Return when the upload of a segment has ended, at the latest after ``wait_s``; at once when there is none.

        Raises the error of an upload that failed; the next `tick` starts it again.
        """
        with self._mutex:
            self._segments.collect(self._root.manifest, max(wait_s, 0.0))

    @property
    def _put_bytes(self) -> int:
        """Of segments and tails, what lies there by now."""
        return self._tails.put_bytes + self._segments.put_bytes

    @property
    def manifest(self) -> Manifest | None:
        """The one that was put last; None before the first."""
        return self._root.manifest

    @property
    def troubles(self) -> dict[str, str]:
        """Partitions whose segments should lie in the object store alone, or here again, and why they do not."""
        return self._evicting.troubles.copy()

    @property
    def unshipped_bytes(self) -> int:
        """What was appended since the last turn, on disk or not."""
        return self._known.unshipped_bytes

    def log_ends(self) -> dict[Where, int]:
        """By partition, the log end offset on the local disk now, of those that the last cycle looked at."""
        with self._mutex:
            return {where: part.local.log_end_offset for where, part in self._known.parts.items()}

    def count_unshipped(self, ends: Mapping[Where, int]) -> int:
        """How many offsets below ``ends`` the manifest does not include; those of deleted topics are not counted."""
        with self._mutex:
            shipped = partitions_of(self._root.manifest)
            counted = ((end, shipped.get(where)) for where, end in ends.items() if where in self._known.parts)
            return sum(max(end - (there.end_offset if there else 0), 0) for end, there in counted)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names and patterns of the topics that are shipped; none for all."""
        return self._binding.topics if self._binding is not None else self._wanted

    @property
    def is_owner(self) -> bool:
        """Whether it is this process that ships the store."""
        return self._owner is not None

    def close(self) -> None:
        """Ship no more. What is being uploaded is not waited for."""
        with self._mutex:
            self._segments.close()
            lease, self._lease = self._lease, None
            self._owner = None
            if lease is not None:
                self._topics.ship_signals.resign(lease)
