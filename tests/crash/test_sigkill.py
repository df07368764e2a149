"""Processes that append to one partition, and are killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from leftovers import opened
from seeds import seeds, share

import segmentlog

ROUNDS = max(int(os.environ.get("SEGMENTLOG_KILL_ROUNDS", "60")) // 2, 6)  # for each way of being acknowledged
WRITER = Path(__file__).with_name("writer.py")


class Writer:
    """A writing process and its acknowledged records: offset -> (name, number)."""

    def __init__(self, store: Path, name: str, seed: int, ack: str) -> None:
        self.name = name
        self.acknowledged: dict[int, tuple[str, int]] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(WRITER), str(store), name, str(seed), ack], stdout=subprocess.PIPE, text=True
        )
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):
                break  # killed in the middle of telling
            base_offset, number, count = map(int, line.split())
            for index in range(count):
                self.acknowledged[base_offset + index] = (self.name, number + index)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._thread.join()


def content(partition: segmentlog.Partition, start: int) -> dict[int, tuple[str, int]]:
    """offset -> (name, number) of every record from ``start`` on."""
    found: dict[int, tuple[str, int]] = {}
    for batch in partition.read(start):
        for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
            assert value is not None
            name, number, _ = value.decode().split(":")
            assert offset not in found, f"offset {offset} twice"
            found[offset] = (name, int(number))
    return found


@pytest.mark.parametrize("seed", seeds("kills"))
@pytest.mark.parametrize("ack", ["written", "durable"])
def test_killed_writers_lose_nothing_acknowledged(tmp_path: Path, ack: str, seed: int) -> None:
    """Writers killed at random: every acknowledged record is there once, at its offset, in its writer's order."""
    rng = random.Random(seed)
    rounds = share(ROUNDS, "kills")
    path = tmp_path / "store"
    with segmentlog.open(path) as store:
        # Small segments and a small index interval, so that kills also interrupt rolls and index writes.
        store.create_topic("t", segment_bytes=20_000, index_interval_bytes=512, fsync="never")
    reader = opened(segmentlog.open(path))
    partition = reader.topic("t").partition(0)
    acknowledged: dict[int, tuple[str, int]] = {}
    seen: dict[int, tuple[str, int]] = {}
    writers: list[Writer] = []
    started = 0
    for number in range(rounds):
        while len(writers) < 3:
            writers.append(Writer(path, f"w{started}", rng.randrange(1 << 30), ack))
            started += 1
        deadline = time.monotonic() + rng.uniform(0.05, 0.6)
        # On a busy machine the writers may hardly have written; the last round waits until they have.
        patience = deadline + (60 if number == rounds - 1 else 0)
        position = max(seen, default=-1) + 1
        while (now := time.monotonic()) < deadline or (partition.log_end_offset <= 2 * rounds and now < patience):
            # a reader follows meanwhile
            fresh = content(partition, position)
            seen.update(fresh)
            position = max(fresh, default=position - 1) + 1
        victim = writers.pop(rng.randrange(len(writers)))
        victim.kill()
        for offset, record in victim.acknowledged.items():
            assert acknowledged.setdefault(offset, record) == record, "an offset was given twice"
    for writer in writers:
        writer.kill()
        for offset, record in writer.acknowledged.items():
            assert acknowledged.setdefault(offset, record) == record, "an offset was given twice"

    assert partition.log_end_offset > 2 * rounds, "the writers hardly wrote: this proves nothing"
    final = content(partition, 0)
    for offset, record in acknowledged.items():
        assert final.get(offset) == record
    for offset, record in seen.items():
        assert final.get(offset) == record, "a reader was handed what is gone"
    assert sorted(final) == list(range(len(final))), "a process's death leaves no gap"
    last: dict[str, int] = {}
    for offset in sorted(final):
        name, number = final[offset]
        assert number == last.get(name, -1) + 1, "a writer's records are out of order, doubled or missing"
        last[name] = number
    # This would hang if a lock of a dead process blocked others.
    assert partition.append([b"after:0:"]) == len(final)
    reader.close()


def test_a_stopped_holder_of_the_lock_blocks_only_until_it_dies(tmp_path: Path) -> None:
    """The kernel frees a dead process's lock, and its half-written bytes are cut off and kept."""
    path = tmp_path / "store"
    with segmentlog.open(path) as store:
        store.create_topic("t", fsync="never")
        store.topic("t").partition(0).append([b"before"])
    script = (
        "import os, sys, signal, segmentlog\n"
        "store = segmentlog.open(sys.argv[1], background=False)\n"
        "partition = store.topic('t').partition(0)\n"
        "partition.append([b'whole'])\n"
        "write = store._topics.fs.pwritev\n"
        "def torn(fd, buffers, position):\n"
        "    write(fd, [b''.join(buffers)[:70]], position)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "store._topics.fs.pwritev = torn\n"
        "partition.append([b'torn' * 100])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with segmentlog.open(path) as store:
        partition = store.topic("t").partition(0)
        report = partition.recovery_report
        assert report.verdict == "torn write"
        assert report.truncated_bytes > 0
        assert report.quarantine_path is not None
        assert Path(report.quarantine_path).stat().st_size == report.truncated_bytes
        assert [value for batch in partition.read(0) for value in batch.values] == [b"before", b"whole"]
        assert partition.append([b"after"]) == 2
