"""Rows of transactions by confluent-kafka: of records alone, and of a copy from topic to topic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.ecosystem.streams import fill
from bench.server.brokers import Start
from bench.server.clients import ClientFailed, check_confluent
from bench.server.rows import Compared, Figures, Once, Row, Side

_PARTITIONS = 4
_RECORDS = 100
_WAIT_S = 60.0
_PATIENCE_S = 120.0
_COPIED = 20_000
_AT_ONCE = 500
ON_DISK = Start(of="transactions", kafka=(("log.flush.interval.messages", "1"),))
"""Ours decides on disk as it comes; Kafka does once each of its logs is flushed with each write."""


def rows() -> list[Row]:
    """All of them."""
    return [
        Row("transactions/records", "transactions on disk",
            (Compared("each", f"{_RECORDS} records over {_PARTITIONS} partitions, p50", "ms", 0.5, at_least=False),
             Compared("records/s", "the same, one after the other", "records/s", 2.0)),
            _transactions, start=ON_DISK),
        Row("transactions/copy", "read, process, write",
            (Compared("records/s", f"confluent-kafka, {_AT_ONCE} records a transaction, positions with them",
                      "records/s", 2.0),),
            _copy, start=ON_DISK),
    ]  # fmt: skip


def _producer(side: Side) -> Producer:
    producer = Producer({
        "bootstrap.servers": side.broker.bootstrap_servers, "transactional.id": f"bench-{time.time_ns()}",
        "linger.ms": 1, "log_level": 0,
    })  # fmt: skip
    producer.init_transactions(_WAIT_S)
    return producer


@contextmanager
def _transactions(side: Side) -> Iterator[Once]:
    check_confluent()
    with side.new_topic(_PARTITIONS) as topic:
        producer = _producer(side)

        def once() -> Figures:
            took_s = []
            began_s = time.perf_counter()
            while time.perf_counter() < began_s + side.sizes.seconds:
                start_s = time.perf_counter()
                producer.begin_transaction()
                for number in range(_RECORDS):
                    producer.produce(topic.name, b"x" * 100, partition=number % _PARTITIONS)
                producer.commit_transaction(_WAIT_S)
                took_s.append(time.perf_counter() - start_s)
            seconds = time.perf_counter() - began_s
            return {"each": statistics.median(took_s) * 1e3, "records/s": len(took_s) * _RECORDS / seconds}

        yield once


@contextmanager
def _copy(side: Side) -> Iterator[Once]:
    """Consume, write, commit the positions with what was written; each round reads the same records in a new group."""
    check_confluent()
    wanted = min(side.sizes.client_records, _COPIED)
    with side.new_topic(_PARTITIONS) as source, side.new_topic(_PARTITIONS) as to:
        fill(side.broker.bootstrap_servers, source.name, wanted)

        def once() -> Figures:
            producer = _producer(side)
            consumer = Consumer({
                "bootstrap.servers": side.broker.bootstrap_servers, "group.id": f"copy-{time.time_ns()}",
                "isolation.level": "read_committed", "enable.auto.commit": False, "log_level": 0,
            })  # fmt: skip
            consumer.assign([TopicPartition(source.name, number, 0) for number in range(_PARTITIONS)])
            copied, began_s = 0, time.perf_counter()
            while copied < wanted:
                if time.perf_counter() > began_s + _PATIENCE_S:
                    raise ClientFailed(f"{copied:,} of {wanted:,} records were copied in {_PATIENCE_S:g} s")
                messages = [one for one in consumer.consume(_AT_ONCE, 1.0) if one.error() is None]
                if not messages:
                    continue
                producer.begin_transaction()
                for message in messages:
                    producer.produce(to.name, message.value(), partition=message.partition())
                positions = consumer.position(consumer.assignment())
                producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), _WAIT_S)
                producer.commit_transaction(_WAIT_S)
                copied += len(messages)
            seconds = time.perf_counter() - began_s
            consumer.close()
            return {"records/s": copied / seconds}

        yield once
