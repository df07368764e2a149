"""Rows about the start of a server: of a new one, and after SIGKILL with gigabytes on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.server import load
from bench.server.batches import batch
from bench.server.producing import producer_lanes
from bench.server.rows import Compared, Figures, Once, Row, Side
from bench.server.wire import LEADER, Client, Topic

_PARTITIONS = 4
_BATCH = 1000
_BEFORE_KILL_S = 0.3


def rows() -> list[Row]:
    """All of them."""
    return [
        Row("start", "ready after start",
            (Compared("ready", "ApiVersions and Metadata answered", "s", 0.3, at_least=False, to=None),),
            _start, start=None),
        Row("restart", "ready after kill -9",
            (Compared("ready", "ApiVersions and Metadata answered", "s", 0.5, at_least=False, to=None),
             Compared("open", "the end of each partition told as well", "s", 0.5, at_least=False, to=None)),
            _restart, start=None, rounds_max=3),
    ]  # fmt: skip


@contextmanager
def _start(side: Side) -> Iterator[Once]:
    broker = side.new_broker()

    def once() -> Figures:
        seconds = broker.start()
        broker.stop()
        return {"ready": seconds}

    try:
        yield once
    finally:
        broker.kill()


@contextmanager
def _restart(side: Side) -> Iterator[Once]:
    """Measure a restart with a log that grew until the kill. All acknowledged records must exist afterwards."""
    broker = side.new_broker()
    broker.start()
    try:
        with Client(broker.address) as client:
            client.create("restart", _PARTITIONS, {})
            topic = Topic("restart", client.leaders("restart"))
        topic.end()
        _append(topic, 3600, int(side.sizes.restart_gb * 1e9))

        def once() -> Figures:
            _append(topic, _BEFORE_KILL_S, None)
            before = topic.end()
            broker.kill()
            began_s = time.perf_counter()
            ready_s = broker.start()
            with Client(broker.address) as client:
                again = Topic("restart", client.leaders("restart"))
            after = again.end()
            open_s = time.perf_counter() - began_s
            if after != before:
                raise RuntimeError(f"{before:,} records were acknowledged, and {after:,} are there after the kill")
            return {"ready": ready_s, "open": open_s}

        yield once
    finally:
        broker.kill()


def _append(topic: Topic, seconds: float, most_bytes: int | None) -> None:
    lanes = producer_lanes(topic, batch(_BATCH), 4, 4, LEADER)
    load.run(lanes, seconds, most_bytes)
    for lane in lanes:
        lane.close()
