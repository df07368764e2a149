"""Producers, transactions, pipelines and readers are killed and stopped at any moment; what they saw is held together.

SEGMENTLOG_DELIVERY_ROUNDS  how many kills and stops (50; `make test-crash`: 5,000)
SEGMENTLOG_SEED             a failure names the one that shows it again, as far as scheduling lets it
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import delivery_checker as checker
import msgspec
import pytest
from crashfs_mount import disk as disk
from delivery_cast import PATIENCE_S, Cast, Nursery
from seeds import endless, seeds, share

import segmentlog
from segmentlog.testing.crashfs import CrashFS

ROUNDS = int(os.environ.get("SEGMENTLOG_DELIVERY_ROUNDS", "50"))
WORKER = Path(__file__).with_name("delivery_worker.py")
TOPICS = {"in": 2, "other": 1}
TARGET = "out"
STRIKES = 10
"""Kills and stops in the life of one store."""
GAMES_MORE = 30
"""On a busy machine, some kind of event may be missing: at most this many more games are played until it comes."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Yield one nursery for all tests."""
    made = Nursery(WORKER)
    yield made
    made.close()


class Game(Cast):
    """The life of one store: its workers, what is done to them, and the check in the end."""

    def __init__(self, folder: Path, seed: int, nursery: Nursery, disk: CrashFS | None = None) -> None:
        super().__init__(folder, seed, nursery)
        self.path = (folder if disk is None else disk.path) / "store"
        self.boot = "" if disk is None else "boot-0"
        self.durable = disk is not None
        rng = self.rng
        self.evictions = rng.random() < 0.5
        shared: dict[str, Any] = {
            "store": str(self.path), "topics": TOPICS, "durable": self.durable,
            "transaction_timeout_ms": rng.choice((150, 60_000)),
            "max_poll_interval_ms": rng.choice((200, 1000)) if self.evictions else 300_000,
            "group": "g", "source": "in", "target": TARGET, "targets": 2,
        }  # fmt: skip
        self.orders: list[dict[str, Any]] = [
            {**shared, "job": "plain"},
            {**shared, "job": "named", "name": "counter"},
            {**shared, "job": "transactions", "name": "bank"},
            {**shared, "job": "transactions"},
            {**shared, "job": "pipeline", "name": "pipe-0"},
            {**shared, "job": "pipeline", "name": "pipe-1"},
            {**shared, "job": "reader", "topics": {**TOPICS, TARGET: 2}, "isolation": "read_committed"},
            {**shared, "job": "reader", "isolation": "read_uncommitted"},
        ]

    def __enter__(self) -> Game:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def make(self) -> None:
        """Create the store and its topics."""
        with segmentlog.LogStore(self.path, background=False) as store:
            for topic, partitions in {**TOPICS, TARGET: 2}.items():
                store.create_topic(topic, partitions, segment_bytes=self.rng.choice((3000, 1 << 20)), fsync="never")

    def enter(self, order: dict[str, Any]) -> int:
        """Start one more process."""
        return self.spawn(order, boot=self.boot, background=self.rng.random() < 0.5)

    def strike(self) -> None:
        """Do something to one of them."""
        rng = self.rng
        time.sleep(rng.uniform(0.01, 0.15))
        for pid in rng.sample(list(self.stopped), len(self.stopped)):
            if rng.random() < 0.5:
                self.wake(pid)
        pid = rng.choice(list(self.running))
        order = self.running[pid]
        how = rng.random()
        if how < 0.5:
            self.kill(pid)
        elif how < 0.9:
            self.stop(pid)
        else:
            self.terminate(pid)
        self.enter(order)

    def play(self, strikes: int) -> None:
        for order in self.orders:
            self.enter(order)
        time.sleep(0.1)
        for _ in range(strikes):
            self.strike()

    def look(self) -> checker.Store:
        """Settle, and read everything, in a process of its own."""
        found = self.folder / "found"
        order = {**self.orders[4], "max_poll_interval_ms": 300_000, "transaction_timeout_ms": 60_000}
        self.end(self.enter({**order, "job": "look", "broken": (), "found": str(found), "patience_s": PATIENCE_S / 2}))
        return {
            (topic, partition): msgspec.convert(one, checker.Final, strict=False)
            for topic, partition, one in json.loads(found.read_text())
        }

    def check(self, *, power_cut: bool = False) -> checker.History:
        """Hold everything that is there against everything that was seen."""
        store = self.look()
        history = checker.gather(self.events())
        wrong = checker.check(history, store, power_cut=power_cut)
        wrong += checker.check_pipeline(store, "in", TARGET)
        if not power_cut:
            wrong += checker.check_owners(history, evictions=self.evictions)
        assert not wrong, "\n  ".join([f"{len(wrong)} contradictions; {self.where}", *wrong[:12]])
        return history


@pytest.mark.long(minutes=0.4)
def test_killed_and_stopped_processes_tear_no_transaction(tmp_path: Path, nursery: Nursery) -> None:
    """Processes are killed and stopped: no record is lost or doubled, transactions are atomic, and all work ends.

    Pipelines work exactly once, and a partition has one owner.
    """
    games = max(-(-ROUNDS // STRIKES), 2)
    totals = dict.fromkeys(("committed", "aborted", "unknown", "acknowledged", "handed", "owned"), 0)
    seen: set[str] = set()
    for number, seed in zip(range(games + GAMES_MORE), endless("delivery"), strict=False):
        if number >= games and seen >= totals.keys() - {"unknown"}:
            break
        with Game(tmp_path / str(number), seed, nursery) as game:
            game.make()
            game.play(min(-(-ROUNDS // games), STRIKES) if number < games else STRIKES)
            game.finish()
            history = game.check()
        for one in history.transactions.values():
            totals[one.verdict] += 1
        totals["acknowledged"] += len(history.acknowledged)
        totals["handed"] += sum(map(len, history.handed.values()))
        totals["owned"] += len(history.owned)
        seen = {what for what, count in totals.items() if count}
    print(totals)
    assert seen >= totals.keys() - {"unknown"}, totals


def test_readers_that_are_shown_aborted_records_are_caught(tmp_path: Path, nursery: Nursery) -> None:
    """The checker catches such readers. (A pipeline with such a record as input may also never end.)"""
    with pytest.raises(AssertionError, match=r"dirty|aborted|pipeline|ended with"):
        _play_broken(tmp_path, nursery, ["aborts"])


def test_zombies_that_nobody_fences_are_caught(tmp_path: Path, nursery: Nursery) -> None:
    """Two instances of a name count, and an aborted one commits; or a worker finds an impossible state."""
    with pytest.raises(
        AssertionError, match=r"miscounted|doubled|half|uncommitted|aborted|dirty|pipeline|ended with 1"
    ):
        _play_broken(tmp_path, nursery, ["fences", "leases"])


def _play_broken(folder: Path, nursery: Nursery, broken: list[str]) -> None:
    for number, seed in zip(range(GAMES_MORE), endless("delivery"), strict=False):  # it need not show in the first
        with Game(folder / str(number), seed, nursery) as game:
            game.orders = [{**order, "broken": broken} for order in game.orders]
            game.make()
            game.play(STRIKES)
            game.finish()
            game.check()


@pytest.mark.parametrize("seed", seeds("delivery crashes"))
def test_power_cuts_tear_no_transaction(disk: CrashFS, tmp_path: Path, nursery: Nursery, seed: int) -> None:
    """On real files, all processes are killed, and then the disk forgets half of the unsynced data."""
    rounds = share(max(ROUNDS // 10, 2), "delivery crashes")
    history = checker.History()
    with Game(tmp_path / "game", seed, nursery, disk) as game:
        game.make()
        for number in range(rounds + GAMES_MORE):
            if number >= rounds and _saw_everything(history):
                break
            game.boot = f"boot-{number}"
            game.play(5)
            game.kill_all()
            disk.crash(game.rng.randrange(1 << 30))
            game.boot = f"look-{number}"
            history = game.check(power_cut=True)
    assert _saw_everything(history)


def _saw_everything(history: checker.History) -> bool:
    committed = any(one.verdict == "committed" for one in history.transactions.values())
    return committed and bool(history.acknowledged) and bool(history.handed)
