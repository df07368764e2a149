"""The exactly-once step of the demonstration: each flight is processed once, although a process is killed.

``python -m segmentlog.demo.exactly_once_step STORE`` runs a worker process. The step starts two workers and kills one
of them; the second worker continues the work of the first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

import segmentlog
from segmentlog.errors import ConsumerFenced, ProducerFenced

GROUP = "punctuality"
_TOPIC = "delays"
_TRANSACTION_FLIGHTS = 10_000
"""Flights per transaction. The cost of a transaction is its fsyncs, which do not grow with it."""


class _Flight(msgspec.Struct):
    """The fields of a flight that this step reads."""

    carrier: str
    dep_delay: str


def process_flights(folder: str) -> None:
    """Read flights as a group member, and write each delay and the offsets in one transaction."""
    decode = msgspec.json.Decoder(_Flight).decode

    def commit() -> None:
        with producer.transaction():
            producer.send_many(_TOPIC, late)
            producer.commit_offsets(consumer)
        sys.stdout.write(f"{len(late)}\n")
        sys.stdout.flush()
        late.clear()

    late: list[bytes | None] = []
    with (
        segmentlog.open(folder) as store,
        store.producer() as producer,
        store.consumer(
            "flights",
            group=GROUP,
            isolation="read_committed",
            on_revoked=lambda _: commit(),  # before a partition is revoked, commit what was read of it
            on_lost=lambda _: late.clear(),  # already lost: other members start at the last commit
        ) as consumer,
    ):
        try:
            for batch in consumer.batches():
                flights = [decode(value) for value in batch.values if value and value.startswith(b"{")]
                late += [f"{flight.carrier} {flight.dep_delay}".encode() for flight in flights]
                if len(late) >= _TRANSACTION_FLIGHTS:
                    commit()
            commit()
        except (ConsumerFenced, ProducerFenced):
            pass  # evicted: other members have the partitions, and continue after the last commit


class _Worker:
    """A worker process."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "segmentlog.demo.exactly_once_step", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def kill_during_transaction(self) -> int:
        """Kill the process during its fourth transaction. Return the number of flights that it committed before."""
        assert self.process.stdout is not None
        counts = [int(line) for line, _ in zip(self.process.stdout, range(3), strict=False)]
        os.kill(self.process.pid, signal.SIGKILL)
        counts += map(int, self.process.stdout.read().split())
        self.process.stdout.close()
        self.process.wait()
        return sum(counts)

    def wait(self) -> None:
        """Wait until the process has read all flights and has ended."""
        self.process.communicate()


def run_step(folder: Path) -> tuple[int, int, Counter[str], Counter[str], float]:
    """Run the step; return (flights, flights done before the kill, flights by carrier, results by carrier, seconds)."""
    started = time.perf_counter()
    with segmentlog.open(folder) as store:
        store.create_topic(_TOPIC, partitions=2)
    dies, lives = _Worker(folder), _Worker(folder)
    done = dies.kill_during_transaction()
    lives.wait()
    with segmentlog.open(folder) as store:
        while any(
            partition.lag != 0 for partition in store.groups.describe(GROUP).partitions if partition.log_end_offset
        ):
            _Worker(folder).wait()
        decode = msgspec.json.Decoder(_Flight).decode
        expected, found = Counter[str](), Counter[str]()
        with store.consumer("flights") as consumer:
            for batch in consumer.batches():
                expected.update(decode(value).carrier for value in batch.values if value and value.startswith(b"{"))
        with store.consumer(_TOPIC, isolation="read_committed") as consumer:
            for batch in consumer.batches():
                found.update(value.split()[0].decode() for value in batch.values if value)
    return expected.total(), done, expected, found, time.perf_counter() - started


if __name__ == "__main__":
    process_flights(sys.argv[1])
