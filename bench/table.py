"""A table of many keys: how fast it is built, what it keeps in memory, how fast it answers.

``python -m bench.table`` writes a compacted topic of ten million keys (``--keys``), each once and
a fifth of them a second time, and prints one line a figure, ``--json`` one JSON object for all.
The memory at the peak is the growth of the process's largest resident size while the table is built:
the kernel counts mapped pages of the log among it, too.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import segmentlog
from bench.arguments import existing_folder
from segmentlog.store import LogStore
from segmentlog.tables.table import Table

_BATCH_RECORDS = 10_000
_GETS = 5_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000, help="how many keys (default 10 million)")
    parser.add_argument("--batch", type=int, default=_BATCH_RECORDS, help="records of a batch (default 10,000)")
    parser.add_argument("--partitions", type=int, default=1, help="partitions of the topic (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="segmentlog-table-", dir=options.dir)
    try:
        with segmentlog.open(folder, background=False) as store:
            records = fill(store, options.keys, options.batch, options.partitions)
            found = measure(store, options.keys, records)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found))
    else:
        for name, figure in found.items():
            print(f"{name:32} {figure:>14,.1f}")
    return 0


def fill(store: LogStore, keys: int, batch: int, partitions: int) -> int:
    """Append the records; returns how many."""
    topic = store.create_topic("users", partitions=partitions, cleanup_policy="compact", fsync="never")
    records = 0
    for numbers in _batches(keys, batch):
        log = topic.partition(numbers[0] // batch % partitions)
        log.append(
            [b'{"id": %d, "name": "somebody", "visits": %d}' % (number, number % 97) for number in numbers],
            [_key(number) for number in numbers],
        )
        records += len(numbers)
    return records


def _batches(keys: int, batch: int) -> Iterator[range]:
    for first in range(0, keys, batch):
        yield range(first, min(first + batch, keys))
        if first // batch % 5 == 4:
            yield range(first, min(first + batch, keys))


def _key(number: int) -> bytes:
    return b"user-%d" % number


def measure(store: LogStore, keys: int, records: int) -> dict[str, float]:
    """Every figure by its name."""
    before_bytes = _peak_bytes()
    started = time.perf_counter()
    table = Table(store, "users")
    built_s = time.perf_counter() - started
    found = {
        "keys": float(len(table)),
        "built, records/s": records / built_s,
        "at rest, bytes a key": table.nbytes / keys,
        "at the peak, bytes a key": (_peak_bytes() - before_bytes) / keys,
    }
    chosen = random.Random(1)
    latencies = sorted(_time_get(table, _key(chosen.randrange(keys))) for _ in range(_GETS))
    found["get, p50 us"] = latencies[_GETS // 2] * 1e6
    found["get, p99 us"] = latencies[_GETS * 99 // 100] * 1e6
    first = chosen.randrange(max(keys - _GETS, 1))
    near = sorted(_time_get(table, _key(number)) for number in range(first, min(first + _GETS, keys)))
    found["get of neighbours, p50 us"] = near[len(near) // 2] * 1e6
    absent = sorted(_time_get(table, b"nobody-%d" % number) for number in range(_GETS))
    found["get of what is absent, p50 us"] = absent[_GETS // 2] * 1e6
    started = time.perf_counter()
    count = sum(1 for _ in table.items())
    found["items(), records/s"] = count / (time.perf_counter() - started)
    return found


def _time_get(table: Table, key: bytes) -> float:
    started = time.perf_counter()
    table.get(key)
    return time.perf_counter() - started


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
