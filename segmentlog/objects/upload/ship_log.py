"""What a process that ships by itself logs: that it begins and ends, what it ships, and when a failure is over.

A cycle comes every second, so the first upload has a line, and after that a line sums up at most every `SUMMARY_S`. The
failures themselves are logged by `topics.background_threads.Worker`, each when it is another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

logger = logging.getLogger("segmentlog.ship")

SUMMARY_S: Final = 60.0


class ShipLog:
    """The log of shipping one store to one place. For one thread at a time."""

    def __init__(self, path: str, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._url = url
        self._clock = clock
        self._is_owner: bool | None = None
        """None before the first cycle."""
        self._said_s = float("-inf")
        self._records = self._cycles = 0
        """Since the last line about uploads."""
        self._all_records = self._all_cycles = 0
        self._failed_s = 0.0
        """Monotonic, when the failure began that goes on; 0 without one."""
        self._failures = 0
        self._stuck: dict[str, str] = {}

    def note_cycle(self, *, is_owner: bool, put: bool, records: int, stuck: Mapping[str, str]) -> None:
        """A cycle came to its end: whether this process ships the store, and what was uploaded.

        ``records`` are offsets outside lost ranges; ``stuck`` says by partition why it cannot be shipped.
        """
        now_s = self._clock()
        if is_owner != self._is_owner:
            self._is_owner = is_owner
            if is_owner:
                logger.info("%s: shipping to %s", self._path, self._url)
            else:
                logger.info("%s: another process ships to %s; this one waits to take its place", self._path, self._url)
        if self._failures:
            logger.info(
                "%s: shipping to %s works again, after %d failed cycles in %.0f s",
                self._path, self._url, self._failures, now_s - self._failed_s,
            )  # fmt: skip
            self._failures = 0
        for name, why in stuck.items():
            if name not in self._stuck:
                logger.warning("%s: %s cannot be shipped: %s; trying again", self._path, name, why)
        for name in self._stuck.keys() - stuck.keys():
            logger.info("%s: %s is shipped again", self._path, name)
        self._stuck = dict(stuck)
        if put:
            self._records, self._cycles = self._records + max(records, 0), self._cycles + 1
        if self._cycles and now_s - self._said_s >= SUMMARY_S:
            self._say(now_s)

    def note_failure(self) -> None:
        """A cycle failed; its error is logged by the thread that runs it."""
        if not self._failures:
            self._failed_s = self._clock()
        self._failures += 1

    def end(self, *, is_whole: bool) -> None:
        """No more cycles come; ``is_whole``: the manifest includes all that was appended."""
        if self._is_owner is None and not self._failures:
            return  # it never began
        if self._cycles:
            self._say(self._clock())
        rest = "all of it is there" if is_whole else "not all of it is there"
        logger.info(
            "%s: shipping to %s ended: %d offsets in %d uploads; %s",
            self._path, self._url, self._all_records, self._all_cycles, rest if self._is_owner else "another ships it",
        )  # fmt: skip

    def _say(self, now_s: float) -> None:
        logger.info(
            "%s: shipped %d offsets in %d uploads to %s", self._path, self._records, self._cycles, self._url
        )  # fmt: skip
        self._all_records, self._all_cycles = self._all_records + self._records, self._all_cycles + self._cycles
        self._records = self._cycles = 0
        self._said_s = now_s
