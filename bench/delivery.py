"""What delivery semantics cost: ``python -m bench.delivery``.

idempotence   appends through a producer that numbers its batches, against one that does not
commits       positions that a group commits: written, and on disk against one fdatasync each
transactions  100 records over 4 partitions, committed, against 5 fdatasyncs of 5 files: what a commit
              needs, one for each partition and one for the decision
rebalance     from SIGKILL of a member to the record that another one reads of its partition

Sides alternate, and figures are medians over the rounds; of rebalances the 50th and 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import segmentlog
from bench.arguments import existing_folder
from bench.workload import json_records
from segmentlog.producing.producer import Producer
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

_RECORDS = 1024
_BLOCK = b"x" * 12_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each pair (default 7)")
    parser.add_argument("--kills", type=int, default=100, help="members that are killed (default 100)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        return member(options.member)
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-delivery-", dir=options.dir))
    found: dict[str, float] = {}
    try:
        with segmentlog.open(folder / "store", background=False) as store:
            found |= idempotence(store, options.rounds)
            found |= commits(store, folder, options.rounds)
            found |= transactions(store, folder, options.rounds)
        found |= rebalances(folder / "group", options.kills)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(found))
    else:
        for name, figure in found.items():
            print(f"{name:44} {figure:>14,.3f}")
    return 0


def alternate(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each side, run in turn after one round for warming up. The caller computes ratios."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            figure = side()
            if number:
                figures[name].append(figure)
    return {name: statistics.median(measured) for name, measured in figures.items()}


# ---------------------------------------------------------------- idempotence


def idempotence(store: LogStore, rounds: int) -> dict[str, float]:
    """Measure records a second of both kinds of producers, and the part of the time that sequence numbers take."""
    load = json_records(300, _RECORDS)

    def side(idempotent: bool) -> Callable[[], float]:
        topic = f"appends-{idempotent}"
        store.create_topic(topic, fsync="never", retention_bytes=64 << 20)
        producer = store.producer(enable_idempotence=idempotent)

        def run() -> float:
            started = time.perf_counter()
            for values, keys in zip(load.values, load.keys, strict=True):
                producer.send_many(topic, values, keys)
            return 300 * _RECORDS / (time.perf_counter() - started)

        return run

    found = alternate({"plain": side(False), "idempotent": side(True)}, rounds)
    plain, numbered = found["plain"], found["idempotent"]
    return {
        "append, plain (records/s)": plain,
        "append, idempotent (records/s)": numbered,
        "idempotence costs (wanted: <= 0.05)": 1 - numbered / plain,
    }


# ---------------------------------------------------------------- commits


def commits(store: LogStore, folder: Path, rounds: int) -> dict[str, float]:
    """Measure commits a second, written and synced, and fdatasyncs a second of a file that grows like the topic."""
    store.create_topic("read")
    store.topic("read").partition(0).append([b"x"] * 100_000)
    consumer = store.consumer("read", group="bench")
    while not consumer.poll_group(wait_s=5):
        pass
    tp = TopicPartition("read", 0)
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT, 0o666)
    os.posix_fallocate(fd, 0, 1 << 20)
    at = 0

    def run(count: int, commit: Callable[[int], None]) -> float:
        started = time.perf_counter()
        for number in range(count):
            commit(number)
        return count / (time.perf_counter() - started)

    def sync(number: int) -> None:
        nonlocal at
        at = (at + 200) % (1 << 20)
        os.pwrite(fd, _BLOCK[:200], at)
        os.fdatasync(fd)

    found = alternate(
        {
            "async": lambda: run(5000, lambda number: consumer.commit_async({tp: number})),
            "sync": lambda: run(500, lambda number: consumer.commit({tp: number})),
            "fdatasync": lambda: run(500, sync),
        },
        rounds,
    )
    consumer.close()
    os.close(fd)
    return {
        "commits, async (1/s, wanted: >= 20,000)": found["async"],
        "commits, sync (1/s)": found["sync"],
        "sync commits against fdatasync": found["sync"] / found["fdatasync"],
    }


# ---------------------------------------------------------------- transactions


def transactions(store: LogStore, folder: Path, rounds: int) -> dict[str, float]:
    """Transactions a second, fsyncs of each, and the limit: five files written and synced, one after the other."""
    store.create_topic("four", partitions=4, fsync="never")
    values: list[bytes | None] = [
        b'{"id":%09d,"name":"somebody","amount":12.50,"city":"berlin"}' % n for n in range(25)
    ]
    producer = store.producer(name="bench")
    logs = [*store.topic("four").partitions(), store.topic("__transaction_state").partition(0)]
    syncs = transfers = 0

    def one() -> None:
        with producer.transaction():
            for number in range(4):
                producer.send_many("four", values, partition=number)

    def run() -> float:
        nonlocal syncs, transfers
        before = sum(log.sync_count for log in logs)
        started = time.perf_counter()
        for _ in range(100):
            one()
        seconds = time.perf_counter() - started
        syncs, transfers = syncs + sum(log.sync_count for log in logs) - before, transfers + 100
        return 100 / seconds

    fds = [os.open(folder / f"raw-{number}", os.O_RDWR | os.O_CREAT, 0o666) for number in range(5)]
    for fd in fds:
        os.posix_fallocate(fd, 0, 4 << 20)
    at = 0

    def limit() -> float:
        nonlocal at
        started = time.perf_counter()
        for _ in range(100):
            at = (at + 2000) % (4 << 20)
            for fd in fds:
                os.pwrite(fd, _BLOCK[:2000], at)
                os.fdatasync(fd)
        return 100 / (time.perf_counter() - started)

    found = alternate({"ours": run, "limit": limit}, rounds)
    producer.close()
    for fd in fds:
        os.close(fd)
    return {
        "transactions of 4 x 25 records (1/s)": found["ours"],
        "5 fdatasyncs (1/s)": found["limit"],
        "transactions against the fsync limit": found["ours"] / found["limit"],
        "fsyncs a transaction": syncs / transfers,
    }


# ---------------------------------------------------------------- rebalances


def rebalances(folder: Path, kills: int) -> dict[str, float]:
    """Milliseconds until another member reads a partition whose owner was killed."""
    times: list[float] = []
    with segmentlog.open(folder) as store:
        store.create_topic("shared", partitions=4)
        with store.producer() as producer:
            survivor = store.consumer("shared", group="g", follow=True)
            survivor.poll_group(wait_s=5)
            for _ in range(kills):
                times.append(_kill_one(folder, producer, survivor))
            survivor.close()
    times.sort()
    return {
        "rebalance after SIGKILL, p50 (ms)": statistics.median(times),
        "rebalance after SIGKILL, p99 (ms, wanted: < 1,000)": times[min(int(len(times) * 0.99), len(times) - 1)],
        "rebalance after SIGKILL, max (ms)": times[-1],
    }


def _kill_one(folder: Path, producer: Producer, survivor: segmentlog.Consumer) -> float:
    other = subprocess.Popen(
        [sys.executable, "-m", "bench.delivery", "--member", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    while len(survivor.poll_group()) != 2:  # until it has given two away
        time.sleep(0.005)
    while len(other.stdout.readline().split()) != 2:
        pass
    lost = next(number for number in range(4) if TopicPartition("shared", number) not in survivor.assignment())
    producer.send_many("shared", [b"x"], partition=lost)
    started = time.perf_counter()
    other.send_signal(signal.SIGKILL)
    for record in survivor:
        if record.partition == lost:
            break
    elapsed_ms = (time.perf_counter() - started) * 1000
    other.wait()
    other.stdout.close()
    return elapsed_ms


def member(folder: str) -> int:
    """Run the process that is killed: it holds partitions, prints them, and reads nothing."""
    with segmentlog.open(folder, background=False) as store, store.consumer("shared", group="g") as consumer:
        while True:
            owned = [str(tp.partition) for tp in consumer.poll_group(wait_s=0.05)]
            print(*owned, flush=True)


if __name__ == "__main__":
    sys.exit(main())
