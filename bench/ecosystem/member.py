"""A member of a group: ``python -m bench.ecosystem.member BOOTSTRAP TOPIC GROUP PROTOCOL SESSION_MS``.

It prints its partitions, with commas between, whenever they have changed, and ends when it is killed.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer


def main() -> None:
    bootstrap, topic, group, protocol, session_ms = sys.argv[1:]
    settings: dict[str, object] = {
        "bootstrap.servers": bootstrap, "group.id": group, "group.protocol": protocol, "log_level": 0,
        "auto.offset.reset": "latest", "partition.assignment.strategy": "cooperative-sticky",
    }  # fmt: skip
    if protocol == "classic":
        settings |= {"session.timeout.ms": int(session_ms), "heartbeat.interval.ms": int(session_ms) // 6}
    else:
        del settings["partition.assignment.strategy"]
    consumer = Consumer(settings)
    consumer.subscribe([topic])
    told: list[int] = []
    while True:
        consumer.poll(0.02)
        now = sorted(where.partition for where in consumer.assignment())
        if now != told:
            told = now
            print(",".join(map(str, now)), flush=True)


if __name__ == "__main__":
    main()
