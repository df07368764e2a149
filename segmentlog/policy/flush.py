"""When un-fsynced data is due to be fsynced, policy by policy."""

from __future__ import annotations

from segmentlog.config import FsyncPolicy


def append_must_sync(policy: FsyncPolicy, *, unsynced_records: int, unsynced_bytes: int) -> bool:
    """Whether an append may only return after an fsync, given what lies un-fsynced including it."""
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
    """Whether the background flush should fsync now.

    ``unsynced_age_ms`` is the time since the last fsync, an upper bound of the age of what
    is un-fsynced; ``slack_ms`` the time until the question is asked again, so that the bound
    holds in between. Sealed segments are synced under every policy, ``never`` included:
    it bounds what recovery has to read after a machine death.
    """
    if not unsynced_records:
        return False
    if sealed_unsynced:
        return True
    return policy.kind == "ms" and unsynced_age_ms + slack_ms >= policy.amount
