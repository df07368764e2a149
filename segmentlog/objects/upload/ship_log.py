"""Log lines of a process that ships in the background: start, end, progress, and the end of a failure.

Cycles run every second. So only the first upload is logged, and then one summary at most every `SUMMARY_S`.
`topics.background_threads.Worker` logs a failed cycle if the text of its error differs from that of the last failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

logger = logging.getLogger("segmentlog.ship")

SUMMARY_S: Final = 60.0


class ShipLog:
    """Logs the shipping of one store to one URL. Not thread-safe."""

    def __init__(self, path: str, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._url = url
        self._clock = clock
        self._is_owner: bool | None = None
        """None before the first cycle."""
        self._summarized_s = float("-inf")
        self._records = self._cycles = 0
        """Since the last summary."""
        self._all_records = self._all_cycles = 0
        self._failed_s = 0.0
        """Monotonic time at which the current series of failed cycles began; 0 if the last cycle succeeded."""
        self._failures = 0
        self._stuck: dict[str, str] = {}

    def record_cycle(self, *, is_owner: bool, put: bool, records: int, stuck: Mapping[str, str]) -> None:
        """Log the result of a cycle if it differs from that of the last cycle, or if a summary is due.

        is_owner  whether this process ships the store
        put       whether a manifest was published
        records   number of newly shipped offsets outside lost ranges
        stuck     reason why a partition cannot be shipped, by partition
        """
        now_s = self._clock()
        if is_owner != self._is_owner:
            self._is_owner = is_owner
            if is_owner:
                logger.info("%s: shipping to %s", self._path, self._url)
            else:
                logger.info("%s: another process ships to %s; this process stands by", self._path, self._url)
        if self._failures:
            logger.info(
                "%s: shipping to %s works again after %d failed cycles in %.0f s",
                self._path, self._url, self._failures, now_s - self._failed_s,
            )  # fmt: skip
            self._failures = 0
        for name, why in stuck.items():
            if name not in self._stuck:
                logger.warning("%s: %s cannot be shipped: %s. The next cycle tries again", self._path, name, why)
        for name in self._stuck.keys() - stuck.keys():
            logger.info("%s: shipping %s works again", self._path, name)
        self._stuck = dict(stuck)
        if put:
            self._records, self._cycles = self._records + max(records, 0), self._cycles + 1
        if self._cycles and now_s - self._summarized_s >= SUMMARY_S:
            self._log_summary(now_s)

    def record_failure(self) -> None:
        """Count a failed cycle. The thread that runs it logs its error."""
        if not self._failures:
            self._failed_s = self._clock()
        self._failures += 1

    def log_end(self, *, is_whole: bool) -> None:
        """Log that shipping ends. ``is_whole`` is true if the manifest includes everything that was appended."""
        if self._is_owner is None and not self._failures:
            return  # no cycle has run
        if self._cycles:
            self._log_summary(self._clock())
        rest = "everything is uploaded" if is_whole else "not everything is uploaded"
        logger.info(
            "%s: shipping to %s ended: %d offsets in %d uploads; %s", self._path, self._url, self._all_records,
            self._all_cycles, rest if self._is_owner else "another process ships the store",
        )  # fmt: skip

    def _log_summary(self, now_s: float) -> None:
        logger.info(
            "%s: shipped %d offsets in %d uploads to %s", self._path, self._records, self._cycles, self._url
        )  # fmt: skip
        self._all_records, self._all_cycles = self._all_records + self._records, self._all_cycles + self._cycles
        self._records = self._cycles = 0
        self._summarized_s = now_s
