"""Stores for tests of `verify`, `repair` and `dump`: created whole, then damaged byte by byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.format.batch import decode_header
from segmentlog.inspection.finding import Finding
from segmentlog.inspection.store_inspection import inspect_store


class Batch(NamedTuple):
    """The position of a batch."""

    path: Path
    position: int
    size_bytes: int
    base_offset: int
    next_offset: int


def make_store(path: Path, batches: int = 6, records: int = 2, **settings: object) -> Path:
    """Create a store with topic "t" of one partition, close it cleanly, and return the partition's folder.

    A segment has two batches unless ``settings`` change that. Record ``i`` has the value "value i" and the timestamp
    1000 + i. Some records have keys, null values or headers.
    """
    config = {"segment_records": 2 * records, "index_interval_bytes": 1, "fsync": "never", **settings}
    with segmentlog.open(path, background=False) as store:
        partition = store.create_topic("t", **config).partition(0)
        for number in range(batches):
            first = number * records
            partition.append(
                [b"value %d" % (first + index) for index in range(records)],
                keys=[b"key" if index % 2 else None for index in range(records)],
                timestamps=[1000 + first + index for index in range(records)],
                headers=[[("name", b"x"), ("none", None)] if index % 2 else None for index in range(records)],
            )
    return path / "t" / "0"


def log_files(folder: Path) -> list[Path]:
    """Return the segment files, oldest first."""
    return sorted(folder.glob("*.log"))


def batches_of(folder: Path) -> list[Batch]:
    """Return every batch of a partition, in order."""
    found = []
    for path in log_files(folder):
        view = memoryview(path.read_bytes())
        position = 0
        while position < len(view):
            header = decode_header(view, position)
            found.append(Batch(path, position, header.size_bytes, header.base_offset, header.next_offset))
            position += header.size_bytes
    return found


def flip(path: Path, position: int, bits: int = 1) -> None:
    """Flip bits of one byte; a second call flips them back."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bits]))


def copied(store: Path, to: Path) -> Path:
    """Copy a store as a backup would, and return the folder of its partition. A copy's state page is not trusted."""
    shutil.copytree(store, to)
    return to / "t" / "0"


def crash(store: Path, to: Path) -> Path:
    """Copy a store without its state page: the state after a power cut if everything was on disk."""
    folder = copied(store, to)
    os.unlink(folder / "state")
    return folder


def findings(store: Path, *severities: str) -> list[Finding]:
    """Return the findings of an inspection, of these severities or of all."""
    return [one for one in inspect_store(str(store)) if not severities or one.severity in severities]


def records(store: Path) -> dict[int, bytes | None]:
    """Return offset -> value of all readable records of topic "t"."""
    with segmentlog.open(store, create=False, background=False) as opened:
        return {record.offset: record.value for record in opened.consumer("t")}


def command(store: Path, *arguments: str) -> int:
    """Run the command line in this process and return its exit status."""
    return run(cli, ["--dir", str(store), *arguments])
