"""MirrorMaker 2, and what it is to copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ecosystem.kafka.programs import HERE, SCRIPTS
from server.clients.driver import Got, Sent
from server.clients.java_driver import MOVED, java_command
from server.clients.teller import Start, Teller

PARTITIONS = 3
AGES_MS = "864000000000"
"""Retention that keeps the records: they are of 2023."""


def records(begin: int, end: int) -> list[Sent]:
    """Return records with and without keys, with values and tombstones, with headers, some of them null."""
    return [
        Sent(
            partition=number % PARTITIONS,
            key=None if number % 7 == 0 else b"key-%d" % (number % 50),
            value=None if number % 10 == 9 else b"%d" % number,
            timestamp=1_700_000_000_000 + number,
            headers=(("number", b"%d" % number), ("null", None)) if number % 3 else (),
        )
        for number in range(begin, end)
    ]


def mirror(start: Start, settings: str, folder: Path) -> Teller:
    """MirrorMaker, by itself."""
    path = folder / "mirror.properties"
    path.write_text(settings)
    return start(java_command(SCRIPTS["connect-mirror-maker.sh"], path, memory="512m", project=HERE, more=[MOVED]))


def by_partition(found: Iterable[Got | Sent]) -> dict[int, list[tuple[Any, ...]]]:
    """Return everything but the offsets, by partition."""
    told: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for one in found:
        told[one.partition].append((one.timestamp, one.key, one.value, one.headers))
    return told


def once(found: dict[int, list[tuple[Any, ...]]]) -> dict[int, list[tuple[Any, ...]]]:
    """Remove repeated records. (Timestamps are unique.)"""
    return {number: list(dict.fromkeys(told)) for number, told in found.items()}


def lags(out: str, groups: Sequence[str]) -> dict[tuple[str, str, str], str]:
    """Return the lags by group, topic and partition, from the output of ``kafka-consumer-groups.sh --describe``."""
    rows = [line.split() for line in out.splitlines()]
    return {(row[0], row[1], row[2]): row[5] for row in rows if row and row[0] in groups}
