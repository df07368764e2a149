"""docs/examples/sessions.py finds the same sessions as plain Python, whenever the query stops and continues."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

import segmentlog

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "sessions.py"
MINUTE_MS = 60_000
TEN_MS = 1_357_034_400_000  # ten o'clock
LATE_MS = 10 * MINUTE_MS
GAP_MS = 30 * MINUTE_MS

Click = tuple[int, str, str]
"""When, who, which page."""
Session = tuple[str, int, int, int, list[str]]
"""User, start, end, number of clicks, pages."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Return the program as a module that cannot be imported by name: workers get its class, not its name."""
    spec = importlib.util.spec_from_file_location("sessions_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clicks:
    """A store with clicks, and the query over it."""

    def __init__(self, example: ModuleType, spark: SparkSession, folder: Path) -> None:
        self._example, self._spark = example, spark
        self.path, self.checkpoint = str(folder / "store"), folder / "checkpoint"
        with segmentlog.open(self.path, background=False) as store:
            store.create_topic("clicks", partitions=2, retention_ms=-1)
            store.create_topic("sessions", partitions=2, retention_ms=-1)

    def add(self, *clicks: Click) -> None:
        with segmentlog.open(self.path, background=False) as store, store.producer() as producer:
            for at_ms, user, page in clicks:
                value = json.dumps({"user": user, "page": page}).encode()
                producer.send("clicks", value, key=user.encode(), timestamp=at_ms)

    def run(self) -> int:
        read = self._example.run(self._spark, self.path, str(self.checkpoint), GAP_MS / MINUTE_MS)
        assert isinstance(read, int)
        return read

    def sessions(self) -> list[Session]:
        """Return the sessions in the topic, repeated ones included."""
        found = []
        with segmentlog.open(self.path, read_only=True) as store:
            for record in store.consumer("sessions", isolation="read_committed"):
                value: dict[str, Any] = json.loads(record.value or b"")
                started, ended = (
                    round(datetime.fromisoformat(value[name]).timestamp() * 1000) for name in ("started", "ended")
                )
                assert (record.key, record.timestamp) == (value["user"].encode(), ended)
                found.append((value["user"], started, ended, value["clicks"], value["pages"]))
        return sorted(found)


@pytest.fixture
def clicks(example: ModuleType, spark: SparkSession, tmp_path: Path) -> Clicks:
    """Return an empty store, of this test."""
    return Clicks(example, spark, tmp_path)


def sessions_of(clicks: list[Click]) -> list[Session]:
    """Compute the sessions in plain Python."""
    by_user: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for at_ms, user, page in clicks:
        by_user[user].append((at_ms, page))
    found: list[Session] = []
    for user, visits in by_user.items():
        visits.sort()
        cuts = [at for at in range(1, len(visits)) if visits[at][0] - visits[at - 1][0] >= GAP_MS]
        for begin, end in zip([0, *cuts], [*cuts, len(visits)], strict=True):
            part = visits[begin:end]
            found.append((user, part[0][0], part[-1][0], len(part), [page for _, page in part]))
    return sorted(found)


def over(sessions: list[Session], latest_ms: int) -> list[Session]:
    """Return the sessions that have ended once the latest click is at ``latest_ms``."""
    return [one for one in sessions if one[2] + GAP_MS <= latest_ms - LATE_MS]


def some_clicks(count: int) -> list[Click]:
    """Return clicks of twenty users over half a day, slightly out of order."""
    chance = random.Random(5)
    made = [
        (TEN_MS + chance.randrange(720 * MINUTE_MS), f"user-{chance.randrange(20)}", f"/{chance.randrange(9)}")
        for _ in range(count)
    ]
    return sorted(made, key=lambda click: click[0] + chance.randrange(LATE_MS // 2))


def test_sessions_go_on_over_a_restart(clicks: Clicks) -> None:
    """A query that was stopped during open sessions continues them: it writes each session of plain Python once."""
    made = some_clicks(900)
    first, second = made[:450], made[450:]
    clicks.add(*first)
    assert clicks.run() == len(first)
    latest_ms = max(click[0] for click in first)
    assert clicks.sessions() == over(sessions_of(first), latest_ms)
    every = sessions_of(made)
    assert any(one[1] < latest_ms < one[2] for one in every)  # they are open at the cut

    last = (max(click[0] for click in made) + GAP_MS + LATE_MS, "last", "/")  # lets the time go by
    clicks.add(*second, last)
    assert clicks.run() == len(second) + 1
    assert clicks.sessions() == every


def test_a_batch_that_is_replayed_is_written_once(clicks: Clicks) -> None:
    """After a kill between the sink's commit and Spark's own, the query repeats the micro-batch, and writes each
    session once.

    Values that are not clicks are skipped.
    """
    with segmentlog.open(clicks.path, background=False) as store:
        store.topic("clicks").partition(0).append([b"no JSON", b'{"page": "/"}', None], timestamps=[TEN_MS] * 3)
    made = [(TEN_MS + minute * MINUTE_MS, user, "/") for minute in (0, 20, 200) for user in ("ann", "bob")]
    clicks.add(*made)
    clicks.run()
    found = clicks.sessions()
    assert found == [one for one in sessions_of(made) if one[3] == 2]
    commits = clicks.checkpoint / "commits"
    last = max(int(one.name) for one in commits.iterdir() if one.name.isdigit())
    for name in (f"{last}", f".{last}.crc"):
        (commits / name).unlink(missing_ok=True)
    clicks.run()
    assert (commits / f"{last}").exists()  # it was done again
    assert clicks.sessions() == found


def test_timers_and_the_watermark(clicks: Clicks) -> None:
    """A click between two sessions joins them despite the first timer; clicks before the watermark are dropped."""

    def at(minute: int, user: str, page: str) -> Click:
        return (TEN_MS + minute * MINUTE_MS, user, page)

    clicks.add(at(0, "ann", "/a"), at(35, "ann", "/d"))  # two sessions; the watermark becomes 25
    clicks.run()
    assert clicks.sessions() == []
    # The watermark becomes 40, later than the end of ann's first session.
    clicks.add(at(26, "ann", "/c"), at(20, "ann", "/late"), at(24, "bob", "/late"), at(50, "cid", "/"))
    clicks.run()
    assert clicks.sessions() == []
    clicks.add(at(75, "cid", "/"))  # 65: both of ann's sessions have ended, cid's continues
    clicks.run()
    assert clicks.sessions() == [("ann", TEN_MS, TEN_MS + 35 * MINUTE_MS, 3, ["/a", "/c", "/d"])]


def test_it_is_a_program() -> None:
    """The program prints its usage."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--checkpoint" in done.stdout
