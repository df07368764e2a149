"""Decide when appended data must be fsynced, for each fsync policy."""

from __future__ import annotations

from segmentlog.config import FsyncPolicy


def append_must_sync(policy: FsyncPolicy, *, unsynced_records: int, unsynced_bytes: int) -> bool:
    """Return whether an append must fsync before it returns. Unsynced records and bytes include those of the append."""
    if policy.kind == "always":
        return True
    if policy.kind == "records":
        return unsynced_records >= policy.amount
    if policy.kind == "bytes":
        return unsynced_bytes >= policy.amount
    return False


def background_sync_due(
    policy: FsyncPolicy,
    *,
    unsynced_records: int,
    unsynced_age_ms: int,
    sealed_unsynced: bool,
    slack_ms: int = 0,
) -> bool:
    """Return whether the background flush should fsync now.

    ``unsynced_age_ms`` is the time since the last fsync, an upper bound for the age of unsynced data.
    ``slack_ms`` is the time until the next call, so that the bound also holds until then. Sealed
    segments are synced under every policy, including ``never``: this limits what recovery must read
    after a machine crash.
    """
    if not unsynced_records:
        return False
    if sealed_unsynced:
        return True
    return policy.kind == "ms" and unsynced_age_ms + slack_ms >= policy.amount
