"""The check of `test_machines` is no formality: ways to break a machine, and each is found out."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from machines.events import stop_machine
from machines.game import PLAIN, Game
from machines.network import missing_for_network
from waiting import wait_until

pytest.importorskip("confluent_kafka")
pytestmark = [
    pytest.mark.long(minutes=1),
    pytest.mark.skipif("SEGMENTLOG_MACHINES_ROUNDS" not in os.environ, reason="SEGMENTLOG_MACHINES_ROUNDS is not set"),
]


def _game(tmp_path: Path, store: str, sabotage: str) -> Game:
    if missing := missing_for_network():
        pytest.skip(missing)
    game = Game(tmp_path / "game", 1, store=store, clients=PLAIN[:1])
    for machine in game.machines:
        machine.sabotage = sabotage
    return game


def test_a_server_that_acknowledges_before_it_ships_is_found_out(tmp_path: Path) -> None:
    """The owner loses the object store, acknowledges records, and is gone: the new owner does not have them."""
    with _game(tmp_path, "s3", "acknowledges before it ships") as game:
        game.start()
        owner, standby = game.machines
        game.object_store.disconnect()
        (client,) = [game.label(pid) for pid in game.running]
        before = len(game.told(client, "acked"))
        wait_until(lambda: len(game.told(client, "acked")) > before + 20, game.describe)
        owner.kill()
        game.heal()
        game.wait_for_owner(standby)
        owner.start()
        game.wait_until_steady()
        _, wrong = game.contradictions()
    assert any(line.startswith("lost:") for line in wrong), wrong[:5]


def test_a_former_owner_that_is_not_fenced_is_found_out(tmp_path: Path) -> None:
    """It continues after a takeover, ships over what the new owner shipped, and acknowledges it."""
    with _game(tmp_path, "folder", "does not fence a former owner") as game:
        game.start()
        owner, standby = game.machines
        stop_machine(game, owner)
        game.wait_for_owner(standby)
        wait_until(lambda: len(game.told(standby.program_label, "acked")) > 5, game.describe)
        before = len(game.told(owner.program_label, "acked"))
        owner.signal(signal.SIGCONT)
        wait_until(lambda: len(game.told(owner.program_label, "acked")) > before + 5, game.describe)
        for machine in game.machines:
            machine.kill()
        game.finish()
        _, wrong = game.compare(standby)
    assert any(line.startswith(("lost:", "offset:", "invented:")) for line in wrong), wrong[:5]
