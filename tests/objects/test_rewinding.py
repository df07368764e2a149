"""Restores to a time and to offsets: what is left out, what is kept, and what goes on from there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from objects.rewinding_trial import Trial
from seeds import seeds


@pytest.mark.parametrize("seed", seeds("rewinding"))
def test_what_is_below_the_cut_is_there_and_nothing_else(tmp_path: Path, seed: int) -> None:
    """Over random histories: no part of a transaction without the rest, no offset twice, no position behind it."""
    seen: Counter[str] = Counter()
    for number in range(8):
        (tmp_path / str(number)).mkdir()
        trial = Trial(tmp_path / str(number), f"{seed}/{number}")
        try:
            trial.run(40)
            for restore in range(3):
                trial.restore_at_random(restore)
        finally:
            trial.close()
        seen["further"] += trial.further
    assert seen["further"], "no transaction ever had to be kept together"
