"""From topic to topic, exactly once, by aiokafka: aiokafka_copy.py BOOTSTRAP FROM TO, like confluent_copy.py."""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError, ProducerFenced


async def main() -> None:
    """Copy until the process is killed."""
    bootstrap, source, target = sys.argv[1:4]
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id="copy")
    # First, because it aborts its predecessor's open transaction: then the committed offsets are final.
    await producer.start()
    consumer = AIOKafkaConsumer(
        source, bootstrap_servers=bootstrap, group_id="copy", auto_offset_reset="earliest", enable_auto_commit=False,
        isolation_level="read_committed", session_timeout_ms=3000, heartbeat_interval_ms=300,
    )  # fmt: skip
    await consumer.start()
    for turn in count(1):
        found = await consumer.getmany(timeout_ms=200, max_records=50)
        if not found:
            continue
        await producer.begin_transaction()
        try:
            for place, messages in found.items():
                for message in messages:
                    await producer.send(target, message.value, message.key, place.partition)
            behind = {place: messages[-1].offset + 1 for place, messages in found.items()}
            await producer.send_offsets_to_transaction(behind, "copy")
            if turn % 5:
                await producer.commit_transaction()
                print("committed", sum(map(len, found.values())), flush=True)
                continue
        except ProducerFenced:
            raise
        except KafkaError as error:
            print(error, file=sys.stderr)
        await producer.abort_transaction()
        print("aborted", flush=True)
        for place in consumer.assignment():
            position = await consumer.committed(place)
            consumer.seek(place, position or 0)


asyncio.run(main())
