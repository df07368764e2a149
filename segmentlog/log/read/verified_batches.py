"""Where the batches of Kafka's of a segment lie that this process has checked: a server is asked for them again.

Consumers read the same log one after the other. The first one has each batch checked, header and payload; for those
behind it the batches are looked up. So what is sent was checked once since the segment was mapped, and not each time: a
byte that rots in between is told by the checksum that Kafka's clients check, and by every other reader here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from typing import Final

from segmentlog.format.wire_run import WireRun

_JOINED_MAX: Final = 16 << 10
"""Batches of a run that others are joined to."""
_FEWEST: Final = 8
_LEAST_BYTES: Final = 64 << 10
"""Runs that are smaller in both ways are not kept, unless they go on one that is: they cost little to check again, and
at the end of a log each fetch finds one."""
_JOINED_SMALL_MAX: Final = 256
"""Batches of a run that such a small one is joined to: all of them are copied for it."""


class VerifiedBatches:
    """The runs of one mapped segment, those kept that were used last. Who calls holds the lock of `OpenSegments`."""

    __slots__ = ("_bases", "_epoch", "_runs", "count")

    def __init__(self) -> None:
        self.count = 0
        """Batches in all of them."""
        self._epoch = -1
        self._bases: list[int] = []
        self._runs: OrderedDict[int, WireRun] = OrderedDict()
        """By their base offsets."""

    def find(self, epoch: int, offset: int) -> tuple[WireRun | None, int | None]:
        """(the run that holds ``offset``, or ends there; where the next one begins).

        A truncation gives the bytes behind it to other batches, in another epoch of the log: then none is left.
        """
        if epoch > self._epoch:
            self.clear()
            self._epoch = epoch
        if epoch < self._epoch:  # read before somebody else read the one that there is now
            return None, None
        at = bisect_right(self._bases, offset)
        following = self._bases[at] if at < len(self._bases) else None
        if not at:
            return None, following
        base = self._bases[at - 1]
        self._runs.move_to_end(base)
        run = self._runs[base]
        return (run if offset <= run.end_offset else None), following

    def keep(self, epoch: int, run: WireRun, count_max: int) -> None:
        """Keep a run that was found in that epoch, and no more than so many batches."""
        before, following = self.find(epoch, run.base_offset)
        if epoch != self._epoch or (following is not None and following < run.end_offset):
            return  # another thread was at it
        if before is not None and (before.end_offset, before.end_position) != (run.base_offset, run.position):
            return  # it holds some of them already
        is_small = run.batch_count < _FEWEST and run.sizes[-1] < _LEAST_BYTES
        if is_small and before is None:
            return
        # In pieces that are small against all there may be: the one that was used last is not given up with the others.
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
        """Forget all of them."""
        self.count = 0
        self._bases.clear()
        self._runs.clear()

    def _drop(self, run: WireRun) -> None:
        del self._runs[run.base_offset]
        del self._bases[bisect_left(self._bases, run.base_offset)]
        self.count -= run.batch_count
