"""confluent-kafka: librdkafka as it is now."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, NewTopic
from server.clients.driver import HEARTBEAT_MS, SESSION_TIMEOUT_MS, WAIT_S, Driver, Got, Sent, told

_MEMBER = Path(__file__).with_name("member.py")
_REBALANCED = {KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID}


class ConfluentDriver(Driver):
    """confluent-kafka."""

    name = "confluent-kafka"

    def create(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=config)
        admin = self._admin()  # a variable, because its requests end when it is collected
        admin.create_topics([new])[topic].result(WAIT_S)

    def write(
        self, topic: str, records: Sequence[Sent], *, codec: str = "none", acks: str = "all", idempotent: bool = False
    ) -> list[tuple[int, int]]:
        producer = Producer({
            "bootstrap.servers": self.bootstrap, "compression.type": codec, "acks": acks, "linger.ms": 20,
            "enable.idempotence": idempotent,
        })  # fmt: skip
        placed: list[tuple[int, int]] = [(-1, -1)] * len(records)
        errors: list[Any] = []

        def delivered(number: int, error: Any, message: Any) -> None:
            if error is not None:
                errors.append(error)
            placed[number] = (message.partition(), message.offset())

        for number, one in enumerate(records):
            producer.produce(
                topic, one.value, one.key, partition=one.partition, timestamp=one.timestamp, headers=list(one.headers),
                on_delivery=lambda error, message, number=number: delivered(number, error, message),
            )  # fmt: skip
        left = producer.flush(WAIT_S)
        del producer  # which is how it is closed
        assert not left
        if errors:
            raise KafkaException(errors[0])
        return placed

    def read(self, topic: str, count: int, *, committed: bool = False) -> list[Got]:
        consumer = self._consumer("reader", **{
            "enable.partition.eof": True,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
        })  # fmt: skip
        found: list[Got] = []
        try:
            numbers = consumer.list_topics(topic, WAIT_S).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in numbers])
            ended: set[int] = set()
            ends_s = time.monotonic() + WAIT_S
            while len(ended) < len(numbers):
                assert time.monotonic() < ends_s, f"the end did not come: {len(found)} records"
                message = consumer.poll(0.1)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    found.append(_got(message))
                    continue
                assert error.code() == KafkaError._PARTITION_EOF, error
                ended.add(message.partition())
        finally:
            consumer.close()
        return found

    def consume(self, group: str, topic: str, count: int) -> list[Got]:
        consumer = self._consumer(group)
        found: list[Got] = []
        consumer.subscribe([topic], on_assign=lambda *_: found.clear())
        ends_s = time.monotonic() + WAIT_S
        try:
            while True:
                assert time.monotonic() < ends_s, f"{len(found)} of {count} records came"
                message = consumer.poll(0.1)
                if message is None:
                    continue
                assert message.error() is None, message.error()
                found.append(_got(message))
                if len(found) < count:
                    continue
                if _is_committed(consumer, _positions(topic, found)):
                    return found
                found.clear()
        finally:
            consumer.close()

    def member(self, group: str, topic: str) -> list[str]:
        return [sys.executable, str(_MEMBER), self.name, self.bootstrap, group, topic]

    def run_member(self, group: str, topic: str) -> None:
        """Run a member in this process until it is killed."""
        consumer = self._consumer(group)
        consumer.subscribe([topic])
        while True:
            message = consumer.poll(1.0)
            if message is None or message.error() is not None:
                continue
            if _is_committed(consumer, _positions(topic, [_got(message)])):
                print(told(message.partition(), message.offset(), message.value()), flush=True)

    def at_time(self, topic: str, partition: int, timestamp: int) -> int:
        consumer = self._consumer("reader")
        try:
            (found,) = consumer.offsets_for_times([TopicPartition(topic, partition, timestamp)], WAIT_S)
            return found.offset if found.offset >= 0 else -1
        finally:
            consumer.close()

    def lag(self, group: str, topic: str) -> dict[int, int]:
        admin = self._admin()
        future = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
        consumer = self._consumer("reader")
        try:
            return {
                one.partition: consumer.get_watermark_offsets(one, WAIT_S)[1] - one.offset
                for one in future.result(WAIT_S).topic_partitions
                if one.topic == topic
            }
        finally:
            consumer.close()

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        wanted = TopicPartition(topic, partition, before_offset)
        admin = self._admin()
        assert admin.delete_records([wanted])[wanted].result(WAIT_S).low_watermark == before_offset

    def delete(self, topic: str) -> None:
        admin = self._admin()
        admin.delete_topics([topic])[topic].result(WAIT_S)

    def delete_group(self, group: str) -> None:
        admin = self._admin()
        admin.delete_consumer_groups([group])[group].result(WAIT_S)

    def _admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": self.bootstrap})

    def _consumer(self, group: str, **settings: Any) -> Consumer:
        return Consumer({
            "bootstrap.servers": self.bootstrap, "group.id": group, "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "enable.auto.offset.store": False,
            "session.timeout.ms": SESSION_TIMEOUT_MS, "heartbeat.interval.ms": HEARTBEAT_MS, **settings,
        })  # fmt: skip


def _positions(topic: str, found: Sequence[Got]) -> list[TopicPartition]:
    ends: dict[int, int] = {}
    for one in found:
        ends[one.partition] = one.offset + 1
    return [TopicPartition(topic, number, end) for number, end in ends.items()]


def _is_committed(consumer: Consumer, positions: list[TopicPartition]) -> bool:
    """Commit, and return False if a rebalance prevented it."""
    try:
        answers = consumer.commit(offsets=positions, asynchronous=False)
    except KafkaException as error:
        if error.args[0].code() not in _REBALANCED:
            raise
        return False
    for one in answers:
        assert one.error is None, one.error
    return True


def _got(message: Any) -> Got:
    return Got(
        message.partition(), message.offset(), message.key(), message.value(), message.timestamp()[1],
        tuple(message.headers() or ()),
    )  # fmt: skip
