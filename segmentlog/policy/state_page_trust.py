"""Whether the state page of a partition is believed when it is opened: a decision table, evidence in, doubt out.

    the page                                    the files                        what is decided
    is of another boot, folder, or damaged      whatever they are                not believed
    is of a memory that the kernel does not     whatever they are                not believed: it may be any version
    vouch for                                                                    that ever was, beside any state
    says that its log is being rewritten, or    whatever they are                believed so far that a recovery
    that an fsync failed                                                         begins where it ends
    has an epoch, or a ceiling above the one,   the checkpoint                   not believed: page or checkpoint was
    of another checkpoint                                                        put back from elsewhere
    ends behind the end of the active segment   shorter                          not believed: the same
    ends before a whole batch that goes on      longer, and nobody is appending  not believed: the same
    where it ends
    none of these                               they agree                       believed

Not to be believed is to be recovered as after the death of the machine: the log goes on at the
offset ceiling, so that no offset that anybody may have seen is given out again. A gap in the numbers
is what that costs at most, since a recovery keeps every whole batch that it finds.
"""

from __future__ import annotations

import msgspec


class Evidence(msgspec.Struct, frozen=True):
    """What page, kernel and files say of a partition."""

    is_about: bool
    """The page's header names this boot and this folder, and its blocks are whole."""
    same_memory: bool
    """The kernel had the page's file in memory ever since the page was made."""
    in_rewrite: bool
    """The page says that its log is being rewritten, or that an fsync failed."""
    is_appending: bool
    """Somebody is in the middle of an append, or died in it."""
    epoch: int
    offset_ceiling: int
    checkpoint_epoch: int | None
    """None without a checkpoint."""
    checkpoint_ceiling: int
    end_position: int
    file_bytes: int
    """Length of the active segment's file; -1 when it is missing."""
    goes_on: bool
    """A whole header of a batch of the next offset stands where the page says that the log ends."""


def doubt(found: Evidence) -> str | None:
    """Why the page is not believed; None when it is."""
    if not found.is_about:
        return "the state page is of another boot or folder, or damaged"
    if not found.same_memory:
        return "the disk may have gone and come back since the state page was made"
    if found.in_rewrite:
        return None
    if found.checkpoint_epoch is not None:
        if found.epoch != found.checkpoint_epoch:
            return f"the state page is of epoch {found.epoch}, the checkpoint of {found.checkpoint_epoch}"
        if found.offset_ceiling > found.checkpoint_ceiling:
            return f"the state page has offsets up to {found.offset_ceiling}, the checkpoint {found.checkpoint_ceiling}"
    if found.file_bytes < found.end_position:
        return f"the active segment has {found.file_bytes} bytes, and the state page speaks of {found.end_position}"
    if found.goes_on and not found.is_appending:
        return f"the active segment goes on behind byte {found.end_position}, where the state page ends"
    return None
