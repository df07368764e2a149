"""What becomes of a log that has to be recovered: a decision table, evidence in, verdict out.

``end`` is where the last whole batch above the recovery point ends.

    checkpoint   what the scan found          resume at              epoch    why
    none         no segment at all            0                      0        the partition is new
    none         end                          end + 2^32             + 1      how far offsets were handed out is
                                                                              unknown; numbers are cheap
    clean        nothing above the point      end                    same     nothing was appended since
    unclean      end = ceiling                end                    + 1      everything that was ever handed out
                                                                              survived
    unclean      end < ceiling                ceiling                + 1      offsets in between may have been seen
    unclean      end > ceiling                end + 2^32             + 1      the ceiling is from a checkpoint that
                                                                              was replaced: as if there were none
    restored     end <= ceiling                the same as unclean; the report says what made the log
    one slot     end                          max(end, ceiling)      + 1      the damaged slot may have held a
    damaged                                   + 2^32                          higher ceiling

Resuming beyond ``end`` gives up [end, resume) as a lost range. Under the boot in which the
log was written none of this applies: the page cache is intact, and the shared state says
where the log ends to the byte.
"""

from __future__ import annotations

from typing import Final

import msgspec

from segmentlog.format.checkpoint import Checkpoint

UNKNOWN_CEILING_GAP: Final = 1 << 32
"""How far to jump when no ceiling is known: a thousand times what one ceiling reserves."""


class RecoveryVerdict(msgspec.Struct, frozen=True):
    """Where a recovered log goes on: ``[end, resume_offset)`` is lost when not empty."""

    resume_offset: int
    epoch: int
    why: str


def decide(
    checkpoint: Checkpoint | None, *, slot_damaged: bool, has_segments: bool, end_offset: int, last_epoch: int
) -> RecoveryVerdict:
    """The row of the table above that applies. ``last_epoch`` is the highest epoch met in the log."""
    if checkpoint is None and not slot_damaged and not has_segments:
        return RecoveryVerdict(0, 0, "the partition is new")
    if checkpoint is None:
        return RecoveryVerdict(
            end_offset + UNKNOWN_CEILING_GAP,
            last_epoch + 1,
            "the checkpoint is missing or damaged in both slots",
        )
    next_epoch = max(checkpoint.epoch, last_epoch) + 1
    ceiling = checkpoint.offset_ceiling
    if slot_damaged:
        resume = max(end_offset, ceiling) + UNKNOWN_CEILING_GAP
        return RecoveryVerdict(resume, next_epoch, "one slot of the checkpoint is damaged; it may have been the newer")
    if end_offset > ceiling:
        resume = end_offset + UNKNOWN_CEILING_GAP
        return RecoveryVerdict(resume, next_epoch, f"the log goes past the checkpoint's offset ceiling {ceiling}")
    if checkpoint.clean and end_offset == checkpoint.recovery_offset == ceiling:
        return RecoveryVerdict(end_offset, checkpoint.epoch, "it was closed cleanly")
    if checkpoint.is_restored:
        why = "restored from an object store"
        if end_offset < ceiling:
            why += f"; the owner of the store may have assigned offsets up to the ceiling {ceiling} before that"
        return RecoveryVerdict(ceiling, next_epoch, why)
    if end_offset == ceiling:
        return RecoveryVerdict(end_offset, next_epoch, "every offset that was handed out survived")
    return RecoveryVerdict(
        ceiling,
        next_epoch,
        f"offsets up to the ceiling {ceiling} may have been handed out before the machine died",
    )
