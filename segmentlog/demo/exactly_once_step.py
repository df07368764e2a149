"""The demonstration's last step: each flight once, though a process dies half way.

``python -m segmentlog.demo.exactly_once_step STORE`` is the process that dies, and the one that goes on.
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
_TOGETHER = 10_000
"""Flights of a transaction: what it costs is fsyncs, and those do not grow with it."""


class _Flight(msgspec.Struct):
    """What is looked at of a flight."""

    carrier: str
    dep_delay: str


def transform(folder: str) -> None:
    """Read flights as a member of the group, and write how late each was, in one transaction with the positions."""
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
            on_revoked=lambda _: commit(),  # what was read of a partition that goes is committed before it does
            on_lost=lambda _: late.clear(),  # it went already: others begin where the last commit was
        ) as consumer,
    ):
        try:
            for batch in consumer.batches():
                flights = [decode(value) for value in batch.values if value and value.startswith(b"{")]
                late += [f"{flight.carrier} {flight.dep_delay}".encode() for flight in flights]
                if len(late) >= _TOGETHER:
                    commit()
            commit()
        except (ConsumerFenced, ProducerFenced):
            pass  # taken for dead: others have the partitions, and go on where this one committed


class _Worker:
    """A process at it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "segmentlog.demo.exactly_once_step", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def kill_at_work(self) -> int:
        """Kill it after its third transaction, in the middle of another one; how many flights it had committed."""
        assert self.process.stdout is not None
        told = [int(line) for line, _ in zip(self.process.stdout, range(3), strict=False)]
        os.kill(self.process.pid, signal.SIGKILL)
        told += map(int, self.process.stdout.read().split())
        self.process.stdout.close()
        self.process.wait()
        return sum(told)

    def wait(self) -> None:
        """Let it read to the end."""
        self.process.communicate()


def deliver(folder: Path) -> tuple[int, int, Counter[str], Counter[str], float]:
    """(flights, those that were done before the kill, flights by carrier, results by carrier, seconds)."""
    started = time.perf_counter()
    with segmentlog.open(folder) as store:
        store.create_topic(_TOPIC, partitions=2)
    dies, lives = _Worker(folder), _Worker(folder)
    done = dies.kill_at_work()
    lives.wait()
    with segmentlog.open(folder) as store:
        while any(
            partition.lag != 0 for partition in store.groups.describe(GROUP).partitions if partition.log_end_offset
        ):
            _Worker(folder).wait()
        decode = msgspec.json.Decoder(_Flight).decode
        wanted, found = Counter[str](), Counter[str]()
        with store.consumer("flights") as consumer:
            for batch in consumer.batches():
                wanted.update(decode(value).carrier for value in batch.values if value and value.startswith(b"{"))
        with store.consumer(_TOPIC, isolation="read_committed") as consumer:
            for batch in consumer.batches():
                found.update(value.split()[0].decode() for value in batch.values if value)
    return wanted.total(), done, wanted, found, time.perf_counter() - started


if __name__ == "__main__":
    transform(sys.argv[1])
