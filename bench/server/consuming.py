"""Rows that consume: fetches whose answers nobody decodes, so that it is the server that is measured."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import segmentlog
from bench.server import load
from bench.server.batches import CLIENT_RECORDS, batch, values
from bench.server.brokers import OURS, OurBroker, Start, last_core
from bench.server.load import Lane
from bench.server.producing import producer_lanes
from bench.server.rows import Compared, Figures, Once, Row, Side
from bench.server.wire import LEADER, Topic, fetches_of

_FETCH_BYTES = 1 << 20
"""`max.partition.fetch.bytes`, as Kafka's consumers have it."""
_LIBRARY_RECORDS = 1000
_SMALL_LOG_FETCHES = 64
_CPU = "us of server CPU a record"


def rows() -> list[Row]:
    """All of them."""
    found = []
    for records in (1, 10):
        what = f"batches of {records} record{'s' if records > 1 else ''}"
        found.append(
            Row(
                f"small/fetch-{records}",
                "small batches",
                (
                    Compared("records/s", f"fetch, {what}", "records/s", 0.5),
                    Compared(_CPU, f"fetch, {what}: server CPU a record", "us"),
                ),
                _of_clients(records, 1, log_part=0.1),
            )
        )
    pinned = Start(core=last_core())
    for who, target, prepare in (
        ("Kafka clients", 1.5, lambda count: _of_clients(CLIENT_RECORDS, count)),
        ("the library", 0.8, _of_library),
    ):
        for count in (1, 4):
            what = f"what {who} wrote, {count} consumer{'s' if count > 1 else ''}"
            found.append(
                Row(
                    f"consume/{'clients' if who != 'the library' else 'library'}-{count}",
                    "consume, server pinned to a core",
                    (
                        Compared("records/s", what, "records/s", target),
                        Compared("MB/s", f"{what}: bytes", "MB/s"),
                        Compared(_CPU, f"{what}: server CPU a record", "us"),
                    ),
                    prepare(count),
                    start=pinned,
                )
            )
    return found


def _of_clients(records: int, consumers: int, log_part: float = 1.0) -> Callable[[Side], AbstractContextManager[Once]]:
    """Prepare a topic with batches of ``records`` records, as a producer sent them."""

    @contextmanager
    def prepare(side: Side) -> Iterator[Once]:
        with side.new_topic() as topic:
            (lane,) = producer_lanes(topic, batch(records), 1, 32, LEADER)
            load.run([lane], 600, int(side.sizes.log_mb * log_part * 1e6))
            lane.close()
            with _consumers(side, topic, consumers) as once:
                yield once

    return prepare


def _of_library(consumers: int) -> Callable[[Side], AbstractContextManager[Once]]:
    """Prepare the same records; with our server, a local process has appended them, by columns and with LZ4."""

    @contextmanager
    def prepare(side: Side) -> Iterator[Once]:
        if side.system != OURS:
            with _of_clients(CLIENT_RECORDS, consumers)(side) as once:
                yield once
            return
        assert isinstance(side.broker, OurBroker)
        with side.new_topic() as topic:
            with segmentlog.open(side.broker.store, background=False) as store:
                log = store.topic(topic.name).partition(0)
                many = list(values(_LIBRARY_RECORDS))
                for _ in range(max(1, int(side.sizes.log_mb * 1e6 / (_LIBRARY_RECORDS * 110)))):
                    log.append(many)
            with _consumers(side, topic, consumers) as once:
                yield once

    return prepare


@contextmanager
def _consumers(side: Side, topic: Topic, count: int) -> Iterator[Once]:
    """Each reads the topic from its beginning to its end, again and again, a fetch ahead of what has come."""
    requests, sizes, records = fetches_of(topic, 0, _FETCH_BYTES)
    with ExitStack() as stack:
        lanes = [Lane(topic.leaders[0], requests, sizes, 2) for _ in range(count)]
        for lane in lanes:
            stack.callback(lane.close)

        def once() -> Figures:
            before_s = side.broker.cpu_s()
            with _beside(side):
                done = load.run(lanes, side.sizes.seconds)
            cpu_s = side.broker.cpu_s() - before_s
            # A round may end in the middle of the log; all of its fetches are about as large.
            read = sum(done.answered) * records / len(requests)
            return {
                "records/s": read / done.seconds,
                "MB/s": done.size_bytes / done.seconds / 1e6,
                _CPU: cpu_s / read * 1e6,
            }

        yield once


@contextmanager
def _beside(side: Side) -> Iterator[None]:
    """Keep the client off the core of a pinned server."""
    core = side.start.core
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before - {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
