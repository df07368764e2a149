"""Seeds of a random test: a fixed one, those that found a fault before, and a fresh one for each run.

    @pytest.mark.parametrize("seed", seeds("kills"))              a run with each seed
    ... share(ROUNDS, "kills")                                    rounds in each run
    run_until(STATES, run_trial, *jobs("power cuts", POLICIES))   trials for a budget of states

Fixed seeds repeat the checks of earlier runs; fresh seeds try new cases. The fresh seed is the same in all tests and
processes of a run. Pytest prints it at the beginning and at the end, and a failed test reports its seed.

SEGMENTLOG_SEED=<n> runs every test with that seed alone, which repeats a failure. Then add the seed to `FOUND`.

A seed repeats its failure while the trial draws the same numbers in the same order, and as far as the scheduler of a
machine allows. So each fault also gets a deterministic test of its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice, product
from typing import Any, Final

import pytest

FOUND: Final[dict[str, tuple[int, ...]]] = {
    "power cuts": (
        12,  # a trimmed segment came back, the empty one after it was deleted: verify missed the offsets between them
        991836100,  # a power cut while a partition was created: the segment was on disk, the checkpoint's name was not
    ),
    "compaction cuts": (
        325485466,  # a truncation removed the copy of a pass, which then noted its range as clean
        1003913150,  # segments were rewritten in the middle of a pass, which reported damage
        # A fault of the trial: a truncation met a copy before its swap, and records that were shown disappeared.
        1065547676,
    ),
    "delivery power cuts": (
        500007,  # a commit's marker was written by a process that died, reported as returned by another one, and lost
        430337954,  # a process died before the name of the topic of states was on disk, and another one used the topic
    ),
    "shipping": (
        59338546,  # a file of ranges was compacted, and a process that had it open kept the old positions
    ),
    "replication": (
        1002710000,  # a follower with an empty disk joined without a ceiling, led, and assigned offset 0 again
    ),
    "healthy logs": (
        901614981,  # after a trim up to its end and a roll, verify considered the segment of the recovery point deleted
    ),
}
"""Seeds that always run, by the name under which tests ask for them; each with the fault that it found."""

FIXED: Final = 1
"""The first seed of every test, in every run."""

_FRESH_NAME: Final = "SEGMENTLOG_FRESH_SEED"
# Internal: the environment variable by which the processes of one run share the fresh seed.


def given_seed() -> int | None:
    """Return the seed in SEGMENTLOG_SEED, or None. All tests use that seed alone."""
    text = os.environ.get("SEGMENTLOG_SEED")
    return int(text) if text else None


def fresh_seed() -> int:
    """Return a random seed, the same for the whole run, or the one in SEGMENTLOG_SEED."""
    given = given_seed()
    fresh = os.environ.setdefault(_FRESH_NAME, str(random.SystemRandom().randrange(1000, 1 << 30)))
    return int(fresh) if given is None else given


def every_seed(name: str, fixed: Iterable[int] = (FIXED,)) -> list[int]:
    """Return the seeds of a test: the fixed ones, those in `FOUND`, the fresh one."""
    if (given := given_seed()) is not None:
        return [given]
    return list(dict.fromkeys((*fixed, *FOUND.get(name, ()), fresh_seed())))


def seeds(name: str, fixed: Iterable[int] = (FIXED,)) -> list[Any]:
    """Return the seeds for `pytest.mark.parametrize`; the name of a test does not contain the fresh seed."""
    fresh = fresh_seed()
    return [pytest.param(seed, id="fresh" if seed == fresh else str(seed)) for seed in every_seed(name, fixed)]


def share(total: int, name: str) -> int:
    """Return the number of rounds for each seed, of ``total`` rounds."""
    return max(total // len(every_seed(name)), 1)


def endless(name: str) -> Iterator[int]:
    """Yield seeds without end: those in `FOUND`, then fixed and fresh ones in turn.

    With SEGMENTLOG_SEED, yield that seed and its successors.
    """
    if (given := given_seed()) is not None:
        return count(given)
    return chain(FOUND.get(name, ()), chain.from_iterable(_in_turns()))


def jobs(name: str, *variants: Sequence[Any]) -> tuple[list[tuple[Any, ...]], Iterator[tuple[Any, ...]]]:
    """Return arguments for trials, each with a seed and one of ``variants``: (those always run, more without end).

    Each seed in `FOUND` always runs, with a variant that the fresh seed chooses, and so do the first fixed and the
    first fresh seed. Fixed and fresh seeds then take turns. The fixed ones begin with the first variant and the fresh
    ones with the last, so that a small budget covers different variants.

    *Rejected:* every variant of each seed in `FOUND`. With three such seeds they used up the budget of a CI run, which
    then tried no fresh seed.
    """
    every = list(product(*variants))
    if (given := given_seed()) is not None:
        return [(given, *variant) for variant in every], iter(())
    found = [(seed, *every[(fresh_seed() + at) % len(every)]) for at, seed in enumerate(FOUND.get(name, ()))]
    turns = ((pair, zip(every, reversed(every), strict=True)) for pair in _in_turns())
    more = (
        (seed, *variant) for pair, both in turns for chosen in both for seed, variant in zip(pair, chosen, strict=True)
    )
    return [*found, *islice(more, 2)], more


def _in_turns() -> Iterator[tuple[int, int]]:
    return zip(count(FIXED), count(fresh_seed()), strict=False)
