"""Debezium: the changes of a table in PostgreSQL come into a topic exactly once, and from there into another table."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ecosystem.connect.cluster import PATIENCE_S, Cluster
from ecosystem.connect.postgres import Postgres, plugins, running
from ecosystem.reading import by_client, by_library, open_transactions, undecided_and_aborted
from server.clients.fetching import Missing
from server.clients.served import Served
from server.clients.teller import Start
from waiting import wait_until

from segmentlog.demo.flights import load_flights
from segmentlog.store import LogStore

pytestmark = pytest.mark.ecosystem

_TOPIC = "airport.public.flights"
_PARTITIONS = 3
_COUNT = 20_000
# In Debezium 3.3, a task that starts while another one stops fails, and must be restarted.
_FLAW = "DebeziumOpenLineageEmitter not initialized"


@pytest.fixture
def database() -> Iterator[Postgres]:
    """Skipped where it cannot be had."""
    try:
        plugins()
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))
    with running() as database:
        yield database


class Airport:
    """A table at which something changes all the time."""

    def __init__(self, database: Postgres) -> None:
        self._database = database
        self._rows = [json.loads(value) for value in load_flights(_COUNT).values]
        self.changes: dict[int, int] = {}
        """How often each flight was changed."""
        self.cancelled: set[int] = set()
        database.do("CREATE TABLE flights (id int PRIMARY KEY, carrier text, flight text, tail text, changes int)")

    def work(self, count: int) -> None:
        """Insert ``count`` flights, change every 10th earlier one, and cancel every 20th."""
        first = len(self.changes)
        rows = self._rows[first : first + count]
        if not rows:
            return
        values = ", ".join(
            f"({number}, '{row['carrier']}', '{row['flight']}', '{row['tailnum']}', 0)"
            for number, row in enumerate(rows, first)
        )
        self._database.do(f"INSERT INTO flights VALUES {values}")
        self.changes |= dict.fromkeys(range(first, first + len(rows)), 0)
        for number in range(max(0, first - 30), first):
            if number % 10 == 0 and number not in self.cancelled:
                self._database.do(f"UPDATE flights SET changes = changes + 1 WHERE id = {number}")
                self.changes[number] += 1
        for number in range(max(0, first - 200), first - 100):
            if number % 20 == 0 and number not in self.cancelled:
                self._database.do(f"DELETE FROM flights WHERE id = {number}")
                self.cancelled.add(number)

    def table(self, name: str) -> list[list[str]]:
        """Return the rows of a table, which may not exist yet."""
        there = self._database.do(f"SELECT 1 FROM pg_tables WHERE tablename = '{name}'")
        return self._database.do(f"SELECT id, carrier, flight, tail, changes FROM {name} ORDER BY id") if there else []


def changes_of(payload: dict[str, Any]) -> str:
    """Return a change as a word: its kind, and how often the flight was changed before."""
    return f"{payload['op']}{'' if payload['after'] is None else payload['after']['changes']}"


def test_a_table_is_followed(store: LogStore, served: Served, start: Start, database: Postgres, tmp_path: Path) -> None:
    """Workers of both are killed meanwhile: each change comes exactly once, and the other table becomes the same."""
    airport = Airport(database)
    airport.work(500)
    json_converter = "org.apache.kafka.connect.json.JsonConverter"
    cluster = Cluster(served, start, tmp_path, {
        "plugin.path": plugins(), "key.converter": json_converter, "value.converter": json_converter,
    }, flaw=_FLAW)  # fmt: skip
    cluster.configure("source", {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector", "topic.prefix": "airport",
        "database.hostname": "127.0.0.1", "database.port": database.port, "database.user": "postgres",
        "database.password": "-", "database.dbname": "postgres", "table.include.list": "public.flights",
        "plugin.name": "pgoutput", "publication.autocreate.mode": "filtered",
        "topic.creation.default.partitions": _PARTITIONS, "topic.creation.default.replication.factor": 1,
        "exactly.once.support": "required", "transaction.boundary": "interval",
        "transaction.boundary.interval.ms": 500,
    })  # fmt: skip
    cluster.configure("sink", {
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector", "topics": _TOPIC,
        "connection.url": database.url, "connection.username": "postgres", "connection.password": "-",
        "collection.name.format": "copied", "insert.mode": "upsert", "primary.key.mode": "record_key",
        "delete.enabled": "true", "schema.evolution": "basic",
        "consumer.override.isolation.level": "read_committed",
    })  # fmt: skip
    cluster.wait_for_tasks("source", "sink")

    def is_in_the_middle() -> bool:
        airport.work(5)
        return _TOPIC in store.topics() and open_transactions(store, _TOPIC)

    wait_until(lambda: len(airport.table("copied")) > 100, "nothing is copied", PATIENCE_S, 0.5)
    for turn, victim in enumerate(["source", "sink", "source"]):
        cluster.kill_holder(victim, is_in_the_middle)
        cluster.wait_for_tasks("source", "sink")
        wait_until(is_in_the_middle, "there is no transaction", PATIENCE_S)
        os.kill(served.workers()[turn], signal.SIGKILL)
        wait_until(lambda: len(served.workers()) == 3, "it stays dead", PATIENCE_S)
        airport.work(500)

    def is_done() -> bool:
        cluster.wait_for_tasks("source", "sink")
        return airport.table("copied") == airport.table("flights")

    wait_until(is_done, "the tables differ", PATIENCE_S, 1)
    wait_until(lambda: not open_transactions(store, _TOPIC), "a transaction stays open", PATIENCE_S)
    rows = by_client(served.address, _TOPIC, _PARTITIONS)
    assert rows == by_library(store, _TOPIC)
    assert undecided_and_aborted(store, _TOPIC) > 0, "no worker was killed in the middle"
    told: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        assert row.key is not None
        number = json.loads(row.key)["payload"]["id"]
        told[number].append("gone" if row.value is None else changes_of(json.loads(row.value)["payload"]))
    assert told.keys() == airport.changes.keys()
    for number, count in airport.changes.items():
        first, *rest = told[number]
        assert first in ("c0", f"r{first[1:]}")
        since = int(first[1:]) + 1
        assert rest == [
            *(f"u{change}" for change in range(since, count + 1)),
            *(("d", "gone") if number in airport.cancelled else ()),
        ]
