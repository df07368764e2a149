"""The machine dies at any call of producers with transactions: what it promised is held against what comes back.

SEGMENTLOG_DELIVERY_STATES  how many different crash states
SEGMENTLOG_SEED             that seed alone; a failure names the one that shows it again
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from delivery_trial import Trial, run_trial
from seeds import given_seed, jobs
from trial import Broken, run_until

STATES = int(os.environ.get("SEGMENTLOG_DELIVERY_STATES", "500"))


def test_no_transaction_is_torn_at_any_crash_state() -> None:
    """At any power cut, transactions are atomic, committed ones stay, and readers saw only committed records."""
    states = run_until(STATES, run_trial, *jobs("delivery power cuts"))
    assert states >= STATES or given_seed() is not None
    print(f"{states:,} crash states")


@pytest.mark.parametrize(
    ("broken", "how", "caught"),
    [
        ("segmentlog.log.transaction_index.AbortedTransactions.read_ranges", lambda self: {}, "aborted|dirty"),
        (
            "segmentlog.transactions.producer_identity.ProducerIdentity.sync_data",
            lambda self: None,
            "uncommitted|half|dirty",
        ),
        (
            "segmentlog.transactions.outcome.TransactionCompleter.find_unconfirmed",
            lambda *_: (),
            "uncommitted|half|dirty",
        ),
        ("segmentlog.transactions.abandoned.AbandonedTransactions._finish_orphan", lambda *_: None, "blocked"),
    ],
)
def test_a_broken_library_is_caught(
    monkeypatch: pytest.MonkeyPatch, broken: str, how: Callable[..., object], caught: str
) -> None:
    """The trial detects a library that lacks one of its precautions."""

    def run() -> None:
        for seed in range(1, 41):
            Trial(seed).run(rounds=2, operations=50, variants=5)

    monkeypatch.setattr(broken, how)
    with pytest.raises(Broken, match=caught):
        run()
