"""A process that appends to a store, which is shipped, until it is killed; or tries to, and says why it may not.

    python ship_process.py FOLDER URL SEED LIFE

Before an append it says what it is about to append, and afterwards at which offset it is and what was acknowledged.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import segmentlog
from segmentlog.errors import StoreFenced, TransactionAborted
from segmentlog.objects.upload import multipart
from segmentlog.store import LogStore

PARTITIONS = 3


def append_for_ever(store: LogStore, url: str, rng: random.Random, life: str) -> None:
    """Append in all ways, and run transactions over all partitions, until killed."""
    if "t" not in store.topics():
        store.create_topic("t", PARTITIONS, segment_bytes=30_000, remote_storage_enable=True, local_retention_ms=0)
        store.ship(url)  # otherwise a takeover creates another topic of the name, with its own offsets
    topic = store.topic("t")
    producer = store.producer(name="p", ack="shipped")
    number = 0
    while True:
        number += 1
        ack = rng.choice(("shipped", "shipped", "durable", "written"))
        text = f"{life}-{number} " + "x" * rng.choice((0, 100, 5000))
        if rng.random() < 0.2:
            with producer.transaction():
                sent = [producer.send("t", text.encode(), partition=partition) for partition in range(PARTITIONS)]
            for partition, future in enumerate(sent):
                say(["shipped", partition, future.result().offset, [text]])
            continue
        partition, values = rng.randrange(PARTITIONS), [f"{text}{copy}" for copy in range(rng.randrange(1, 4))]
        offset = topic.partition(partition).append([value.encode() for value in values], ack=ack)
        say([ack, partition, offset, values])


def say(what: Any) -> None:
    """Print a line at once: every printed line was true before a kill."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Return 3 if another machine owns the store by now."""
    folder, url, seed, life = sys.argv[1:]
    rng = random.Random(f"{seed}/{life}")
    multipart.PART_BYTES = rng.choice((8_000, multipart.PART_BYTES))  # type: ignore[misc]
    with segmentlog.open(folder, ship=url, ship_interval_ms=rng.choice((5, 50, 1000))) as store:
        say("open")
        try:
            store.ship(url)  # a new owner has no offsets before this
            append_for_ever(store, url, rng, life)
        except (StoreFenced, TransactionAborted) as error:
            if not isinstance(error, StoreFenced) and not isinstance(error.__cause__, StoreFenced):
                raise
            say("fenced")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
