"""The step with an object store: a machine ships its records and loses its disk, and another machine continues."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import segmentlog
from segmentlog.demo.flights import DemoFailed, Say, check

_TOPIC = "arrivals"
_COUNT = 30_000
_WORKER = """
import sys, segmentlog
folder, url, topic = sys.argv[1:]
with segmentlog.open(folder, ship=url, ship_interval_ms=100) as store:
    log = store.create_topic(topic).partition(0)
    values = []
    for line in sys.stdin.buffer:
        values.append(line.rstrip(b"\\n"))
        if len(values) == 100:
            log.append(values, ack="shipped" if log.log_end_offset % 1000 == 0 else "durable")
            print(log.log_end_offset, log.shipped_offset, flush=True)
            values = []
"""
"""Every tenth append waits until it and all earlier ones are shipped; the other appends are only on disk."""


def ship(folder: Path, values: Sequence[bytes], say: Say) -> None:
    """Run the step. Raises `DemoFailed`."""
    say(
        "11. Shipping a store to an object store (a folder here); its machine and disk are lost, and another machine"
        " continues"
    )
    machine, other, bucket = (Path(f"{folder.absolute()}-{name}") for name in ("machine", "other-machine", "objects"))
    try:
        values = values[:_COUNT]
        appended, shipped = _work_until_killed(machine, f"file://{bucket}", values)
        shutil.rmtree(machine)
        started = time.perf_counter()
        _take_over(bucket, other)
        took_s = time.perf_counter() - started
        say(f"   killed, and its folder deleted, with {appended:,} records on its disk, {shipped:,} of them shipped")
        with segmentlog.open(other, ship=f"file://{bucket}") as store:
            log = store.topic(_TOPIC).partition(0)
            found = [record.value for record in store.consumer(_TOPIC)]
            (lost,) = log.lost_ranges()
            check(len(found) >= shipped, f"all {shipped} records that were acknowledged as shipped exist")
            check(found == list(values[: len(found)]), "the existing records are the appended ones, in order")
            check(lost.base_offset == len(found), "records that were not shipped are reported as lost")
            say(f"   taken over in {took_s:.2f} s: {len(found):,} records exist, including all that were shipped")
            say(f"   reported: offsets {lost.base_offset:,} to {lost.end_offset - 1:,} have no record, and never will")
            first = log.append(list(values[len(found) :]), ack="shipped")
            check(first >= lost.end_offset, "no offset is assigned that the other machine may have assigned")
            everything = [record.value for record in store.consumer(_TOPIC, shipped_only=True)]
            check(everything == list(values), "with the rest appended again every record exists once")
        say(f"   the rest was appended again from offset {first:,} on: all {len(values):,} records, each once, shipped")
    finally:
        for path in (machine, other, bucket):
            shutil.rmtree(path, ignore_errors=True)


def _work_until_killed(machine: Path, url: str, values: Sequence[bytes]) -> tuple[int, int]:
    """Run a process that appends and ships, and kill it; return (records appended, records shipped)."""
    worker = subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(machine), url, _TOPIC], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    appended = shipped = 0
    try:
        for start in range(0, len(values), 100):
            worker.stdin.write(b"".join(value + b"\n" for value in values[start : start + 100]))
            worker.stdin.flush()
            line = worker.stdout.readline()
            if not line:
                raise DemoFailed("the shipping process ended before it was killed")
            appended, shipped = map(int, line.split())
            if appended >= len(values) // 2 and shipped < appended:
                break
    finally:
        worker.kill()
        worker.communicate()
    return appended, shipped


def _take_over(bucket: Path, other: Path) -> None:
    from segmentlog.objects.bucket.local_bucket import LocalBucket
    from segmentlog.objects.takeover import take_over

    logger = logging.getLogger("segmentlog")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the death of a machine is the subject of this step
    try:
        take_over(LocalBucket(str(bucket)), str(other))
        with segmentlog.open(other, background=False) as store:
            store.topic(_TOPIC).partition(0)
            store.ship(f"file://{bucket}")
    finally:
        logger.setLevel(level)
