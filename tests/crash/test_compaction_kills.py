"""Processes that compact and append are killed at any moment; then the power fails as well."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from crashfs_mount import disk as disk
from leftovers import opened
from seeds import seeds, share

import segmentlog
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.store_inspection import Tally
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.crashfs import CrashFS

ROUNDS = max(int(os.environ.get("SEGMENTLOG_KILL_ROUNDS", "60")) // 10, 3)
CRASHES = max(int(os.environ.get("SEGMENTLOG_CRASHFS_ROUNDS", "9")) // 3, 3)
KEEPER = Path(__file__).with_name("keeper.py")
SETTINGS: dict[str, Any] = {
    "cleanup_policy": "compact", "segment_bytes": 3000, "index_interval_bytes": 256, "fsync": "never",
    "delete_retention_ms": 20, "file_delete_delay_ms": 50,
}  # fmt: skip


class OneBoot(FileSystem):
    """The real file system of a machine whose boot time the test chooses."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    def boot_id(self) -> str:
        return self._boot


class Keeper:
    """A process that compacts or appends, and the last durable record of each of its keys.

    The state of the key that it was appending when it was killed is unknown. The record may exist although the process
    did not report it. If it was a tombstone, a later pass may have removed all records of the key.
    """

    def __init__(self, store: Path, job: str, seed: int, boot: str = "") -> None:
        self.seed = seed
        self.last: dict[bytes, tuple[int, bytes | None]] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(KEEPER), str(store), job, str(seed), boot],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._pending: bytes | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == "ready\n":
                self._ready.set()
            elif line.endswith("\n"):
                key, *appended = line.split()
                self._pending = b"%d/%s" % (self.seed, key.encode())
                if appended:
                    offset, number = appended
                    self.last[self._pending] = (int(offset), None if number == "-" else number.encode())
                    self._pending = None

    def wait_ready(self) -> None:
        """Wait until the process is ready: starting Python takes longer than a round."""
        assert self._ready.wait(60), "it does not start"

    def kill(self) -> None:
        assert self.process.stderr is not None
        assert self.process.poll() is None, self.process.stderr.read()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._thread.join()
        self.process.stderr.close()
        if self._pending is not None:
            self.last.pop(self._pending, None)


def check(partition: segmentlog.Partition, last: dict[bytes, tuple[int, bytes | None]]) -> None:
    """Check that each key has its last record or a newer one, and no record from before a tombstone."""
    newest: dict[bytes, tuple[int, bytes | None]] = {}
    for batch in partition.read(partition.log_start_offset):
        for offset, key, value in zip(batch.offsets.tolist(), batch.keys, batch.values, strict=True):
            assert key is not None
            newest[key] = (offset, None if value is None else value.split(b":")[0])
    for key, (offset, number) in last.items():
        found = newest.get(key)
        if found is None:
            assert number is None, f"the last record of {key!r} is gone, {number!r} at {offset}"
        else:
            assert found == (offset, number) or found[0] > offset, (
                f"{key!r}: {found} is older than {number!r}, {offset}"
            )


def damage(partition: segmentlog.Partition) -> list[Any]:
    """Return the findings of `verify` that are damage."""
    found = inspect_partition(FileSystem(), partition.folder, "t", 0, partition.config, Tally())
    return [finding for finding in found.findings if finding.severity == "damage"]


@pytest.mark.parametrize("seed", seeds("compaction kills"))
def test_killed_cleaners_and_writers_lose_no_last_record(tmp_path: Path, seed: int) -> None:
    """A reader reads during the kills, and passes continue where the dead process stopped."""
    rng = random.Random(seed)
    rounds = share(ROUNDS, "compaction kills")
    path = tmp_path / "store"
    with segmentlog.open(path) as store:
        store.create_topic("t", **SETTINGS)
    reader = opened(segmentlog.open(path, background=False))
    partition = reader.topic("t").partition(0)
    last: dict[bytes, tuple[int, bytes | None]] = {}
    for number in range(rounds):
        of_both = rng.randrange(1 << 20) * 100 + number
        workers = [Keeper(path, "append", of_both), Keeper(path, "compact", of_both)]
        for worker in workers:
            worker.wait_ready()
        deadline = time.monotonic() + rng.uniform(0.05, 0.4)
        # On a busy machine little was written, and no pass came to its end, before they were killed: the last ones may.
        patience = deadline + (60 if number == rounds - 1 else 0)
        while (now := time.monotonic()) < deadline or (
            (not partition.cleaned_offset or len(last | workers[0].last) <= rounds) and now < patience
        ):
            position = partition.log_start_offset
            for batch in partition.read(position):
                assert len(batch.values) == len(batch.offsets)
                assert position <= batch.offsets[0]
                position = int(batch.offsets[-1]) + 1
        for worker in rng.sample(workers, 2):
            worker.kill()
            last |= worker.last
        check(partition, last)
    assert len(last) > rounds, "the writers hardly wrote: this proves nothing"
    assert partition.cleaned_offset > 0
    partition.roll()
    assert not partition.compact(wait_s=5).busy
    check(partition, last)
    left = [file.name for file in Path(partition.folder).iterdir() if file.suffix in (".swap", ".cleaned")]
    assert not left
    assert not damage(partition)
    reader.close()


@pytest.mark.parametrize("seed", seeds("compaction crashes"))
def test_power_cuts_during_compaction_lose_no_last_record(disk: CrashFS, seed: int) -> None:
    """On real files, a pass is killed, and then the disk forgets half of its copies, links and renames."""
    rng = random.Random(seed)
    crashes = share(CRASHES, "compaction crashes")
    path = disk.path / "store"
    with segmentlog.LogStore(path, fs=OneBoot("first")) as store:
        store.create_topic("t", **SETTINGS)
    last: dict[bytes, tuple[int, bytes | None]] = {}
    for number in range(crashes):
        of_both = rng.randrange(1 << 20) * 100 + number
        workers = [Keeper(path, job, of_both, f"boot-{number}") for job in ("append", "compact")]
        for worker in workers:
            worker.wait_ready()
        time.sleep(rng.uniform(0.05, 0.5))
        # On a busy machine they hardly wrote, which proves nothing: the last ones may.
        patience = time.monotonic() + (60 if number == crashes - 1 else 0)
        while len(last | workers[0].last) <= crashes + 1 and time.monotonic() < patience:
            time.sleep(0.01)
        for worker in workers:
            worker.kill()
            last |= worker.last
        lost = disk.crash(rng.randrange(1 << 30))
        look = [sys.executable, __file__, str(path), f"look-{number}", repr(last)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        done = subprocess.run(look, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, f"{done.stderr[-3000:]}\n" + "\n".join(lost[-20:])
    assert len(last) > crashes


def look() -> None:
    """Check, compact and check again. This runs in another process, so that its end frees the mount."""
    import ast

    path, boot, last = sys.argv[1:4]
    partition = segmentlog.LogStore(path, fs=OneBoot(boot)).topic("t").partition(0)
    expected = ast.literal_eval(last)
    check(partition, expected)
    partition.roll()
    partition.compact()
    time.sleep(0.03)
    partition.compact()
    check(partition, expected)
    assert not damage(partition)


if __name__ == "__main__":
    look()
