"""The power of a follower is cut at every call that its log makes, and it follows its leader again afterwards.

SEGMENTLOG_FOLLOWER_STATES  how many different crash states (10,000)
SEGMENTLOG_SEED             that seed alone; a failure names the one that shows it again
"""

from __future__ import annotations

import os

import pytest
from follower_trial import run_trial
from seeds import given_seed, jobs
from trial import run_until

STATES = int(os.environ.get("SEGMENTLOG_FOLLOWER_STATES", "10000"))


@pytest.mark.long(minutes=1.5)
def test_a_follower_keeps_its_promises_at_any_crash_state() -> None:
    """Confirmed records and noted ceilings stay. The log has no record that the leader never had there.

    And once it has followed the leader again, both logs are equal to the byte.
    """
    states = run_until(STATES, run_trial, *jobs("follower cuts"))
    assert states >= STATES or given_seed() is not None
    print(f"{states:,} crash states")
