"""A process that appends numbered records to a partition until it is killed, and reports the acknowledged ones.

It prints one line for each append that returned: base offset, first number, count.
"""

from __future__ import annotations

import random
import sys
import time

import segmentlog


def main() -> None:
    """Append until the process is killed."""
    path, name, seed, ack = sys.argv[1:5]
    rng = random.Random(int(seed))
    store = segmentlog.open(path)
    partition = store.topic("t").partition(0)
    number = 0
    while True:
        count = rng.choice((1, 1, 2, 7, 50))
        padding = rng.choice((0, 10, 300))
        values = [f"{name}:{number + index}:{'x' * padding}".encode() for index in range(count)]
        base_offset = partition.append(values, ack=ack)  # type: ignore[arg-type]
        sys.stdout.write(f"{base_offset} {number} {count}\n")
        sys.stdout.flush()
        number += count
        time.sleep(rng.choice((0, 0.001, 0.003)))


main()
