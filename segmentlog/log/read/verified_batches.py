"""Cache the positions of Kafka batches in a segment that this process has verified, for the next fetch.

Many consumers read the same log. For the first consumer, this process verifies the header and the payload of each
batch. For later consumers it looks up the positions. So each batch is verified once for each mapping of its segment,
not for each fetch. If a byte changes later, the checksum that Kafka's clients check detects it, and so do all other
readers of this package.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Final

from segmentlog.format.wire_run import WireRun

_JOINED_MAX: Final = 16 << 10
"""A run of more batches than this is not extended: the next batches begin a new run."""
_FEWEST: Final = 8
_LEAST_BYTES: Final = 64 << 10
"""Smaller runs (in both count and bytes) are cached only if they extend a cached run.

They are cheap to verify again, and each fetch at the end of a log finds one.
"""
_JOINED_SMALL_MAX: Final = 256
"""A small run does not extend a run of more batches than this, because joining two runs copies both."""


class VerifiedBatches:
    """The runs of verified batches in one mapped segment, least recently used dropped first.

    The caller holds the lock of `OpenSegments`.
    """

    __slots__ = ("_bases", "_epoch", "_runs", "count")

    def __init__(self) -> None:
        self.count = 0
        """The number of batches in all runs."""
        self._epoch = -1
        self._bases: list[int] = []
        self._runs: OrderedDict[int, WireRun] = OrderedDict()
        """By their base offsets."""

    def find(self, epoch: int, offset: int) -> tuple[WireRun | None, int | None]:
        """Return (the run that contains or ends at ``offset``, base offset of the next run).

        A truncation may put other batches at the same positions, in a new epoch of the log: then all runs are dropped.
        """
        if epoch > self._epoch:
            self.clear()
            self._epoch = epoch
        if epoch < self._epoch:  # the caller read the log state before another thread saw the current epoch
            return None, None
        at = bisect_right(self._bases, offset)
        following = self._bases[at] if at < len(self._bases) else None
        if not at:
            return None, following
        base = self._bases[at - 1]
        self._runs.move_to_end(base)
        run = self._runs[base]
        return (run if offset <= run.end_offset else None), following

    def add_run(self, epoch: int, run: WireRun, count_max: int) -> None:
        """Add a run found in that epoch, and drop runs until at most ``count_max`` batches are left."""
        before, following = self.find(epoch, run.base_offset)
        if epoch != self._epoch or (following is not None and following < run.end_offset):
            return  # another thread has added the same batches
        if before is not None and (before.end_offset, before.end_position) != (run.base_offset, run.position):
            return  # the cached run contains some of the batches
        is_small = run.batch_count < _FEWEST and run.sizes[-1] < _LEAST_BYTES
        if is_small and before is None:
            return
        # Keep each run small relative to the limit, so that dropping the oldest runs never drops the newest.
        most = min(_JOINED_SMALL_MAX if is_small else _JOINED_MAX, count_max // 4)
        if before is not None and before.batch_count + run.batch_count <= most:
            self._drop(before)
            run = before.joined(run)
        self._bases.insert(bisect_left(self._bases, run.base_offset), run.base_offset)
        self._runs[run.base_offset] = run
        self.count += run.batch_count
        while self.count > count_max:
            self._drop(next(iter(self._runs.values())))

    def clear(self) -> None:
        """Drop all runs."""
        self.count = 0
        self._bases.clear()
        self._runs.clear()

    def _drop(self, run: WireRun) -> None:
        del self._runs[run.base_offset]
        del self._bases[bisect_left(self._bases, run.base_offset)]
        self.count -= run.batch_count
