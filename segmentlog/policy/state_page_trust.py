"""Decide whether to trust the state page of a partition when the partition is opened: a decision table.

    the page                                    the files                        decision
    is of another boot or folder, or damaged    any                              distrusted
    has left the kernel's memory since it was   any                              distrusted: it may be any earlier
    created                                                                      version
    records a rewrite of the log, or a failed   any                              trusted: a recovery starts at
    fsync                                                                        the end that the page records
    has another epoch than the checkpoint, or   any                              distrusted: page or checkpoint was
    a higher ceiling                                                             restored from elsewhere
    records an end after the end of the         active segment shorter           distrusted: the same reason
    active segment
    records an end that an intact batch         active segment longer, no        distrusted: the same reason
    follows                                     running append
    none of these                               agree with the page              trusted

If the page is distrusted, the partition is recovered as after a machine crash: the log resumes at the
offset ceiling, so that no offset that a consumer may have seen is assigned again. The cost is at most a
gap in the offsets, because recovery keeps every intact batch.
"""

from __future__ import annotations

import msgspec


class Evidence(msgspec.Struct, frozen=True):
    """The facts about a partition from its state page, the kernel and its files."""

    is_about: bool
    """The page's header names this boot and this folder, and its blocks are intact."""
    same_memory: bool
    """The kernel has had the page's file in memory ever since the page was created."""
    in_rewrite: bool
    """The page records a rewrite of the log, or a failed fsync."""
    is_appending: bool
    """A process is appending, or was killed during an append."""
    epoch: int
    offset_ceiling: int
    checkpoint_epoch: int | None
    """None if there is no checkpoint."""
    checkpoint_ceiling: int
    end_position: int
    file_bytes: int
    """Size of the active segment's file; -1 if it is missing."""
    continues: bool
    """At the end of the log that the page records, the segment has an intact batch header with the next offset."""


def distrust(found: Evidence) -> str | None:
    """Return the reason to distrust the page, or None if it is trusted."""
    if not found.is_about:
        return "the state page is of another boot or folder, or damaged"
    if not found.same_memory:
        return "the disk may have been detached and attached again since the state page was created"
    if found.in_rewrite:
        return None
    if found.checkpoint_epoch is not None:
        if found.epoch != found.checkpoint_epoch:
            return f"the state page has epoch {found.epoch}, but the checkpoint has {found.checkpoint_epoch}"
        if found.offset_ceiling > found.checkpoint_ceiling:
            return (
                f"the state page has the offset ceiling {found.offset_ceiling},"
                f" but the checkpoint has {found.checkpoint_ceiling}"
            )
    if found.file_bytes < found.end_position:
        return f"the active segment has {found.file_bytes} bytes, but the state page records {found.end_position}"
    if found.continues and not found.is_appending:
        return f"the active segment continues after byte {found.end_position}, the end that the state page records"
    return None
