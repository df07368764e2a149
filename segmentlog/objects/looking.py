"""What of a store is to be shipped in an interval: each partition is looked at, planned and, for its tail, read.

All partitions are looked at first, in the order of `capture.topics_of`, and decisions last of all; then each is planned
for itself; then what would tear a transaction is held back: its bytes are put, and no manifest speaks of them before
the rest is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Final

import msgspec
import xxhash

from segmentlog.errors import PartitionFailed, SegmentlogError, StoreClosed, UnknownTopic
from segmentlog.format.manifest import Chunk, Manifest, ShippedPartition, ShippedSegment, Snapshot
from segmentlog.format.names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from segmentlog.log import granting
from segmentlog.log.partition import Partition
from segmentlog.objects.bucket import Bucket
from segmentlog.objects.capture import LocalPartition, Replaced, Signature, topics_of
from segmentlog.objects.decisions import Ends, Where, ends_of_commits, ends_still_owed, find_markers
from segmentlog.objects.recalling import settle
from segmentlog.policy.shipping import (
    TAIL_BYTES,
    LocalLog,
    LocalSegment,
    Plan,
    ceiling_for,
    plan,
    tails_to_move,
    wasted_tails,
)
from segmentlog.topics.folders import TopicFile
from segmentlog.topics.topics import Topics

_RATE_MS: Final = 1_000
"""How fast a log grows is measured over so long at least."""
_UNKNOWN: Final = 1 << 62

Uploaded = tuple[tuple[int, int, int], ShippedSegment]
"""The stamp of a file that was uploaded, and what the manifest is to say of it."""


class Part:
    """What a shipper knows of one partition."""

    def __init__(self, local: LocalPartition) -> None:
        self.local = local
        self.seen: Signature = ()
        """As it was looked at last; empty when it is to be looked at once more."""
        self.uploaded: dict[int, Uploaded] = {}
        """By base offset."""
        self.snapshots: dict[int, Snapshot] = {}
        self.staged: tuple[Chunk, ...] | None = None
        """Instead of the manifest's chunks: put, and held back."""
        self.same: set[Chunk] = set()
        """Chunks that hold what the files held in the ``compared`` version of the log."""
        self.compared: tuple[int, int] | None = None
        self.ceiling = 0
        self.end_offset = 0
        """When the rate of appends was looked at last, and ``looked_ms`` then."""
        self.looked_ms = 0
        self.appended_bytes = 0
        """At the last look."""


class Round(msgspec.Struct):
    """What one tick is to put of a partition: ``data`` are the pieces that the plan wants in the tail."""

    part: Part
    log: LocalLog
    to_do: Plan
    ceiling: int
    data: list[memoryview]
    chunks: list[Chunk] = []
    """What they became."""
    same: Set[Chunk] = frozenset()
    """Of those that were put before, which hold what the files hold."""
    is_held: bool = False
    """The manifest is to say of it what it said before."""


class _Looked(msgspec.Struct):
    """A partition as it was looked at, and the ceiling that it is to get."""

    part: Part
    log: LocalLog
    ceiling: int


class Interval(msgspec.Struct, frozen=True):
    """What is to be done in one tick, by partition; ``ceilings`` are those of all that there are.

    ``waiting``: why nothing more of a partition can be shipped now, though there may be more.
    """

    rounds: dict[Where, Round]
    topics: list[tuple[str, TopicFile]]
    ceilings: dict[Where, int]
    waiting: dict[Where, str]


class Looking:
    """Of one shipper: what is known of all partitions, and what of them comes next. For one thread at a time."""

    def __init__(self, topics: Topics, bucket: Bucket) -> None:
        self._bucket = bucket
        self.parts: dict[Where, Part] = {}
        self.orphans: list[str] = []
        """Objects that were put, and no manifest refers to."""
        self._topics = topics
        self._turn = 0
        self._owed: Ends | None = None
        """Transactions whose markers may not be shipped yet, though decisions are; None while that is not known."""
        self._markers: dict[Where, dict[int, int]] = {}
        """Those that were found at the last look."""
        self._waiting: dict[Where, str] = {}
        """Of the look that is under way."""

    def look(self, wanted: tuple[str, ...], manifest: Manifest | None, now_ms: int) -> Interval:
        """Look at all of it; ``manifest`` is what lies there.

        A partition that cannot be opened keeps no other from being shipped, unless nothing was promised of it yet:
        then what keeps it is raised.
        """
        topics = topics_of(self._topics, wanted, [topic.id for topic in manifest.topics] if manifest else ())
        self._waiting = {}
        self.forget_topics({file.topic_id for _, file in topics})
        shipped = partitions_of(manifest)
        wasted = _wasted_tails(manifest, shipped)
        decisions = next(((file.topic_id, 0) for name, file in topics if name == TRANSACTIONS_TOPIC), None)
        decided_before = self._decided_offset(decisions)
        looked: dict[Where, _Looked] = {}
        ceilings: dict[Where, int] = {}
        is_complete = True
        for name, file in topics:
            for number in range(file.partitions):
                where = (file.topic_id, number)
                there = shipped.get(where)
                part = self._part(name, where, there)
                if part is None:
                    is_complete &= where not in self._waiting
                    continue
                is_wasted = there is not None and any(chunk.tail in wasted for chunk in there.chunks)
                ceiling = ceilings[where] = _ceiling(part, there, now_ms)
                is_known = there is not None and ceiling == there.ceiling and not is_wasted
                if is_known and part.local.signature() == part.seen:
                    continue
                is_complete &= self._look_at(looked, where, part, ceiling, there) is not None
        ends = self._ends_of_transactions(looked, topics, decisions, decided_before, shipped, is_complete)
        rounds = self._plan(looked, decisions, shipped, wasted)
        positions = {(file.topic_id, number) for name, file in topics if name == OFFSETS_TOPIC
                     for number in range(file.partitions)}  # fmt: skip
        _hold_back(rounds, shipped, ends, decisions, positions, is_complete)
        held = {where: "it waits for the rest of a transaction, or for the data that positions are of"
                for where, round_ in rounds.items() if round_.is_held}  # fmt: skip
        return Interval(rounds, topics, ceilings, held | self._waiting)

    def _look_at(
        self, looked: dict[Where, _Looked], where: Where, part: Part, ceiling: int, there: ShippedPartition | None
    ) -> LocalLog | None:
        signature, appended_bytes = part.local.signature(), part.local.appended_bytes
        log = part.local.look()
        if log is None:  # next time
            part.seen = ()
            failed = part.local.partition.failed
            name = part.local.partition.handle.log_name
            self._waiting[where] = str(PartitionFailed(name, failed)) if failed else "files of it are being replaced"
            return None
        if (why := self._settle(part, log, there)) is not None:
            part.seen = ()
            self._waiting[where] = why
            return None
        part.seen, part.appended_bytes = signature, appended_bytes
        part.snapshots = {one.segment: one for one in (there.snapshots if there else ())} | part.snapshots
        looked[where] = _Looked(part, log, ceiling)
        return log

    def _settle(self, part: Part, log: LocalLog, there: ShippedPartition | None) -> str | None:
        """See to it that the manifest refers to each object that a segment lies in alone; what keeps it from that.

        It does, unless shipping began anew, or a stub is damaged: then the segment comes back first.
        """
        known = {segment.log.key for segment in (there.segments if there else ())}
        known |= {one.log.key for _, one in part.uploaded.values()}
        strays = [segment for segment in log.segments if segment.remote and segment.remote not in known]
        try:
            for segment in strays:
                settle(part.local.partition.handle, self._bucket.url, segment, there)
        except (SegmentlogError, OSError) as error:
            return str(error)
        return "files of it are being replaced" if strays else None

    # ------------------------------------------------------------ transactions

    def _decided_offset(self, decisions: Where | None) -> int:
        """How far decisions are on disk now."""
        part = None if decisions is None else self._part(TRANSACTIONS_TOPIC, decisions)
        return 0 if part is None else part.local.partition.durable_offset

    def _ends_of_transactions(
        self, looked: dict[Where, _Looked], topics: list[tuple[str, TopicFile]], decisions: Where | None,
        decided_before: int, shipped: Mapping[Where, ShippedPartition], is_complete: bool,
    ) -> dict[Where, int]:  # fmt: skip
        """How far each partition has to be shipped, lest one of the transactions that were committed of late be torn.

        So far as its data goes, and its marker if that is on disk, and decisions with it. Where it is further than was
        looked at, it is looked at once more.
        """
        part = None if decisions is None else self.parts.get(decisions)
        if decisions is None or part is None:
            has_come = self._topics.has(TRANSACTIONS_TOPIC)  # after the others were looked at
            return {where: _UNKNOWN for where, one in looked.items() if has_come and one.log.has_producers}
        there = shipped.get(decisions)
        decided = looked[decisions].log.end_offset if decisions in looked else part.local.partition.durable_offset
        shipped_offset = there.end_offset if there else 0
        if decided == shipped_offset and decisions not in looked:
            return {}
        ended = ends_of_commits(part.local.partition, shipped_offset, decided)
        self._markers = {}
        if ended is None:  # compacted already: then all there is, if nothing was decided while all were looked at
            self._owed = None
            is_whole = is_complete and decided == decided_before
            whole = {where: one.log.end_offset for where, one in looked.items() if one.log.has_producers}
            return whole | {decisions: decided} if is_whole else dict.fromkeys([*whole, decisions], _UNKNOWN)
        if self._owed is None:
            self._owed = ends_still_owed(part.local.partition, shipped_offset)
        owed = self._owed
        for where, of_producer in ended.items():
            owed.setdefault(where, {}).update(of_producer)
        names = {file.topic_id: name for name, file in topics}
        ends: dict[Where, int] = {}
        for where in list(owed):
            if where[0] in names:
                ends[where] = self._end_of_transactions(looked, names[where[0]], where, owed[where], shipped.get(where))
            else:
                del owed[where]
        return ends | {decisions: decided} if ends else {}

    def _end_of_transactions(
        self, looked: dict[Where, _Looked], name: str, where: Where, ends: dict[int, int],
        there: ShippedPartition | None,
    ) -> int:  # fmt: skip
        """How far one partition has to be shipped; looked at once more if that is further than it was."""
        part, known = self._part(name, where), looked.get(where)
        if part is None:
            return _UNKNOWN
        looked_offset = known.log.end_offset if known else there.end_offset if there else 0
        durable_offset = part.local.partition.durable_offset
        markers = self._markers[where] = find_markers(part.local.partition, ends, durable_offset)
        end = max([*ends.values(), *markers.values()])
        if looked_offset < end:
            self._look_again(looked, name, where, end, there)
        return end

    def note_put(self, rounds: Mapping[Where, Round]) -> None:
        """What was put is what the files held: it needs no comparing, as long as no file is another one."""
        for round_ in rounds.values():
            if round_.part.compared == round_.log.version:
                round_.part.same.update(round_.chunks)

    def note_shipped(self, shipped: Mapping[Where, ShippedPartition]) -> None:
        """Markers that were found may be there now: of their decisions nothing is owed any more."""
        owed = self._owed or {}
        for where, markers in self._markers.items():
            there = shipped.get(where)
            for producer_id, end in markers.items():
                if there is not None and there.end_offset >= end and where in owed:
                    owed[where].pop(producer_id, None)
            if not owed.get(where, True):
                del owed[where]
        self._markers = {}

    def _look_again(
        self, looked: dict[Where, _Looked], name: str, where: Where, end: int, there: ShippedPartition | None
    ) -> None:
        """At a partition in which a transaction ends behind what was looked at: up to there, and no further."""
        part, known = self._part(name, where), looked.get(where)
        if part is None:
            return
        log = self._look_at(looked, where, part, known.ceiling if known else part.ceiling, there)
        cut = None if log is None else part.local.upto(log, end)
        part.seen = ()
        if cut is not None:
            looked[where].log = cut
        elif known is not None:
            looked[where] = known
        else:
            looked.pop(where, None)

    # ------------------------------------------------------------ plans

    def _plan(
        self, looked: dict[Where, _Looked], decisions: Where | None, shipped: Mapping[Where, ShippedPartition],
        wasted: set[int],
    ) -> dict[Where, Round]:  # fmt: skip
        """What is to be done about each partition. Each time another one is the first, so that none waits for ever."""
        rounds: dict[Where, Round] = {}
        room_bytes = TAIL_BYTES
        self._turn += 1
        order = [where for where in looked if where != decisions]
        first = self._turn % len(order) if order else 0
        for where in [*order[first:], *order[:first], *(where for where in looked if where == decisions)]:
            one = looked[where]
            there, local = shipped.get(where), one.part.local
            chunks = one.part.staged if one.part.staged is not None else there.chunks if there is not None else ()
            same = _same_chunks(one.part, one.log, {*chunks, *(there.chunks if there is not None else ())})
            uploaded = self._uploaded(one.part, one.log, there)
            room_bytes = TAIL_BYTES if where == decisions else room_bytes  # they are what others wait for
            to_do = plan(one.log, there, uploaded, chunks, same.__contains__, wasted.__contains__, room_bytes)
            try:
                data = [local.read(one.log, piece.segment, piece.position, piece.size_bytes) for piece in to_do.pieces]
            except Replaced:
                one.part.seen = ()
                continue
            room_bytes -= to_do.size_bytes
            if to_do.is_behind:
                one.part.seen = ()
            rounds[where] = Round(one.part, one.log, to_do, max(one.ceiling, one.part.ceiling), data, same=same)
        return rounds

    def _uploaded(self, part: Part, log: LocalLog, there: ShippedPartition | None) -> dict[int, ShippedSegment]:
        """The segments that lie there as their files are here, by base offset."""
        shipped = {segment.base_offset: segment for segment in (there.segments if there else ())}
        found: dict[int, ShippedSegment] = {}
        for segment in log.segments:
            if not segment.sealed:
                continue
            known = part.uploaded.get(segment.base_offset)
            if segment.remote:
                there_now = (known[1] if known is not None else None, shipped.get(segment.base_offset))
                of_stub = [one for one in there_now if one is not None and one.log.key == segment.remote]
                if of_stub:
                    found[segment.base_offset] = of_stub[0]
                    part.uploaded[segment.base_offset] = (segment.stamp, of_stub[0])
                continue
            if known is None and segment.base_offset in shipped:
                # Of an earlier process: its stamp is not known, so the bytes are compared.
                candidate = shipped[segment.base_offset]
                if _is_same(part.local, log, segment, candidate):
                    known = part.uploaded[segment.base_offset] = (segment.stamp, candidate)
            elif (
                known is not None and known[0] != segment.stamp and known[0][1:] == segment.stamp[1:]
                and _is_same(part.local, log, segment, known[1])
            ):  # fmt: skip
                known = part.uploaded[segment.base_offset] = (segment.stamp, known[1])  # it was away, and came back
            if known is not None and known[0] == segment.stamp:
                found[segment.base_offset] = known[1]
        bases = {segment.base_offset for segment in log.segments}
        for base in [base for base in part.uploaded if base not in bases]:
            self.forget_upload(part, base)
        return found

    # ------------------------------------------------------------ what is known

    def _part(self, name: str, where: Where, there: ShippedPartition | None = None) -> Part | None:
        """What is known of a partition, by the store's own object: one that it has let go of is not to be used.

        None when it is gone; or cannot be opened, where something of it is ``there``. Else that is raised.
        """
        try:
            return self._part_of(self._topics.open_partition(name, where[1], where[0]), where)
        except (UnknownTopic, StoreClosed):
            return None
        except (SegmentlogError, OSError) as error:
            if there is None:
                raise
            self._waiting[where] = str(error)
            return None

    def _part_of(self, partition: Partition, where: Where) -> Part:
        before = part = self.parts.get(where)
        if part is None or part.local.partition is not partition:
            part = self.parts[where] = Part(LocalPartition(partition))
            if before is not None:  # renamed, say
                part.uploaded, part.snapshots, part.staged = before.uploaded, before.snapshots, before.staged
                part.ceiling = before.ceiling
        if not part.ceiling:
            part.ceiling = granting.limit(part.local.partition.handle)
        return part

    def forget_upload(self, part: Part, base: int) -> None:
        """What was uploaded is not what a file here is any more; it goes once no manifest refers to it."""
        known = part.uploaded.pop(base, None)
        if known is not None:
            self.orphans += [stored.key for stored in known[1].objects]

    def forget_topics(self, there: set[str]) -> None:
        """Keep nothing of topics that are gone; ``there``: the ids of those that are not."""
        for where in [where for where in self.parts if where[0] not in there]:
            part = self.parts.pop(where)
            for base in list(part.uploaded):
                self.forget_upload(part, base)

    def kept(self) -> set[str]:
        """Keys of segments and snapshots that were put and are still of use, though no manifest may refer to them."""
        segments = [segment for part in self.parts.values() for _, segment in part.uploaded.values()]
        snapshots = (one.object for part in self.parts.values() for one in part.snapshots.values())
        return {stored.key for stored in (*(one for segment in segments for one in segment.objects), *snapshots)}

    def staged_tails(self) -> set[int]:
        """The numbers of tails that hold what is held back."""
        return {chunk.tail for part in self.parts.values() for chunk in part.staged or ()}

    def forget_keys(self, gone: set[str]) -> None:
        """Of what nobody referred to for so long that somebody swept it; chunks that are held back are put anew."""
        for part in self.parts.values():
            part.uploaded = {
                base: one for base, one in part.uploaded.items() if not any(it.key in gone for it in one[1].objects)
            }
            part.snapshots = {base: one for base, one in part.snapshots.items() if one.object.key not in gone}
        self.forget_staged()

    def forget_staged(self) -> None:
        """Put anew what is held back: another manifest lies there than the one that it continued."""
        for part in self.parts.values():
            part.staged = None

    def forget_what_was_seen(self) -> None:
        """Look at every partition, the next time."""
        for part in self.parts.values():
            part.seen = ()


def partitions_of(manifest: Manifest | None) -> dict[Where, ShippedPartition]:
    """The entries of all partitions."""
    topics = () if manifest is None else manifest.topics
    return {(topic.id, part.number): part for topic in topics for part in topic.partitions}


def _hold_back(
    rounds: Mapping[Where, Round], shipped: Mapping[Where, ShippedPartition], ends: Mapping[Where, int],
    decisions: Where | None, positions: set[Where], is_complete: bool,
) -> None:  # fmt: skip
    """Where a transaction cannot be shipped as a whole, none of its partitions goes on, and no decision.

    Positions that were committed do not go on before all the data that they may be of.
    """

    def hold(these: Iterable[Where]) -> None:
        for where in these:
            if where in rounds:
                rounds[where].is_held = True
                rounds[where].part.seen = ()

    if not is_complete or any(
        round_.to_do.is_behind for where, round_ in rounds.items() if where != decisions and where not in positions
    ):
        hold(positions)
    reached = {where: there.end_offset for where, there in shipped.items()}
    reached.update((where, round_.to_do.end_offset) for where, round_ in rounds.items() if not round_.is_held)
    if any(reached.get(where, 0) < end for where, end in ends.items()):
        hold([*ends, *positions, *([decisions] if decisions else [])])


def _ceiling(part: Part, there: ShippedPartition | None, now_ms: int) -> int:
    """The ceiling that the manifest is to promise."""
    end_offset = part.local.wanted_offset
    elapsed_ms = now_ms - part.looked_ms
    # Looks may follow each other by a millisecond: one record in that is no thousand in a second.
    rate = max(end_offset - part.end_offset, 0) * 1000 / max(elapsed_ms, _RATE_MS) if part.looked_ms else 0.0
    if not part.looked_ms or not 0 <= elapsed_ms < _RATE_MS:
        part.end_offset, part.looked_ms = end_offset, now_ms
    return ceiling_for(end_offset, max(part.ceiling, there.ceiling if there else 0), rate)


def _wasted_tails(manifest: Manifest | None, shipped: Mapping[Where, ShippedPartition]) -> set[int]:
    if manifest is None:
        return set()
    chunks = (chunk for part in shipped.values() for chunk in part.chunks)
    inline = {tail.number: len(tail.data) for tail in manifest.tails if tail.object is None}
    return tails_to_move(inline) | wasted_tails({tail.number: tail.size_bytes for tail in manifest.tails}, chunks)


def _same_chunks(part: Part, log: LocalLog, chunks: Iterable[Chunk]) -> set[Chunk]:
    """Which chunks that lie there hold what the files hold; each is compared once in a version of the log."""
    known = part.same if part.compared == log.version else set()
    part.compared = log.version
    part.same = {chunk for chunk in chunks if chunk in known or part.local.holds(chunk)}
    return part.same


def _is_same(local: LocalPartition, log: LocalLog, segment: LocalSegment, shipped: ShippedSegment) -> bool:
    """Whether a file here is what was uploaded once."""
    if (segment.end_offset, segment.size_bytes) != (shipped.end_offset, shipped.log.size_bytes):
        return False
    position = 0
    try:
        for one in shipped.log.objects:
            data = local.read(log, segment.base_offset, position, one.size_bytes)
            if xxhash.xxh3_64_hexdigest(data) != one.xxh3_64:
                return False
            position += one.size_bytes
    except Replaced:
        return False
    return True
