"""A process that produces by confluent-kafka, or that sends and receives single records: see `bench.server.clients`."""

from __future__ import annotations

import json
import random
import string
import sys
import time

import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from bench.server.clients import Run

_WAIT_S = 30.0
_PAUSE_S = 0.002


def produce(bootstrap: str, topic: str, records: int, record_bytes: int) -> None:
    """As a program that has one record at a time: the same values as Java's tool makes, random capitals."""
    producer = Producer({"bootstrap.servers": bootstrap, "acks": 1, "log_level": 0})
    producer.list_topics(topic, timeout=_WAIT_S)
    rng = random.Random(1)
    values = ["".join(rng.choices(string.ascii_uppercase, k=record_bytes)).encode() for _ in range(1000)]
    failed = 0

    def delivered(error: object, _message: object) -> None:
        nonlocal failed
        failed += error is not None

    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    for number in range(records):
        while True:
            try:
                producer.produce(topic, values[number % 1000], on_delivery=delivered)
                break
            except BufferError:  # the queue is full: what is delivered meanwhile makes room
                producer.poll(0.1)
        if not number % 1000:
            producer.poll(0)
    left = producer.flush(_WAIT_S)
    run = Run(records, began_s, time.monotonic())
    if failed or left:
        raise SystemExit(f"{failed + left} records are not acknowledged")
    print(msgspec.json.encode(run).decode(), flush=True)


def latency(bootstrap: str, topic: str, samples: int) -> None:
    """One record after the other, each sent while the consumer waits for it."""
    common = {"bootstrap.servers": bootstrap, "log_level": 0}
    producer = Producer({**common, "acks": 1, "linger.ms": 0})
    consumer = Consumer({**common, "group.id": "bench", "enable.auto.commit": False, "auto.offset.reset": "earliest"})
    position = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=_WAIT_S)[1]
    consumer.assign([TopicPartition(topic, 0, position)])
    found = []
    for number in range(samples + 20):
        time.sleep(_PAUSE_S)
        began_s = time.perf_counter()
        producer.produce(topic, b"x" * 100, partition=0)
        message = consumer.poll(_WAIT_S)
        took_ms = (time.perf_counter() - began_s) * 1000
        if message is None or message.error():
            raise SystemExit(f"no record came: {message and message.error()}")
        producer.poll(0)
        if number >= 20:
            found.append(took_ms)
    consumer.close()
    print(json.dumps(found))


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    if kind == "produce":
        produce(given[0], given[1], int(given[2]), int(given[3]))
    else:
        latency(given[0], given[1], int(given[2]))
