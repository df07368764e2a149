"""How far each partition has to be shipped, lest a transaction that was committed of late be torn.

The ends come from the decisions (`decisions`), which are read once all partitions have been looked at. What cannot
reach them is held back, and so are the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

from segmentlog.format.file_names import TRANSACTIONS_TOPIC
from segmentlog.format.manifest import ShippedPartition
from segmentlog.objects.local.transaction_ends import Ends, Where, ends_of_commits, ends_still_owed, find_markers
from segmentlog.objects.local.upload_state import KnownPartitions
from segmentlog.objects.upload.store_scan import Look
from segmentlog.policy.upload_policy import Plan
from segmentlog.topics.topic_folders import TopicFile
from segmentlog.topics.topic_registry import Topics

_UNKNOWN: Final = 1 << 62
"""An end that nothing reaches."""


class Commits:
    """Of one shipper. For one thread at a time."""

    def __init__(self, topics: Topics, known: KnownPartitions) -> None:
        self._topics = topics
        self._known = known
        self._owed: Ends | None = None
        """Transactions whose markers may not be shipped yet, though decisions are; None while that is not known."""
        self._markers: dict[Where, dict[int, int]] = {}
        """Those that were found at the last look."""

    def decided_offset(self, decisions: Where | None) -> int:
        """How far decisions are on disk now."""
        part = None if decisions is None else self._known.part(TRANSACTIONS_TOPIC, decisions)
        return 0 if part is None else part.local.partition.durable_offset

    def ends(
        self, look: Look, topics: list[tuple[str, TopicFile]], decisions: Where | None, decided_before: int
    ) -> dict[Where, int]:
        """How far each partition has to be shipped, lest one of the transactions that were committed of late be torn.

        So far as its data goes, and its marker if that is on disk, and decisions with it. Where it is further than was
        looked at, it is looked at once more. ``decided_before``: how far decisions were on disk before the look.
        """
        part = None if decisions is None else self._known.parts.get(decisions)
        if decisions is None or part is None:
            has_come = self._topics.has(TRANSACTIONS_TOPIC)  # after the others were looked at
            return {where: _UNKNOWN for where, one in look.found.items() if has_come and one.log.has_producers}
        there, found = look.shipped.get(decisions), look.found.get(decisions)
        decided = found.log.end_offset if found is not None else part.local.partition.durable_offset
        shipped_offset = there.end_offset if there else 0
        if decided == shipped_offset and found is None:
            return {}
        ended = ends_of_commits(part.local.partition, shipped_offset, decided)
        self._markers = {}
        if ended is None:  # compacted already: then all there is, if nothing was decided while all were looked at
            self._owed = None
            is_whole = look.is_complete and decided == decided_before
            whole = {where: one.log.end_offset for where, one in look.found.items() if one.log.has_producers}
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
                ends[where] = self._end(look, names[where[0]], where, owed[where])
            else:
                del owed[where]
        return ends | {decisions: decided} if ends else {}

    def _end(self, look: Look, name: str, where: Where, ends: Mapping[int, int]) -> int:
        """How far one partition has to be shipped; looked at once more if that is further than it was."""
        part, found, there = self._known.part(name, where), look.found.get(where), look.shipped.get(where)
        if part is None:
            return _UNKNOWN
        looked_offset = found.log.end_offset if found else there.end_offset if there else 0
        durable_offset = part.local.partition.durable_offset
        markers = self._markers[where] = find_markers(part.local.partition, ends, durable_offset)
        end = max([*ends.values(), *markers.values()])
        if looked_offset < end:
            look.again(name, where, end)
        return end

    def record_shipped(self, shipped: Mapping[Where, ShippedPartition]) -> None:
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


def held_back(
    plans: Mapping[Where, Plan], shipped: Mapping[Where, ShippedPartition], ends: Mapping[Where, int],
    decisions: Where | None, positions: Set[Where], is_complete: bool,
) -> Set[Where]:  # fmt: skip
    """Where a transaction cannot be shipped as a whole, none of its partitions goes on, and no decision.

    Positions that were committed do not go on before all the data that they may be of.
    """
    held: set[Where] = set()
    if not is_complete or any(
        to_do.is_behind for where, to_do in plans.items() if where != decisions and where not in positions
    ):
        held |= positions
    reached = {where: there.end_offset for where, there in shipped.items()}
    reached.update((where, to_do.end_offset) for where, to_do in plans.items() if where not in held)
    if any(reached.get(where, 0) < end for where, end in ends.items()):
        held |= {*ends, *positions, *([decisions] if decisions else [])}
    return held & plans.keys()
