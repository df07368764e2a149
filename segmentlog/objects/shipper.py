"""Shipping a store: in each interval what is new goes into one object, and one conditional put says so.

Few bytes that are new are part of what that one puts.

look      which partitions have something new on disk; segments to upload whole, pieces for the tail (`looking`)
upload    segments by threads of their own, over as many intervals as it takes; the tail at once
put       the manifest, in the place of the one that was read or put last
tell      readers and waiters what is shipped, appenders how far they may go; delete what was condemned long ago
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
import xxhash
from msgspec.structs import replace

from segmentlog.arguments import as_patterns
from segmentlog.defaults import SHIP_INTERVAL_MS
from segmentlog.errors import SegmentlogError, ShippingRefused, StoreClosed, StoreFenced, UnknownTopic
from segmentlog.format.batch import decode_header
from segmentlog.format.manifest import (
    MANIFEST_KEY,
    Chunk,
    Condemned,
    Manifest,
    Owner,
    ShippedPartition,
    ShippedSegment,
    Snapshot,
    StoreFile,
    Tail,
    encode_manifest,
)
from segmentlog.format.names import SHIPPED_FILES
from segmentlog.log import granting
from segmentlog.objects import uploads
from segmentlog.objects.binding import Binding, read_binding, write_binding
from segmentlog.objects.bucket import Bucket, ObjectChanged
from segmentlog.objects.capture import Replaced, as_shipped, is_wanted
from segmentlog.objects.decisions import Where
from segmentlog.objects.evicting import Evicting
from segmentlog.objects.looking import Interval, Looking, Part, Round, Uploaded, partitions_of
from segmentlog.objects.ownership import claim, compare, fence, read_manifest
from segmentlog.objects.parts import Begun, SegmentPuts, key_of
from segmentlog.policy.shipping import LocalSegment, Piece, entry, promise, stands_inline
from segmentlog.storage import forks
from segmentlog.storage.files import read_file
from segmentlog.storage.forks import Held
from segmentlog.topics.topics import Topics

logger = logging.getLogger("segmentlog")

GRACE_MS: Final = 5 * 60_000
"""Objects that the manifest refers to no more are deleted after so long: who reads an older one is not hurried."""

_ALONE_BYTES: Final = 8 << 20
"""Chunks as large are tails of their own."""
_UPLOAD_WAIT_S: Final = 1.0
_LOOKED_THROUGH_BYTES: Final = 4 << 20
_PATIENCE_S: Final = 3.0
"""A partition of which nothing could be shipped for so long, though others were, will not be by itself."""
_PAUSE_S: Final = 0.02
_LOOK_MS: Final = 30_000
"""Who has nothing to ship looks so often whether somebody has taken over."""
_ENDED: Final = "shipping was ended ('segmentlog ship --stop') while this process was at it: it ships no more"


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
        parallel: int = uploads.PARALLEL,
    ) -> None:
        self._topics = topics
        self._fs = topics.fs
        self._clock = topics.clock
        self._wanted = as_patterns("topics", wanted)
        self._interval_ms = interval_ms
        self._grace_ms = grace_ms
        self.bucket = bucket
        self._mutex = forks.reentrant_lock(self, "_mutex")
        self._parallel = parallel
        self._forget()
        forks.on_fork(self, "_forget")

    def _forget(self) -> None:
        """As at the beginning; in a forked child, where the parent ships."""
        self._lease: Held | None = None
        self._binding: Binding | None = None
        self._owner: Owner | None = None
        self._manifest: Manifest | None = None
        self._tag: str | None = None
        self._keys: dict[str, frozenset[str]] = {}
        """By nonce, all that the last manifests refer to."""
        self._tried: dict[str, Manifest] = {}
        """By nonce: puts of whose outcome nothing is known, and what each said."""
        self._looking = Looking(self._topics, self.bucket)
        self._evicting = Evicting(self.bucket)
        self._tails: dict[int, Tail] = {}
        """By number, those that no manifest refers to yet."""
        self._files: dict[str, tuple[tuple[int, ...], StoreFile]] = {}
        """By path, files of the store that lie there, and what each looked like here when it was put."""
        self._next_tail = 0
        self._uploads: uploads.Uploads[tuple[Where, int], Uploaded] = uploads.Uploads(self._parallel)
        self._left: list[ShippedSegment] = []
        """What of segments was put, and is of no use: an upload failed, or was of a topic that is gone."""
        self._segments = SegmentPuts(self._fs, self._topics.path, self.bucket, self._parallel)
        self._put_bytes = self._left_bytes = 0
        """Of segments and tails: what lies there by now, and what is to be uploaded still."""
        self._looked_ms = 0
        """When the manifest was last put, or looked at."""
        self._deleted: set[str] = set()
        """Of what the manifest condemns."""
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
            try:
                if not self._become_owner(now_ms):
                    return ShippedNow(put=False, records=0, size_bytes=0)
                try:
                    result = self._tick(now_ms)
                except ObjectChanged:  # somebody swept the place meanwhile; what lies there is known by now
                    result = self._tick(now_ms)
            except (SegmentlogError, OSError) as error:
                self.error = self._topics.ship_signals.trouble = str(error)
                self._looking.forget_what_was_seen()
                raise
            self.error = None
            if not result.pending and not result.waiting:
                self.shipped_ms = now_ms
            self._topics.ship_signals.trouble = ""
        self._topics.ship_signals.tell()
        return result

    def _tick(self, now_ms: int) -> ShippedNow:
        assert self._owner is not None
        if self._tried:
            self._learn_outcome()
        self._collect_uploads()
        assert self._binding is not None
        interval = self._looking.look(self._binding.topics, self._manifest, now_ms)
        rounds = interval.rounds
        pending = len(self._uploads) + self._begin_uploads(rounds)
        before = self._manifest
        uploading = ((where, one) for where, round_ in rounds.items() for one in round_.to_do.upload)
        self._left_bytes = self._segments.missing_bytes(uploading)
        size_bytes = self._put_tails(rounds)
        self._put_bytes += size_bytes
        self._put_files()
        manifest = self._compose(interval, now_ms)
        if before is None or _said(manifest) != _said(before):
            self._put(manifest)
            self._looked_ms = now_ms
        elif now_ms - self._looked_ms >= _LOOK_MS:
            self._learn_outcome()
            self._looked_ms = now_ms
        for round_ in rounds.values():
            if not round_.is_held:
                round_.part.staged = None
        shipped = partitions_of(self._manifest)
        self._looking.note_shipped(shipped)
        for where, there in shipped.items():
            self._tell(where, there, rounds.get(where))
        pending += any(round_.to_do.is_behind for round_ in rounds.values())
        leaving = {file.topic_id for name, file in interval.topics if not is_wanted(name, self._binding.topics)}
        self._evicting.turn(self._looking.parts, shipped, leaving, now_ms)
        records = _records(manifest) - (_records(before) if before else 0)
        waiting = self._note_waiting(interval, shipped)
        self._topics.ship_signals.tell()  # nobody waits for what is deleted
        self._delete_condemned(now_ms)
        return ShippedNow(manifest is self._manifest, records, size_bytes, pending, waiting)

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
        return {name: why for name, (why, since_s) in self._waiting.items() if since_s <= long_ago_s}

    # ------------------------------------------------------------ being the owner

    def _become_owner(self, now_ms: int) -> bool:
        if self._owner is not None:
            return True
        if self._lease is None:
            self._lease = self._topics.ship_signals.become_shipper()
        if self._lease is None:
            return False
        self._binding, self._owner, found = claim(self._topics, self.bucket, self._wanted, now_ms)
        self._segments.load()
        if found is not None:
            self._manifest, self._tag = found
            self._segments.settle(self._keys_of(found[0]) | {one.key for one in found[0].condemned})
        return True

    # ------------------------------------------------------------ uploading

    def _begin_uploads(self, rounds: dict[Where, Round]) -> int:
        """How many segments have to wait for their turn."""
        waiting = 0
        self._looking.orphans += self._segments.of_no_use(lambda one: self._is_wanted(one, rounds))
        for where, round_ in rounds.items():
            for segment in round_.to_do.upload:
                key = (where, segment.base_offset)
                if key not in self._uploads and not self._uploads.begin(key, self._uploading(where, round_, segment)):
                    waiting += 1
        return waiting

    def _is_wanted(self, begun: Begun, rounds: dict[Where, Round]) -> bool:
        """Whether the file may still be there of which parts were put."""
        if (begun.where, begun.base_offset) in self._uploads:
            return True
        if begun.where not in rounds:
            return begun.where in self._looking.parts
        found = rounds[begun.where].log.segments
        is_behind = bool(found) and begun.base_offset >= found[-1].end_offset  # of what was looked at
        return is_behind or any(one.stamp == begun.stamp for one in found)

    def _uploading(self, where: Where, round_: Round, segment: LocalSegment) -> Callable[[], Uploaded]:
        local, log, stop = round_.part.local, round_.log, self._uploads.stop
        bucket, segments, base = self.bucket, self._segments, segment.base_offset
        left = self._left

        def read(position: int, size_bytes: int) -> memoryview:
            return local.read(log, base, position, size_bytes)

        def upload() -> Uploaded:
            base_timestamp = decode_header(read(0, segment.size_bytes), 0).base_timestamp if segment.size_bytes else -1
            max_timestamp, known = local.max_timestamp(base), local.snapshot(base)
            stored = segments.put(where, segment, read, stop)
            found = ShippedSegment(base, segment.end_offset, stored, base_timestamp, max_timestamp)
            try:
                key = key_of(where, base) if stored.parts else stored.key
                if known is not None:
                    found = replace(found, snapshot=uploads.put(bucket, f"{key}.snapshot", known))
                entries = local.index(log, segment)
                if entries is not None:
                    found = replace(found, index=uploads.put(bucket, f"{key}.index", entries))
            except BaseException:
                left.append(found)
                raise
            return segment.stamp, found

        return upload

    def _collect_uploads(self, wait_s: float = 0.0) -> None:
        """Take note of segments that lie there now. Raises the first error; what failed is begun anew."""
        first: BaseException | None = None
        condemned = {one.key for one in self._manifest.condemned} if self._manifest else set()
        for (where, base), future in self._uploads.ended(wait_s):
            part = self._looking.parts.get(where)
            if part is not None:
                part.seen = ()  # there is something to say
            error = future.exception()
            if error is None and part is not None:
                self._looking.forget_upload(part, base)
                stamp, segment = future.result()
                if segment.log.key not in condemned and self._segments.is_whole(segment.log):
                    part.uploaded[base] = (stamp, segment)
                    self._put_bytes += 0 if segment.is_in_parts else segment.log.size_bytes
                    continue
                self._left.append(segment)  # it has taken so long that somebody swept it
            elif error is None:
                self._left.append(future.result()[1])
            elif not isinstance(error, Replaced | UnknownTopic | StoreClosed):
                first = first or error
        while self._left:
            # Of what was put in parts the journal knows, and whoever begins anew goes on with them.
            segment = self._left.pop()
            stored = segment.objects[len(segment.log.parts) :]
            self._looking.orphans += [one.key for one in stored]
        if first is not None:
            raise first

    def _put_tails(self, rounds: dict[Where, Round]) -> int:
        """Put what is new of all partitions, as one object, beside others of what is large; how many bytes it is."""
        together = max(self._next_tail, self._manifest.next_tail if self._manifest else 0)
        parts: dict[int, list[memoryview]] = {together: []}
        size_bytes = start = 0
        for where, round_ in rounds.items():
            round_.chunks = []
            for piece, data in zip(round_.to_do.pieces, round_.data, strict=True):
                if len(data) >= _ALONE_BYTES:
                    number = together + len(parts)
                    parts[number] = [data]
                    round_.chunks.append(_chunk(piece, data, number, 0))
                else:
                    parts[together].append(data)
                    round_.chunks.append(_chunk(piece, data, together, start))
                    start += len(data)
                size_bytes += len(data)
            if round_.log.has_producers:
                for segment in {round_.to_do.active_base, *(piece.segment for piece in round_.to_do.pieces)}:
                    self._put_snapshot(where, round_.part, segment)
        if size_bytes:
            self._next_tail = together + len(parts)
            if len(parts) == 1 and stands_inline(size_bytes, self._inline_bytes()):
                self._tails[together] = Tail(together, data=b"".join(parts[together]))
            else:
                self._put_as_objects({number: data for number, data in parts.items() if data})
            self._looking.note_put(rounds)
        for round_ in rounds.values():
            if round_.is_held:
                round_.part.staged = (*round_.to_do.keep, *round_.chunks)
        return size_bytes

    def _inline_bytes(self) -> int:
        """Of tails that stand in the manifest, or are to."""
        tails = (*(self._manifest.tails if self._manifest else ()), *self._tails.values())
        return sum(len(data) for data in {tail.number: tail.data for tail in tails}.values())

    def _put_as_objects(self, parts: Mapping[int, list[memoryview]]) -> None:
        """Put tails, by number."""
        keys = {number: f"tails/{number:020d}-{uploads.nonce()}" for number in parts}
        self._looking.orphans += keys.values()  # until a manifest says otherwise

        def put(number: int) -> Tail:
            data = parts[number]
            joined = data[0] if len(data) == 1 else b"".join(data)
            return Tail(number, uploads.put(self.bucket, keys[number], joined))

        self._tails.update((tail.number, tail) for tail in uploads.beside_each_other(put, keys, self._parallel))

    def _put_snapshot(self, where: Where, part: Part, segment: int) -> None:
        """See to it that what was known of producers where a segment begins lies there."""
        if segment in part.snapshots or (data := part.local.snapshot(segment)) is None:
            return
        key = f"segments/{where[0]}/{where[1]}/{segment:020d}-{uploads.nonce()}.snapshot"
        self._looking.orphans.append(key)
        part.snapshots[segment] = Snapshot(segment, uploads.put(self.bucket, key, data))

    def _put_files(self) -> None:
        """Put the store's own files, where they are others than those that lie there."""
        there = {file.path: file for file in self._manifest.files} if self._manifest else {}
        before, self._files = self._files, {}
        for path in SHIPPED_FILES:
            local = f"{self._topics.path}/{path}"
            try:
                found = self._fs.stat(local)
                looks = (found.st_ino, found.st_size, found.st_mtime_ns)
                if path in before and before[path][0] == looks:
                    self._files[path] = before[path]
                    continue
                data = read_file(self._fs, local)
            except FileNotFoundError:
                continue
            file = there.get(path)
            if file is None or file.object.xxh3_64 != xxhash.xxh3_64_hexdigest(data):
                key = f"files/{path}-{uploads.nonce()}"
                self._looking.orphans.append(key)
                file = StoreFile(path, uploads.put(self.bucket, key, data))
            self._files[path] = looks, file

    # ------------------------------------------------------------ putting the manifest

    def _entry(self, where: Where, interval: Interval, shipped: ShippedPartition | None) -> ShippedPartition | None:
        """What the manifest is to say of a partition; None of one that cannot be opened, and never was shipped."""
        round_ = interval.rounds.get(where)
        if round_ is not None and not round_.is_held:
            snapshots = round_.part.snapshots.values()
            stable = round_.part.local.stable_offset(round_.log, round_.to_do.end_offset)
            return entry(
                round_.log, shipped, round_.to_do, round_.chunks, snapshots, round_.ceiling, stable,
                round_.same.__contains__,
            )  # fmt: skip
        ceiling = interval.ceilings.get(where, 0)
        if shipped is not None:
            return shipped if shipped.ceiling >= ceiling else replace(shipped, ceiling=ceiling)
        if where not in interval.ceilings:
            return None
        return promise(where[1], ceiling, self._looking.parts[where].local.first_epoch())

    def _compose(self, interval: Interval, now_ms: int) -> Manifest:
        """What the manifest is to say."""
        assert self._owner is not None
        before, there = self._manifest, partitions_of(self._manifest)
        composed = []
        for name, file in interval.topics:
            places = [(file.topic_id, number) for number in range(file.partitions)]
            entries = [self._entry(where, interval, there.get(where)) for where in places]
            composed.append(as_shipped(name, file, tuple(one for one in entries if one is not None)))
        tails = {tail.number: tail for tail in before.tails} | self._tails if before else self._tails
        live = {chunk.tail for topic in composed for part in topic.partitions for chunk in part.chunks}
        manifest = Manifest(
            store_id=self._topics.store_id,
            owner=self._owner,
            sequence=before.sequence + 1 if before else 0,
            nonce=uploads.nonce(),
            shipped_ms=now_ms,
            interval_ms=self._interval_ms,
            topics=tuple(composed),
            tails=tuple(tail for number, tail in sorted(tails.items()) if number in live),
            files=tuple(file for _, file in self._files.values()),
            next_tail=max(self._next_tail, before.next_tail if before else 0),
        )
        return replace(manifest, condemned=self._condemn(manifest, now_ms))

    def _keys_of(self, manifest: Manifest) -> frozenset[str]:
        """All that it refers to."""
        found = self._keys.get(manifest.nonce)
        if found is None:
            found = frozenset(stored.key for stored in manifest.objects())
            last = self._manifest.nonce if self._manifest else ""
            self._keys = {nonce: keys for nonce, keys in self._keys.items() if nonce == last}
            self._keys[manifest.nonce] = found
        return found

    def _condemn(self, manifest: Manifest, now_ms: int) -> tuple[Condemned, ...]:
        """What nothing refers to any more, with the time since when."""
        before = self._manifest
        known = {one.key: one for one in before.condemned if one.key not in self._deleted} if before else {}
        kept = set(self._keys_of(manifest))
        staged = self._looking.staged_tails()
        kept |= self._looking.kept()
        kept |= {
            tail.object.key for number, tail in self._tails.items() if number in staged and tail.object is not None
        }
        gone = self._keys_of(before) if before else frozenset()
        for key in sorted((gone | set(self._looking.orphans)) - kept):
            known.setdefault(key, Condemned(key, now_ms))
        return tuple(one for key, one in known.items() if key not in kept)

    def _put(self, manifest: Manifest) -> None:
        """Put it in the place of the last one. Raises `ObjectStoreError`: the next tick learns what became of it."""
        self._tried[manifest.nonce] = manifest
        try:
            tag = self.bucket.swap(MANIFEST_KEY, encode_manifest(manifest), self._tag)
        except ObjectChanged:
            self._learn_outcome()
            if self._manifest is not manifest:
                raise
            return
        self._take_over(manifest, tag)

    def _take_over(self, manifest: Manifest, tag: str) -> None:
        """Go on from a manifest that lies there."""
        assert self._binding is not None
        kept = self._keys_of(manifest) | {one.key for one in manifest.condemned}
        self._segments.settle(kept)
        if tag != self._tag:  # else a put that was sent may still take effect
            self._tried.clear()
        self._manifest, self._tag = manifest, tag
        staged = self._looking.staged_tails()
        self._tails = {number: tail for number, tail in self._tails.items() if number in staged}
        self._looking.orphans = [key for key in self._looking.orphans if key not in kept]
        self._deleted &= {one.key for one in manifest.condemned}
        if not self._binding.begun:
            self._binding = replace(self._binding, begun=True)
            write_binding(self._fs, self._topics.path, self._binding)

    def _learn_outcome(self) -> None:
        """Find out what lies there, after a put of which nobody knows whether it took effect.

        One of our own did, or an earlier process's; or the one before it still lies there; or somebody only condemned
        objects meanwhile. Raises `ShippingRefused` where somebody here has ended shipping meanwhile.
        """
        assert self._binding is not None
        bound = read_binding(self._fs, self._topics.path)
        if bound is None or bound.owner_id != self._binding.owner_id:  # before anybody is fenced for another's sake
            raise ShippingRefused(self.bucket.url, _ENDED)
        found = read_manifest(self.bucket)
        if found is None:
            if self._manifest is not None:
                raise ShippingRefused(self.bucket.url, "the manifest is gone, which nobody here has deleted")
            return
        manifest, tag = found
        self._files = {}
        assert self._owner is not None
        if manifest.store_id != self._topics.store_id:
            raise ShippingRefused(self.bucket.url, f"another store is shipped there, by {manifest.owner}")
        if (manifest.owner.epoch, manifest.owner.id) != (self._owner.epoch, self._owner.id):
            if self._manifest is not None and manifest.nonce == self._manifest.nonce:
                return  # what had ended, and is not ours yet
            fence(self._topics, self._binding, manifest.owner)
            raise StoreFenced(f"store {self._topics.path}", str(manifest.owner))
        if manifest.ended and (self._manifest is None or not self._manifest.ended):
            raise ShippingRefused(self.bucket.url, _ENDED)
        if manifest.nonce in self._tried:
            self._take_over(self._tried[manifest.nonce], tag)
            self._looking.forget_staged()
            self._looking.forget_what_was_seen()
        elif self._manifest is not None and _said(manifest) == _said(self._manifest):
            self._take_over(manifest, tag)
            self._looking.forget_keys({one.key for one in manifest.condemned})
            self._looking.forget_what_was_seen()
        else:  # of an earlier process of this very store, arriving late: then it says nothing that is not so here
            compare(self._topics, self.bucket, manifest)
            self._looking.forget_topics(set())
            self._tails = {}  # it has others of these numbers
            self._take_over(manifest, tag)

    # ------------------------------------------------------------ afterwards

    def _tell(self, where: Where, there: ShippedPartition, round_: Round | None) -> None:
        """Let those know here who wait for it, or need more offsets, what the manifest says of a partition."""
        part = self._looking.parts.get(where)
        if part is None or (round_ is None and there.ceiling <= part.ceiling):
            return
        if round_ is not None and round_.to_do.upload:
            part.seen = ()
        if round_ is not None and not round_.is_held:
            part.snapshots = {one.segment: one for one in there.snapshots}
        handle = part.local.partition.handle
        with contextlib.suppress(UnknownTopic):
            handle.ledger.note_shipped(there.end_offset)
            handle.wake_followers()
            if there.ceiling > part.ceiling:
                granting.grant(handle, there.ceiling)
                part.ceiling = there.ceiling

    def _delete_condemned(self, now_ms: int) -> None:
        """Delete what was condemned long ago. It is struck off the list with the next put."""
        assert self._manifest is not None
        due = [one.key for one in self._manifest.condemned if now_ms - one.since_ms >= self._grace_ms]
        due = [key for key in due if key not in self._deleted]
        if due:
            self.bucket.delete(due)
            self._deleted.update(due)

    # ------------------------------------------------------------ for whoever asks

    def ship(self, progress: Progress | None = None) -> ShippedNow:
        """Ship all that is on disk now, until it lies there. Raises as `tick` does.

        And `ShippingRefused` for partitions of which nothing more can be shipped; all else lies there then.
        """
        put_before = self._put_bytes + self._segments.put_bytes
        first = self.tick()
        records, size_bytes, put = first.records, first.size_bytes, first.put
        while True:
            with self._mutex:
                if self._owner is None:
                    raise ShippingRefused(self.bucket.url, f"another process is shipping {self._topics.path} there")
                self._collect_uploads(_UPLOAD_WAIT_S)
            now = self.tick()
            records, size_bytes, put = records + now.records, size_bytes + now.size_bytes, put or now.put
            if progress is not None:
                done = self._put_bytes + self._segments.put_bytes - put_before
                progress(done, done + self._left_bytes)
            if not now.pending and not now.waiting and not self._evicting.is_behind:
                return ShippedNow(put, records, size_bytes)
            if not now.pending and (stuck := self.stuck):
                what = "; ".join(f"{name}: {why}" for name, why in stuck.items())
                raise ShippingRefused(self.bucket.url, f"not all of the store can be shipped: {what}")
            if now.waiting:
                time.sleep(_PAUSE_S)

    @property
    def manifest(self) -> Manifest | None:
        """The one that was put last; None before the first."""
        return self._manifest

    @property
    def troubles(self) -> dict[str, str]:
        """Partitions whose segments should lie in the object store alone, or here again, and why they do not."""
        return dict(self._evicting.troubles)

    @property
    def unshipped_bytes(self) -> int:
        """What was appended since the last turn, on disk or not."""
        return sum(part.local.appended_bytes - part.appended_bytes for part in list(self._looking.parts.values()))

    @property
    def is_owner(self) -> bool:
        """Whether it is this process that ships the store."""
        return self._owner is not None

    def close(self) -> None:
        """Ship no more. What is being uploaded is not waited for."""
        with self._mutex:
            self._uploads.close()
            lease, self._lease = self._lease, None
            self._owner = None
            if lease is not None:
                self._topics.ship_signals.resign(lease)


def _chunk(piece: Piece, data: memoryview, tail: int, start: int) -> Chunk:
    return Chunk(
        piece.segment, piece.position, piece.size_bytes, piece.base_offset, piece.end_offset, tail, start,
        xxhash.xxh3_64_hexdigest(data), _max_timestamp(data),
    )  # fmt: skip


def _max_timestamp(data: memoryview) -> int:
    """Of the batches in a piece; -1 for one that is too large to be looked through."""
    found, position = -1, 0
    while position < len(data) <= _LOOKED_THROUGH_BYTES:
        header = decode_header(data, position)
        found, position = max(found, header.max_timestamp), position + header.size_bytes
    return found


def _said(manifest: Manifest) -> object:
    """What a manifest says of the store; nothing needs to be put for the rest."""
    return manifest.owner, manifest.topics, manifest.tails, manifest.files, manifest.ended


def _records(manifest: Manifest) -> int:
    """Offsets that are shipped, by and large."""
    return sum(part.end_offset - part.log_start_offset for topic in manifest.topics for part in topic.partitions)
