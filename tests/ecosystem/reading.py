"""The content of topics through both interfaces: for read_committed readers of the library and of librdkafka."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition
from server.clients.driver import WAIT_S

from segmentlog.store import LogStore


class Row(NamedTuple):
    """A record that is seen."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int


def by_library(store: LogStore, topic: str) -> list[Row]:
    """Return the committed records as the library reads them."""
    with store.consumer(topic, isolation="read_committed") as consumer:
        return sorted(Row(one.partition, one.offset, one.key, one.value, one.timestamp) for one in consumer)


def by_client(address: str, topic: str, partitions: int) -> list[Row]:
    """Return the committed records as librdkafka reads them."""
    consumer = Consumer({
        "bootstrap.servers": address, "group.id": "reader", "enable.auto.commit": False, "enable.partition.eof": True,
        "isolation.level": "read_committed", "auto.offset.reset": "error",
    })  # fmt: skip
    try:
        return sorted(_until_the_ends(consumer, [TopicPartition(topic, number, 0) for number in range(partitions)]))
    finally:
        consumer.close()


def _until_the_ends(consumer: Consumer, places: list[TopicPartition]) -> Iterator[Row]:
    consumer.assign(places)
    open_ends, ends_s = {place.partition for place in places}, time.monotonic() + WAIT_S
    while open_ends:
        messages = consumer.consume(1000, 0.1)
        if messages:
            ends_s = time.monotonic() + WAIT_S
        assert time.monotonic() < ends_s, f"the ends of {open_ends} did not come"
        for message in messages:
            if (error := message.error()) is not None:
                assert error.code() == KafkaError._PARTITION_EOF, error
                open_ends.discard(message.partition())
                continue
            yield Row(
                message.partition(), message.offset(), message.key(), message.value(), message.timestamp()[1]
            )  # fmt: skip


def open_transactions(store: LogStore, topic: str) -> bool:
    """Return whether a transaction is open in a topic: records are written and not decided."""
    return any(log.last_stable_offset < log.log_end_offset for log in store.topic(topic).partitions())


def undecided_and_aborted(store: LogStore, topic: str) -> int:
    """Return the number of records that readers must not see."""
    with store.consumer(topic, isolation="read_uncommitted") as consumer:
        return sum(1 for _ in consumer) - len(by_library(store, topic))
