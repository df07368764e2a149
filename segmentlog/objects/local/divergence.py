"""Find data in the manifest that the local log never contained: the local store is an old copy or another log."""

from __future__ import annotations

from segmentlog.format.manifest import ShippedPartition
from segmentlog.objects.local.partition_snapshot import LocalPartition

_WHY = "the local store is an older copy; take the store over into an empty folder ('segmentlog takeover')"


def find_divergence(local: LocalPartition, shipped: ShippedPartition) -> str:
    """Describe shipped data that the local log never contained; return an empty string if there is none."""
    epochs = local.partition.epochs()
    ours = {epoch.epoch: epoch.start_offset for epoch in epochs}
    for epoch in shipped.epochs:
        if ours.get(epoch.epoch) != epoch.start_offset:
            return f"epoch {epoch.epoch} begins at offset {epoch.start_offset} in the object store, not locally; {_WHY}"
    if epochs[-1].epoch > shipped.epoch:
        return ""  # a recovery lost these records after their upload, and reported the range
    if shipped.end_offset > local.log_end_offset:
        end = local.log_end_offset
        return f"its log ends at offset {shipped.end_offset} in the object store, but at {end} locally; {_WHY}"
    start, compacted = local.partition.log_start_offset, local.partition.compacted_below
    local_bases = {info.base_offset for info in local.partition.segments()}
    comparable = [
        chunk
        for chunk in shipped.chunks
        if chunk.segment in local_bases and chunk.end_offset > start and chunk.base_offset >= compacted
    ]
    same = local.contained_chunks(comparable)
    for chunk in comparable:
        if chunk not in same:
            return f"the records from offset {chunk.base_offset} on differ in the object store; {_WHY}"
    return ""
