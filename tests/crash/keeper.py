"""A process of a compacted store that compacts, or appends and prints results, until it is killed.

    keeper.py STORE append SEED BOOT    prints the key before each append; once that is durable, the key, its offset,
                                        and its number or "-" for a tombstone
    keeper.py STORE compact SEED BOOT

BOOT is the boot id that the process sees; empty: the real one. The first line that it prints is "ready".
"""

from __future__ import annotations

import random
import sys
import time

import segmentlog
from segmentlog.storage.fs import FileSystem


class OneBoot(FileSystem):
    """The real file system of a machine whose boot time the test chooses."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    def boot_id(self) -> str:
        return self._boot or FileSystem.boot_id(self)


def main() -> None:
    """Work until the process is killed."""
    path, job, seed, boot = sys.argv[1:5]
    rng = random.Random(int(seed))
    store = segmentlog.open(path, background=False) if not boot else _store_of(path, boot)
    partition = store.topic("t").partition(0)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    number = 0
    while True:
        if job == "compact":
            partition.compact(buffer_bytes=rng.choice((100, 10_000)))
            partition.retain()
            time.sleep(rng.choice((0, 0.002)))
            continue
        key = rng.randrange(12)
        number += 1
        value = None if rng.random() < 0.2 else b"%d:%s" % (number, b"x" * rng.choice((0, 200)))
        sys.stdout.write(f"{key}\n")
        sys.stdout.flush()
        offset = partition.append([value], [b"%s/%d" % (seed.encode(), key)], ack="durable")
        sys.stdout.write(f"{key} {offset} {'-' if value is None else number}\n")
        sys.stdout.flush()


def _store_of(path: str, boot: str) -> segmentlog.LogStore:
    return segmentlog.LogStore(path, fs=OneBoot(boot))


main()
