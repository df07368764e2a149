"""Decide at which offset and epoch a recovered log resumes: a decision table.

``end`` is the end offset of the last intact batch. A checkpoint file has two slots: see `segmentlog.format.checkpoint`.

    checkpoint   result of the scan           resume at              epoch    reason
    none         no segment                   0                      0        the partition is new
    none         end                          end + 2^32             + 1      the highest assigned offset is
                                                                              unknown; offsets are cheap
    clean        end = recovery point         end                    same     no append since the checkpoint
    unclean      end = ceiling                end                    + 1      every offset that was ever assigned
                                                                              survived
    unclean      end < ceiling                ceiling                + 1      a consumer may have seen the offsets
                                                                              in between
    unclean      end > ceiling                end + 2^32             + 1      the ceiling is from another
                                                                              checkpoint: treated as unknown
    restored     end <= ceiling               ceiling                + 1,024  the owner may have used epochs before
                                                                              it shipped them
    one slot     end                          max(end, ceiling)      + 1      the damaged slot may have had a
    damaged                                   + 2^32                          higher ceiling
    replicated   end                          end                    same     only leaders open gaps

If the log resumes after ``end``, [end, resume) becomes a lost range. If a lost range of a replicated log begins at its
``end``, the log resumes after that range (`decide_replicated`). The table applies only after a
reboot. Under the boot in which the log was written, the page cache is intact, and the shared state
contains the exact end of the log.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from segmentlog.format.checkpoint import Checkpoint, Replicated
from segmentlog.policy.lost_ranges import skip_lost_ranges
from segmentlog.policy.replica_fetch import LogHistory, truncate_history

UNKNOWN_CEILING_GAP: Final = 1 << 32
"""Offsets to skip when the ceiling is unknown: a thousand times as many as a ceiling reserves."""

RESTORED_EPOCH_GAP: Final = 1 << 10
"""Difference between the epoch of a restored log and the last shipped epoch. An owner resumes in a new epoch after
each crash, and another machine may take over before the owner ships. A consumer with the unshipped epoch rejects
leaders with a lower epoch. If two logs had the same epoch, it could not detect lost records. A thousand crashes in
between suffice: after each crash, appends wait for an upload."""


class RecoveryVerdict(msgspec.Struct, frozen=True):
    """Offset and epoch at which a recovered log resumes. ``[end, resume_offset)``, if not empty, is lost."""

    resume_offset: int
    epoch: int
    why: str


def decide(
    checkpoint: Checkpoint | None, *, slot_damaged: bool, has_segments: bool, end_offset: int, last_epoch: int
) -> RecoveryVerdict:
    """Return the verdict of the table above. ``last_epoch`` is the highest epoch found in the log."""
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
        return RecoveryVerdict(resume, next_epoch, f"the log extends beyond the checkpoint's offset ceiling {ceiling}")
    if checkpoint.clean and end_offset == checkpoint.recovery_offset == ceiling:
        return RecoveryVerdict(end_offset, checkpoint.epoch, "it was closed cleanly")
    if checkpoint.is_restored:
        why = "restored from an object store"
        if end_offset < ceiling:
            why += f"; the owner of the store may have assigned offsets up to the ceiling {ceiling} before that"
        return RecoveryVerdict(ceiling, next_epoch - 1 + RESTORED_EPOCH_GAP, why)
    if end_offset == ceiling:
        return RecoveryVerdict(end_offset, next_epoch, "every assigned offset survived")
    return RecoveryVerdict(
        ceiling,
        next_epoch,
        f"offsets up to the ceiling {ceiling} may have been assigned before the machine crashed",
    )


class ReplicatedVerdict(NamedTuple):
    """Outcome of the recovery of a replicated log. The log resumes at the end of ``history``."""

    history: LogHistory
    offset_ceiling: int
    is_intact: bool
    """Whether everything that was synced is present. If not, the machine needs a new incarnation and a new copy."""
    why: str


def decide_replicated(
    checkpoint: Checkpoint, *, slot_damaged: bool, end_offset: int, last_epoch: int, last_base: int
) -> ReplicatedVerdict:
    """Decide where a replicated log resumes, and with which epochs and lost ranges.

    The log gets epochs and lost ranges after its end from the leader again. ``last_epoch`` is the highest epoch found
    in the log, and ``last_base`` the base offset of its last segment.

    A power cut that interrupts a write of the checkpoint leaves a damaged slot. The log then has no record of an epoch
    that only this slot had, and no segment after such a gap. If it has, the slot was complete, and was damaged later.
    """
    history = LogHistory(checkpoint.epochs, checkpoint.lost_ranges, max(end_offset, checkpoint.offset_ceiling))
    mark = checkpoint.replicated or Replicated()
    truncate_to = mark.truncate_to
    if truncate_to >= 0:
        history = truncate_history(history, truncate_to)
    resume_offset = skip_lost_ranges(history.lost_ranges, end_offset)
    why = "a replicated log resumes at its end"
    if truncate_to >= 0:
        why += f"; it was truncated to {truncate_to}"
    is_short = end_offset < checkpoint.recovery_offset
    has_missing = slot_damaged and (last_epoch > checkpoint.epoch or last_base > resume_offset)
    ceiling = max(checkpoint.offset_ceiling, resume_offset)
    if slot_damaged:
        ceiling += UNKNOWN_CEILING_GAP
    if mark.is_incomplete:
        why += "; an earlier recovery found that synced records or ranges are missing"
    elif has_missing:
        why += "; one slot of the checkpoint is damaged, and had epochs or lost ranges that the log needs"
    elif is_short:
        why += f"; records that were synced are missing before offset {checkpoint.recovery_offset}"
    history = truncate_history(history._replace(log_end_offset=resume_offset), resume_offset)
    return ReplicatedVerdict(history, ceiling, not (mark.is_incomplete or has_missing or is_short), why)
