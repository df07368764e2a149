"""The disk goes away and comes back while the machine runs, and every promise is held against what is found then.

SEGMENTLOG_REMOUNT_STATES  how many different states (4,000; `make test-crash`: 200,000)
SEGMENTLOG_SEED            the one seed to take; a failure names the one that shows it again
"""

from __future__ import annotations

import os

from remount_trial import KERNELS, run_remounts
from seeds import jobs
from trial import POLICIES, run_until

STATES = int(os.environ.get("SEGMENTLOG_REMOUNT_STATES", "4000"))


def test_no_promise_is_broken_by_a_remount() -> None:
    """Any version of the state page comes back with any state of the files, in the same boot."""
    states = run_until(STATES, run_remounts, *jobs("remounts", POLICIES, (1, 3), KERNELS))
    assert states > 0
    print(f"{states:,} states")
