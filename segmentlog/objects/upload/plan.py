"""What of a store is to be shipped in an interval: each partition is looked at, planned and, for its tail, read.

All partitions are looked at first (`looking`), in the order of `capture.topics_of`, and decisions last of all; then
each is planned for itself; then what would tear a transaction is held back (`commits`): its bytes are put, and no
manifest speaks of them before the rest is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from segmentlog.format.file_names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from segmentlog.format.manifest import Chunk, Manifest, ShippedPartition
from segmentlog.objects.local.partition_snapshot import Replaced, topics_of
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.upload_state import KnownPartitions, Part
from segmentlog.objects.upload.store_scan import Look, partitions_of
from segmentlog.objects.upload.transaction_barrier import Commits, held_back
from segmentlog.policy.fair_share import Turns
from segmentlog.policy.upload_policy import TAIL_BYTES, LocalLog, Plan, plan, tails_to_move, wasted_tails
from segmentlog.topics.topic_folders import TopicFile
from segmentlog.topics.topic_registry import Topics


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


class Interval(msgspec.Struct, frozen=True):
    """What is to be done in one tick, by partition; ``ceilings`` are those of all that there are.

    ``shipped``: what the manifest said that lay there. ``waiting``: why nothing more of a partition can be shipped
    now, though there may be more.
    """

    rounds: dict[Where, Round]
    topics: list[tuple[str, TopicFile]]
    shipped: Mapping[Where, ShippedPartition]
    ceilings: dict[Where, int]
    waiting: dict[Where, str]


class Planning:
    """Of one shipper. For one thread at a time."""

    def __init__(self, topics: Topics, url: str, known: KnownPartitions) -> None:
        self._topics = topics
        self._url = url
        self._known = known
        self._commits = Commits(topics, known)
        self._turns: Turns[Where] = Turns()
        """By whose bytes the tails took, which have room for so many."""

    def look(self, wanted: tuple[str, ...], manifest: Manifest | None, now_ms: int) -> Interval:
        """Look at all of it; ``manifest`` is what lies there.

        A partition that cannot be opened keeps no other from being shipped, unless nothing was promised of it yet:
        then what keeps it is raised.
        """
        topics = topics_of(self._topics, wanted, [topic.id for topic in manifest.topics] if manifest else ())
        self._known.forget_topics({file.topic_id for _, file in topics})
        shipped = partitions_of(manifest)
        wasted = _wasted_tails(manifest, shipped)
        decisions = next(((file.topic_id, 0) for name, file in topics if name == TRANSACTIONS_TOPIC), None)
        decided_before = self._commits.decided_offset(decisions)
        look = Look(self._known, self._url, shipped)
        for name, file in topics:
            for number in range(file.partitions):
                look.at(name, (file.topic_id, number), wasted, now_ms)
        ends = self._commits.ends(look, topics, decisions, decided_before)
        rounds = self._plan(look, decisions, wasted)
        positions = {(file.topic_id, number) for name, file in topics if name == OFFSETS_TOPIC
                     for number in range(file.partitions)}  # fmt: skip
        plans = {where: round_.to_do for where, round_ in rounds.items()}
        held = held_back(plans, shipped, ends, decisions, positions, look.is_complete)
        waiting: dict[Where, str] = {}
        for where, round_ in rounds.items():
            if where in held:
                round_.is_held = True
                round_.part.look_again()
                waiting[where] = "it waits for the rest of a transaction, or for the data that positions are of"
        return Interval(rounds, topics, shipped, look.ceilings, waiting | look.waiting)

    def record_shipped(self, interval: Interval, shipped: Mapping[Where, ShippedPartition]) -> None:
        """The manifest that lies there says this now: what is not held back is staged no more."""
        for round_ in interval.rounds.values():
            if not round_.is_held:
                round_.part.standing.unstage()
        self._commits.record_shipped(shipped)

    def _plan(self, look: Look, decisions: Where | None, wasted: Set[int]) -> dict[Where, Round]:
        """What is to be done about each partition. Those whose bytes wait longest come first, and decisions last."""
        rounds: dict[Where, Round] = {}
        room_bytes = TAIL_BYTES
        order = self._turns.order(where for where in look.found if where != decisions)
        for where in [*order, *(where for where in look.found if where == decisions)]:
            one = look.found[where]
            there, local, standing = look.shipped.get(where), one.part.local, one.part.standing
            chunks = standing.staged if standing.staged is not None else there.chunks if there is not None else ()
            same = standing.same_chunks(one.log, {*chunks, *(there.chunks if there is not None else ())})
            uploaded = standing.segments(one.log, there)
            room_bytes = TAIL_BYTES if where == decisions else room_bytes  # they are what others wait for
            to_do = plan(one.log, there, uploaded, chunks, same.__contains__, wasted.__contains__, room_bytes)
            try:
                data = [local.read(one.log, piece.segment, piece.position, piece.size_bytes) for piece in to_do.pieces]
            except Replaced:
                one.part.look_again()
                continue
            room_bytes -= to_do.size_bytes
            if to_do.size_bytes:
                self._turns.record_served(where)
            if to_do.is_behind:
                one.part.look_again()
            rounds[where] = Round(one.part, one.log, to_do, max(one.ceiling, one.part.ceiling), data, same=same)
        return rounds


def _wasted_tails(manifest: Manifest | None, shipped: Mapping[Where, ShippedPartition]) -> set[int]:
    if manifest is None:
        return set()
    chunks = (chunk for part in shipped.values() for chunk in part.chunks)
    inline = {tail.number: len(tail.data) for tail in manifest.tails if tail.object is None}
    return tails_to_move(inline) | wasted_tails({tail.number: tail.size_bytes for tail in manifest.tails}, chunks)
