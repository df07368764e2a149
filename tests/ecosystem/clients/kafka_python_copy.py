"""From topic to topic, exactly once, by kafka-python: kafka_python_copy.py BOOTSTRAP FROM TO; see confluent_copy.py."""

from __future__ import annotations

import sys
from itertools import count

from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata
from kafka.errors import KafkaError, ProducerFencedError


def main() -> None:
    """Copy until the process is killed."""
    bootstrap, source, target = sys.argv[1:4]
    producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id="copy")
    # First, because it aborts its predecessor's open transaction: then the committed offsets are final.
    producer.init_transactions()
    consumer = KafkaConsumer(
        source, bootstrap_servers=bootstrap, group_id="copy", auto_offset_reset="earliest", enable_auto_commit=False,
        isolation_level="read_committed", session_timeout_ms=3000, heartbeat_interval_ms=300, max_poll_records=50,
    )  # fmt: skip
    for turn in count(1):
        found = consumer.poll(timeout_ms=200)
        if not found:
            continue
        producer.begin_transaction()
        try:
            for place, messages in found.items():
                for message in messages:
                    producer.send(target, message.value, message.key, partition=place.partition)
            behind = {place: OffsetAndMetadata(messages[-1].offset + 1, "", -1) for place, messages in found.items()}
            producer.send_offsets_to_transaction(behind, consumer.group_metadata())
            if turn % 5:
                producer.commit_transaction()
                print("committed", sum(map(len, found.values())), flush=True)
                continue
        except ProducerFencedError:
            raise
        except KafkaError as error:
            print(error, file=sys.stderr)
        producer.abort_transaction()
        print("aborted", flush=True)
        for place in consumer.assignment():
            consumer.seek(place, consumer.committed(place) or 0)


main()
