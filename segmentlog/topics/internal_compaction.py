"""Keeping the store's own topics short where nobody has the store open for long enough to compact them.

Each of many short processes reads such a topic from its start: the state of one key is its last record,
and what came before only takes time. Background work would compact it, but a process that lives
for a tenth of a second has none.
"""

from __future__ import annotations

from typing import Final

from segmentlog.errors import SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.storage.interrupt_check import failures_ignored

_BATCHES: Final = 500
"""So many take 20 ms to read; compacting them takes about as long."""


class Tidy:
    """Counts the batches of a log, and compacts it when there are many. Not thread-safe."""

    def __init__(self) -> None:
        self._batches = 0

    def count(self, batches: int = 1) -> None:
        """So many more were read or appended."""
        self._batches += batches

    def tidy(self, log: Partition) -> None:
        """Compact the log if it is worth it. What keeps it from that is no reason to fail."""
        if self._batches >= _BATCHES:
            self._batches = 0
            with failures_ignored(SegmentlogError):
                log.roll()
                log.compact()
