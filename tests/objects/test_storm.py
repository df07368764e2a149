"""Shipping through a storm: kills, failing, late and doubled requests, takeovers, and what must hold all the while."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from objects.storm import Storm
from objects.storm_bucket import FAULTS
from seeds import seeds, share

ROUNDS = int(os.environ.get("SEGMENTLOG_SHIPPING_ROUNDS", "200"))
STEPS = 60
_KINDS = (
    *FAULTS, "late arrivals", "a zombie at work", "died shipping", "fenced", "taken over", "takeover begun anew",
    "restored", "restart", "kill", "compact", "trim", "truncate", "recreate", "rename", "add partition", "gc",
    "transaction", "second shipper",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("shipping"))
def test_nothing_shipped_is_lost_and_no_offset_has_two_records(tmp_path: Path, seed: int) -> None:
    """Over all machines, and in every restore; and everything was tried."""
    seen: Counter[str] = Counter()
    rounds = share(ROUNDS, "shipping")
    for number in range(rounds):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            Storm(folder, f"{seed}/{number}", seen).run(STEPS)
        except BaseException as error:
            error.add_note(f"seed {seed}, round {number}")
            raise
    print(f"{rounds} rounds: " + ", ".join(f"{kind} {count}" for kind, count in sorted(seen.items())))
    if rounds >= 50:
        assert not [kind for kind in _KINDS if not seen[kind]], "never tried"
