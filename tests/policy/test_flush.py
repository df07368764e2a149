"""The time of an fsync: every policy, below its bound and at the bound."""

from __future__ import annotations

import pytest

from segmentlog.config import FsyncPolicy
from segmentlog.policy.flush import append_must_sync, background_sync_due

APPENDS = [
    # policy, records and bytes un-fsynced with this append, whether it waits for an fsync
    ("always", 1, 1, True),
    ("1000ms", 10**6, 10**9, False),
    ("everysec", 10**6, 10**9, False),
    ("never", 10**6, 10**9, False),
    ("100records", 99, 10**9, False),
    ("100records", 100, 1, True),
    ("100records", 5000, 1, True),
    ("1records", 1, 1, True),
    ("4096bytes", 10**6, 4095, False),
    ("4096bytes", 1, 4096, True),
    ("4096bytes", 1, 10**9, True),
]


@pytest.mark.parametrize(("policy", "records", "size_bytes", "waits"), APPENDS)
def test_when_an_append_waits_for_an_fsync(policy, records, size_bytes, waits):
    """An append returns only after an fsync exactly when its policy counts so much as un-fsynced."""
    parsed = FsyncPolicy.parse(policy)
    assert append_must_sync(parsed, unsynced_records=records, unsynced_bytes=size_bytes) is waits


BACKGROUND = [
    # policy, records un-fsynced, their age, milliseconds until asked again, a sealed segment among them, due
    ("1000ms", 1, 999, 0, False, False),
    ("1000ms", 1, 1000, 0, False, True),
    ("1000ms", 1, 750, 250, False, True),
    ("1000ms", 1, 749, 250, False, False),
    ("1000ms", 0, 10**9, 10**9, False, False),
    ("1000ms", 1, 0, 0, True, True),
    ("1ms", 1, 1, 0, False, True),
    ("always", 1, 10**9, 0, False, False),
    ("always", 1, 0, 0, True, True),
    ("5records", 4, 10**9, 0, False, False),
    ("5records", 4, 0, 0, True, True),
    ("5bytes", 4, 10**9, 0, False, False),
    ("never", 10**6, 10**9, 0, False, False),
    ("never", 10**6, 0, 0, True, True),
    ("never", 0, 10**9, 0, True, False),
]


@pytest.mark.parametrize(("policy", "records", "age_ms", "slack_ms", "sealed", "due"), BACKGROUND)
def test_when_the_background_flush_is_due(policy, records, age_ms, slack_ms, sealed, due):
    """The background sync keeps a policy in milliseconds, before its bound.

    It syncs sealed segments under every policy. Without new records it does nothing.
    """
    found = background_sync_due(
        FsyncPolicy.parse(policy),
        unsynced_records=records,
        unsynced_age_ms=age_ms,
        sealed_unsynced=sealed,
        slack_ms=slack_ms,
    )
    assert found is due
