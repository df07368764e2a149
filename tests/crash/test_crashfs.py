"""CrashFS forgets data that was not synced, and a log on it keeps its guarantees.

    SEGMENTLOG_CRASHFS_ROUNDS=200 SEGMENTLOG_SEED=42 pytest tests/crash/test_crashfs.py

A seed repeats the actions of the writers, the times of their kills and the choices of a crash. How far the writers
got before they were killed depends on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crashfs_mount import disk as disk
from seeds import seeds, share

from segmentlog.errors import LogTruncated
from segmentlog.log.partition import Partition
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing import History
from segmentlog.testing.crashfs import CrashFS

ROUNDS = int(os.environ.get("SEGMENTLOG_CRASHFS_ROUNDS", "9"))

# ---------------------------------------------------------------- a log on it


class OneBoot(FileSystem):
    """The real file system of a machine that was started at a time of our choosing."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    def boot_id(self) -> str:
        return self._boot


class Machine:
    """Runs processes on the disk and kills them: a process that forks, so that each starts in a millisecond."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.boots = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def run(self, *jobs: tuple[str, list[object]], seconds: float | None = None) -> list[list[Any]]:
        """Run jobs at the same time, to their end or for ``seconds``; return the lines that they wrote."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"path": str(self.path), "boot": f"boot-{self.boots}", "jobs": jobs, "seconds": seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        told = []
        for line in self._process.stdout:
            if line == "done\n":
                return told
            told.append(json.loads(line))
        raise AssertionError("the process that starts the others ended")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize("fsync", ["always", "20ms", "50records", "8192bytes", "never"])
@pytest.mark.parametrize("seed", seeds("crashfs"))
def test_promises_survive_power_cuts(disk: CrashFS, fsync: str, writers: int, seed: int) -> None:
    """All durable records exist, no offset names two records, and every missing offset is in a lost range."""
    rng = random.Random(f"{seed} {fsync} {writers}")
    rounds = share(ROUNDS, "crashfs")
    history = History()
    story: list[str] = []
    machine = Machine(disk.path / "store")
    with contextlib.closing(machine):
        machine.run(("make", [fsync]))
        for number in range(rounds):
            machine.boots += 1
            jobs: list[tuple[str, list[object]]] = [
                ("write", [f"w{number}.{writer}", rng.randrange(1 << 30), fsync == "always"])
                for writer in range(writers)
            ]
            jobs.append(("follow", [f"r{number}"]))
            seconds = rng.uniform(0.01, 0.06)
            told = machine.run(*jobs, seconds=seconds)
            while number == rounds - 1 and not len(history) and not _wrote(told) and seconds < 60:
                # On a busy machine, no writer may have appended in that time, which proves nothing.
                seconds *= 2
                learn(history, told, story)
                told = machine.run(*jobs, seconds=seconds)
            learn(history, told, story)
            crash_seed = rng.randrange(1 << 30)
            story.append(f"round {number}: {len(history)} records; crash({crash_seed})")
            story += [f"    {line}" for line in disk.crash(crash_seed)]
            # Now and then it is the next writers that recover, and may be killed while they do.
            if rng.random() < 0.3 and number < rounds - 1:
                continue
            machine.boots += 1
            check(history, machine.run(("look", [f"c{number}", rng.random() < 0.5])), story)
    assert len(history) > 0, "the writers did not write: this proves nothing"


def _wrote(told: list[list[Any]]) -> bool:
    return any(kind == "acknowledged" for kind, *_ in told)


def learn(history: History, told: list[list[Any]], story: list[str]) -> None:
    """Enter the lines of the processes of one boot.

    All records below the durable offset of that boot are durable, also those that were reported before.

    This does not hold for records of earlier boots: a crash that no process has noticed yet may have taken them.
    """
    durable_offset = max((what[0] for kind, *what in told if kind == "durable"), default=0)
    for kind, *what in told:
        if kind == "acknowledged":
            base_offset, names, durable = what
            for offset, name in enumerate(names, base_offset):
                history.acknowledged(offset, [name.encode()], durable=durable or offset < durable_offset)
        elif kind == "handed":
            reader, offset, name, durable = what
            history.handed(reader, offset, name.encode(), durable_only=durable or offset < durable_offset)
        elif kind == "failed":
            fail(story, f"a process failed:\n{what[0]}")


def check(history: History, told: list[list[Any]], story: list[str]) -> None:
    """Compare with what a process found after the crash, and enter what it did besides."""
    contents = {what[0]: what[1].encode() for kind, *what in told if kind == "is"}
    ranges = [(what[0], what[1]) for kind, *what in told if kind == "lost"]
    verdict = [what[0] for kind, *what in told if kind == "verdict"]
    story.append(f"    recovery: {verdict}, lost ranges {ranges}, {len(contents)} records")
    learn(history, [line for line in told if line[0] == "failed"], story)
    if conflicts := history.check(contents, ranges):
        fail(story, "\n".join(map(str, conflicts[:10])))
    learn(history, told, story)


def fail(story: list[str], what: str) -> None:
    """Fail with what happened before, and how to repeat it."""
    tail = "\n".join(story[-60:])
    pytest.fail(f"{what}\n\nSEGMENTLOG_CRASHFS_ROUNDS={ROUNDS}\n{tail}", pytrace=False)


# ---------------------------------------------------------------- in the machine's processes


def tell(*what: object) -> None:
    """Write a line with one call: a pipe takes up to 4096 bytes at once, also from a killed process."""
    line = json.dumps(what).encode() + b"\n"
    assert len(line) <= 4096
    os.write(1, line)


def value_of(name: str) -> bytes:
    """Return the record of that name. The name contains its length, so that a half overwritten record is detected."""
    return name.encode() + b":" + b"x" * int(name.rpartition(":")[2])


def name_of(value: bytes | None) -> str:
    """Return the name in a record, if the record is complete."""
    assert value is not None
    name = value.rpartition(b":")[0].decode()
    return name if value_of(name) == value else f"damaged {value!r}"


def make(store: LogStore, fsync: str) -> None:
    """Make the topic, with small segments so that crashes meet rolls."""
    store.create_topic("t", fsync=fsync, segment_bytes=20_000, index_interval_bytes=512)


def write(store: LogStore, writer: str, seed: int, always: bool) -> None:
    """Append until the process is killed, and report the acknowledged records."""
    rng = random.Random(seed)
    partition: Partition = store.topic("t").partition(0)
    number = 0
    while True:
        count = rng.choice((1, 1, 2, 7, 50))
        padding = rng.choice((0, 10, 300))
        names = [f"{writer}:{number + index}:{padding}" for index in range(count)]
        ack: Any = rng.choice(("durable", "written", "written", None))
        base_offset = partition.append([value_of(name) for name in names], ack=ack)
        tell("acknowledged", base_offset, names, always or ack == "durable")
        if rng.random() < 0.02:
            tell("durable", partition.flush())
        number += count
        time.sleep(rng.choice((0, 0, 0.001, 0.003)))


def follow(store: LogStore, reader: str) -> None:
    """Read until the process is killed, durable records and all records in turn, and report them."""
    partition = store.topic("t").partition(0)
    positions = {True: 0, False: 0}
    while True:
        for durable_only, position in positions.items():
            try:
                for batch in partition.read(position, durable_only=durable_only):
                    for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                        tell("handed", reader, offset, name_of(value), durable_only)
                        positions[durable_only] = offset + 1
            except LogTruncated as error:
                positions[durable_only] = error.lost.end_offset
        tell("durable", partition.durable_offset)
        time.sleep(0.002)


def look(store: LogStore, writer: str, cleanly: bool) -> None:
    """Tell everything that is there, append, and go with or without closing."""
    partition = store.topic("t").partition(0)
    tell("verdict", partition.recovery_report.verdict)
    for batch in partition.read(partition.log_start_offset):
        for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
            tell("is", offset, name_of(value))
    for lost in partition.lost_ranges():
        tell("lost", lost.base_offset, lost.end_offset)
    names = [f"{writer}:0:5"]
    tell("acknowledged", partition.append([value_of(names[0])], ack="durable"), names, True)
    if cleanly:
        store.close()


_JOBS: dict[str, Callable[..., None]] = {"make": make, "write": write, "follow": follow, "look": look}


def start_processes() -> None:
    """Fork the jobs that stdin orders, kill them when their time is over, and say when they are dead."""
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for job, options in order["jobs"]:
            child = os.fork()
            if child == 0:
                try:
                    _JOBS[job](LogStore(order["path"], fs=OneBoot(order["boot"])), *options)
                except BaseException:
                    tell("failed", traceback.format_exc()[-3000:])
                os._exit(0)
            children.append(child)
        if order["seconds"] is not None:
            time.sleep(order["seconds"])
            for child in children:
                os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        os.write(1, b"done\n")


if __name__ == "__main__":
    start_processes()
