"""Compacts the store's internal topics in processes that are too short-lived for background work.

Each process reads an internal topic from its start, although only the last record of each key counts. Background work
compacts the topic, but a process that lives for a tenth of a second ends before that work starts.
"""

from __future__ import annotations

from typing import Final

from segmentlog.errors import SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.storage.interrupt_check import failures_ignored

_BATCHES: Final = 500
"""Reading this many batches takes 20 ms; compacting them takes about as long."""


class InternalCompaction:
    """Counts the batches of a log, and compacts the log when it has many. Not thread-safe."""

    def __init__(self) -> None:
        self._batches = 0

    def count(self, batches: int = 1) -> None:
        """Count batches of the log that the caller has read or appended."""
        self._batches += batches

    def compact_if_due(self, log: Partition) -> None:
        """Compact the log if it has many batches. Errors are ignored: the next process tries again."""
        if self._batches >= _BATCHES:
            self._batches = 0
            with failures_ignored(SegmentlogError):
                log.roll()
                log.compact()
