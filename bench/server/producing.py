"""Rows that produce: what clients get acknowledged, and what processor time a record costs the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from bench.server import clients, load
from bench.server.batches import batch
from bench.server.brokers import OURS
from bench.server.clients import Run
from bench.server.load import Lane
from bench.server.rows import Compared, Figures, Once, Row, Side
from bench.server.wire import ALL, LEADER, Client, Topic, check_produced, produce_request

_PARTITIONS = 4
_MOST_BYTES = 1 << 30
_CPU = "us of server CPU a record"
# Kafka has it as a setting of a topic, and we take the same one; what acks=all means here needs none.
_SYNC_EACH = {"flush.messages": "1"}

Clients = Callable[[int, str, str, int], "list[Run]"]


def rows() -> list[Row]:
    """All of them."""
    found = []
    for name, check, run in (
        ("java", clients.check_java, clients.java_producers),
        ("confluent", clients.check_confluent, clients.confluent_producers),
    ):
        for count, target in ((1, 1.0), (4, 1.3)):
            who = {"java": "ProducerPerformance", "confluent": "confluent-kafka"}[name]
            what = f"{who}, {count} producer{'s' if count > 1 else ''}"
            found.append(
                Row(
                    f"produce/{name}-{count}",
                    "produce, 100 B, acks=1",
                    (
                        Compared("records/s", what, "records/s", target),
                        Compared(_CPU, f"{what}: server CPU a record", "us", 0.5, at_least=False),
                    ),
                    _by_clients(check, run, count),
                )
            )
    for records, target in ((1, 2.5), (1000, 1.0)):
        what = "64 connections, " + ("one record a request" if records == 1 else f"{records:,} records a request")
        found.append(
            Row(
                f"acks-all/{records}",
                "acks=all on disk, Kafka with flush.messages=1",
                (Compared("records/s", what, "records/s", target),),
                _by_lanes(64, 1, records, ALL, {}),
            )
        )
    for records in (1, 10):
        what = f"batches of {records} record{'s' if records > 1 else ''}"
        found.append(
            Row(
                f"small/produce-{records}",
                "small batches",
                (
                    Compared("records/s", f"produce, {what}", "records/s", 0.5),
                    Compared(_CPU, f"produce, {what}: server CPU a record", "us"),
                ),
                _by_lanes(4, 16, records, LEADER, {}),
            )
        )
    return found


def _by_clients(check: Callable[[], None], run: Clients, count: int) -> Callable[[Side], AbstractContextManager[Once]]:
    @contextmanager
    def prepare(side: Side) -> Iterator[Once]:
        check()

        def once() -> Figures:
            records = side.sizes.client_records // (1 if count == 1 else 2)
            with side.new_topic(_PARTITIONS) as topic:
                before_s = side.broker.cpu_s()
                runs = run(count, side.broker.bootstrap_servers, topic.name, records)
                cpu_s = side.broker.cpu_s() - before_s
                check_end(topic, records * count)
            return {"records/s": clients.rate(runs), _CPU: cpu_s / (records * count) * 1e6}

        yield once

    return prepare


def _by_lanes(
    connections: int, depth: int, records: int, acks: int, config: Mapping[str, str]
) -> Callable[[Side], AbstractContextManager[Once]]:
    """Prepare requests of one batch to one partition, several in flight on each of the connections."""

    @contextmanager
    def prepare(side: Side) -> Iterator[Once]:
        wanted = config
        if acks == ALL and side.system != OURS:
            wanted = _SYNC_EACH
        one = batch(records)

        def once() -> Figures:
            with side.new_topic(1, wanted) as topic:
                lanes = producer_lanes(topic, one, connections, depth, acks)
                before_s = side.broker.cpu_s()
                done = load.run(lanes, side.sizes.seconds, _MOST_BYTES)
                cpu_s = side.broker.cpu_s() - before_s
                for lane in lanes:
                    lane.close()
                count = sum(done.answered) * records
                check_end(topic, count + records)
            return {"records/s": count / done.seconds, _CPU: cpu_s / count * 1e6}

        yield once

    return prepare


def producer_lanes(topic: Topic, one: bytes, connections: int, depth: int, acks: int) -> list[Lane]:
    """Open connections that repeat this batch, each to the partitions of one process of the server in turn.

    One batch is sent at once to the first partition, to know the form of its answer.
    """
    requests: dict[tuple[str, int], list[bytes]] = {}
    for number, address in enumerate(topic.leaders):
        requests.setdefault(address, []).append(produce_request(topic.name, number, one, acks))
    (address, some), *_ = requests.items()
    with Client(address) as client:
        client.send(some[0])
        frame = client.receive_frame()
        check_produced(frame)
    addresses: Sequence[tuple[str, int]] = list(requests)
    lanes = []
    for number in range(connections):
        address = addresses[number % len(addresses)]
        lanes.append(Lane(address, requests[address], [len(frame)], depth))
    return lanes


def check_end(topic: Topic, records: int) -> None:
    """Check that the log has exactly the acknowledged records."""
    if (end := topic.end()) != records:
        raise RuntimeError(f"{topic.name} holds {end:,} records, where {records:,} were acknowledged")
