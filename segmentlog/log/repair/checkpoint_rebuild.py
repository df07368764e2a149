"""Compute what a repair writes: epochs, lost ranges and the checkpoint, from the findings of an inspection. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from segmentlog.format.checkpoint import Checkpoint, recovery_point_at
from segmentlog.inspection.partition_findings import Cut, PartitionFindings
from segmentlog.policy.lost_ranges import add_lost_ranges
from segmentlog.policy.recovery_policy import UNKNOWN_CEILING_GAP
from segmentlog.records import EpochStart, LostRange


def next_epoch(found: PartitionFindings) -> int:
    """Return an epoch that is not used in the log, the checkpoint or the state page."""
    epochs = [epoch for segment in found.segments for epoch in segment.epochs]
    if found.checkpoint.checkpoint is not None:
        epochs.append(found.checkpoint.checkpoint.epoch)
    if found.state.log is not None:
        epochs.append(found.state.log.epoch)
    return max(epochs, default=0) + 1


def new_ranges(found: PartitionFindings, epoch: int, now_ms: int) -> Iterator[LostRange]:
    """Yield the lost ranges for everything that is damaged, or missing without a reason, ascending."""
    ranges = [(cut.base_offset, cut.end_offset, f"{_damage_kind(cut)}, cut out by a repair") for cut in found.cuts]
    ranges += [(hole.base_offset, hole.end_offset, f"repaired: {hole.why}") for hole in found.holes]
    for base_offset, end_offset, reason in sorted(ranges):
        if base_offset < end_offset:
            yield LostRange(base_offset, end_offset, epoch, reason, now_ms)


def _damage_kind(cut: Cut) -> str:
    return "damaged" if cut.record_count is None else "unreadable"


def rebuilt_checkpoint(found: PartitionFindings, lost: Iterable[LostRange]) -> Checkpoint:
    """Return the checkpoint with the additional lost ranges, replacing a damaged slot's fields from the log."""
    known, log = found.checkpoint.checkpoint, found.state.log
    bases = [segment.base_offset for segment in found.segments]
    end_offset = max([segment.end_offset for segment in found.segments], default=0)
    first = bases[0] if bases else 0
    checkpoint = known or Checkpoint(
        log_start_offset=first, clean=False, epochs=(EpochStart(0, 0),), has_producers=True
    )
    ceiling = checkpoint.offset_ceiling
    if log is not None:
        ceiling = log.offset_ceiling
        checkpoint = replace(checkpoint, log_start_offset=log.log_start_offset)
    elif known is None or found.checkpoint.is_damaged:
        ceiling = max(end_offset, ceiling) + UNKNOWN_CEILING_GAP  # the damaged slot may have had a higher ceiling
        checkpoint = replace(checkpoint, clean=False)
    if known is None or known.recovery_segment not in bases:
        # Begin with the next segment: everything before is below the recovery point.
        later = [base for base in bases if known is not None and base > known.recovery_segment] or bases or [0]
        checkpoint = replace(checkpoint, clean=False, **recovery_point_at(later[0]))
    return replace(
        checkpoint,
        offset_ceiling=ceiling,
        has_producers=checkpoint.has_producers or found.has_producers,
        epochs=_epochs(found, checkpoint.epochs),
        lost_ranges=add_lost_ranges(checkpoint.lost_ranges, lost),
    )


def _epochs(found: PartitionFindings, known: tuple[EpochStart, ...]) -> tuple[EpochStart, ...]:
    """Return the epoch history, completed from the epochs of batches."""
    starts = {started.epoch: started.start_offset for started in known}
    for segment in found.segments:
        for epoch, base_offset in segment.epochs.items():
            starts.setdefault(epoch, base_offset)
    history: list[EpochStart] = []
    for epoch, start_offset in sorted(starts.items()):
        if not history or start_offset >= history[-1].start_offset:
            history.append(EpochStart(epoch, start_offset))
    return tuple(history)
