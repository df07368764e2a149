"""Build the next manifest, and decide whether it differs from the current one."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from segmentlog.format.manifest import Manifest, ShippedPartition, ShippedTopic
from segmentlog.objects.local.partition_snapshot import to_manifest_topic
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import PartitionUploadState
from segmentlog.objects.upload.plan import UploadPlan
from segmentlog.policy.lost_ranges import count_offsets
from segmentlog.policy.upload_policy import grant_only_entry, manifest_entry


def build_topics(
    plan: UploadPlan, states: Mapping[PartitionKey, PartitionUploadState]
) -> tuple[ShippedTopic, ...]:  # fmt: skip
    """Return the entries of all topics. Everything in the plan must have been uploaded."""
    built = []
    for name, file in plan.topics:
        keys = [(file.topic_id, number) for number in range(file.partitions)]
        entries = [_build_entry(partition_key, plan, states) for partition_key in keys]
        built.append(to_manifest_topic(name, file, tuple(entry for entry in entries if entry is not None)))
    return tuple(built)


def _build_entry(
    partition_key: PartitionKey, plan: UploadPlan, states: Mapping[PartitionKey, PartitionUploadState]
) -> ShippedPartition | None:
    """Return the entry of a partition; None for a partition that cannot be opened and was never shipped."""
    upload, shipped = plan.uploads.get(partition_key), plan.shipped.get(partition_key)
    if upload is not None and not upload.is_withheld:
        snapshots = upload.state.objects.snapshots.values()
        stable = upload.state.local.stable_offset(upload.log, upload.plan.end_offset)
        return manifest_entry(
            upload.log, shipped, upload.plan, upload.chunks, snapshots, upload.offset_grant, stable,
            upload.unchanged.__contains__,
        )  # fmt: skip
    offset_grant = plan.offset_grants.get(partition_key, 0)
    if shipped is not None:
        return shipped if shipped.offset_grant >= offset_grant else replace(shipped, offset_grant=offset_grant)
    if partition_key not in plan.offset_grants:
        return None
    return grant_only_entry(partition_key[1], offset_grant, states[partition_key].local.first_epoch())


def tail_numbers(topics: tuple[ShippedTopic, ...]) -> set[int]:
    """Return the numbers of the tails that these entries refer to."""
    return {chunk.tail for topic in topics for part in topic.partitions for chunk in part.chunks}


def content_of(manifest: Manifest) -> object:
    """Return the parts of a manifest that describe the store. If two manifests have equal parts, no put is needed."""
    return (
        manifest.owner, manifest.topics, manifest.tails, manifest.files, manifest.ended, manifest.is_handed_over,
    )  # fmt: skip


def count_shipped_offsets(manifest: Manifest | None) -> int:
    """Return the number of shipped offsets, without those in lost ranges."""
    topics = () if manifest is None else manifest.topics
    return sum(
        count_offsets(part.lost_ranges, part.log_start_offset, part.end_offset)
        for topic in topics
        for part in topic.partitions
    )
