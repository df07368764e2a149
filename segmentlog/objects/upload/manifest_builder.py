"""What the next manifest is to say of the store, and whether that is anything new."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from segmentlog.format.manifest import Manifest, ShippedPartition, ShippedTopic
from segmentlog.objects.local.partition_snapshot import as_shipped
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.upload_state import Part
from segmentlog.objects.upload.plan import Interval
from segmentlog.policy.lost_ranges import count_offsets
from segmentlog.policy.upload_policy import entry, promise


def compose_topics(interval: Interval, parts: Mapping[Where, Part]) -> tuple[ShippedTopic, ...]:
    """All topics, once what was planned has been put; ``parts`` is what is known of partitions."""
    composed = []
    for name, file in interval.topics:
        places = [(file.topic_id, number) for number in range(file.partitions)]
        entries = [_entry(where, interval, parts) for where in places]
        composed.append(as_shipped(name, file, tuple(one for one in entries if one is not None)))
    return tuple(composed)


def _entry(where: Where, interval: Interval, parts: Mapping[Where, Part]) -> ShippedPartition | None:
    """Of one partition; None of one that cannot be opened, and never was shipped."""
    round_, shipped = interval.rounds.get(where), interval.shipped.get(where)
    if round_ is not None and not round_.is_held:
        snapshots = round_.part.standing.snapshots.values()
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
    return promise(where[1], ceiling, parts[where].local.first_epoch())


def tails_of(topics: tuple[ShippedTopic, ...]) -> set[int]:
    """The numbers of those that hold something of these."""
    return {chunk.tail for topic in topics for part in topic.partitions for chunk in part.chunks}


def said(manifest: Manifest) -> object:
    """What a manifest says of the store; nothing needs to be put for the rest."""
    return manifest.owner, manifest.topics, manifest.tails, manifest.files, manifest.ended


def records_of(manifest: Manifest | None) -> int:
    """Offsets that are shipped, without those in lost ranges."""
    topics = () if manifest is None else manifest.topics
    return sum(
        count_offsets(part.lost_ranges, part.log_start_offset, part.end_offset)
        for topic in topics
        for part in topic.partitions
    )
