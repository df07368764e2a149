"""Spark's own Kafka source and sink at `segmentlog serve`, beside our data source on the same store: the same rows."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from server.clients.driver import WAIT_S
from server.clients.fetching import Missing
from server.clients.java_driver import class_path
from server.clients.served import Served
from server.clients.teller import Start
from waiting import wait_until

from segmentlog.store import LogStore

pytest.importorskip("pyspark")

_HERE = Path(__file__).parent
_T0 = time.time_ns() // 1_000_000 - 3_600_000  # an hour ago, within the retention time
Ask = Callable[[dict[str, Any]], dict[str, Any]]


def command(*words: str) -> list[str]:
    """Return the command of the driver."""
    try:
        jars = class_path(_HERE)
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))
    return [sys.executable, str(_HERE / "job.py"), jars, *words]


@contextmanager
def asking(log: Path) -> Iterator[Ask]:
    """Provide a driver that answers tasks."""
    with (
        open(log, "w") as errors,
        subprocess.Popen(
            command("batch"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        too_late = threading.Timer(300, process.kill)
        too_late.start()

        def ask(task: dict[str, Any]) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())  # type: ignore[no-any-return]

        try:
            assert process.stdout.readline(), log.read_text()
            yield ask
        finally:
            process.stdin.close()
            process.wait()
            too_late.cancel()
            too_late.join()


def fill(store: LogStore, served: Served) -> None:
    """``t`` by the library and by a client; ``x`` with transactions; ``lost`` without its first records."""
    store.create_topic("t", partitions=3)
    for log in store.topic("t").partitions():
        log.append(
            [b"%d" % number if number % 7 else None for number in range(40)],
            keys=[b"k%d" % number if number % 5 else None for number in range(40)],
            headers=[[("h", b"%d" % number), ("none", None)] if number % 3 else [] for number in range(40)],
            timestamps=[_T0 + 1000 * number for number in range(40)],
        )
    producer = Producer({"bootstrap.servers": served.address, "compression.type": "lz4"})
    for number in range(60):
        where, headers = number % 3, [("c", b"%d" % number)]
        producer.produce("t", b"c%d" % number, b"k", where, timestamp=_T0 + 50_000 + number, headers=headers)
    assert producer.flush(WAIT_S) == 0
    store.create_topic("x")
    producer = Producer({"bootstrap.servers": served.address, "transactional.id": "x"})
    producer.init_transactions(WAIT_S)
    for number in range(6):
        producer.begin_transaction()
        producer.produce("x", b"%d" % number)
        assert producer.flush(WAIT_S) == 0  # else it is never sent where it is aborted
        (producer.abort_transaction if number % 2 else producer.commit_transaction)(WAIT_S)
    store.create_topic("lost")
    log = store.topic("lost").partition(0)
    log.append([b"%d" % number for number in range(10)])
    log.trim(4)
    store.create_topic("written", partitions=3)


def values_of(answer: dict[str, Any]) -> list[bytes]:
    """Return the values of the rows."""
    return [base64.b64decode(row[4]) for row in answer["rows"]]


@pytest.mark.long(minutes=2)
def test_batches(store: LogStore, served: Served, tmp_path: Path) -> None:
    """Both sources give the same rows for all options; Kafka's sink writes the rows that were read."""
    fill(store, served)
    path = {"path": str(store.path)}
    address = {"kafka.bootstrap.servers": served.address}
    with asking(tmp_path / "spark.log") as ask:

        def both(**options: str) -> dict[str, Any]:
            theirs = ask({"read": ["kafka", address | options]})
            ours = ask({"read": ["segmentlog", path | options | {"compatible": "true"}]})
            assert "error" not in theirs, theirs["error"][:800]
            assert "error" not in ours, ours["error"][:800]
            assert theirs["rows"] == ours["rows"]
            return theirs

        everything = both(subscribe="t", includeHeaders="true")["rows"]
        assert len(everything) == 180
        assert [row[:3] for row in everything] == [["t", part, offset] for part in range(3) for offset in range(60)]
        assert everything[1][7] == [["h", base64.b64encode(b"1").decode()], ["none", None]]
        first, last = {"0": 5, "1": -2, "2": 38}, {"0": 45, "1": 7, "2": -1}
        found = both(subscribe="t", startingOffsets=json.dumps({"t": first}), endingOffsets=json.dumps({"t": last}))
        assert len(found["rows"]) == 40 + 7 + 22
        times = {"0": _T0 + 10_500, "1": _T0, "2": _T0 + 50_000}
        found = both(
            subscribePattern="^t$",
            startingOffsetsByTimestamp=json.dumps({"t": times}),
            endingTimestamp=str(_T0 + 50_030),
        )
        assert len(found["rows"]) == 29 + 10 + 40 + 10 + 10
        assert both(assign='{"t": [1]}', minPartitions="7")["tasks"] >= 7

        committed = {"kafka.isolation.level": "read_committed"}
        theirs = ask({"read": ["kafka", address | committed | {"subscribe": "x"}]})
        assert theirs["rows"] == ask({"read": ["segmentlog", path | {"subscribe": "x"}]})["rows"]
        assert values_of(theirs) == [b"0", b"2", b"4"]
        theirs = ask({"read": ["kafka", address | {"kafka.isolation.level": "read_uncommitted", "subscribe": "x"}]})
        ours = ask({"read": ["segmentlog", path | {"subscribe": "x", "isolation": "read_uncommitted"}]})
        assert values_of(theirs) == values_of(ours) == [b"%d" % number for number in range(6)]

        gone = {"subscribe": "lost", "startingOffsets": '{"lost": {"0": 1}}'}
        assert "error" in ask({"read": ["kafka", address | gone]})
        assert "error" in ask({"read": ["segmentlog", path | gone]})
        assert values_of(both(**gone, failOnDataLoss="false")) == [b"4", b"5", b"6", b"7", b"8", b"9"]

        read = ["kafka", address | {"subscribe": "t", "includeHeaders": "true"}]
        assert ask({"read": read, "write": ["kafka", address | {"topic": "written"}]}) == {}
        written = both(subscribe="written", includeHeaders="true")["rows"]
        assert [[*row[1:5], row[7]] for row in written] == [[*row[1:5], row[7]] for row in everything]


def committed(store: LogStore, topic: str) -> list[list[bytes | None]]:
    """Return the committed values of each partition."""
    return [
        [value for batch in log.read(0, isolation="read_committed") for value in batch.values]
        for log in store.topic(topic).partitions()
    ]


@pytest.mark.ecosystem
def test_streams(store: LogStore, served: Served, start: Start, tmp_path: Path) -> None:
    """Killed with a worker of the server, and started again: our sink has each record once, Kafka's at least once."""
    for name in ("from", "to", "sent"):
        store.create_topic(name, partitions=3)
    for log in store.topic("from").partitions():
        log.append([b"%d/%d" % (log.number, number) for number in range(700)])
    expected = committed(store, "from")
    words = command("stream", str(store.path), served.address, str(tmp_path / "checkpoint"))
    for goes_until in ("there 4", "there 9", "back 4", "back 9"):
        running = start(words)
        until_told(running.told, goes_until)
        os.killpg(int(running.told[0]), signal.SIGKILL)
        os.kill(served.workers()[0], signal.SIGKILL)
        running.kill()
    running = start(words)
    until_told(running.told, "done")
    assert committed(store, "to") == expected
    for sent, once in zip(committed(store, "sent"), expected, strict=True):
        assert list(dict.fromkeys(sent)) == once


def until_told(told: list[str], line: str) -> None:
    """Spark takes its time to start."""
    for _ in range(4):
        try:
            wait_until(lambda: line in told)
            return
        except AssertionError:
            continue
    raise AssertionError(f"never: {line}: {told}")
