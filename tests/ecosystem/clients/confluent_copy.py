"""Copy a topic to another one, exactly once, with confluent-kafka: confluent_copy.py BOOTSTRAP FROM TO.

The program runs until it is killed. It prints ``committed COUNT`` for each transaction, and ``aborted`` for each that
failed; every fifth must fail.

It seeks to numbers only. If librdkafka (2.16) has asked where a log begins, and the answer comes after a seek, it asks
again half a second later, and then begins there, whatever the seek was.
"""

from __future__ import annotations

import sys
from itertools import count

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

PATIENCE_S = 30.0


def main() -> None:
    """Copy until the process is killed; a final error ends the program, and the test starts it again."""
    bootstrap, source, target = sys.argv[1:4]
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "copy"})
    # First, because it aborts its predecessor's open transaction: then the committed offsets are final.
    producer.init_transactions(PATIENCE_S)
    consumer = Consumer({
        "bootstrap.servers": bootstrap, "group.id": "copy", "auto.offset.reset": "earliest",
        "enable.auto.commit": False, "isolation.level": "read_committed", "session.timeout.ms": 3000,
        "heartbeat.interval.ms": 300,
    })  # fmt: skip
    consumer.subscribe([source], on_assign=lambda consumer, places: consumer.assign(committed(consumer, places)))
    for turn in count(1):
        messages = [message for message in consumer.consume(50, 0.2) if message.error() is None]
        if not messages:
            continue
        try:
            producer.begin_transaction()
            for message in messages:
                producer.produce(target, message.value(), message.key(), message.partition())
            producer.send_offsets_to_transaction(behind(messages), consumer.consumer_group_metadata(), PATIENCE_S)
            if turn % 5:
                producer.commit_transaction(PATIENCE_S)
                print("committed", len(messages), flush=True)
                continue
        except KafkaException as error:
            if error.args[0].fatal():
                raise
        producer.abort_transaction(PATIENCE_S)
        print("aborted", flush=True)
        rewind(consumer)


def behind(messages: list[Message]) -> list[TopicPartition]:
    """Return the offsets after these messages."""
    last = {(message.topic(), message.partition()): message.offset() + 1 for message in messages}
    return [TopicPartition(topic, partition, offset) for (topic, partition), offset in last.items()]


def committed(consumer: Consumer, places: list[TopicPartition]) -> list[TopicPartition]:
    """Return the places with their committed positions, or where their partitions begin."""
    found = consumer.committed(places, PATIENCE_S)
    for place in found:
        if place.error is not None:
            raise KafkaException(place.error)
        if place.offset < 0:
            place.offset, _ = consumer.get_watermark_offsets(place, PATIENCE_S)
    return found


def rewind(consumer: Consumer) -> None:
    """Seek to the committed offsets."""
    for place in committed(consumer, consumer.assignment()):
        consumer.seek(place)


main()
