"""One record, from before it is sent until who waits for it has it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from bench.server import clients
from bench.server.batches import batch
from bench.server.rows import Compared, Figures, Once, Row, Side
from bench.server.wire import (
    LEADER,
    Client,
    check_produced,
    fetch_request,
    fetched_records,
    next_offset,
    produce_request,
)

_WARM_UP = 20
_PAUSE_S = 0.002
"""In which the fetch gets to where it waits."""


def rows() -> list[Row]:
    """All of them."""
    return [
        Row(
            f"latency/{name}",
            "one record, produce to consume, linger 0",
            (
                Compared("p50", f"{what}, p50", "ms", 1.0, at_least=False),
                Compared("p99", f"{what}, p99", "ms", 1.0, at_least=False),
            ),
            prepare,
        )
        for name, what, prepare in (
            ("confluent", "confluent-kafka", _by_confluent),
            ("raw", "a client that decodes nothing", _by_wire),
        )
    ]


@contextmanager
def _by_confluent(side: Side) -> Iterator[Once]:
    clients.check_confluent()
    with side.new_topic() as topic:

        def once() -> Figures:
            return _figures(
                clients.confluent_latency(side.broker.bootstrap_servers, topic.name, side.sizes.single_records)
            )

        yield once


@contextmanager
def _by_wire(side: Side) -> Iterator[Once]:
    with side.new_topic() as topic, Client(topic.leaders[0]) as producer, Client(topic.leaders[0]) as consumer:
        send = produce_request(topic.name, 0, batch(1), LEADER)
        offset = 0

        def once() -> Figures:
            nonlocal offset
            found = []
            for number in range(side.sizes.single_records + _WARM_UP):
                consumer.send(fetch_request(topic.name, 0, offset, 1 << 20, max_wait_ms=10_000))
                time.sleep(_PAUSE_S)
                began_s = time.perf_counter()
                producer.send(send)
                fetched = consumer.receive_frame()
                took_ms = (time.perf_counter() - began_s) * 1000
                check_produced(producer.receive_frame())
                reached = next_offset(fetched_records(fetched))
                if reached != offset + 1:
                    raise RuntimeError(f"a fetch from {offset} came back with what reaches to {reached}")
                offset += 1
                if number >= _WARM_UP:
                    found.append(took_ms)
            return _figures(found)

        yield once


def _figures(times_ms: list[float]) -> Figures:
    ordered = sorted(times_ms)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}
