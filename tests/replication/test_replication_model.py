"""The rules of replication keep their promises in every state of a model, and the model finds deliberate mistakes.

SEGMENTLOG_REPLICATION_RUNS  how many random runs (6,000; `make test-crash`: 1,500,000)
SEGMENTLOG_SEED              that seed alone; a failure names the one that shows it again
"""

from __future__ import annotations

import os
import re

import pytest
from replication.cluster_model import STEPS, Setting, check, first_state
from replication.explorer import Violation, explore, run_many
from replication.mistakes import FOCUS, MISTAKES, made
from seeds import seeds, share

RUNS = int(os.environ.get("SEGMENTLOG_REPLICATION_RUNS", "6000"))
MISTAKE_RUNS = 5000
"""Limit of the runs that look for one mistake."""

TWO = Setting(machines=2, min_isr=2, isr=2, copies=0, fetches=1, is_exhaustive=True, records=1, changes=0)
SMALL = {
    "a takeover": TWO._replace(terms=2, cuts=0, kills=0),
    "a follower joins": TWO._replace(terms=1, changes=1, cuts=0, kills=0, min_isr=1, isr=1),
    "a follower leaves and joins": TWO._replace(terms=1, changes=2, cuts=0, kills=0, min_isr=1),
    "a power cut": TWO._replace(terms=1, cuts=1, kills=0),
    "messages arrive twice": TWO._replace(terms=1, cuts=0, kills=0, copies=1),
}
LARGER = {
    "a takeover and a kill": TWO._replace(terms=2, cuts=0, kills=1),
    "a takeover and a power cut": TWO._replace(terms=2, cuts=1, kills=0),
    "a takeover and a join": TWO._replace(terms=2, changes=1, cuts=0, kills=0, min_isr=1, isr=1),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_state_of_a_small_cluster_is_right(name: str) -> None:
    """No invariant breaks in any state that two machines reach, and acknowledgements happen in some."""
    found = explore(SMALL[name])
    assert found.is_complete
    assert found.acknowledged > 0
    print(f"{name}: {found}")


@pytest.mark.long(minutes=0.4)
@pytest.mark.parametrize("name", LARGER)
def test_the_nearest_states_of_a_larger_cluster_are_right(name: str) -> None:
    """No invariant breaks in the 100,000 states that take the fewest steps."""
    found = explore(LARGER[name], max_states=100_000)
    assert found.led_twice > 0
    print(f"{name}: {found}")


def test_some_random_runs_are_right() -> None:
    """A few runs with a fixed seed break no rule of the model."""
    found = run_many(1, 300)
    assert found.acknowledged > 50
    assert found.led_twice > 10


@pytest.mark.long(minutes=0.4)
@pytest.mark.parametrize("seed", seeds("replication"))
def test_random_runs_are_right(seed: int) -> None:
    """No invariant breaks in runs with drawn faults: power cuts, kills, late, lost, doubled and overtaken messages."""
    found = run_many(seed, share(RUNS, "replication"))
    print(f"seed {seed}: {found}")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    """Runs find each deliberate mistake. The seed is fixed, so that chance does not fail the test."""
    with made(name), pytest.raises(Violation) as caught:
        run_many(1, MISTAKE_RUNS, FOCUS.get(name))
    reason, found, *_ = str(caught.value).splitlines()
    print(f"{name}: {reason}; {found}, {len(caught.value.trace)} in the trace")


def test_a_forced_leader_shows_only_what_it_has_synced() -> None:
    """It may know a higher high watermark from before, which a power cut would take back. A random run found this."""
    setting = Setting(machines=2, min_isr=1, isr=1, forced=1)
    cluster = first_state(setting)
    for kind, prefix in (
        *(("append", (0,)), ("append", (0,)), ("sync", (0,)), ("fetch", (1,)), ("advance the high watermark", (0,))),
        *(("deliver", ("request", 0)), ("deliver", ("answer", 1)), ("force", (1,)), ("deliver", ("swap", 1))),
        *(("read the document", (1,)), ("cut the power", (1, 1)), ("start", (1,)), ("read the document", (1,))),
        *(("stand", (1,)), ("deliver", ("swap", 1)), ("read the document", (1,))),
    ):
        cluster = next(after for key, after in STEPS[kind](cluster, setting) if key[: len(prefix)] == prefix)
        check(cluster, setting)
    assert cluster.machines[1].is_leading
    assert cluster.machines[1].log_end_offset > 1


def test_a_violation_has_a_short_trace() -> None:
    """The report names the invariant, the run, the setting and each step; the exhaustive search finds the shortest."""
    with made("confirms_unsynced"), pytest.raises(Violation) as caught:
        explore(TWO._replace(terms=1, cuts=0, kills=0))
    assert re.search(r"^I3: . is in the ISR and lacks acknowledged records \{0\} on disk$", str(caught.value), re.M)
    assert "   1 a: append" in str(caught.value)
    with made("confirms_unsynced"), pytest.raises(Violation) as random_run:
        run_many(1, 1000)
    assert len(caught.value.trace) <= len(random_run.value.trace) < 60
