"""The clock of a store. Modules that compute with times get them as arguments, so that tests can choose the times."""

from __future__ import annotations

import time


class Clock:
    """The wall clock and the monotonic clock, in milliseconds. Tests replace this class."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since 1970 UTC, for timestamps of records."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return milliseconds since boot, for ages and deadlines. All processes see the same clock."""
        return time.monotonic_ns() // 1_000_000

    _first: tuple[int, int] | None = None

    def steady_ms(self) -> int:
        """Return the wall clock, limited by the monotonic clock: it never advances faster than since the first call.

        Use it for expiry, so that a jump of the wall clock expires nothing. Time in which the machine slept does not
        count.
        """
        wall_ms, up_ms = self.now_ms(), self.monotonic_ms()
        if self._first is None:
            self._first = wall_ms, up_ms
        first_ms, first_up_ms = self._first
        return min(wall_ms, first_ms + up_ms - first_up_ms)
