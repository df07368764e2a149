"""Counters of one worker: plain numbers, which `telemetry` turns into metrics when they are requested."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import Final

BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the latency histogram."""


class Event(Enum):
    """Events that are rare compared with requests."""

    ACCEPTED = 1
    """A client connected."""
    REFUSED = 2
    """A client was rejected because a limit of connections was reached."""
    CUT = 3
    """The server closed a connection, because a request was malformed, late or missing."""
    TLS_FAILED = 4
    """A TLS handshake failed."""
    SASL_FAILED = 5
    """SASL authentication failed."""


class ApiCounts:
    """Requests of one API: a latency histogram, and the total seconds."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.seconds = 0.0


class WorkerCounters:
    """Counters of requests, errors and events. Thread-safe; costs less than a microsecond a request."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._apis: dict[str, ApiCounts] = {}
        self._errors: Counter[tuple[str, int]] = Counter()
        self._events: Counter[Event] = Counter()

    def count_request(self, api: str, seconds: float) -> None:
        """Count an answered request."""
        counts = self._apis.get(api)
        if counts is None:
            with self._mutex:
                counts = self._apis.setdefault(api, ApiCounts())
        bucket = bisect_left(BUCKETS_S, seconds)
        with self._mutex:
            counts.buckets[bucket] += 1
            counts.seconds += seconds

    def count_errors(self, api: str, codes: Iterable[int]) -> None:
        """Count the error codes of a response; a response may contain one for each partition."""
        with self._mutex:
            for code in codes:
                self._errors[api, int(code)] += 1

    def count_event(self, event: Event) -> None:
        """Count an event."""
        with self._mutex:
            self._events[event] += 1

    # ------------------------------------------------------------ reading

    def apis(self) -> dict[str, tuple[list[int], float]]:
        """Return for each API the requests in each bucket (the last has no upper bound), and the total seconds."""
        with self._mutex:
            return {api: (list(counts.buckets), counts.seconds) for api, counts in self._apis.items()}

    def error_counts(self) -> dict[tuple[str, int], int]:
        """Return the number of errors for each API and Kafka error code."""
        with self._mutex:
            return dict(self._errors)

    def count_of(self, event: Event) -> int:
        """Return how often an event has happened."""
        return self._events[event]

    def totals(self) -> dict[str, float]:
        """Return the number of requests, and the total seconds that they took."""
        with self._mutex:
            counts = list(self._apis.values())
            return {
                "requests": sum(sum(count.buckets) for count in counts),
                "seconds": round(sum(count.seconds for count in counts), 3),
            }
