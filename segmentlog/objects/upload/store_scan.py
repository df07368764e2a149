"""One look at the partitions of a store: how each is found on disk, and what keeps one from being shipped."""

from __future__ import annotations

from collections.abc import Mapping, Set

import msgspec

from segmentlog.errors import PartitionFailed, SegmentlogError
from segmentlog.format.manifest import Manifest, ShippedPartition
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.upload_state import KnownPartitions, Part
from segmentlog.objects.tier.recall import settle
from segmentlog.policy.upload_policy import LocalLog

_REPLACED = "files of it are being replaced"


class Looked(msgspec.Struct):
    """A partition as it was looked at, and the ceiling that it is to get."""

    part: Part
    log: LocalLog
    ceiling: int


class Look:
    """Of one tick. ``url``: the place that is shipped to; ``shipped``: what the manifest says that lies there."""

    def __init__(self, known: KnownPartitions, url: str, shipped: Mapping[Where, ShippedPartition]) -> None:
        self._known = known
        self._url = url
        self.shipped = shipped
        self.found: dict[Where, Looked] = {}
        """Those of which something is to be shipped, perhaps."""
        self.ceilings: dict[Where, int] = {}
        """Of all that there are."""
        self.waiting: dict[Where, str] = {}
        """Why nothing more of a partition can be shipped now, though there may be more."""
        self.is_complete = True
        """Whether each that there is was found, or is as it was."""

    def at(self, name: str, where: Where, wasted: Set[int], now_ms: int) -> None:
        """Look at a partition, unless it is as it was, and has nothing in ``wasted`` tails.

        One that cannot be opened waits, unless nothing was promised of it yet: then what keeps it is raised.
        """
        there = self.shipped.get(where)
        try:
            part = self._known.part(name, where)
        except (SegmentlogError, OSError) as error:
            if there is None:
                raise
            self.waiting[where] = str(error)
            self.is_complete = False
            return
        if part is None:
            return
        if there is not None and (why := self._known.why_not_ours(where, there)):
            self.waiting[where] = why
            self.is_complete = False
            return
        is_wasted = there is not None and any(chunk.tail in wasted for chunk in there.chunks)
        ceiling = self.ceilings[where] = part.wanted_ceiling(there, now_ms)
        is_known = there is not None and ceiling == there.ceiling and not is_wasted
        if not is_known or part.local.signature() != part.seen:
            self.is_complete &= self._look(where, part, ceiling) is not None

    def again(self, name: str, where: Where, end: int) -> None:
        """Look once more at a partition in which a transaction ends behind what was found: up to there, no further."""
        part, found = self._known.part(name, where), self.found.get(where)
        if part is None:
            return
        log = self._look(where, part, found.ceiling if found else part.ceiling)
        cut = None if log is None else part.local.upto(log, end)
        part.look_again()
        if cut is not None:
            self.found[where].log = cut
        elif found is not None:
            self.found[where] = found
        else:
            self.found.pop(where, None)

    def _look(self, where: Where, part: Part, ceiling: int) -> LocalLog | None:
        there = self.shipped.get(where)
        signature, appended_bytes = part.local.signature(), part.local.appended_bytes
        log = part.local.look()
        if log is None:  # next time
            part.look_again()
            failed = part.local.partition.failed
            name = part.local.partition.handle.log_name
            self.waiting[where] = str(PartitionFailed(name, failed)) if failed else _REPLACED
            return None
        if (why := self._settle(part, log, there)) is not None:
            part.look_again()
            self.waiting[where] = why
            return None
        part.seen, part.appended_bytes = signature, appended_bytes
        part.standing.add_snapshots(there)
        self.found[where] = Looked(part, log, ceiling)
        return log

    def _settle(self, part: Part, log: LocalLog, there: ShippedPartition | None) -> str | None:
        """See to it that the manifest refers to each object that a segment lies in alone; what keeps it from that.

        It does, unless shipping began anew, or a stub is damaged: then the segment comes back first.
        """
        strays = part.standing.strays(log, there)
        try:
            for segment in strays:
                settle(part.local.partition.handle, self._url, segment, there)
        except (SegmentlogError, OSError) as error:
            return str(error)
        return _REPLACED if strays else None


def partitions_of(manifest: Manifest | None) -> dict[Where, ShippedPartition]:
    """The entries of all partitions."""
    topics = () if manifest is None else manifest.topics
    return {(topic.id, part.number): part for topic in topics for part in topic.partitions}
