"""Shipping a store: in each interval what is new goes into one object, and one conditional put says so.

look      which partitions have something new on disk (`capture`)
plan      segments to upload whole, pieces for the tail (`policy.shipping`)
upload    segments by threads of their own, over as many intervals as it takes; the tail at once
put       the manifest, in the place of the one that was read or put last
tell      readers and waiters what is shipped, appenders how far they may go; delete what was condemned long ago
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import xxhash
from msgspec.structs import replace

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
    Tail,
    encode_manifest,
)
from segmentlog.format.names import TRANSACTIONS_TOPIC
from segmentlog.log import granting
from segmentlog.objects import uploads
from segmentlog.objects.binding import Binding, write_binding
from segmentlog.objects.bucket import Bucket, ObjectChanged
from segmentlog.objects.capture import LocalPartition, Replaced, Signature, as_shipped, topics_of
from segmentlog.objects.decisions import Where, ends_of_commits
from segmentlog.objects.ownership import claim, compare, fence, read_manifest
from segmentlog.policy.shipping import (
    TAIL_BYTES,
    LocalLog,
    LocalSegment,
    Piece,
    Plan,
    ceiling_for,
    entry,
    plan,
    wasted_tails,
)
from segmentlog.storage import forks
from segmentlog.storage.forks import Held
from segmentlog.topics.folders import TopicFile
from segmentlog.topics.topics import Topics

logger = logging.getLogger("segmentlog")

GRACE_MS: Final = 5 * 60_000
"""Objects that the manifest refers to no more are deleted after so long: who reads an older one is not hurried."""

_UPLOAD_WAIT_S: Final = 1.0
_LOOK_MS: Final = 30_000
"""Who has nothing to ship looks so often whether somebody has taken over."""

_UNKNOWN: Final = 1 << 62


class ShippedNow(msgspec.Struct, frozen=True):
    """What a tick did. ``pending``: segments that are being uploaded, or wait for it."""

    put: bool
    records: int
    size_bytes: int
    pending: int


class _Part:
    """What a shipper knows of one partition."""

    def __init__(self, local: LocalPartition) -> None:
        self.local = local
        self.seen: Signature = ()
        self.uploaded: dict[int, _Uploaded] = {}
        """By base offset."""
        self.snapshots: dict[int, Snapshot] = {}
        self.compared: tuple[int, int] | None = None
        """The version of the log whose files the chunks in the manifest were last compared with."""
        self.ceiling = 0
        self.end_offset = 0
        """When the rate of appends was looked at last, and ``looked_ms`` then."""
        self.looked_ms = 0
        self.appended_bytes = 0
        """At the last look."""


_Uploaded = tuple[tuple[int, int, int], ShippedSegment]
"""The stamp of a file that was uploaded, and what the manifest is to say of it."""


class _Looked(msgspec.Struct):
    """A partition as it was looked at, and the ceiling that it is to get."""

    part: _Part
    log: LocalLog
    ceiling: int


class _Round(msgspec.Struct):
    """What one tick is to put."""

    part: _Part
    log: LocalLog
    to_do: Plan
    ceiling: int
    chunks: list[Chunk] = []


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
        self._wanted = tuple(wanted)
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
        self._tried: dict[str, Manifest] = {}
        """By nonce: puts of whose outcome nothing is known, and what each said."""
        self._orphans: list[str] = []
        """Objects that only those refer to."""
        self._parts: dict[Where, _Part] = {}
        self._uploads: uploads.Uploads[tuple[Where, int], _Uploaded] = uploads.Uploads(self._parallel)
        self._turn = 0
        self._looked_ms = 0
        """When the manifest was last put, or looked at."""
        self._deleted: set[str] = set()
        """Of what the manifest condemns."""
        self.error: str | None = None
        """Why the last tick failed; None when it did not."""
        self.shipped_ms = 0
        """Wall clock when the manifest was last put, or found to say all that there is."""

    # ------------------------------------------------------------ the tick

    def tick(self, now_ms: int | None = None) -> ShippedNow:
        """Ship what is on disk by now, but for segments whose upload goes on.

        Raises `ObjectStoreError` (what was not shipped is the next time), `StoreFenced`, `ShippingRefused`.
        """
        with self._mutex:
            now_ms = self._clock.now_ms() if now_ms is None else now_ms
            try:
                if not self._become_owner(now_ms):
                    return ShippedNow(put=False, records=0, size_bytes=0, pending=0)
                result = self._tick(now_ms)
            except (SegmentlogError, OSError) as error:
                self.error = self._topics.ship_signals.trouble = str(error)
                self._forget_what_was_seen()
                raise
            self.error = None
            self.shipped_ms = now_ms
            self._topics.ship_signals.trouble = ""
        self._topics.ship_signals.tell()
        return result

    def _tick(self, now_ms: int) -> ShippedNow:
        assert self._owner is not None
        if self._tried:
            self._learn_outcome()
        self._collect_uploads()
        rounds, topics = self._look(now_ms)
        pending = len(self._uploads) + self._begin_uploads(rounds)
        before = self._manifest
        tail = self._put_tail(rounds)
        manifest = self._compose(rounds, topics, tail, now_ms)
        size_bytes = 0 if tail is None else tail.object.size_bytes
        if before is None or _said(manifest) != _said(before):
            self._put(manifest)
            self._looked_ms = now_ms
        elif now_ms - self._looked_ms >= _LOOK_MS:
            self._learn_outcome()
            self._looked_ms = now_ms
        for where, round_ in rounds.items():
            if round_.to_do.upload:
                round_.part.seen = ()
            self._tell(where)
        pending += any(round_.to_do.is_behind for round_ in rounds.values())
        self._delete_condemned(now_ms)
        records = _records(manifest) - (_records(before) if before else 0)
        return ShippedNow(put=manifest is self._manifest, records=records, size_bytes=size_bytes, pending=pending)

    # ------------------------------------------------------------ being the owner

    def _become_owner(self, now_ms: int) -> bool:
        if self._owner is not None:
            return True
        if self._lease is None:
            self._lease = self._topics.ship_signals.become_shipper()
        if self._lease is None:
            return False
        self._binding, self._owner, found = claim(self._topics, self.bucket, self._wanted, now_ms)
        if found is not None:
            self._manifest, self._tag = found
        return True

    # ------------------------------------------------------------ looking and planning

    def _look(self, now_ms: int) -> tuple[dict[Where, _Round], list[tuple[str, TopicFile]]]:
        """(what is to be done, by partition; the topics that there are).

        All partitions are looked at first, in the order of `topics_of`, and decisions last of all.
        """
        assert self._binding is not None
        looked: dict[Where, _Looked] = {}
        topics = list(topics_of(self._topics, self._binding.topics))
        self._forget_topics({file.topic_id for _, file in topics})
        shipped = self._shipped()
        wasted = self._wasted()
        decided_before = self._decided_offset(topics)
        for name, file in topics:
            for number in range(file.partitions):
                where = (file.topic_id, number)
                part = self._part(name, where)
                if part is None:
                    continue
                there = shipped.get(where)
                is_wasted = there is not None and any(chunk.tail in wasted for chunk in there.chunks)
                ceiling = self._ceiling(part, there, now_ms)
                is_known = there is not None and ceiling == there.ceiling and not is_wasted
                if is_known and part.local.signature() == part.seen:
                    continue
                self._look_at(looked, where, part, ceiling)
        journal = next(((file.topic_id, 0) for name, file in topics if name == TRANSACTIONS_TOPIC), None)
        ends = self._complete_transactions(looked, topics, journal, decided_before)
        return self._plan(looked, journal, ends, wasted), topics

    def _look_at(self, looked: dict[Where, _Looked], where: Where, part: _Part, ceiling: int) -> LocalLog | None:
        signature, appended_bytes = part.local.signature(), part.local.appended_bytes
        log = part.local.look()
        if log is None:  # next time
            part.seen = ()
            return None
        there = self._shipped().get(where)
        part.seen, part.appended_bytes = signature, appended_bytes
        part.snapshots = {one.segment: one for one in (there.snapshots if there else ())} | part.snapshots
        looked[where] = _Looked(part, log, ceiling)
        return log

    def _decided_offset(self, topics: list[tuple[str, TopicFile]]) -> int:
        """How far decisions are on disk now."""
        for name, file in topics:
            if name == TRANSACTIONS_TOPIC and (part := self._part(name, (file.topic_id, 0))) is not None:
                return part.local.partition.durable_offset
        return 0

    def _complete_transactions(
        self, looked: dict[Where, _Looked], topics: list[tuple[str, TopicFile]], journal: Where | None, before: int
    ) -> dict[Where, int]:
        """Look once more where a transaction goes on that was decided meanwhile; where those of late end.

        What cannot be told is said to end beyond everything.
        """
        part = None if journal is None else self._parts.get(journal)
        if journal is None or part is None:
            return {}
        there = self._shipped().get(journal)
        decided = looked[journal].log.end_offset if journal in looked else part.local.partition.durable_offset
        ends = ends_of_commits(part.local.partition, there.end_offset if there else 0, decided)
        if ends is None:  # compacted already: then it is safe only if nothing was decided while all were looked at
            return (
                {} if decided == before else {where: _UNKNOWN for where, one in looked.items() if one.log.has_producers}
            )
        ids = {file.topic_id: name for name, file in topics}
        ends = {where: end for where, end in ends.items() if where[0] in ids}
        for where, end in ends.items():
            known = looked.get(where)
            if known is None or known.log.end_offset < end:
                again = self._part(ids[where[0]], where)
                if again is None:
                    continue
                log = self._look_at(looked, where, again, known.ceiling if known else again.ceiling)
                cut = None if log is None else again.local.upto(log, end)
                again.seen = ()
                if cut is not None:
                    looked[where].log = cut
                elif known is not None:
                    looked[where] = known
                else:
                    looked.pop(where, None)
        return ends

    def _plan(
        self, looked: dict[Where, _Looked], journal: Where | None, ends: dict[Where, int], wasted: set[int]
    ) -> dict[Where, _Round]:
        """What is to be done about each partition. Each tick begins with another one, so that none waits for ever.

        Where a transaction cannot be shipped as a whole, none of its partitions goes on, and no decision.
        """
        rounds: dict[Where, _Round] = {}
        shipped = self._shipped()
        room_bytes = TAIL_BYTES
        self._turn += 1
        order = [where for where in looked if where != journal]
        first = self._turn % len(order) if order else 0
        for where in [*order[first:], *order[:first], *(where for where in looked if where == journal)]:
            one = looked[where]
            there = shipped.get(where)
            to_do = plan(
                one.log, self._checked(one.part, one.log, there), self._known(one.part, one.log, there),
                wasted.__contains__, room_bytes,
            )  # fmt: skip
            room_bytes -= to_do.size_bytes
            if to_do.is_behind:
                one.part.seen = ()
            rounds[where] = _Round(one.part, one.log, to_do, max(one.ceiling, one.part.ceiling))
        reached = {where: there.end_offset for where, there in shipped.items()}
        reached.update((where, round_.to_do.end_offset) for where, round_ in rounds.items())
        if any(reached.get(where, 0) < end for where, end in ends.items()):
            for held in [*ends, *([journal] if journal else [])]:
                if held in rounds:
                    rounds.pop(held).part.seen = ()
        return rounds

    def _part(self, name: str, where: Where) -> _Part | None:
        """What is known of a partition, by the store's own object: one that it has let go of is not to be used."""
        try:
            partition = self._topics.open_partition(name, where[1], where[0])
        except (UnknownTopic, StoreClosed):
            return None
        before = part = self._parts.get(where)
        if part is None or part.local.partition is not partition:
            part = self._parts[where] = _Part(LocalPartition(partition))
            if before is not None:  # renamed, say
                part.uploaded, part.snapshots, part.ceiling = before.uploaded, before.snapshots, before.ceiling
        if not part.ceiling:
            part.ceiling = granting.limit(part.local.partition.handle)
        return part

    def _forget_topics(self, there: set[str]) -> None:
        """Keep nothing of topics that are gone."""
        for where in [where for where in self._parts if where[0] not in there]:
            part = self._parts.pop(where)
            for base in list(part.uploaded):
                self._forget_upload(part, base)

    def _ceiling(self, part: _Part, there: ShippedPartition | None, now_ms: int) -> int:
        """The ceiling that the manifest is to promise."""
        end_offset = part.local.wanted_offset
        elapsed_ms = now_ms - part.looked_ms
        rate = max(end_offset - part.end_offset, 0) * 1000 / elapsed_ms if part.looked_ms and elapsed_ms > 0 else 0.0
        part.end_offset, part.looked_ms = end_offset, now_ms
        return ceiling_for(end_offset, max(part.ceiling, there.ceiling if there else 0), rate)

    def _shipped(self) -> dict[Where, ShippedPartition]:
        if self._manifest is None:
            return {}
        return {(topic.id, part.number): part for topic in self._manifest.topics for part in topic.partitions}

    def _wasted(self) -> set[int]:
        if self._manifest is None:
            return set()
        chunks = (chunk for part in self._shipped().values() for chunk in part.chunks)
        return wasted_tails({tail.number: tail.object.size_bytes for tail in self._manifest.tails}, chunks)

    def _checked(self, part: _Part, log: LocalLog, there: ShippedPartition | None) -> ShippedPartition | None:
        """The partition's entry, without chunks that are not what the files are now."""
        if part.compared == log.version or there is None:
            return there
        part.compared = log.version
        kept: list[Chunk] = []
        torn = set[int]()
        for chunk in there.chunks:
            if chunk.segment in torn or not part.local.holds(chunk):
                torn.add(chunk.segment)
            else:
                kept.append(chunk)
        return replace(there, chunks=tuple(kept))

    def _known(self, part: _Part, log: LocalLog, there: ShippedPartition | None) -> dict[int, ShippedSegment]:
        """The segments that lie there as their files are here, by base offset."""
        shipped = {segment.base_offset: segment for segment in (there.segments if there else ())}
        found: dict[int, ShippedSegment] = {}
        for segment in log.segments:
            if not segment.sealed:
                continue
            known = part.uploaded.get(segment.base_offset)
            if known is None and segment.base_offset in shipped:
                # Of an earlier process: its stamp is not known, so the bytes are compared.
                candidate = shipped[segment.base_offset]
                if _is_same(part.local, log, segment, candidate):
                    known = part.uploaded[segment.base_offset] = (segment.stamp, candidate)
            if known is not None and known[0] == segment.stamp:
                found[segment.base_offset] = known[1]
        bases = {segment.base_offset for segment in log.segments}
        for base in [base for base in part.uploaded if base not in bases]:
            self._forget_upload(part, base)
        return found

    def _forget_upload(self, part: _Part, base: int) -> None:
        """What was uploaded is not what a file here is any more; it goes once no manifest refers to it."""
        known = part.uploaded.pop(base, None)
        if known is not None:
            self._orphans += [stored.key for stored in (known[1].log, known[1].snapshot) if stored is not None]

    # ------------------------------------------------------------ uploading

    def _begin_uploads(self, rounds: dict[Where, _Round]) -> int:
        """How many segments have to wait for their turn."""
        waiting = 0
        for where, round_ in rounds.items():
            for segment in round_.to_do.upload:
                key = (where, segment.base_offset)
                if key not in self._uploads and not self._uploads.begin(key, self._uploading(where, round_, segment)):
                    waiting += 1
        return waiting

    def _uploading(self, where: Where, round_: _Round, segment: LocalSegment) -> Callable[[], _Uploaded]:
        local, bucket, log = round_.part.local, self.bucket, round_.log
        key = f"segments/{where[0]}/{where[1]}/{segment.base_offset:020d}-{uploads.nonce()}"

        def upload() -> _Uploaded:
            base = segment.base_offset
            data = local.read(log, base, 0, segment.size_bytes)
            base_timestamp = decode_header(data, 0).base_timestamp if data else -1
            max_timestamp, known = local.max_timestamp(base), local.snapshot(base)
            stored = uploads.put(bucket, key, data)
            snapshot = None if known is None else uploads.put(bucket, f"{key}.snapshot", known)
            return segment.stamp, ShippedSegment(
                base, segment.end_offset, stored, base_timestamp, max_timestamp, snapshot
            )

        return upload

    def _collect_uploads(self, wait_s: float = 0.0) -> None:
        """Take note of segments that lie there now. Raises the first error; what failed is begun anew."""
        first: BaseException | None = None
        condemned = {one.key for one in self._manifest.condemned} if self._manifest else set()
        for (where, base), future in self._uploads.ended(wait_s):
            part = self._parts.get(where)
            if part is not None:
                part.seen = ()  # there is something to say
            error = future.exception()
            if error is None and part is not None:
                self._forget_upload(part, base)
                stamp, segment = future.result()
                if segment.log.key not in condemned:  # else it has taken so long that somebody swept it
                    part.uploaded[base] = (stamp, segment)
            elif error is not None and not isinstance(error, Replaced | UnknownTopic | StoreClosed):
                first = first or error
        if first is not None:
            raise first

    def _put_tail(self, rounds: dict[Where, _Round]) -> Tail | None:
        """Put what is new of all partitions as one object; None when nothing is."""
        parts: list[memoryview] = []
        number = self._manifest.next_tail if self._manifest else 0
        start = 0
        for where, round_ in list(rounds.items()):
            pieces, local = round_.to_do.pieces, round_.part.local
            try:
                read = [local.read(round_.log, one.segment, one.position, one.size_bytes) for one in pieces]
            except Replaced:
                round_.part.seen = ()
                del rounds[where]
                continue
            chunks = []
            for piece, data in zip(pieces, read, strict=True):
                chunks.append(_chunk(piece, data, number, start))
                parts.append(data)
                start += len(data)
            round_.chunks = chunks
            for segment in {round_.to_do.active_base, *(piece.segment for piece in round_.to_do.pieces)}:
                self._put_snapshot(where, round_.part, segment)
        if not parts:
            return None
        joined = parts[0] if len(parts) == 1 else b"".join(parts)
        key = f"tails/{number:020d}-{uploads.nonce()}"
        self._orphans.append(key)  # until a manifest says otherwise
        return Tail(number, uploads.put(self.bucket, key, joined))

    def _put_snapshot(self, where: Where, part: _Part, segment: int) -> None:
        """See to it that what was known of producers where a segment begins lies there."""
        if segment in part.snapshots or (data := part.local.snapshot(segment)) is None:
            return
        key = f"segments/{where[0]}/{where[1]}/{segment:020d}-{uploads.nonce()}.snapshot"
        self._orphans.append(key)
        part.snapshots[segment] = Snapshot(segment, uploads.put(self.bucket, key, data))

    # ------------------------------------------------------------ putting the manifest

    def _compose(
        self, rounds: dict[Where, _Round], topics: list[tuple[str, TopicFile]], tail: Tail | None, now_ms: int
    ) -> Manifest:
        """What the manifest is to say."""
        assert self._owner is not None
        before, there = self._manifest, self._shipped()
        composed = []
        for name, file in topics:
            partitions = []
            for number in range(file.partitions):
                where = (file.topic_id, number)
                round_, shipped = rounds.get(where), there.get(where)
                if round_ is not None:
                    snapshots = round_.part.snapshots.values()
                    shipped = entry(round_.log, shipped, round_.to_do, round_.chunks, snapshots, round_.ceiling)
                if shipped is not None:
                    partitions.append(shipped)
            composed.append(as_shipped(name, file, tuple(partitions)))
        tails = [*(before.tails if before else ()), *([tail] if tail else [])]
        live = {chunk.tail for topic in composed for part in topic.partitions for chunk in part.chunks}
        manifest = Manifest(
            store_id=self._topics.store_id,
            owner=self._owner,
            sequence=before.sequence + 1 if before else 0,
            nonce=uploads.nonce(),
            shipped_ms=now_ms,
            interval_ms=self._interval_ms,
            topics=tuple(composed),
            tails=tuple(one for one in tails if one.number in live),
            next_tail=(before.next_tail if before else 0) + (tail is not None),
        )
        return replace(manifest, condemned=self._condemn(manifest, now_ms))

    def _condemn(self, manifest: Manifest, now_ms: int) -> tuple[Condemned, ...]:
        """What nothing refers to any more, with the time since when."""
        before = self._manifest
        known = {one.key: one for one in before.condemned if one.key not in self._deleted} if before else {}
        kept = {stored.key for stored in manifest.objects()}
        kept |= {segment.log.key for part in self._parts.values() for _, segment in part.uploaded.values()}
        gone = {stored.key for stored in before.objects()} if before else set()
        for key in sorted((gone | set(self._orphans)) - kept):
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
        kept = {stored.key for stored in manifest.objects()} | {one.key for one in manifest.condemned}
        if tag != self._tag:  # else a put that was sent may still take effect
            self._tried.clear()
        self._manifest, self._tag = manifest, tag
        self._orphans = [key for key in self._orphans if key not in kept]
        self._deleted &= {one.key for one in manifest.condemned}
        if not self._binding.begun:
            self._binding = replace(self._binding, begun=True)
            write_binding(self._fs, self._topics.path, self._binding)

    def _learn_outcome(self) -> None:
        """Find out what lies there, after a put of which nobody knows whether it took effect.

        One of our own did, or an earlier process's; or the one before it still lies there; or somebody only condemned
        objects meanwhile.
        """
        found = read_manifest(self.bucket)
        if found is None:
            if self._manifest is not None:
                raise ShippingRefused(self.bucket.url, "the manifest is gone, which nobody here has deleted")
            return
        manifest, tag = found
        assert self._owner is not None
        assert self._binding is not None
        if manifest.store_id != self._topics.store_id:
            raise ShippingRefused(self.bucket.url, f"another store is shipped there, by {manifest.owner}")
        if (manifest.owner.epoch, manifest.owner.id) != (self._owner.epoch, self._owner.id):
            if self._manifest is not None and manifest.nonce == self._manifest.nonce:
                return  # what had ended, and is not ours yet
            fence(self._topics, self._binding, manifest.owner)
            raise StoreFenced(f"store {self._topics.path}", str(manifest.owner))
        if manifest.nonce in self._tried:
            self._take_over(self._tried[manifest.nonce], tag)
            self._forget_what_was_seen()
        elif self._manifest is not None and _said(manifest) == _said(self._manifest):
            self._take_over(manifest, tag)
            condemned = {one.key for one in manifest.condemned}
            for part in self._parts.values():  # what nobody referred to for so long that somebody swept it
                part.uploaded = {base: one for base, one in part.uploaded.items() if one[1].log.key not in condemned}
                part.snapshots = {base: one for base, one in part.snapshots.items() if one.object.key not in condemned}
            self._forget_what_was_seen()
        else:  # of an earlier process of this very store, arriving late: then it says nothing that is not so here
            compare(self._topics, self.bucket, manifest)
            self._take_over(manifest, tag)
            self._forget_topics(set())

    def _forget_what_was_seen(self) -> None:
        for part in self._parts.values():
            part.seen = ()

    # ------------------------------------------------------------ afterwards

    def _tell(self, where: Where) -> None:
        """Let those know here who wait for it, or need more offsets, what the manifest says of a partition."""
        part, there = self._parts.get(where), self._shipped().get(where)
        if part is None or there is None:
            return
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

    def ship(self, progress: Callable[[int], None] | None = None) -> ShippedNow:
        """Ship all that is on disk now, until it lies there. Raises as `tick` does.

        ``progress`` is told how many segments are still being uploaded.
        """
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
                progress(now.pending)
            if not now.pending:
                return ShippedNow(put, records, size_bytes, 0)

    @property
    def manifest(self) -> Manifest | None:
        """The one that was put last; None before the first."""
        return self._manifest

    @property
    def unshipped_bytes(self) -> int:
        """What was appended since the last turn, on disk or not."""
        return sum(part.local.appended_bytes - part.appended_bytes for part in list(self._parts.values()))

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
        xxhash.xxh3_64_hexdigest(data),
    )  # fmt: skip


def _is_same(local: LocalPartition, log: LocalLog, segment: LocalSegment, shipped: ShippedSegment) -> bool:
    """Whether a file here is what was uploaded once."""
    if (segment.end_offset, segment.size_bytes) != (shipped.end_offset, shipped.log.size_bytes):
        return False
    try:
        data = local.read(log, segment.base_offset, 0, segment.size_bytes)
    except Replaced:
        return False
    return xxhash.xxh3_64_hexdigest(data) == shipped.log.xxh3_64


def _said(manifest: Manifest) -> object:
    """What a manifest says of the store; nothing needs to be put for the rest."""
    return manifest.owner, manifest.topics, manifest.tails, manifest.files, manifest.ended


def _records(manifest: Manifest) -> int:
    """Offsets that are shipped, by and large."""
    return sum(part.end_offset - part.log_start_offset for topic in manifest.topics for part in topic.partitions)
