"""The check of `test_protocol` detects six broken servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from delivery_cast import Nursery
from ecosystem.protocol.game import CLIENTS, Game
from ecosystem.protocol.strikes import PRODUCE, Strikes
from waiting import wait_until

_PLAYER = Path(__file__).with_name("player.py")
_PATIENCE_S = 6.0
"""A pipeline that was led astray may never come to its end."""
PLAIN, TRANSACTIONS, FIRST, SECOND, COMMITTED, _ = CLIENTS
Play = Callable[[Game, Strikes], object]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Yield one nursery for all tests."""
    made = Nursery(_PLAYER)
    yield made
    made.close()


def found(tmp_path: Path, nursery: Nursery, sabotage: str, orders: list[dict[str, Any]], play: Play) -> set[str]:
    """Return the kinds of contradictions at the end of a game; "twice" if the pipeline repeated a value."""
    with Game(tmp_path / "game", 1, nursery, sabotage=sabotage, patience_s=_PATIENCE_S) as game:
        for order in orders:
            game.enter(order)
        game.until_all_play()
        play(game, Strikes(game))
        _, wrong = game.contradictions()
        print("\n".join(wrong[:20]))
        # An incomplete pipeline is not a sign: it had little time.
        return {line.split(":")[0] for line in wrong} | {"twice" for line in wrong if "went through 2 times" in line}


def _kill_after_an_acknowledgement(game: Game, strikes: Strikes) -> None:
    (pid,) = game.players("client", "plain")
    label = game.label(pid)
    before = len(game.told(label, "acked"))
    wait_until(lambda: len(game.told(label, "acked")) > before)
    strikes.kill_server()


def _read_what_is_aborted(game: Game, strikes: Strikes) -> None:
    """Wait until a reader gets an aborted record; with a correct server this never ends."""
    (writer,), (reader,) = game.players("client", "transactions"), game.players("client", "reader")

    def has_read() -> bool:
        aborted = {event[2] for event in game.told(game.label(writer), "aborted")}
        sent = {value for event in game.told(game.label(writer), "send") if event[2] in aborted for value in event[5]}
        return any(value in sent for event in game.told(game.label(reader), "handed") for _, value in event[5])

    wait_until(has_read)


def _own_together(game: Game, strikes: Strikes) -> None:
    """Wait until both members own a partition in one generation; with a correct server this never ends."""
    first, second = (game.label(pid) for pid in game.players("client", "pipeline"))

    def owned(label: str) -> set[tuple[Any, ...]]:
        return {tuple(event[4:]) for event in game.told(label, "owns")}

    wait_until(lambda: owned(first) & owned(second))


def _lose_answers(game: Game, strikes: Strikes) -> None:
    game.server.proxy.lose_answers(PRODUCE, 3)
    wait_until(lambda: game.server.proxy.seen["lost"] == 3)
    (pid,) = game.players("client", "plain")
    before = len(game.told(game.label(pid), "acked"))
    wait_until(lambda: len(game.told(game.label(pid), "acked")) > before + 3)


def test_a_forgotten_fence_is_caught(tmp_path: Path, nursery: Nursery) -> None:
    """A zombie of a transactional id writes, and commits, after its successor has begun."""
    wrong = found(tmp_path, nursery, "fence", [COMMITTED, PLAIN], lambda _, strikes: strikes.fence())
    assert wrong & {"aborted", "uncommitted"}


def test_an_acknowledgement_before_the_write_is_caught(tmp_path: Path, nursery: Nursery) -> None:
    """An acknowledged record is gone with its worker."""
    assert "lost" in found(tmp_path, nursery, "early", [PLAIN], _kill_after_an_acknowledgement)


def test_reading_past_the_last_stable_offset_is_caught(tmp_path: Path, nursery: Nursery) -> None:
    """A consumer is handed what is aborted later."""
    assert "dirty" in found(tmp_path, nursery, "unstable", [TRANSACTIONS, COMMITTED], _read_what_is_aborted)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_commit_from_an_old_generation_is_caught(tmp_path: Path, nursery: Nursery, protocol: str) -> None:
    """A member that was given up commits what another one has done meanwhile."""
    orders = [PLAIN, {**FIRST, "protocol": protocol}]

    def evict(game: Game, strikes: Strikes) -> None:
        """Repeat the eviction if a slow machine aborted the transaction for its age."""
        for _ in range(5):
            before = game.seen["member fenced"]
            strikes.evict(protocol)
            if game.seen["member fenced"] == before:
                return

    games = (tmp_path / f"{number}" for number in range(4))
    assert any("twice" in found(_made(game), nursery, "generation", orders, evict) for game in games)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(("protocol", "sabotage"), [("classic", "twice-classic"), ("consumer", "twice")])
def test_a_partition_that_is_assigned_twice_is_caught(
    tmp_path: Path, nursery: Nursery, protocol: str, sabotage: str
) -> None:
    """Two members read it in one generation."""
    orders = [{**one, "protocol": protocol} for one in (FIRST, SECOND)]
    assert "owners" in found(tmp_path, nursery, sabotage, [PLAIN, *orders], _own_together)


def test_a_skipped_dedupe_is_caught(tmp_path: Path, nursery: Nursery) -> None:
    """A record that a producer sent again, because the answer was lost, is in the log twice."""
    assert "doubled" in found(tmp_path, nursery, "dedupe", [PLAIN], _lose_answers)
