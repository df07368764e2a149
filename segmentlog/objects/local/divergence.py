"""Whether what lies in an object store of a partition is what was here once: else it is another log, or a newer one."""

from __future__ import annotations

from segmentlog.format.manifest import ShippedPartition
from segmentlog.objects.local.partition_snapshot import LocalPartition

_WHY = "the store here is older than that, or a copy: take it over into an empty folder"


def what_differs(local: LocalPartition, shipped: ShippedPartition) -> str:
    """What lies in the object store and was never here; empty when it all was, or was given up since."""
    epochs = local.partition.epochs()
    ours = {epoch.epoch: epoch.start_offset for epoch in epochs}
    for epoch in shipped.epochs:
        if ours.get(epoch.epoch) != epoch.start_offset:
            return f"epoch {epoch.epoch} begins at offset {epoch.start_offset} there; {_WHY}"
    if epochs[-1].epoch > shipped.epoch:
        return ""  # something was given up here since, and that is told
    if shipped.end_offset > local.log_end_offset:
        return f"its log ends at {shipped.end_offset} there, and at {local.log_end_offset} here; {_WHY}"
    start, compacted = local.partition.log_start_offset, local.partition.compacted_below
    here = {info.base_offset for info in local.partition.segments()}
    for chunk in shipped.chunks:
        is_comparable = chunk.segment in here and chunk.end_offset > start and chunk.base_offset >= compacted
        if is_comparable and not local.holds(chunk):
            return f"offsets from {chunk.base_offset} on are other records there; {_WHY}"
    return ""
