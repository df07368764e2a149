"""What a shipper knows of each partition of a store, from one tick to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import Final

from segmentlog.errors import StoreClosed, UnknownTopic
from segmentlog.format.manifest import ShippedPartition
from segmentlog.log import offset_grants
from segmentlog.objects.local.divergence import what_differs
from segmentlog.objects.local.partition_snapshot import LocalPartition, Signature
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.uploaded_objects import Standing
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.policy.upload_policy import ceiling_for
from segmentlog.topics.topic_registry import Topics

_RATE_MS: Final = 1_000
"""How fast a log grows is measured over so long at least."""


class Part:
    """What is known of one."""

    def __init__(self, local: LocalPartition, standing: Standing, ceiling: int) -> None:
        self.local = local
        self.standing = standing
        self.seen: Signature = ()
        """As it was looked at last; empty when it is to be looked at once more."""
        self.appended_bytes = 0
        """At the last look."""
        self.ceiling = ceiling
        """How far offsets may be handed out here."""
        self._end_offset = 0
        """When the rate of appends was looked at last, and ``_looked_ms`` then."""
        self._looked_ms = 0

    def look_again(self) -> None:
        """Look at it the next time, whether or not something becomes of it until then."""
        self.seen = ()

    def wanted_ceiling(self, there: ShippedPartition | None, now_ms: int) -> int:
        """The ceiling that the manifest is to promise; ``there`` is what it says of the partition now."""
        end_offset = self.local.wanted_offset
        elapsed_ms = now_ms - self._looked_ms
        # Looks may follow each other by a millisecond: one record in that is no thousand in a second.
        rate = max(end_offset - self._end_offset, 0) * 1000 / max(elapsed_ms, _RATE_MS) if self._looked_ms else 0.0
        if not self._looked_ms or not 0 <= elapsed_ms < _RATE_MS:
            self._end_offset, self._looked_ms = end_offset, now_ms
        return ceiling_for(end_offset, max(self.ceiling, there.ceiling if there else 0), rate)

    def tell(self, there: ShippedPartition) -> None:
        """Let those know here who wait for it, or need more offsets, what the manifest says."""
        handle = self.local.partition.handle
        with contextlib.suppress(UnknownTopic):
            handle.ledger.record_shipped(there.end_offset)
            handle.wake_followers()
            if there.ceiling > self.ceiling:
                offset_grants.grant(handle, there.ceiling)
                self.ceiling = there.ceiling


class KnownPartitions:
    """Of one shipper. For one thread at a time, but for `unshipped_bytes`."""

    def __init__(self, topics: Topics, orphans: Orphans) -> None:
        self._topics = topics
        self._orphans = orphans
        self.parts: dict[Where, Part] = {}
        self.not_compared: set[Where] = set()
        """Those that could not be opened when all others were compared with what lies there."""

    def part(self, name: str, where: Where) -> Part | None:
        """What is known of a partition, by the store's own object: one that it has let go of is not to be used.

        None when it is gone. Raises what keeps it from being opened.
        """
        try:
            partition = self._topics.open_partition(name, where[1], where[0])
            part = before = self.parts.get(where)
            if part is None or part.local.partition is not partition:
                local = LocalPartition(partition)
                standing = Standing(local, self._orphans, before.standing if before is not None else None)
                part = self.parts[where] = Part(local, standing, before.ceiling if before is not None else 0)
            if not part.ceiling:
                part.ceiling = offset_grants.limit(part.local.partition.handle)
            return part
        except (UnknownTopic, StoreClosed):
            return None

    def why_not_ours(self, where: Where, there: ShippedPartition) -> str:
        """Why nothing of a partition may be shipped, which can be opened by now: what lies there never was here."""
        if where not in self.not_compared:
            return ""
        why = what_differs(self.parts[where].local, there)
        if not why:
            self.not_compared.discard(where)
        return why

    @property
    def unshipped_bytes(self) -> int:
        """What was appended since the last look, on disk or not."""
        return sum(part.local.appended_bytes - part.appended_bytes for part in self.parts.copy().values())

    def kept(self) -> set[str]:
        """Keys of segments and snapshots that were put and are still of use, though no manifest may refer to them."""
        uploads = (one for part in self.parts.values() for _, one in part.standing.uploaded.values())
        keys = {stored.key for segment in uploads for stored in segment.objects}
        return keys | {one.object.key for part in self.parts.values() for one in part.standing.snapshots.values()}

    def staged_tails(self) -> set[int]:
        """The numbers of tails that hold what is held back."""
        return {chunk.tail for part in self.parts.values() for chunk in part.standing.staged or ()}

    # ------------------------------------------------------------ forgetting

    def forget_topics(self, there: Set[str]) -> None:
        """Keep nothing of topics that are gone; ``there``: the ids of those that are not."""
        for where in [where for where in self.parts if where[0] not in there]:
            self.parts.pop(where).standing.forget_uploads()

    def forget_keys(self, gone: Set[str]) -> None:
        """Of what nobody referred to for so long that somebody swept it; chunks that are held back are put anew."""
        for part in self.parts.values():
            part.standing.forget_keys(gone)

    def forget_staged(self) -> None:
        """Put anew what is held back: another manifest lies there than the one that it continued."""
        for part in self.parts.values():
            part.standing.unstage()

    def forget_what_was_seen(self) -> None:
        """Look at every partition, the next time."""
        for part in self.parts.values():
            part.look_again()
