"""The clocks: what time it is is an argument everywhere else, so that tests can say it."""

from __future__ import annotations

import time


class Clock:
    """The two clocks, in milliseconds. Tests hand in another one."""

    def now_ms(self) -> int:
        """Wall clock since 1970 UTC: timestamps of records."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Since boot, the same in every process: ages and deadlines."""
        return time.monotonic_ns() // 1_000_000

    _began: tuple[int, int] | None = None

    def steady_ms(self) -> int:
        """The wall clock as far as the monotonic one bears it out: never further on since this was first asked.

        For what expires: that the wall clock jumps forward ends nothing. Time that the machine slept does not count.
        """
        wall_ms, up_ms = self.now_ms(), self.monotonic_ms()
        if self._began is None:
            self._began = wall_ms, up_ms
        began_ms, began_up_ms = self._began
        return min(wall_ms, began_ms + up_ms - began_up_ms)
