"""Kafka's clients and processes of the library, on the same topics and groups, while everything is done to them.

SEGMENTLOG_PROTOCOL_ROUNDS  how many things are done (50; `make test-crash`: 2,000)
SEGMENTLOG_SEED             a failure names the one that shows it again, as far as scheduling lets it
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from delivery_cast import Nursery
from ecosystem.protocol.game import CLIENTS, LIBRARY, Game
from ecosystem.protocol.java_players import PROJECT
from ecosystem.protocol.strikes import STRIKES, play
from seeds import endless, fresh_seed
from server.clients.fetching import Missing
from server.clients.java_driver import java_command

ROUNDS = int(os.environ.get("SEGMENTLOG_PROTOCOL_ROUNDS", "50"))
ROUNDS_OF_A_GAME = 50
ROUNDS_MIN = 22
"""In which each kind of thing has its turn."""
_PLAYER = Path(__file__).with_name("player.py")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Yield one nursery for all tests."""
    made = Nursery(_PLAYER)
    yield made
    made.close()


def java() -> list[str] | None:
    """Return the command of Java's clients, or None if they are not available."""
    try:
        return java_command("Players", project=PROJECT)
    except Missing as error:
        if "CI" in os.environ:
            raise
        print(f"without Java's clients: {error}")
        return None


@pytest.mark.long(minutes=1)
def test_nothing_is_lost_doubled_or_torn(tmp_path: Path, nursery: Nursery) -> None:
    """No disturbance of workers, clients, connections, the disk or topics breaks a guarantee."""
    command = java()
    games = -(-ROUNDS // ROUNDS_OF_A_GAME)
    for number, seed in enumerate(islice(endless("protocol"), games) if games > 1 else [fresh_seed()]):
        began_s = time.monotonic()
        with Game(tmp_path / str(number), seed, nursery, java=command) as game:
            for order in (*CLIENTS, *LIBRARY):
                game.enter(order)
            if game.java is not None:
                game.java.start(seed)
            game.until_all_play()
            play(game, max(min(ROUNDS, ROUNDS_OF_A_GAME), ROUNDS_MIN))
            history = game.check()
            epoch = game.store.transactions.states()["java"].epoch if game.java is not None else 0
        verdicts = {one.verdict for one in history.transactions.values()}
        print(f"{time.monotonic() - began_s:.0f} s, {len(history.acknowledged)} acknowledged, {dict(game.seen)}")
        assert game.seen.keys() >= {*STRIKES, "producer fenced", "member fenced", "records deleted", "partition added"}
        assert verdicts >= {"committed", "aborted"}
        by_java = [
            txn for txn, one in history.transactions.items() if one.result and "transactions/" in txn and "java" in txn
        ]
        assert epoch >= len(by_java), "the protocol in which each transaction has an epoch of its own took no part"
