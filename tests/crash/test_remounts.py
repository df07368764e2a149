"""The disk goes away and comes back while the machine runs, and every promise is held against what is found then.

SEGMENTLOG_REMOUNT_STATES  how many different states (CI: 20,000)
SEGMENTLOG_SEED            the first seed; a failure names the one that shows it again
"""

from __future__ import annotations

import os
from itertools import count

from remount_trial import KERNELS, run_remounts
from trial import POLICIES, run_until

STATES = int(os.environ.get("SEGMENTLOG_REMOUNT_STATES", "4000"))
SEED = int(os.environ.get("SEGMENTLOG_SEED", "1"))


def test_no_promise_is_broken_by_a_remount() -> None:
    """Whatever version of the state page comes back beside whatever state of the files, in the same boot."""
    jobs = (
        (seed, policy, writers, KERNELS[(seed + index) % len(KERNELS)])
        for seed in count(SEED)
        for index, (policy, writers) in enumerate((policy, writers) for policy in POLICIES for writers in (1, 3))
    )
    states = run_until(STATES, run_remounts, jobs)
    assert states >= STATES
    print(f"{states:,} states")
