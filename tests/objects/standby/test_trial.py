"""Standbys while everything fails: they take over at any step, right or wrong, and are killed or stopped anywhere.

SEGMENTLOG_STANDBY_ROUNDS  lives of a store that standbys follow
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from objects.standby_trial import STANDBY_KINDS, StandbyTrial
from seeds import seeds, share

ROUNDS = int(os.environ.get("SEGMENTLOG_STANDBY_ROUNDS", "60"))
STEPS = 80
_SEEN = (
    *STANDBY_KINDS, "standby died", "standby stopped", "standby begins a takeover", "standby took over", "set aside",
    "standby took over in the end", "wrong probe", "local program of a former owner", "read at a standby",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("standbys"))
def test_no_promise_is_broken(memory_path: Path, seed: int) -> None:
    """Any machine may take over at any time: shipped records stay, and an offset has one record.

    Unshipped records of a former owner stay in its folder, and some machine is the owner in the end. All kinds of steps
    occur.
    """
    seen: Counter[str] = Counter()
    rounds = share(ROUNDS, "standbys")
    for number in range(rounds):
        folder = memory_path / str(number)
        folder.mkdir()
        try:
            StandbyTrial(folder, f"standby/{seed}/{number}", seen).run(STEPS)
        except BaseException as error:
            error.add_note(f"seed {seed}, round {number}")
            raise
    print(f"{rounds} rounds: " + ", ".join(f"{kind} {count}" for kind, count in sorted(seen.items())))
    if rounds >= 30:
        assert not [kind for kind in _SEEN if not seen[kind]], "never tried"
