"""What a worker counts of itself: plain numbers, which `telemetry` reads when somebody asks."""

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
    """What happens now and then, and not with every request."""

    ACCEPTED = 1
    """A client connected."""
    REFUSED = 2
    """A client was sent away, since there was no room for one more."""
    CUT = 3
    """A connection was closed for what came, or did not come, over it."""
    TLS_FAILED = 4
    """A client got no further than the handshake."""
    SASL_FAILED = 5
    """A client did not prove who it is."""


class ApiCounts:
    """Requests of one API: how many by latency, and how long all together."""

    __slots__ = ("buckets", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.seconds = 0.0


class Meter:
    """Thread-safe; costs less than a microsecond a request."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._apis: dict[str, ApiCounts] = {}
        self._errors: Counter[tuple[str, int]] = Counter()
        self._events: Counter[Event] = Counter()

    def request(self, api: str, seconds: float) -> None:
        """One request was answered."""
        counts = self._apis.get(api)
        if counts is None:
            with self._mutex:
                counts = self._apis.setdefault(api, ApiCounts())
        bucket = bisect_left(BUCKETS_S, seconds)
        with self._mutex:
            counts.buckets[bucket] += 1
            counts.seconds += seconds

    def errors(self, api: str, codes: Iterable[int]) -> None:
        """What an answer said that went wrong; one answer may say that of several partitions."""
        with self._mutex:
            for code in codes:
                self._errors[api, int(code)] += 1

    def event(self, event: Event) -> None:
        """It happened."""
        with self._mutex:
            self._events[event] += 1

    # ------------------------------------------------------------ asking

    def apis(self) -> dict[str, tuple[list[int], float]]:
        """By API: requests in each bucket (the last one has no upper bound), and seconds all together."""
        with self._mutex:
            return {api: (list(counts.buckets), counts.seconds) for api, counts in self._apis.items()}

    def error_counts(self) -> dict[tuple[str, int], int]:
        """By API and Kafka's error code."""
        with self._mutex:
            return dict(self._errors)

    def count_of(self, event: Event) -> int:
        """How often it happened."""
        return self._events[event]

    def totals(self) -> dict[str, float]:
        """Requests done so far, and the seconds that took."""
        with self._mutex:
            counts = list(self._apis.values())
            return {
                "requests": sum(sum(count.buckets) for count in counts),
                "seconds": round(sum(count.seconds for count in counts), 3),
            }
