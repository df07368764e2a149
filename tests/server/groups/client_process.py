"""A consumer of the consumer protocol in a process of its own, until it is killed: client_process.py ADDRESS GROUP.

It prints a line once it has been assigned something.
"""

from __future__ import annotations

import sys

import confluent_kafka


def main() -> None:
    """Consume until the process is killed."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": sys.argv[1],
            "group.id": sys.argv[2],
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["t"])
    is_told = False
    while True:
        consumer.poll(0.05)
        if consumer.assignment() and not is_told:
            is_told = True
            print("assigned", flush=True)


main()
