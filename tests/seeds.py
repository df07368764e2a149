"""Which seeds a random test takes: a fixed one, those that once found something, and a fresh one that nobody tried.

    @pytest.mark.parametrize("seed", seeds("kills"))              a run with each of them
    ... share(ROUNDS, "kills")                                    so many rounds in each
    run_until(STATES, run_trial, *jobs("power cuts", POLICIES))   trials for a budget of states

The fixed ones keep what was checked yesterday checked today, the fresh ones look where nobody has looked. The fresh
seed is the same in all tests of a run and all its processes; pytest prints it at the beginning and in the end, and a
test that fails names the one it had. SEGMENTLOG_SEED=<n> takes that one and no other, in every test, so that a
failure is seen again. Then it belongs into `FOUND`.

A seed shows again what it showed as long as the trial draws the same numbers in the same order, and as far as the
scheduler of a machine lets it. So what it found gets a test of its own as well, that needs no luck.
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
        12,  # a trimmed segment came back, and the empty one behind it went: verify missed the offsets in between
        991836100,  # of a partition that was being made the segment was on disk, and the checkpoint's name was not
    ),
    "compaction cuts": (
        325485466,  # a truncation removed the copy of a pass, which then noted its range as clean
        1003913150,  # segments were written anew in the middle of a pass, which told of damage
        1065547676,  # of the trial: a truncation met a copy that was about to be put in place, and what was shown went
    ),
    "delivery power cuts": (
        500007,  # a commit's marker was written by one who died, noted by another as told, and lost
        430337954,  # the topic of the states was made by one who died before its name was on disk, and used by another
    ),
    "shipping": (
        59338546,  # a file of ranges made room, and who had it open did not hear where its bytes lay by then
    ),
    "replication": (
        1002710000,  # a follower with an empty disk joined without a ceiling, led, and assigned offset 0 again
    ),
    "healthy logs": (
        901614981,  # trimmed up to its end and rolled: verify took the segment of the recovery point for deleted
    ),
}
"""Seeds that are always run, by the name under which tests ask for them; each with what it found."""

FIXED: Final = 1
"""The first seed of every test, in every run."""

_FRESH_NAME: Final = "SEGMENTLOG_FRESH_SEED"
# Internal: how the processes of one run agree on the fresh seed.


def given_seed() -> int | None:
    """The seed that SEGMENTLOG_SEED asks for: then there is no other."""
    text = os.environ.get("SEGMENTLOG_SEED")
    return int(text) if text else None


def fresh_seed() -> int:
    """A seed that was not tried before, or the one that was asked for."""
    given = given_seed()
    fresh = os.environ.setdefault(_FRESH_NAME, str(random.SystemRandom().randrange(1000, 1 << 30)))
    return int(fresh) if given is None else given


def every_seed(name: str, fixed: Iterable[int] = (FIXED,)) -> list[int]:
    """Return the seeds of a test: the fixed ones, those in `FOUND`, the fresh one."""
    if (given := given_seed()) is not None:
        return [given]
    return list(dict.fromkeys((*fixed, *FOUND.get(name, ()), fresh_seed())))


def seeds(name: str, fixed: Iterable[int] = (FIXED,)) -> list[Any]:
    """Return the same for `pytest.mark.parametrize`; a test's name does not change with the fresh seed."""
    fresh = fresh_seed()
    return [pytest.param(seed, id="fresh" if seed == fresh else str(seed)) for seed in every_seed(name, fixed)]


def share(total: int, name: str) -> int:
    """What each of the seeds gets of ``total`` rounds."""
    return max(total // len(every_seed(name)), 1)


def endless(name: str) -> Iterator[int]:
    """Seeds for as many trials as one likes: those in `FOUND`, then fixed and fresh ones in turns.

    With SEGMENTLOG_SEED that one and those that follow it.
    """
    if (given := given_seed()) is not None:
        return count(given)
    return chain(FOUND.get(name, ()), chain.from_iterable(_in_turns()))


def jobs(name: str, *variants: Sequence[Any]) -> tuple[list[tuple[Any, ...]], Iterator[tuple[Any, ...]]]:
    """Return arguments for trials, each a seed and one of each of ``variants``: (those always run, more without end).

    Each seed in `FOUND` is always run, with a variant that the fresh seed chooses, and so are the first fixed and the
    first fresh seed. Fixed and fresh seeds then take turns. The fixed ones begin with the first variant and the fresh
    ones with the last, so that a small budget meets different variants.

    *Rejected:* every variant of each seed in `FOUND`. With three such seeds they used up the budget of a CI run,
    which then tried no fresh seed.
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
